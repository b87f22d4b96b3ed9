// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/test/lab"
)

// firstGPU is the device with index 0, which nobody has between tests.
const firstGPU = "gpu-0000-1b-00-0"

// The agent's registration socket is removed under a real kubelet, which takes that for the end of the driver. The agent makes it anew, the
// kubelet registers the driver again, and pods get their GPUs.
func TestTheAgentRegistersAgainWhenItsSocketGoes(t *testing.T) {
	namespace := newNamespace(t)
	agent := theNode.Agent()
	before := agentMetrics(t, agent).Sum("stowage_agent_sockets_renewed_total")
	inNode(t, "sh", "-c", "rm /var/lib/kubelet/plugins_registry/gpu.nvidia.com-*-reg.sock /var/lib/kubelet/plugins/gpu.nvidia.com/dra-*.sock")
	poll(t, "the agent has made both sockets anew", func(context.Context) error {
		if n := agentMetrics(t, agent).Sum("stowage_agent_sockets_renewed_total") - before; n != 2 {
			return fmt.Errorf("it has made %g", n)
		}
		return nil
	})
	poll(t, "the agent is ready", func(ctx context.Context) error {
		_, err := agent.Get(ctx, "/readyz")
		return err
	})
	startPod(t, namespace, "after", 1).check()
	waitDescribed(t, "GPUsReady", "True", "AllGPUsReady", "8 of 8 GPUs can be used")
}

// Probes are for all, metrics for whom the API server lets read them.
func TestWhoReadsTheAgentsMetrics(t *testing.T) {
	namespace := newNamespace(t)
	account := func(name string) (token string) {
		if _, err := cluster.AdminClient().CoreV1().ServiceAccounts(namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		config, err := cluster.ServiceAccountConfig(t.Context(), namespace, name, nil)
		if err != nil {
			t.Fatal(err)
		}
		return config.BearerToken
	}
	tenant, reader := account("tenant"), account("reader")
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: namespace},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "stowage-metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: "reader"}},
	}
	bindings := cluster.AdminClient().RbacV1().ClusterRoleBindings()
	if _, err := bindings.Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bindings.Delete(context.Background(), binding.Name, metav1.DeleteOptions{}) })
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // as probes and Prometheus do
	for name, tc := range map[string]struct {
		token, path string
		want        int
	}{
		"a probe of life":       {path: "/healthz", want: http.StatusOK},
		"a probe of readiness":  {path: "/readyz", want: http.StatusOK},
		"metrics for nobody":    {path: "/metrics", want: http.StatusUnauthorized},
		"metrics for a tenant":  {path: "/metrics", token: tenant, want: http.StatusForbidden},
		"metrics for a reader":  {path: "/metrics", token: reader, want: http.StatusOK},
		"with a false token":    {path: "/metrics", token: "false", want: http.StatusUnauthorized},
		"profiles for a reader": {path: "/debug/pprof/", token: reader, want: http.StatusNotFound},
	} {
		poll(t, name, func(ctx context.Context) error { // the API server learns of the role a little later
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, theNode.Agent().URL(tc.path), nil)
			if err != nil {
				return err
			}
			if tc.token != "" {
				request.Header.Set("Authorization", "Bearer "+tc.token)
			}
			response, err := client.Do(request)
			if err != nil {
				return err
			}
			defer response.Body.Close()
			if response.StatusCode != tc.want {
				return fmt.Errorf("%s, want %d", response.Status, tc.want)
			}
			return nil
		})
	}
}

// While records cannot be written or read no pod is sent to the node, and it says so where people look. The folder is read-only, then full, then
// its records are gone: each reason takes the place of the one before, so each has been found to be over.
func TestANodeWhoseStateFolderCannotBeUsedTakesItsGPUsOut(t *testing.T) {
	namespace := newNamespace(t)
	running := startPod(t, namespace, "running", 1)
	device, _ := running.gpu()
	state := theNode.StateDir()
	var mends []func()
	mend := func() {
		for _, f := range slices.Backward(mends) {
			f()
		}
		mends = nil
	}
	t.Cleanup(mend)
	says := func(reason, says string) {
		t.Helper()
		poll(t, "readyz says why", func(ctx context.Context) error {
			if text, err := theNode.Agent().Get(ctx, "/readyz"); err == nil || !strings.Contains(string(text), "\n[-] "+says) && !strings.HasPrefix(string(text), "[-] "+says) {
				return fmt.Errorf("%w; it says\n%s", err, text)
			}
			return nil
		})
		_, told, _ := strings.Cut(says, ": ")
		waitDescribed(t, "GPUsReady", "False", reason, told)
		waitDescribed(t, "Warning", "CannotPrepareClaims", told)
		waitTaints(t, device, "gpu.nvidia.com/not-ready="+reason+":NoSchedule")
		running.checkAgain()
	}

	// A pod that was sent there just before is told, and the agent looks at once.
	inNode(t, "mount", "--bind", state, state)
	mends = append(mends, func() { inNode(t, "umount", "--lazy", state) })
	inNode(t, "mount", "-o", "remount,bind,ro", state)
	createPod(t, namespace, "fails", 1)
	text := (pod{t: t, namespace: namespace, name: "fails"}).waitEvent("FailedPrepareDynamicResources")
	if want := "): open " + filepath.Join(state, "locks", "claims.lock") + ": read-only file system"; !strings.Contains(text, want) || strings.Count(text, state) != 1 {
		t.Errorf("the pod is told %q, want %q in it and the folder once", text, want)
	}
	if err := cluster.AdminClient().CoreV1().Pods(namespace).Delete(t.Context(), "fails", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	says("FolderReadOnly", "folders writable: the folder "+state+" is read-only")
	createPod(t, namespace, "waits", 1)
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"waits"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}
	mend()

	// The disk is full: a small one, with the same records.
	claims, small := filepath.Join(state, "claims"), filepath.Join(state, "small")
	inNode(t, "sh", "-ec", fmt.Sprintf(`mkdir %[2]s; mount -t tmpfs -o size=1m tmpfs %[2]s; cp -a %[1]s/. %[2]s/
		head -c 2m /dev/zero >%[2]s/filler 2>/dev/null || true
		mount --bind %[2]s %[1]s; umount %[2]s; rmdir %[2]s`, claims, small))
	mends = append(mends, func() { inNode(t, "umount", "--lazy", claims) })
	says("FolderFull", "folders writable: the folder "+claims+" is full")
	mend()

	away := filepath.Join(state, "away")
	inNode(t, "mv", claims, away)
	mends = append(mends, func() { inNode(t, "sh", "-ec", fmt.Sprintf("if [ -e %[1]s ]; then mv %[1]s %[2]s; fi", away, claims)) })
	says("LedgerUnreadable", "ledger read: ")
	mend()

	waits := pod{t: t, namespace: namespace, name: "waits"}
	waits.waitRunning()
	waits.check()
	waitDescribed(t, "GPUsReady", "True", "AllGPUsReady")
	waitDescribed(t, "Normal", "CanPrepareClaims")
	waitTaints(t, device)
}

// A second agent with the same identity would take the sockets of the first, and leave the kubelet with none when it ends.
func TestASecondAgentWithTheSameIdentityEnds(t *testing.T) {
	first := theNode.Agent()
	program, words := commandOf(t, first)
	args := []string{"--target", strconv.Itoa(first.Pid()), "--mount", "--", program}
	identity := identityOf(t, first)
	for _, word := range words[1:] {
		if strings.HasPrefix(word, "--health-address=") {
			word = "--health-address=127.0.0.1:0"
		}
		args = append(args, word)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // if it does not end
	defer cancel()
	out, err := exec.CommandContext(ctx, "nsenter", args...).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("the second agent: %v, want exit code 1", err)
	}
	for _, want := range []string{
		"already serves driver gpu.nvidia.com on this node with the same --pod-uid, by the registration socket /var/lib/kubelet/plugins_registry/gpu.nvidia.com-" + identity + "-reg.sock: ",
		"stop it first, or give each agent a --pod-uid of its own",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the second agent says\n%s\nwant %q in it", out, want)
		}
	}
	if _, err := first.Get(t.Context(), "/readyz"); err != nil {
		t.Errorf("the first agent: %v", err)
	}
	startPod(t, newNamespace(t), "after", 1).check()
}

// Another process takes both sockets. The agent does not take them back while it lives, and gets no pods.
func TestANodeWhoseSocketsAreTakenTakesItsGPUsOut(t *testing.T) {
	namespace := newNamespace(t)
	identity := identityOf(t, theNode.Agent())
	end := new(rival).serve(t, "plugins/gpu.nvidia.com/dra-"+identity+".sock", "plugins_registry/gpu.nvidia.com-"+identity+"-reg.sock")
	poll(t, "readyz says why", func(ctx context.Context) error {
		if text, err := theNode.Agent().Get(ctx, "/readyz"); err == nil || !strings.Contains(string(text), "[-] serving the kubelet: the socket ") {
			return fmt.Errorf("%w; it says\n%s", err, text)
		}
		return nil
	})
	waitDescribed(t, "GPUsReady", "False", "SocketTaken", "is served by ")
	waitDescribed(t, "Warning", "CannotPrepareClaims", "is served by ")
	waitTaints(t, firstGPU, "gpu.nvidia.com/not-ready=SocketTaken:NoSchedule")
	createPod(t, namespace, "waits", 1)
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"waits"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}
	end()
	waits := pod{t: t, namespace: namespace, name: "waits"}
	waits.waitRunning()
	waits.check()
	waitDescribed(t, "GPUsReady", "True", "AllGPUsReady")
	waitTaints(t, firstGPU)
}

// commandOf is the program of an agent, and its command line.
func commandOf(t *testing.T, agent *node.RunningAgent) (program string, words []string) {
	t.Helper()
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", agent.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	program, err = os.Readlink(fmt.Sprintf("/proc/%d/exe", agent.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	return program, strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")
}

// identityOf is the agent's --pod-uid.
func identityOf(t *testing.T, agent *node.RunningAgent) string {
	t.Helper()
	_, words := commandOf(t, agent)
	for _, word := range words {
		if uid, ok := strings.CutPrefix(word, "--pod-uid="); ok {
			return uid
		}
	}
	t.Fatal("the agent has no --pod-uid")
	return ""
}

// rival is a plugin that says that it is the driver, as NVIDIA's does, and prepares nothing.
type rival struct {
	registerapi.UnimplementedRegistrationServer
	drapb.UnimplementedDRAPluginServer
	endpoint   string // below the kubelet's folder
	registered chan struct{}
}

func (r *rival) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: "gpu.nvidia.com", Endpoint: "/var/lib/kubelet/" + r.endpoint, SupportedVersions: []string{drapb.DRAPluginService},
	}, nil
}

func (r *rival) NotifyRegistrationStatus(_ context.Context, status *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	if status.GetPluginRegistered() {
		close(r.registered)
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

// come has the kubelet register the rival beside the agent, until end is called.
func (r *rival) come(t *testing.T) (end func()) {
	t.Helper()
	return r.serve(t, "plugins/gpu.nvidia.com/rival.sock", "plugins_registry/gpu.nvidia.com-reg.sock")
}

// serve puts both sockets there, in the place of what there is, and has the kubelet register the rival, until end is called.
func (r *rival) serve(t *testing.T, endpoint, registrar string) (end func()) {
	t.Helper()
	r.endpoint, r.registered = endpoint, make(chan struct{})
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, r)
	drapb.RegisterDRAPluginServer(server, r)
	var serving sync.WaitGroup
	var paths []string
	end = sync.OnceFunc(func() {
		for _, path := range paths { // first: what stands there later is the agent's
			if err := os.Remove(path); err != nil {
				t.Error(err)
			}
		}
		server.Stop()
		serving.Wait()
	})
	t.Cleanup(end)
	for _, path := range []string{endpoint, registrar} {
		path = filepath.Join("/proc", strconv.Itoa(theNode.Agent().Pid()), "root", "var", "lib", "kubelet", path)
		// In one step: the agent makes a socket of its own anew when that is gone.
		hidden := filepath.Join(filepath.Dir(path), ".rival")
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(false)
		serving.Go(func() { _ = server.Serve(listener) })
		if err := os.Rename(hidden, path); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	select {
	case <-r.registered:
	case <-time.After(podTimeout):
		t.Fatal("the kubelet does not register the rival")
	}
	return end
}

// A plugin of the same driver name that comes later has the kubelet's calls. The node says so and, before the plugin publishes anything, gets
// no pods.
func TestANodeWithARivalPluginTakesItsGPUsOut(t *testing.T) {
	namespace := newNamespace(t)
	running := startPod(t, namespace, "running", 1)
	device, _ := running.gpu()
	end := new(rival).come(t)
	waitDescribed(t, "GPUsReady", "False", "RivalPlugin", "gpu.nvidia.com-reg.sock")
	waitDescribed(t, "Warning", "CannotPrepareClaims", "another plugin serves driver gpu.nvidia.com")
	waitTaints(t, device, "gpu.nvidia.com/not-ready=RivalPlugin:NoSchedule")
	createPod(t, namespace, "waits", 1)
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"waits"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}
	running.checkAgain()

	end()
	waits := pod{t: t, namespace: namespace, name: "waits"}
	waits.waitRunning()
	waits.check()
	waitDescribed(t, "GPUsReady", "True", "AllGPUsReady")
	waitTaints(t, device)
}

// The rival publishes the same pool, as NVIDIA's driver does, in turns with the agent. The node says that there is one, and when it is gone the
// pool is the agent's again.
func TestAPoolThatARivalPluginPublishesIsOursAgainWhenItIsGone(t *testing.T) {
	end := new(rival).come(t)
	node, err := cluster.AdminClient().CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	theirs := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: []resourceapi.Device{{Name: "gpu-0"}}}}}
	publisher, err := resourceslice.StartController(t.Context(), resourceslice.Options{
		DriverName: "gpu.nvidia.com", KubeClient: cluster.AdminClient(), Owner: &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: nodeName, UID: node.UID},
		Resources: &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{nodeName: theirs}}, SyncDelay: new(time.Second),
	})
	if err != nil {
		t.Fatal(err)
	}
	stop := sync.OnceFunc(publisher.Stop)
	t.Cleanup(stop)
	published := func(ctx context.Context, device string) (is bool, err error) {
		list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + nodeName})
		if err != nil {
			return false, err
		}
		for _, slice := range list.Items {
			is = is || slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool { return d.Name == device })
		}
		return is, nil
	}
	waitDescribed(t, "GPUsReady", "False", "RivalPlugin", "both publish the node's devices in turns")
	poll(t, "the rival publishes its device", func(ctx context.Context) error {
		if is, err := published(ctx, "gpu-0"); err != nil || !is {
			return errors.Join(err, errors.New("it is not there"))
		}
		return nil
	})

	stop()
	end()
	waitTaints(t, firstGPU)
	poll(t, "the rival's device is gone", func(ctx context.Context) error {
		if is, err := published(ctx, "gpu-0"); err != nil || is {
			return errors.Join(err, errors.New("it is there"))
		}
		return nil
	})
	waitDescribed(t, "GPUsReady", "True", "AllGPUsReady")
	startPod(t, newNamespace(t), "after", 1).check()
}

// A GPU that goes bad while nobody uses it: the Node says which, and why, and that it is well again.
func TestAnIdleGPUThatGoesBadShowsOnItsNode(t *testing.T) {
	hardware(t, &nvmlsim.SetRecovery{GPU: "0", Action: nvmlsim.RecoveryReset})
	t.Cleanup(func() {
		if _, err := nvmlsim.Control(context.Background(), controlSocket(), &nvmlsim.SetRecovery{GPU: "0"}); err != nil {
			t.Error(err)
		}
	})
	waitDescribed(t, "GPUsReady", "False", "GPUsUnhealthy", firstGPU+": the driver asks for a reset of the GPU")
	waitDescribed(t, "Warning", "GPUUnhealthy", firstGPU+": the driver asks for a reset of the GPU")
	hardware(t, &nvmlsim.SetRecovery{GPU: "0"})
	waitDescribed(t, "GPUsReady", "True", "AllGPUsReady")
	waitDescribed(t, "Normal", "GPUHealthy", firstGPU)
}

// A process of the host on a GPU that no claim has: the Node says whose it is, and so does a metric.
func TestAHostProcessOnAFreeGPUShowsOnItsNode(t *testing.T) {
	const pid = 4190001
	hardware(t, &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: pid, Kind: nvmlsim.ProcessCompute, Command: "python3"}})
	t.Cleanup(func() {
		if _, err := nvmlsim.Control(context.Background(), controlSocket(), &nvmlsim.RemoveProcess{GPU: "0", PID: pid}); err != nil {
			t.Error(err)
		}
	})
	says := firstGPU + ": it is used without a claim by python3 of the host"
	waitDescribed(t, "GPUsReady", "True", "AllGPUsReady", says)
	waitDescribed(t, "Warning", "GPUUsedWithoutClaim", says)
	if n := agentMetrics(t, theNode.Agent()).Sum("stowage_agent_processes_without_claim", "device", firstGPU, "of", "host"); n != 1 {
		t.Errorf("the metric is %g, want 1", n)
	}
	waitTaints(t, firstGPU) // which is the policy
}

// restartAgent crashes the agent and starts it again, with further arguments.
func restartAgent(t *testing.T, args ...string) {
	t.Helper()
	if err := theNode.KillAgent(); err != nil {
		t.Fatal(err)
	}
	if err := theNode.StartAgent(t.Context(), args...); err != nil {
		t.Fatal(err)
	}
}

// What an agent finds of its GPUs at its start: an error is as old as it was, a host process keeps its GPU from claims if that is the policy, and
// a GPU that does not answer is named.
func TestWhatAnAgentFindsAtItsStart(t *testing.T) {
	const pid = 4190002
	namespace := newNamespace(t)
	all := devices(t)
	if len(all) != gpuCount || all[0] != firstGPU {
		t.Fatalf("devices are %v", all)
	}
	// forget removes what the agent, which does not run, knows of the GPUs.
	forget := func() error {
		records, err := filepath.Glob(filepath.Join(theNode.StateDir(), "health", "*"))
		for _, file := range append(records, filepath.Join(theNode.StateDir(), "gpus.json")) {
			if removed := os.Remove(file); !errors.Is(removed, fs.ErrNotExist) {
				err = errors.Join(err, removed)
			}
		}
		return err
	}
	t.Cleanup(func() { // an XID would keep its GPU for ten minutes
		ctx := context.Background()
		for _, c := range []nvmlsim.Command{&nvmlsim.RemoveProcess{GPU: "1", PID: pid}, &nvmlsim.UnhangGPU{GPU: "0"}} {
			_, _ = nvmlsim.Control(ctx, controlSocket(), c) // if it is left
		}
		_ = theNode.KillAgent() // if it runs
		if err := errors.Join(forget(), theNode.StartAgent(ctx), cluster.WaitForSlices(ctx, nodeName, gpuCount)); err != nil {
			t.Error(err)
		}
	})

	// 1. An XID is as old as before the crash, to the second.
	hardware(t, &nvmlsim.RaiseXID{GPU: "0", Code: 119})
	waitTaints(t, firstGPU, "gpu.nvidia.com/xid=119:NoSchedule")
	since := taintAdded(t, firstGPU, "gpu.nvidia.com/xid")
	hardware(t, &nvmlsim.AddProcess{GPU: "1", Process: nvmlsim.Process{PID: pid, Kind: nvmlsim.ProcessCompute, Command: "python3"}})
	before := sliceVersions(t)
	restartAgent(t, "--host-processes=taint")
	waitTaints(t, all[1], "gpu.nvidia.com/in-use=host-process:NoSchedule")
	if now := sliceVersions(t); now == before {
		t.Error("the new agent has published nothing")
	}
	waitTaints(t, firstGPU, "gpu.nvidia.com/xid=119:NoSchedule")
	if now := taintAdded(t, firstGPU, "gpu.nvidia.com/xid"); !now.Equal(&since) {
		t.Errorf("the XID's taint was added at %s, and after a crash of the agent at %s", since, now)
	}

	// 2. The policy for processes of the host: their GPU is nobody's until they end.
	waitDescribed(t, "GPUsReady", "False", all[1]+": it is used without a claim by ", "of the host")
	createPod(t, namespace, "waits", gpuCount-1)
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"waits"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}
	hardware(t, &nvmlsim.RemoveProcess{GPU: "1", PID: pid})
	waits := pod{t: t, namespace: namespace, name: "waits"}
	waits.waitRunning()
	waits.check()
	waitTaints(t, all[1])

	// 3. A GPU that does not answer, to an agent that has not known it before. Known ones are published, as unhealthy.
	log := theNode.LogFile("agent")
	logged := logSize(t, log)
	hardware(t, &nvmlsim.HangGPU{GPU: "0"})
	if err := errors.Join(theNode.KillAgent(), forget(), theNode.StartAgent(t.Context())); err != nil {
		t.Fatal(err)
	}
	waitDescribed(t, "GPUsReady", "False", "GPUsDoNotAnswer", "7 of 8 GPUs can be used; "+firstGPU+": ")
	if lines := linesSince(t, log, logged, "GPU did not answer, not offered"); len(lines) == 0 || !strings.Contains(lines[0], `device="`+firstGPU+`"`) {
		t.Errorf("the agent's log has %q, want that GPU %s did not answer", lines, firstGPU)
	}
	waits.checkAgain()
}

// devices are the names of the devices that the node offers, sorted.
func devices(t *testing.T) (names []string) {
	t.Helper()
	list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + nodeName})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			names = append(names, device.Name)
		}
	}
	slices.Sort(names)
	return names
}

// sliceVersions changes whenever a slice of the node does.
func sliceVersions(t *testing.T) string {
	t.Helper()
	list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + nodeName})
	if err != nil {
		t.Fatal(err)
	}
	var versions []string
	for _, slice := range list.Items {
		versions = append(versions, slice.Name+slice.ResourceVersion)
	}
	slices.Sort(versions)
	return strings.Join(versions, " ")
}

// taintAdded is when the device's taint was added.
func taintAdded(t *testing.T, device, key string) (at metav1.Time) {
	t.Helper()
	list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + nodeName})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			for _, taint := range d.Taints {
				if d.Name == device && taint.Key == key && taint.TimeAdded != nil {
					return *taint.TimeAdded
				}
			}
		}
	}
	t.Fatalf("device %s has no taint %s with its time", device, key)
	return at
}

func logSize(t *testing.T, log string) int64 {
	t.Helper()
	info, err := os.Stat(log)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// linesSince are the lines of the log after its first bytes that have all of the texts.
func linesSince(t *testing.T, log string, bytes int64, texts ...string) (lines []string) {
	t.Helper()
	content, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(content[bytes:])) {
		if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
			lines = append(lines, line)
		}
	}
	return lines
}

// Logs of agents are named alike on nodes of both kinds, and the demo's nodes can be commanded where it says.
func TestTheFilesOfAnAgentAreWhereTheyAreSaidToBe(t *testing.T) {
	const hollow = "hollow"
	kubelet, err := cluster.StartHollowNode(t.Context(), hollow, profile)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := errors.Join(kubelet.Stop(), cluster.AdminClient().CoreV1().Nodes().Delete(context.Background(), hollow, metav1.DeleteOptions{}))
		if err != nil {
			t.Error(err)
		}
	})
	all := cluster.Places()
	places := all[:0]
	for _, p := range all {
		if p.Node == nodeName || p.Node == hollow { // other tests have nodes of their own
			places = append(places, p)
		}
	}
	if len(places) != 2 || places[0].Node != nodeName || places[1].Node != hollow {
		t.Fatalf("places are %+v", places)
	}
	for _, p := range places {
		if base := filepath.Base(p.AgentLog); base != p.Node+"-agent.log" || logSize(t, p.AgentLog) == 0 {
			t.Errorf("the log of %s is %s", p.Node, p.AgentLog)
		}
		if _, err := nvmlsim.Control(t.Context(), p.SimulatorSocket, &nvmlsim.SetTemperature{GPU: "0"}); err != nil {
			t.Errorf("the simulator of %s: %v", p.Node, err)
		}
	}
}

// waitDescribed waits until a line of kubectl describe node has all of the texts.
func waitDescribed(t *testing.T, texts ...string) {
	t.Helper()
	waitDescribedOn(t, nodeName, texts...)
}

func waitDescribedOn(t *testing.T, nodeName string, texts ...string) {
	t.Helper()
	poll(t, fmt.Sprintf("kubectl describe node has a line with %q", texts), func(ctx context.Context) error {
		described, err := cluster.Kubectl(ctx, "describe", "node", nodeName)
		if err != nil {
			return err
		}
		for line := range strings.Lines(described) {
			all := true
			for _, text := range texts {
				all = all && strings.Contains(line, text)
			}
			if all {
				return nil
			}
		}
		_, shown, _ := strings.Cut(described, "Conditions:")
		return errors.New(shown[:min(len(shown), 4000)])
	})
}

// inNode runs a program where the agent runs, with the node's mounts.
func inNode(t *testing.T, program string, args ...string) {
	t.Helper()
	args = append([]string{"--mount=" + filepath.Join("/proc", strconv.Itoa(theNode.Agent().Pid()), "ns", "mnt"), "--", program}, args...)
	if out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "nsenter", args...).CombinedOutput(); err != nil {
		t.Fatalf("nsenter %v: %v\n%s", args, err, out)
	}
}
