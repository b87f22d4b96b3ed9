//go:build e2e

package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
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

// While records cannot be written no pod is sent to the node, and it says so where people look.
func TestANodeWhoseStateFolderIsReadOnlyTakesItsGPUsOut(t *testing.T) {
	namespace := newNamespace(t)
	running := startPod(t, namespace, "running", 1)
	state := theNode.StateDir()
	inNode(t, "mount", "--bind", state, state)
	mounted := true
	unmount := func() {
		if mounted {
			inNode(t, "umount", "--lazy", state)
			mounted = false
		}
	}
	t.Cleanup(unmount)
	inNode(t, "mount", "-o", "remount,bind,ro", state)

	says := "the folder " + state + " is read-only"
	poll(t, "readyz says why", func(ctx context.Context) error {
		text, err := theNode.Agent().Get(ctx, "/readyz")
		if err == nil {
			return fmt.Errorf("it is ready: %s", text)
		}
		return nil
	})
	waitDescribed(t, "GPUsReady", "False", "FolderReadOnly", says)
	waitDescribed(t, "Warning", "CannotPrepareClaims", says)
	device, _ := running.gpu()
	waitTaints(t, device, "gpu.nvidia.com/not-ready=FolderReadOnly:NoSchedule")
	createPod(t, namespace, "waits", 1)
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"waits"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}
	running.checkAgain()

	unmount()
	waits := pod{t: t, namespace: namespace, name: "waits"}
	waits.waitRunning()
	waits.check()
	waitDescribed(t, "GPUsReady", "True", "AllGPUsReady")
	waitDescribed(t, "Normal", "CanPrepareClaims")
	waitTaints(t, device)
}

// rival is a plugin that says that it is the driver, as NVIDIA's does, and prepares nothing.
type rival struct {
	registerapi.UnimplementedRegistrationServer
	drapb.UnimplementedDRAPluginServer
	registered chan struct{}
}

func (r *rival) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: "gpu.nvidia.com", Endpoint: "/var/lib/kubelet/plugins/gpu.nvidia.com/rival.sock", SupportedVersions: []string{drapb.DRAPluginService},
	}, nil
}

func (r *rival) NotifyRegistrationStatus(_ context.Context, status *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	if status.GetPluginRegistered() {
		close(r.registered)
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

// come has the kubelet register the rival, until end is called.
func (r *rival) come(t *testing.T) (end func()) {
	t.Helper()
	kubelet := filepath.Join("/proc", strconv.Itoa(theNode.Agent().Pid()), "root", "var", "lib", "kubelet")
	r.registered = make(chan struct{})
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, r)
	drapb.RegisterDRAPluginServer(server, r)
	var serving sync.WaitGroup
	end = sync.OnceFunc(func() { server.Stop(); serving.Wait() }) // which removes the sockets
	t.Cleanup(end)
	for _, path := range []string{"plugins/gpu.nvidia.com/rival.sock", "plugins_registry/gpu.nvidia.com-reg.sock"} {
		listener, err := net.Listen("unix", filepath.Join(kubelet, path))
		if err != nil {
			t.Fatal(err)
		}
		serving.Go(func() { _ = server.Serve(listener) })
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
	says := fmt.Sprintf("%s: it is used without a claim by process %d (python3) of the host", firstGPU, pid)
	waitDescribed(t, "GPUsReady", "True", "AllGPUsReady", says)
	waitDescribed(t, "Warning", "GPUUsedWithoutClaim", firstGPU+": it is used without a claim by python3 of the host")
	if n := agentMetrics(t, theNode.Agent()).Sum("stowage_agent_processes_without_claim", "device", firstGPU, "of", "host"); n != 1 {
		t.Errorf("the metric is %g, want 1", n)
	}
	waitTaints(t, firstGPU) // which is the policy
}

// waitDescribed waits until a line of kubectl describe node has all of the texts.
func waitDescribed(t *testing.T, texts ...string) {
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
