// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/internal/localcluster/hollow"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// agentBinary builds cmd/node-agent.
var agentBinary = sync.OnceValues(func() (string, error) { return buildBinary("node-agent") })

// hollowNode is a node of the world with a kubelet that runs no containers, and our agent as a process.
type hollowNode struct {
	w       *world
	options localcluster.AgentOptions
	agent   *localcluster.Process
	// stopKubelet leaves the node as it is.
	stopKubelet func() error
}

func (w *world) addHollowNode(suffix string) *hollowNode {
	w.t.Helper()
	name := w.nodeName(suffix)
	root, err := os.MkdirTemp("", "hollow-") // sockets lie in it: their paths must be short
	w.must(err, "making the folder of node %s", name)
	w.t.Cleanup(func() { _ = os.RemoveAll(root) })
	binary, err := agentBinary()
	w.must(err, "building")
	config, err := cluster.NodeConfig(name)
	w.must(err, "getting the identity of a kubelet")
	port, err := localcluster.FreePort()
	w.must(err, "reserving a port")
	n := &hollowNode{w: w, options: localcluster.AgentOptions{
		Binary: binary, NodeName: name, NVML: "sim:dgx-h100", Root: root,
		KubeletRootDir: filepath.Join(root, "kubelet"), CDIRoot: filepath.Join(root, "cdi"), StateDir: filepath.Join(root, "state"),
		HealthAddress: fmt.Sprintf("127.0.0.1:%d", port),
	}}
	kubelet, err := hollow.Start(context.WithoutCancel(w.ctx), config, hollow.Options{
		Name: name, Labels: map[string]string{worldLabel: w.name}, Root: n.options.KubeletRootDir, CDIRoot: n.options.CDIRoot,
	})
	w.must(err, "starting a kubelet")
	n.stopKubelet = sync.OnceValue(kubelet.Stop)
	w.t.Cleanup(func() {
		if err := n.stopKubelet(); err != nil {
			w.t.Errorf("stopping the kubelet: %v", err)
		}
		w.cleanUp(w.client.CoreV1().Nodes().Delete, name)
	})
	_, err = w.client.CoreV1().Nodes().Patch(w.ctx, name, types.MergePatchType, []byte(`{"spec":{"taints":null}}`), metav1.PatchOptions{})
	w.must(err, "removing the taints of node %s", name)
	n.start()
	w.t.Cleanup(n.stop)
	return n
}

func (n *hollowNode) start() {
	n.w.t.Helper()
	var err error
	n.agent, err = cluster.StartNodeAgent(n.w.ctx, n.options)
	n.w.must(err, "starting the agent")
}

func (n *hollowNode) stop() {
	n.w.t.Helper()
	if err := n.agent.Stop(); err != nil {
		n.w.t.Errorf("stopping the agent: %v", err)
	}
	if n.w.t.Failed() {
		n.w.t.Logf("end of the log of %s:\n%s", n.agent.Name(), localcluster.LogTail(n.agent.LogPath()))
	}
}

// hardware lets something happen to the node's GPUs.
func (n *hollowNode) hardware(command nvmlsim.Command) {
	n.w.t.Helper()
	_, err := nvmlsim.Control(n.w.ctx, filepath.Join(n.options.StateDir, "sim", nvmlsim.ControlSocket), command)
	n.w.must(err, "changing the hardware")
}

func (n *hollowNode) awaitSlices(what string, met func(*resourceapi.ResourceSlice) bool) *resourceapi.ResourceSlice {
	n.w.t.Helper()
	lw := cache.NewListWatchFromClient(n.w.client.ResourceV1().RESTClient(), "resourceslices", metav1.NamespaceAll,
		fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, n.options.NodeName))
	return await(n.w, "a slice "+what, lw, met)
}

// A life of an agent: it publishes GPUs, prepares a claim, tells of one that gets ill twice, removes a slice that it did not make, and looks
// for pods of a claim that nobody gave back. All of it with the rights of the manifests; what it asks for is recorded, and judged with all the rest.
func TestTheAgentDoesItsWorkWithItsRights(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.driver, w.class = gpuDriver, "gpu.nvidia.com"
	startScheduler(t, w.name, schedulerSetup{})
	n := w.addHollowNode("n")
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	slice := n.awaitSlices("with GPUs", func(s *resourceapi.ResourceSlice) bool { return len(s.Spec.Devices) > 0 })
	w.addPod("pod", withTemplate("one"))
	pod := w.awaitPod("pod", "running", func(p *v1.Pod) bool { return p.Status.Phase == v1.PodRunning })
	claim := claimName(pod, "one")
	healthy := func(want metav1.ConditionStatus) func(*resourceapi.ResourceClaim) bool {
		return func(c *resourceapi.ResourceClaim) bool {
			return len(c.Status.Devices) == 1 && c.Status.Devices[0].Data != nil && meta.IsStatusConditionPresentAndEqual(c.Status.Devices[0].Conditions, "Healthy", want)
		}
	}
	var data struct{ UUID string }
	w.must(json.Unmarshal(w.awaitClaim(claim, "healthy", healthy(metav1.ConditionTrue)).Status.Devices[0].Data.Raw, &data), "reading the claim's status")
	for times := range int32(2) {
		n.hardware(&nvmlsim.SetRecovery{GPU: data.UUID, Action: nvmlsim.RecoveryReset})
		w.awaitClaim(claim, "ill", healthy(metav1.ConditionFalse))
		await(w, "the event that the GPU is ill", w.eventList("pod"), func(e *v1.Event) bool { return e.Reason == "DeviceUnhealthy" && e.Count == times+1 })
		n.hardware(&nvmlsim.SetRecovery{GPU: data.UUID})
		w.awaitClaim(claim, "healthy again", healthy(metav1.ConditionTrue))
	}

	strayGoes := func(suffix string) {
		t.Helper()
		stray := w.slice("n", gpus(h100, 1)...)
		stray.Name, stray.Spec.Pool = w.name+suffix, slice.Spec.Pool
		_, err := w.client.ResourceV1().ResourceSlices().Create(w.ctx, stray, metav1.CreateOptions{})
		w.must(err, "creating a slice that the agent does not know")
		w.must(wait.PollUntilContextTimeout(w.ctx, 100*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
			_, err := w.client.ResourceV1().ResourceSlices().Get(ctx, stray.Name, metav1.GetOptions{})
			return apierrors.IsNotFound(err), nil
		}), "waiting until the agent removes it")
	}
	strayGoes("-stray")

	// The pod is gone, and no kubelet says so: the agent, which is started again, asks which pods there are.
	n.stop()
	w.must(n.stopKubelet(), "stopping the kubelet")
	w.deletePod("pod")
	w.awaitClaimGone(claim)
	n.options.Env = []string{"KUBE_FEATURE_WatchListClient=false"} // it lists first, as with an older API server
	n.start()
	w.must(wait.PollUntilContextTimeout(w.ctx, 100*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		log, err := os.ReadFile(n.agent.LogPath())
		return bytes.Contains(log, []byte("Claim is not allocated any more and stays prepared")), err
	}), "waiting until the agent has looked who uses the claim")
	strayGoes("-another") // by now it has listed the slices, too
}

// The agent's port is open to who probes, tells nothing to who has no token, and is held by nobody.
func TestTheAgentsPortIsHeldByNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.addHollowNode("n")
	w.newAccount("stranger", nil)
	w.newAccount("monitor", nil)
	_, err := w.client.RbacV1().ClusterRoleBindings().Create(w.ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: w.name + "-reads-metrics"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "stowage-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: w.name, Name: "monitor"}},
	}, metav1.CreateOptions{})
	w.must(err, "binding the role stowage-metrics-reader")
	w.t.Cleanup(func() { w.cleanUp(w.client.RbacV1().ClusterRoleBindings().Delete, w.name+"-reads-metrics") })
	token := func(name string) string {
		config, err := cluster.ServiceAccountConfig(w.ctx, w.name, name, nil)
		w.must(err, "getting the identity")
		return config.BearerToken
	}
	monitor := token("monitor") // one that has read something is known, and asked about no more
	type call struct {
		path, token string
		want        int
		text        string
	}
	check := func(name string, tc call) {
		t.Helper()
		request, err := http.NewRequestWithContext(w.ctx, http.MethodGet, "https://"+n.options.HealthAddress+tc.path, nil)
		w.must(err, name)
		if tc.token != "" {
			request.Header.Set("Authorization", "Bearer "+tc.token)
		}
		client := &http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
		answer, err := client.Do(request)
		w.must(err, name)
		body, err := io.ReadAll(answer.Body)
		w.must(errors.Join(err, answer.Body.Close()), name)
		if answer.StatusCode != tc.want || !strings.Contains(string(body), tc.text) || tc.want != http.StatusOK && strings.Contains(string(body), "stowage_") {
			t.Errorf("%s: %d %.200s, want %d and %q", name, answer.StatusCode, body, tc.want, tc.text)
		} else if tc.want == http.StatusOK && strings.HasPrefix(tc.path, "/metrics") {
			recorded.show("stowage-metrics-reader: get " + tc.path)
		}
	}
	for name, tc := range map[string]call{
		"a probe":                         {path: "/healthz", want: http.StatusOK, text: "ok"},
		"a scrape without a token":        {path: "/metrics", want: http.StatusUnauthorized},
		"a scrape with a false token":     {path: "/metrics", token: "false", want: http.StatusUnauthorized},
		"a scrape of who may not":         {path: "/metrics", token: token("stranger"), want: http.StatusForbidden},
		"a scrape of who may":             {path: "/metrics", token: monitor, want: http.StatusOK, text: "stowage_"},
		"the readiness, without a token":  {path: "/readyz", want: http.StatusOK, text: "[+]"},
		"the readiness, for who may know": {path: "/readyz", token: monitor, want: http.StatusOK, text: "[+]"},
	} {
		check(name, tc)
	}
	check("GPUs' metrics of who may", call{path: "/metrics/gpus", token: monitor, want: http.StatusOK, text: "stowage_"})

	// Two that say too little are cut off: one has not begun with TLS, one does not end its request. Their time begins before the flood.
	silent, err := net.Dial("tcp", n.options.HealthAddress)
	w.must(err, "connecting")
	defer silent.Close()
	slow := n.connect()
	_, err = io.WriteString(slow, "GET /healthz HTTP/1.1\r\nHost: agent\r\nX-Slow: ")
	w.must(err, "beginning a request")
	for name, conn := range map[string]net.Conn{"one that says nothing": silent, "one with half a header": slow} {
		if err := untilClosed(conn, patience); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	// Of 200 that ask once and stay 128 are kept. The others are closed for those that come, long before they have been idle for too long.
	const many, kept = 200, 128
	var idle []net.Conn
	for i := range many {
		idle = append(idle, n.connect())
		w.must(ask(idle[i]), "asking on connection %d", i)
	}
	for i, conn := range idle[:many-kept] {
		if err := untilClosed(conn, 10*time.Second); err != nil {
			t.Fatalf("connection %d of %d: %v", i, many, err)
		}
	}
	if err := ask(n.connect()); err != nil {
		t.Errorf("a probe beside %d connections: %v", kept, err)
	}
	if err := untilClosed(idle[many-1], patience); err != nil {
		t.Errorf("one that has been idle for long: %v", err)
	}
}

// connect opens a connection to the agent's port until the test ends.
func (n *hollowNode) connect() net.Conn {
	n.w.t.Helper()
	conn, err := tls.Dial("tcp", n.options.HealthAddress, &tls.Config{InsecureSkipVerify: true})
	n.w.must(err, "connecting")
	n.w.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// ask makes a request as a probe does, and leaves the connection open.
func ask(conn net.Conn) error {
	if _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: agent\r\n\r\n"); err != nil {
		return err
	}
	answer := make([]byte, 1024)
	read, err := conn.Read(answer)
	if err == nil && !bytes.HasPrefix(answer[:read], []byte("HTTP/1.1 200 ")) {
		err = fmt.Errorf("answer %.100q", answer[:read])
	}
	return err
}

// untilClosed waits until the other side closes the connection.
func untilClosed(conn net.Conn, limit time.Duration) error {
	_ = conn.SetReadDeadline(time.Now().Add(limit))
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("it is open after %s", limit)
	}
	return nil
}
