// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// pluginBinary builds cmd/kubectl-stowage.
var pluginBinary = sync.OnceValues(func() (string, error) { return buildBinary("kubectl-stowage") })

// reader is the account that has all rights of the manifest, in the namespace readers. One test uses it.
const readers, reader = "stowage-readers", "viewer"

// kubectlStowage is the plugin, with the kubeconfig of an account that has the manifest's rights for readers but those
// on the resources that are left out.
func (w *world) kubectlStowage(account string, without ...string) func(args ...string) *exec.Cmd {
	w.t.Helper()
	binary, err := pluginBinary()
	w.must(err, "building the plugin")
	content, err := os.ReadFile(filepath.Join(manifests, "kubectl/reader.yaml"))
	w.must(err, "reading the manifest")
	var role rbacv1.ClusterRole
	w.must(yaml.UnmarshalStrict(content, &role), "reading the manifest")
	for i := range role.Rules {
		for _, verb := range role.Rules[i].Verbs {
			if verb != "list" && verb != "watch" {
				w.t.Errorf("the manifest grants %s on %v: reading needs no such right", verb, role.Rules[i].Resources)
			}
		}
		role.Rules[i].Resources = slices.DeleteFunc(role.Rules[i].Resources, func(r string) bool { return slices.Contains(without, r) })
	}
	role.Rules = slices.DeleteFunc(role.Rules, func(rule rbacv1.PolicyRule) bool { return len(rule.Resources) == 0 })
	namespace := w.name
	if account == reader {
		// The API server records what this one asks for: each right of the manifest has to be used.
		namespace = readers
		_, err := cluster.AdminClient().CoreV1().Namespaces().Create(w.ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: readers}}, metav1.CreateOptions{})
		w.must(err, "making a namespace")
		_, err = cluster.AdminClient().CoreV1().ServiceAccounts(readers).Create(w.ctx, &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: reader}}, metav1.CreateOptions{})
		w.must(err, "making the ServiceAccount")
		w.t.Cleanup(func() { w.cleanUp(cluster.AdminClient().CoreV1().Namespaces().Delete, readers) })
		_, err = cluster.AdminClient().RbacV1().ClusterRoleBindings().Create(w.ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: w.name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
			Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: readers, Name: reader}},
		}, metav1.CreateOptions{})
		w.must(err, "binding the ClusterRole")
		w.t.Cleanup(func() { w.cleanUp(cluster.AdminClient().RbacV1().ClusterRoleBindings().Delete, w.name) })
	} else {
		w.newAccount(account, role.Rules)
	}
	config, err := cluster.ServiceAccountKubeconfig(w.ctx, namespace, account, nil)
	w.must(err, "getting the identity")
	return func(args ...string) *exec.Cmd {
		command := exec.CommandContext(w.ctx, binary, append(args, "--kubeconfig", config)...)
		command.Env = append(os.Environ(), "HOME="+w.t.TempDir())
		return command
	}
}

// runs returns what a command prints, and its exit code.
func (w *world) runs(command *exec.Cmd) (out, errOut string, code int) {
	w.t.Helper()
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	err := command.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.t.Fatal(err)
	}
	return stdout.String(), stderr.String(), command.ProcessState.ExitCode()
}

// A user with no more than the manifest's rights sees devices with their holders, is told why a pod waits, and sees claims come.
func TestKubectlStowageWithARightToReadAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(h100, 2)...)
	held := w.addClaim("held", spec(w.exactly("gpu", 1)))
	w.allocate(held, "a", gpus(h100, 2)[0].Name)
	w.addClaim("both", spec(w.exactly("gpu", 2)))
	w.addPod("pod", withClaim("both"))
	plugin := w.kubectlStowage(reader)

	out, errOut, code := w.runs(plugin("gpus", "--node", w.nodeName("a"), "-o", "json"))
	var list struct {
		Items []struct {
			State   string
			Holders []struct{ Namespace, Claim string }
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil || code != 0 {
		t.Fatalf("gpus: code %d, %v: %s%s", code, err, out, errOut)
	}
	if len(list.Items) != 2 || list.Items[0].State != "held" || list.Items[1].State != "free" || len(list.Items[0].Holders) != 1 ||
		list.Items[0].Holders[0].Namespace != w.name || list.Items[0].Holders[0].Claim != "held" {
		t.Errorf("gpus: %s", out)
	}
	out, errOut, code = w.runs(plugin("why", "pod", "-n", w.name))
	if want := "Release on node " + w.nodeName("a") + ": claim " + w.name + "/held (1 device)."; code != 3 || !strings.Contains(out, want) {
		t.Errorf("why: code %d, want 3 and %q: %s%s", code, want, out, errOut)
	}

	w.readsTheMap(plugin("map", "--open=false"), `"claim":"held"`, `"name":"pod"`, `"ready":true`)

	watching := plugin("claims", "-n", w.name, "--watch", "--no-headers")
	lines, err := watching.StdoutPipe()
	w.must(err, "watching")
	w.must(watching.Start(), "watching")
	defer func() { _ = watching.Wait() }()
	defer func() { _ = watching.Process.Kill() }()
	timer := time.AfterFunc(patience, func() { _ = watching.Process.Kill() })
	defer timer.Stop()
	scanner := bufio.NewScanner(lines)
	seen := 0
	for seen < 2 && scanner.Scan() { // those that are there
		seen++
	}
	w.addClaim("later", spec(w.exactly("gpu", 1)))
	if !scanner.Scan() || !strings.HasPrefix(scanner.Text(), "later ") {
		t.Errorf("after %d lines, the claim that came is told as %q, %v", seen, scanner.Text(), scanner.Err())
	}
}

// The map tells the same account what it may see, over one stream.
func (w *world) readsTheMap(command *exec.Cmd, want ...string) {
	w.t.Helper()
	out, err := command.StdoutPipe()
	w.must(err, "starting the map")
	w.must(command.Start(), "starting the map")
	defer func() {
		w.must(command.Process.Signal(os.Interrupt), "ending the map")
		w.must(command.Wait(), "ending the map")
	}()
	timer := time.AfterFunc(patience, func() { _ = command.Process.Kill() })
	defer timer.Stop()
	var address, token string
	for lines := bufio.NewScanner(out); address == "" && lines.Scan(); {
		address, token, _ = strings.Cut(strings.TrimSpace(lines.Text()), "#token=")
		if token == "" {
			address = ""
		}
	}
	request, err := http.NewRequestWithContext(w.ctx, http.MethodGet, address+"api/stream", nil)
	w.must(err, "asking for the stream")
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := http.DefaultClient.Do(request)
	w.must(err, "asking for the stream")
	defer response.Body.Close()
	told := ""
	for lines := bufio.NewReader(response.Body); ; {
		line, err := lines.ReadString('\n')
		if told += line; !slices.ContainsFunc(want, func(s string) bool { return !strings.Contains(told, s) }) {
			return
		}
		w.must(err, "reading the stream")
	}
}

// What a user may not list is named: as a warning where there is an answer without it, as an error where there is none.
func TestKubectlStowageNamesTheRightThatIsMissing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if _, errOut, code := w.runs(w.kubectlStowage("nobudgets", "poddisruptionbudgets")("gpus")); code != 0 ||
		!strings.Contains(errOut, "warning: poddisruptionbudgets.policy could not be listed: forbidden") {
		t.Errorf("without budgets: code %d, %s", code, errOut)
	}
	if _, errOut, code := w.runs(w.kubectlStowage("noslices", "resourceslices")("gpus")); code != 1 ||
		!strings.Contains(errOut, "list resourceslices.resource.k8s.io (manifests/kubectl/reader.yaml has the rights that are needed)") {
		t.Errorf("without slices: code %d, %s", code, errOut)
	}
}
