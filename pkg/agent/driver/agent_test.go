// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/utils/clock"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

const (
	nodeName = "node-1"
	gpu0     = "gpu-0000-1b-00-0"
)

// machine is a node with a kubelet's folders, a fake API server and simulated GPUs.
type machine struct {
	t      *testing.T
	root   string
	client *fake.Clientset
	// noDriver makes the library missing, away the API server.
	noDriver, away atomic.Bool
	gpus           *nvmlsim.Machine
	disk           fullDisk
	// makeNodes makes device nodes, below the root.
	makeNodes bool
	// adjust, if it is set, changes the options of agents that are started, and advertise, if it is not empty, says which paths GPUs are on.
	adjust    func(*driver.Options)
	advertise string
	// last is the agent that was started last, and lines are what it has logged.
	last  *driver.Agent
	lines ktesting.Buffer
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	// Socket paths are short, t.TempDir() is not.
	root, err := os.MkdirTemp("", "agent")
	must(t, err)
	t.Cleanup(func() { removeAll(t, root) })
	m := &machine{t: t, root: root, client: driver.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node-uid"}})}
	m.client.PrependReactor("create", "resourceslices", nameSlices())
	m.client.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		return m.away.Load(), nil, errors.New("the API server is away")
	})
	profile, err := nvmlsim.LoadProfile("dgx-h100")
	must(t, err)
	m.gpus = nvmlsim.NewMachine(profile, nodeName)
	must(t, os.MkdirAll(m.path("plugins"), 0o755))
	must(t, os.MkdirAll(m.path("plugins_registry"), 0o755))
	must(t, os.MkdirAll(m.path("proc"), 0o755))
	must(t, os.WriteFile(m.path("proc", "devices"), nil, 0o600))
	return m
}

// removeAll removes a folder of an agent. One that ends does not wait for its last look at its folders, which writes into them: they may
// be hung.
func removeAll(t *testing.T, folder string) {
	t.Helper()
	must(t, wait.PollUntilContextTimeout(context.Background(), time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		err := os.RemoveAll(folder)
		return err == nil, ignoreNotEmpty(err)
	}))
}

func ignoreNotEmpty(err error) error {
	if errors.Is(err, unix.ENOTEMPTY) {
		return nil
	}
	return err
}

// nameSlices does for created slices what an API server does and the fake one does not.
func nameSlices() clienttesting.ReactionFunc {
	var created atomic.Int64
	return func(action clienttesting.Action) (bool, runtime.Object, error) {
		slice := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		n := created.Add(1)
		slice.Name = fmt.Sprintf("%s%d", slice.GenerateName, n)
		slice.UID = types.UID(fmt.Sprintf("slice-%d", n))
		slice.ResourceVersion = fmt.Sprint(n)
		return false, nil, nil
	}
}

func (m *machine) path(parts ...string) string {
	return filepath.Join(append([]string{m.root}, parts...)...)
}

// agent starts nothing yet.
func (m *machine) agent(ctx context.Context, podUID types.UID) (*driver.Agent, error) {
	nodes := cdi.SimulatedOptions{DevRoot: m.path("dev"), ProcRoot: m.path("proc")}
	if !m.makeNodes {
		nodes.Mknod = func(string, uint32, int) error { return unix.EPERM }
	}
	backend, err := cdi.NewSimulated(ctx, nodes)
	if err != nil {
		return nil, err
	}
	open := func() (*nvml.Handle, error) {
		if m.noDriver.Load() {
			return nil, nvml.ErrLibraryNotFound
		}
		sim := m.gpus.NVML()
		return &nvml.Handle{Library: nvml.Adapt(sim, "sim"), Raw: sim, Sysfs: sim.Sysfs(), Simulated: true, Source: "sim", Machine: m.gpus}, nil
	}
	opts := driver.Options{
		NodeName:    nodeName,
		PodUID:      podUID,
		Version:     "v-test",
		Client:      m.client,
		KubeletRoot: m.root,
		StateDir:    m.path("state"),
		CDIDir:      m.path("cdi"),
		Backend:     backend,
		FS:          &m.disk,
		Hardware:    driver.NewHardware(driver.HardwareOptions{Open: open, Clock: clock.RealClock{}, StateDir: m.path("state"), Held: driver.HeldInLedger(m.path("state")), Users: vfio.Simulated{Machine: m.gpus}}),
		Tools:       sharing.NewSimulated(m.gpus),
		Sharing:     config.Rules{Node: nodeName, Allowed: []config.Strategy{config.TimeSlicing, config.MPS}},
	}
	if m.adjust != nil {
		m.adjust(&opts)
	}
	agent, err := driver.New(opts)
	if err == nil && m.advertise != "" {
		paths, err := advertise.Parse(m.advertise)
		must(m.t, err)
		agent.Advertise(pluginpath.Advertised{Paths: paths, Strategies: []deviceplugin.Strategy{deviceplugin.CDIByCRI}})
	}
	return agent, err
}

// run runs an agent until the test ends, or until stop is called, which returns what Run returned.
func (m *machine) run(podUID types.UID) (stop func() error) {
	m.t.Helper()
	logger := ktesting.NewLogger(m.t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	m.lines = logger.GetSink().(ktesting.Underlier).GetBuffer()
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logger))
	agent, err := m.agent(ctx, podUID)
	must(m.t, err)
	m.last = agent
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx) }()
	var result error
	ended := false
	stop = func() error {
		cancel()
		if !ended {
			result, ended = <-done, true
		}
		return result
	}
	m.t.Cleanup(func() { _ = stop() })
	return stop
}

// logged are the values of the lines of the log with this message.
func (m *machine) logged(message string) (lines []string) {
	for _, entry := range m.lines.Data() {
		if entry.Message == message {
			lines = append(lines, strings.TrimSpace(fmt.Sprintln(append(entry.WithKVList, entry.ParameterKVList...)...)))
		}
	}
	return lines
}

// dial connects to a socket once it is served.
func (m *machine) dial(parts ...string) *grpc.ClientConn {
	m.t.Helper()
	path := m.path(parts...)
	eventually(m.t, "the socket "+path+" is served", func() error {
		conn, err := net.Dial("unix", path)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(m.t, err)
	m.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (m *machine) plugin() drapb.DRAPluginClient {
	return drapb.NewDRAPluginClient(m.dial("plugins", driver.Name, "dra.sock"))
}

// register does what a kubelet does when it finds the registration socket.
func (m *machine) register(socket string) *registerapi.PluginInfo {
	m.t.Helper()
	client := registerapi.NewRegistrationClient(m.dial("plugins_registry", socket))
	info, err := client.GetInfo(m.t.Context(), &registerapi.InfoRequest{})
	must(m.t, err)
	_, err = client.NotifyRegistrationStatus(m.t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true})
	must(m.t, err)
	return info
}

// published returns the devices of the node's slices.
func (m *machine) published() []string {
	m.t.Helper()
	list, err := m.client.ResourceV1().ResourceSlices().List(m.t.Context(), metav1.ListOptions{})
	must(m.t, err)
	var names []string
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			names = append(names, device.Name)
		}
	}
	slices.Sort(names)
	return names
}

func (m *machine) waitForGPUs(want int) {
	m.t.Helper()
	eventually(m.t, fmt.Sprintf("%d GPUs are published", want), func() error {
		if got := m.published(); len(got) != want {
			return fmt.Errorf("published are %v", got)
		}
		return nil
	})
}

// allocate creates a claim that has the device, and its pod, which runs.
func (m *machine) allocate(name, device string) *drapb.Claim {
	m.t.Helper()
	return m.allocateIn("default", name, device)
}

func (m *machine) allocateIn(namespace, name, device string) *drapb.Claim {
	m.t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name + "-uid")}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name + "-pod", UID: types.UID(name + "-pod-uid")}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu/h100", Driver: driver.Name, Pool: nodeName, Device: device}},
	}}
	_, err := m.client.ResourceV1().ResourceClaims(namespace).Create(m.t.Context(), claim, metav1.CreateOptions{})
	must(m.t, err)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name + "-pod", UID: types.UID(name + "-pod-uid")}}
	pod.Spec.NodeName, pod.Status.Phase = nodeName, corev1.PodRunning
	_, err = m.client.CoreV1().Pods(namespace).Create(m.t.Context(), pod, metav1.CreateOptions{})
	must(m.t, err)
	return &drapb.Claim{Namespace: namespace, Name: name, Uid: name + "-uid"}
}

func (m *machine) resolve(ids ...string) error {
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(m.path("cdi")), cdilib.WithAutoRefresh(false))
	if err != nil {
		return err
	}
	_, err = cache.InjectDevices(&oci.Spec{}, ids...)
	return err
}

func TestThePathOfAClaim(t *testing.T) {
	m := newMachine(t)
	stop := m.run("")
	info := m.register(driver.Name + "-reg.sock")
	if info.GetName() != driver.Name || info.GetEndpoint() != m.path("plugins", driver.Name, "dra.sock") {
		t.Errorf("registered as %v", info)
	}
	m.waitForGPUs(8)

	plugin := m.plugin()
	claim := m.allocate("train", gpu0)
	prepared, err := plugin.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	must(t, err)
	answer := prepared.GetClaims()["train-uid"]
	if answer.GetError() != "" || len(answer.GetDevices()) != 1 {
		t.Fatalf("prepared: %v", answer)
	}
	device := answer.GetDevices()[0]
	if diff := cmp.Diff([]string{"gpu", nodeName, gpu0}, []string{device.GetRequestNames()[0], device.GetPoolName(), device.GetDeviceName()}); diff != "" {
		t.Errorf("device (-want +got):\n%s", diff)
	}
	must(t, m.resolve(device.GetCdiDeviceIds()...))

	// A container of the running pod restarts after somebody has cleared the folder.
	files, err := filepath.Glob(m.path("cdi", "*"))
	must(t, err)
	must(t, os.Remove(files[0]))
	eventually(t, "the CDI file is back", func() error { return m.resolve(device.GetCdiDeviceIds()...) })

	// The GPU is refused to another claim, which the kubelet tells the pod.
	second := m.allocate("second", gpu0)
	refused, err := plugin.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{second}})
	must(t, err)
	if message := refused.GetClaims()["second-uid"].GetError(); !strings.Contains(message, "held on this node by claim default/train") {
		t.Errorf("the second claim: %q, want a message that names the holder", message)
	}

	released, err := plugin.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim, {Namespace: "default", Name: "never", Uid: "never-uid"}}})
	must(t, err)
	for uid, answer := range released.GetClaims() {
		if answer.GetError() != "" {
			t.Errorf("unprepare of %s: %s", uid, answer.GetError())
		}
	}
	for _, dir := range []string{m.path("cdi"), m.path("state", "claims")} {
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
	must(t, stop())
	if left, _ := filepath.Glob(m.path("plugins*", "*.sock")); len(left) > 0 {
		t.Errorf("sockets left after a clean stop: %v", left)
	}
}

// TestSlicesThatTheKubeletDeletedAreBackSoon: every kubelet start deletes the slices of its node.
func TestSlicesThatTheKubeletDeletedAreBackSoon(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.run("")
	m.waitForGPUs(8)
	list, err := m.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	old := map[types.UID]bool{}
	for _, slice := range list.Items {
		old[slice.UID] = true
		must(t, m.client.ResourceV1().ResourceSlices().Delete(t.Context(), slice.Name, metav1.DeleteOptions{}))
	}
	start := time.Now()
	m.waitForGPUs(8)
	// Without the agent's own delay it would be kubeletplugin's 30 s.
	if took := time.Since(start); took > 28*time.Second {
		t.Errorf("the node was without GPUs for %s", took)
	}
}

func TestTheAgentWaitsForTheKubeletAndTheDriver(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.noDriver.Store(true)
	must(t, os.Remove(m.path("plugins_registry")))
	m.run("")
	must(t, os.Mkdir(m.path("plugins_registry"), 0o755)) // the kubelet has started

	// Served without a driver: what was prepared before can be released.
	released, err := m.plugin().NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{{Namespace: "default", Name: "old", Uid: "old-uid"}}})
	must(t, err)
	if message := released.GetClaims()["old-uid"].GetError(); message != "" {
		t.Errorf("unprepare without a driver: %s", message)
	}
	claim := m.allocate("early", gpu0)
	prepared, err := m.plugin().NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	must(t, err)
	if message := prepared.GetClaims()["early-uid"].GetError(); !strings.Contains(message, "NVML library not found") {
		t.Errorf("prepare without a driver: %q, want the reason", message)
	}

	m.noDriver.Store(false) // the driver is installed
	m.waitForGPUs(8)
}

func TestAnotherPluginForTheDriverIsARivalAndNamed(t *testing.T) {
	ours := driver.Name + "-reg.sock"
	tests := map[string]struct {
		// rival starts something on the machine.
		rival  func(m *machine)
		podUID types.UID
		want   []string // in the error, none if the agent starts
	}{
		"another driver": {
			rival: func(m *machine) { m.serve("other-reg.sock", &registrar{name: "nic.example.com"}) },
		},
		"NVIDIA's driver": {
			rival: func(m *machine) {
				m.serve("nvidia-reg.sock", &registrar{name: driver.Name, endpoint: m.path("plugins", driver.Name, "dra.sock")})
			},
			want: []string{"another plugin", driver.Name, "nvidia-reg.sock", "dra.sock"},
		},
		"NVIDIA's driver, in a rolling update of ours": {
			rival: func(m *machine) {
				m.serve("nvidia-reg.sock", &registrar{name: driver.Name, endpoint: m.path("plugins", driver.Name, "dra-x.sock")})
			},
			podUID: "pod-2",
			want:   []string{"another plugin", "nvidia-reg.sock"},
		},
		"claims that NVIDIA's driver has prepared": {
			rival: func(m *machine) {
				must(m.t, os.Mkdir(m.path("plugins", driver.Name), 0o755))
				must(m.t, os.WriteFile(m.path("plugins", driver.Name, "checkpoint.json"), []byte("{}"), 0o600))
			},
			want: []string{"NVIDIA's DRA driver", "checkpoint.json", "drain"},
		},
		"something that does not answer under our name": {
			rival: func(m *machine) { m.serve(driver.Name+"-x-reg.sock", &registrar{err: errors.New("broken")}) },
			want:  []string{"does not say what it is", "broken"},
		},
		"another agent of ours": {
			rival: func(m *machine) { m.run(""); m.register(ours) },
			want:  []string{"another stowage node agent (v-test)", ours, "--pod-uid"},
		},
		"the agent that this one replaces": {
			rival:  func(m *machine) { m.run("pod-1"); m.register(driver.Name + "-pod-1-reg.sock") },
			podUID: "pod-2",
		},
		"what a crashed agent left": {
			rival: func(m *machine) {
				m.leave("plugins_registry", ours)
				m.leave("plugins_registry", driver.Name+"-pod-1-reg.sock")
				must(m.t, os.Mkdir(m.path("plugins", driver.Name), 0o755))
				m.leave("plugins", driver.Name, "dra-pod-1.sock")
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			tc.rival(m)
			if len(tc.want) == 0 {
				m.run(tc.podUID)
				socket := ours
				if tc.podUID != "" {
					socket = fmt.Sprintf("%s-%s-reg.sock", driver.Name, tc.podUID)
				}
				m.register(socket)
				m.waitForGPUs(8)
				if _, err := os.Lstat(m.path("plugins", driver.Name, "dra-pod-1.sock")); tc.podUID == "" && !errors.Is(err, os.ErrNotExist) {
					t.Errorf("the crashed agent's socket is still there: %v", err)
				}
				return
			}
			_, ctx := ktesting.NewTestContext(t)
			agent, err := m.agent(ctx, tc.podUID)
			must(t, err)
			err = agent.Run(ctx)
			var rival *driver.RivalError
			if !errors.As(err, &rival) {
				t.Fatalf("Run: %v, want a RivalError", err)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

// TestTheSuccessorPublishesWhenTheOldAgentIsGone: of two agents one leads, so that they cannot change slices in
// turns, and the other one takes over.
func TestTheSuccessorPublishesWhenTheOldAgentIsGone(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	stopOld := m.run("pod-1")
	m.waitForGPUs(8)
	m.run("pod-2")
	m.dial("plugins_registry", driver.Name+"-pod-2-reg.sock")
	ready := func() bool {
		recorder := httptest.NewRecorder()
		m.last.Status().Handler(allowAll).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		return recorder.Code == http.StatusOK
	}
	if ready() {
		t.Error("the successor is ready before the kubelet knows it: its predecessor would end too early")
	}
	m.register(driver.Name + "-pod-2-reg.sock")
	if !ready() {
		t.Error("the successor is not ready although the kubelet knows it")
	}
	must(t, stopOld())
	list, err := m.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	for _, slice := range list.Items {
		must(t, m.client.ResourceV1().ResourceSlices().Delete(t.Context(), slice.Name, metav1.DeleteOptions{}))
	}
	m.waitForGPUs(8)
}

// TestAnAgentThatStopsAnswersTheCallsUnderWay: in an update the kubelet calls the new agent, but the old one has what was called before.
func TestAnAgentThatStopsAnswersTheCallsUnderWay(t *testing.T) {
	m := newMachine(t)
	stop := m.run("")
	m.waitForGPUs(8)
	plugin := m.plugin()
	unlock, err := durable.Lock(t.Context(), m.path("state", "locks", "gpu-"+gpu0+".lock"))
	must(t, err)
	claim := m.allocate("train", gpu0)
	answered := make(chan error, 1)
	go func() {
		response, err := plugin.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
		if err == nil && response.GetClaims()["train-uid"].GetError() != "" {
			err = errors.New(response.GetClaims()["train-uid"].GetError())
		}
		answered <- err
	}()
	get := func(path string) string {
		recorder := httptest.NewRecorder()
		m.last.Status().Handler(allowAll).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
		return recorder.Body.String()
	}
	eventually(t, "the call is under way", func() error {
		if !strings.Contains(get("/metrics"), `stowage_agent_calls_in_flight{operation="prepare"} 1`) {
			return errors.New("it is not counted")
		}
		return nil
	})
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	eventually(t, "the agent stops", func() error {
		if strings.Contains(get("/readyz"), "[+] serving the kubelet") {
			return errors.New("it says that it serves")
		}
		return nil
	})
	unlock()
	must(t, <-answered)
	must(t, <-stopped)
	if got := get("/metrics"); !strings.Contains(got, `stowage_agent_calls_in_flight{operation="prepare"} 0`) {
		t.Error("the call is still counted")
	}
}

func TestProbesTellWhatIsReached(t *testing.T) {
	m := newMachine(t)
	m.noDriver.Store(true)
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	agent, err := m.agent(ctx, "")
	must(t, err)
	get := func(path string) (int, string) {
		recorder := httptest.NewRecorder()
		agent.Status().Handler(allowAll).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
		return recorder.Code, recorder.Body.String()
	}
	if code, _ := get("/healthz"); code != http.StatusOK {
		t.Errorf("/healthz before the start: %d", code)
	}
	if code, _ := get("/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("/readyz before the start: %d", code)
	}
	done := make(chan error)
	go func() { done <- agent.Run(ctx) }()
	m.register(driver.Name + "-reg.sock")
	// Ready without a driver: the kubelet can call.
	code, body := get("/readyz")
	want := "[+] ledger read\n[+] folders writable\n[+] serving the kubelet\n[+] registered by the kubelet\n[+] no rival plugin\n[-] GPUs found\n[+] accepted by the API server\n[-] publishes the node's ResourceSlices\n"
	if code != http.StatusOK || body != want {
		t.Errorf("/readyz without a driver: %d\n%s", code, body)
	}
	if code, body := get("/metrics"); code != http.StatusOK || !strings.Contains(body, "stowage_agent_") {
		t.Errorf("/metrics: %d, without metrics of the agent", code)
	}
	cancel()
	must(t, <-done)
	if code, _ := get("/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("/readyz after the stop: %d", code)
	}
}

// Probes are for all. What names claims, pods and folders is for callers that may read it.
func TestWhoMayNotReadIsToldNoReasons(t *testing.T) {
	m := newMachine(t)
	removeAll(t, m.path("cdi"))
	must(t, os.WriteFile(m.path("cdi"), nil, 0o600)) // no folder can be made there
	stop := m.run("")
	defer func() { must(t, stop()) }()
	for status, want := range map[int]struct {
		metrics int
		why     bool
	}{
		http.StatusOK:           {metrics: http.StatusOK, why: true},
		http.StatusUnauthorized: {metrics: http.StatusUnauthorized},
		http.StatusForbidden:    {metrics: http.StatusForbidden},
	} {
		get := func(path string) (int, string) {
			recorder := httptest.NewRecorder()
			m.last.Status().Handler(func(*http.Request) int { return status }).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
			return recorder.Code, recorder.Body.String()
		}
		eventually(t, "it is not ready for a folder", func() error {
			if code, body := get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "[-] folders writable") || strings.Contains(body, m.path("cdi")) != want.why {
				return fmt.Errorf("/readyz for a caller with %d: %d\n%s", status, code, body)
			}
			return nil
		})
		if code, body := get("/metrics"); code != want.metrics || strings.Contains(body, "stowage_agent_") != want.why {
			t.Errorf("/metrics for a caller with %d: %d", status, code)
		}
		if code, _ := get("/healthz"); code != http.StatusOK {
			t.Errorf("/healthz for a caller with %d: %d", status, code)
		}
	}
}

func TestAKubeletFolderThatIsTooDeepIsSaid(t *testing.T) {
	m := newMachine(t)
	m.root = filepath.Join(m.root, strings.Repeat("deep", 30))
	must(t, os.MkdirAll(m.path("proc"), 0o755))
	must(t, os.WriteFile(m.path("proc", "devices"), nil, 0o600))
	_, ctx := ktesting.NewTestContext(t)
	agent, err := m.agent(ctx, "")
	must(t, err)
	if err := agent.Run(ctx); err == nil || !strings.Contains(err.Error(), "at most 107") {
		t.Errorf("Run: %v, want an error about the length", err)
	}
}

// registrar is another plugin's registration service.
type registrar struct {
	registerapi.UnimplementedRegistrationServer
	name, endpoint string
	err            error
}

func (r *registrar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: registerapi.DRAPlugin, Name: r.name, Endpoint: r.endpoint}, r.err
}

// serve runs a registration service until the test ends.
func (m *machine) serve(socket string, r *registrar) {
	m.t.Helper()
	listener, err := net.Listen("unix", m.path("plugins_registry", socket))
	must(m.t, err)
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, r)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	m.t.Cleanup(func() { server.Stop(); <-done })
}

// leave makes a socket that nobody serves.
func (m *machine) leave(parts ...string) {
	m.t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: m.path(parts...)})
	must(m.t, err)
	listener.SetUnlinkOnClose(false)
	must(m.t, listener.Close())
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain until %s: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
