// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	authentication "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The map in the cluster, with the account of its manifests: the page is for everybody, and what it shows for those who may list that by
// their own token.
func TestTheMapInTheCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(h100, 1)...)
	w.allocate(w.addClaim("held", spec(w.exactly("gpu", 1))), "a", gpus(h100, 1)[0].Name)
	pod := workloads(t)["map Deployment"].Spec.Template.Spec
	args := slices.Clone(pod.Containers[0].Args)
	for i := range args {
		args[i] = strings.Replace(args[i], "--listen=:8443", "--listen=127.0.0.1:0", 1)
	}
	binary, err := pluginBinary()
	w.must(err, "building the plugin")
	config, err := cluster.ServiceAccountKubeconfig(w.ctx, "stowage-map", pod.ServiceAccountName, nil)
	w.must(err, "getting the identity")
	address := w.startMap(exec.CommandContext(w.ctx, binary, append(args, "--kubeconfig", config)...))

	page := w.asks(address+"/", "")
	if page.StatusCode != http.StatusOK || !strings.Contains(page.Header.Get("Content-Type"), "text/html") {
		t.Errorf("the page: %s", page.Status)
	}
	stream := address + "/api/stream"
	wantRefused := func(who, token, says string, status int) {
		t.Helper()
		response := w.asks(stream, token)
		text, err := io.ReadAll(io.LimitReader(response.Body, 1<<16))
		if response.StatusCode != status || !strings.Contains(string(text), says) || strings.Contains(string(text), w.name+"-a") {
			t.Errorf("%s: %s, %v, want %d with %q: %s", who, response.Status, err, status, says, text)
		}
	}
	wantRefused("nobody", "", "a token of the cluster is missing", http.StatusUnauthorized)
	wantRefused("a token of nobody", "e30.e30.e30", "does not know the token", http.StatusUnauthorized)
	w.newAccount("poor", nil)
	poor := w.token("poor")
	wantRefused("an account without rights", poor, "system:serviceaccount:"+w.name+":poor may not list nodes in all namespaces", http.StatusForbidden)
	wantRefused("a token for others than the API server", w.token("poor", "https://elsewhere.example.com"), "does not know the token", http.StatusUnauthorized)

	role, err := cluster.AdminClient().RbacV1().ClusterRoles().Get(w.ctx, "stowage-reader", metav1.GetOptions{})
	w.must(err, "getting the readers' role")
	rules := role.Rules
	w.newAccount("reader", rules)
	response := w.asks(stream, w.token("reader"))
	if response.StatusCode != http.StatusOK {
		t.Fatalf("a reader: %s", response.Status)
	}
	told := ""
	for lines := bufio.NewReader(response.Body); !strings.Contains(told, `"claim":"held"`) || !strings.Contains(told, w.nodeName("a")); {
		line, err := lines.ReadString('\n')
		told += line
		w.must(err, "reading the stream")
	}
	w.newAccount("halfway", rules[:len(rules)-1])
	wantRefused("an account that may not list all that why tells of", w.token("halfway"), "may not list priorityclasses.scheduling.k8s.io", http.StatusForbidden)
}

var mapAddress = regexp.MustCompile(`https://[0-9.:]+`)

// startMap starts a map for others and returns its address.
func (w *world) startMap(command *exec.Cmd) string {
	w.t.Helper()
	out, err := command.StdoutPipe()
	w.must(err, "starting the map")
	var errOut bytes.Buffer
	command.Stderr = &errOut
	w.must(command.Start(), "starting the map")
	w.t.Cleanup(func() {
		_ = command.Process.Signal(os.Interrupt) // it ends with the test's context, too
		_ = command.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	address := mapAddress.FindString(line)
	if address == "" {
		_ = command.Wait()
		w.t.Fatalf("the map says %q, %v: %s", line, err, errOut.String())
	}
	return address
}

// asks asks the map, over TLS with its own certificate.
func (w *world) asks(address, token string) *http.Response {
	w.t.Helper()
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // it is signed by nobody
		DisableKeepAlives: true,
	}}
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	w.t.Cleanup(cancel)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	w.must(err, "asking the map")
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	w.must(err, "asking the map")
	w.t.Cleanup(func() { response.Body.Close() })
	return response
}

// token is one of an account of the world.
func (w *world) token(account string, audiences ...string) string {
	w.t.Helper()
	made, err := w.client.CoreV1().ServiceAccounts(w.name).CreateToken(w.ctx, account,
		&authentication.TokenRequest{Spec: authentication.TokenRequestSpec{Audiences: audiences}}, metav1.CreateOptions{})
	w.must(err, "making a token for %s", account)
	return made.Status.Token
}
