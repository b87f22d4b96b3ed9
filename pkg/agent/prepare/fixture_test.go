// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	testingclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

const (
	driverName = "gpu.nvidia.com"
	pool       = "node-1"

	gpu0 = "gpu-0000-1b-00-0"
	gpu1 = "gpu-0000-43-00-0"
	gpu2 = "gpu-0000-52-00-0"
)

// node is one simulated machine: its folders outlive the agents (managers) that are started on it.
type node struct {
	t        testing.TB
	ctx      context.Context // logs to the test
	root     string
	fsys     durable.FS
	disk     durable.FS // fsys, while nothing disturbs it
	hardware *hardware
	timeout  time.Duration
	tools    sharing.Tools
	options  prepare.Options // what is not zero is taken over
	rules    config.Rules
	// pci, if it is set, stands between the agent and the kernel's PCI bus.
	pci vfio.Sysfs
	// noBus: the agent has no access to the PCI bus.
	noBus bool
	// mknod lets device nodes be made, which needs root.
	mknod bool
	// backend, if it is set, stands between the agent and what it knows of containers.
	backend func(cdi.Backend) cdi.Backend
}

func newNode(t *testing.T) *node { return newNodeOf(t, "dgx-h100") }

// twoGPUs, gpu0 and gpu1, make a machine that is started quickly.
const twoGPUs = "testdata/two-h100.yaml"

func newNodeOf(t *testing.T, profile string) *node {
	t.Helper()
	return nodeIn(t, t.TempDir(), profile, "")
}

// nodeIn is a machine whose GPUs' state is kept in simDir if that is not empty.
func nodeIn(t *testing.T, root, profile, simDir string) *node {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	h, err := newHardware(ctx, root, profile, simDir)
	if err != nil {
		t.Fatal(err)
	}
	disk := durabletest.Unsynced{}
	return &node{t: t, ctx: ctx, root: root, fsys: disk, disk: disk, hardware: h, tools: sharing.NewSimulated(h.machine), timeout: 10 * time.Second, rules: byDefault}
}

// victimNode is nodeIn for a process without a test. Only what does not fail by n.t may be called on it.
func victimNode(root, profile string) (*node, error) {
	ctx := context.Background()
	h, err := newHardware(ctx, root, profile, filepath.Join(root, "sim"))
	if err != nil {
		return nil, err
	}
	return &node{ctx: ctx, root: root, hardware: h, timeout: 10 * time.Second, rules: byDefault}, nil
}

// byDefault are the rules of an agent without flags.
var byDefault = config.Rules{Node: pool, Allowed: []config.Strategy{config.TimeSlicing, config.MPS}, Shares: config.TimeSlicing}

func (n *node) cdiDir() string      { return filepath.Join(n.root, "cdi") }
func (n *node) claimsDir() string   { return filepath.Join(n.root, "state", "claims") }
func (n *node) metadataDir() string { return filepath.Join(n.root, "state", "metadata") }

// recordOf opens the ledger and reads the claim's record in it.
func (n *node) recordOf(claim types.UID) (*ledger.Ledger, *ledger.Record) {
	n.t.Helper()
	records, err := ledger.Open(durable.OS{}, n.claimsDir())
	if err != nil {
		n.t.Fatal(err)
	}
	record, err := records.Get(claim)
	if err != nil {
		n.t.Fatal(err)
	}
	return records, record
}

// manager starts an agent's manager on the machine, without Recover.
func (n *node) manager() *prepare.Manager {
	n.t.Helper()
	m, err := n.tryManager()
	if err != nil {
		n.t.Fatal(err)
	}
	return m
}

func (n *node) sysfs() vfio.Sysfs {
	if n.pci != nil {
		return n.pci
	}
	return n.hardware.kernel
}

func (n *node) tryManager() (*prepare.Manager, error) {
	proc := filepath.Join(n.root, "proc")
	if err := os.MkdirAll(proc, 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(proc, "devices"), nil, 0o600); err != nil {
		return nil, err
	}
	options := cdi.SimulatedOptions{DevRoot: filepath.Join(n.root, "dev"), ProcRoot: proc}
	if !n.mknod {
		options.Mknod = func(string, uint32, int) error { return unix.EPERM }
	}
	simulated, err := cdi.NewSimulated(n.ctx, options)
	if err != nil {
		return nil, err
	}
	var backend cdi.Backend = simulated
	if n.backend != nil {
		backend = n.backend(backend)
	}
	opts := prepare.Options{
		Driver:      driverName,
		Pool:        pool,
		StateDir:    filepath.Join(n.root, "state"),
		CDIDir:      n.cdiDir(),
		Backend:     backend,
		Hardware:    n.hardware,
		Tools:       n.tools,
		PCI:         vfio.NewBinder(n.sysfs()),
		Users:       vfio.Simulated{Machine: n.hardware.machine},
		FS:          n.fsys,
		Clock:       testingclock.NewFakePassiveClock(time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC)),
		LockTimeout: n.timeout,
		GPUTimeout:  n.options.GPUTimeout,
		EndTimeout:  n.options.EndTimeout,
		Leftovers:   n.options.Leftovers,
		Handover:    n.options.Handover,
		Sharing:     n.rules,
	}
	if n.options.Users != nil {
		opts.Users = n.options.Users
	}
	if r := n.hardware.readings; r != nil {
		opts.Users = readUsers{opts.Users, r}
	}
	if n.noBus {
		opts.PCI, opts.Users = nil, nil
	}
	m := prepare.New(opts)
	return m, m.MakeFolders()
}

// told leaves what the kubelet is told of a device.
var told = cmpopts.IgnoreFields(ledger.Device{}, "GPU", "UUID", "GPUUUID", "Partition", "Share", "Passthrough", "AdminAccess")

// files lists the ledger and the CDI folder by their base names.
func (n *node) files() []string {
	n.t.Helper()
	var names []string
	for _, dir := range []string{n.claimsDir(), n.cdiDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			n.t.Fatal(err)
		}
		for _, entry := range entries {
			names = append(names, entry.Name())
		}
	}
	return names
}

// container resolves the CDI names as a container runtime does.
func (n *node) container(devices []ledger.Device) *oci.Spec {
	n.t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(n.cdiDir()), cdilib.WithAutoRefresh(false))
	if err != nil {
		n.t.Fatal(err)
	}
	container := &oci.Spec{}
	for _, device := range devices {
		if _, err := cache.InjectDevices(container, device.CDIDeviceIDs...); err != nil {
			n.t.Fatalf("the runtime cannot resolve %v: %v", device.CDIDeviceIDs, err)
		}
	}
	return container
}

// visible are the GPUs that a container gets.
func (n *node) visible(devices []ledger.Device) []string {
	n.t.Helper()
	var uuids []string
	for _, env := range n.container(devices).Process.Env {
		if name, value, _ := strings.Cut(env, "="); strings.HasPrefix(name, "STOWAGE_") {
			uuids = append(uuids, value)
		}
	}
	slices.Sort(uuids)
	return uuids
}

// hardware is a simulated machine, seen as the agent sees it.
type hardware struct {
	*driver.Hardware
	handle  *nvml.Handle
	root    string
	machine *nvmlsim.Machine
	kernel  vfio.Sysfs
	policy  discovery.Policy
	// gone: there is no driver. aside: it is not to be opened.
	gone  bool
	aside error
	// broken GPUs do not answer.
	broken map[string]error
	// looks at the node, by agents.
	looks atomic.Int32
	// aparts are how often NVML was closed.
	aparts atomic.Int32
	// readings, if it is set, are through which the agent reads what is not the GPUs'.
	readings *readings
	// wrap, if it is set, stands between the agent and each GPU.
	wrap func(nvml.Device) nvml.Device
}

// dynamic is the policy of most tests.
var dynamic = discovery.Policy{Dynamic: true}

func newHardware(ctx context.Context, root, profile, simDir string) (*hardware, error) {
	policy := dynamic
	if profile == withSound {
		policy.Passthrough = true
		var err error
		if profile, err = writeProfile(root); err != nil {
			return nil, err
		}
	}
	handle, err := nvml.Open("sim:"+profile, nvml.OpenOptions{NodeName: pool, ProcRoot: filepath.Join(root, "no-driver"), SimDir: simDir})
	if err != nil {
		return nil, err
	}
	h := &hardware{
		machine: handle.Machine,
		kernel:  handle.Sysfs,
		root:    root,
		policy:  policy,
		broken:  map[string]error{},
	}
	h.open(handle)
	h.Offer(policy)
	_, err = h.Discover(ctx)
	return h, err
}

// open is a new agent, which has not looked for GPUs yet.
func (h *hardware) open(handle *nvml.Handle) {
	h.handle = handle
	h.Hardware = driver.NewHardware(driver.HardwareOptions{
		Open:     func() (*nvml.Handle, error) { return handle, nil },
		Clock:    clock.RealClock{},
		StateDir: filepath.Join(h.root, "state"),
		Held:     driver.HeldInLedger(filepath.Join(h.root, "state")),
		Users:    vfio.Simulated{Machine: h.machine},
	})
}

// reopen is open after the agent before has ended, and its session of NVML with it.
func (h *hardware) reopen(t *testing.T) {
	t.Helper()
	if err := h.handle.Shutdown(); err != nil {
		t.Fatal(err)
	}
	sim := h.machine.NVML()
	h.open(&nvml.Handle{Library: nvml.Adapt(sim, "sim"), Raw: sim, Sysfs: sim.Sysfs(), Machine: h.machine, Simulated: true, Source: "sim"})
}

// discover looks for GPUs again, as an agent does that starts.
func (h *hardware) discover(t *testing.T, policy discovery.Policy) {
	t.Helper()
	h.Offer(policy)
	if _, err := h.Discover(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (h *hardware) Begin(string) (func(), error) { return func() {}, h.aside }

func (h *hardware) Find(ctx context.Context, device string) (prepare.Target, error) {
	if h.gone {
		return prepare.Target{}, nvml.ErrDriverNotLoaded
	}
	target, err := h.Hardware.Find(ctx, device)
	if err != nil {
		return target, err
	}
	return target, h.broken[target.GPU.Name]
}

func (h *hardware) BootID() (string, error) {
	if h.readings == nil {
		return h.Hardware.BootID()
	}
	return through(h.readings, "boot ID", h.Hardware.BootID)
}

func (h *hardware) Apart(ctx context.Context, f func(context.Context) error) error {
	h.aparts.Add(1)
	return h.Hardware.Apart(ctx, f)
}

func (h *hardware) Look(ctx context.Context) error {
	h.looks.Add(1)
	return h.Hardware.Look(ctx)
}

func (h *hardware) On(ctx context.Context, gpu, uuid string, f func(nvml.Device) error) error {
	if h.gone {
		return nvml.ErrDriverNotLoaded
	}
	if err := h.broken[gpu]; err != nil {
		return err
	}
	wrap := h.wrap // an act that was given up may go on beside the next ones
	return h.Hardware.On(ctx, gpu, uuid, func(d nvml.Device) error {
		if wrap != nil {
			d = wrap(d)
		}
		return f(d)
	})
}

func (h *hardware) uuid(device string) string {
	target, err := h.Hardware.Find(context.Background(), device)
	if err != nil {
		panic(err)
	}
	return target.GPU.UUID
}

// do commands the machine.
func (n *node) do(commands ...nvmlsim.Command) {
	n.t.Helper()
	for _, c := range commands {
		if _, err := n.hardware.machine.Do(c); err != nil {
			n.t.Fatal(err)
		}
	}
}

// gpu is the state of one of the machine's GPUs.
func (n *node) gpu(index int) nvmlsim.GPUState { return n.hardware.machine.State().GPUs[index] }

// result is one allocation result, in the form "request=device", with "+admin" for admin access, or "+share:<ID>:<memory>:<percent>"
// for a share.
type result string

// claim returns an allocated claim.
func claim(name string, results ...result) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")}}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, r := range results {
		plain, admin := strings.CutSuffix(string(r), "+admin")
		plain, share, shared := strings.Cut(plain, "+share:")
		request, device, _ := strings.Cut(plain, "=")
		allocated := resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driverName, Pool: pool, Device: device}
		if admin {
			allocated.AdminAccess = ptr.To(true)
		}
		if parts := strings.Split(share, ":"); shared {
			allocated.ShareID = ptr.To(types.UID(parts[0]))
			allocated.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(parts[1]), "compute": resource.MustParse(parts[2])}
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, allocated)
	}
	return c
}

// reservedFor adds pods that may use the claim.
func reservedFor(c *resourceapi.ResourceClaim, pods ...types.UID) *resourceapi.ResourceClaim {
	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: string(pod), UID: pod})
	}
	return c
}

// sharingConfig is parameters of that kind with a strategy and more fields.
func sharingConfig(kind, strategy, fields string) string {
	return `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + kind + `","sharing":{"strategy":"` + strategy + `"` + fields + `}}`
}

// withConfig adds opaque parameters for a driver.
func withConfig(c *resourceapi.ResourceClaim, driver, parameters string) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: resourceapi.AllocationConfigSourceClass,
		DeviceConfiguration: resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)}},
		},
	})
	return c
}

// offers are the names of all devices.
func (n *node) offers() []string {
	n.t.Helper()
	found, err := n.hardware.Discover(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	var names []string
	for _, gpu := range found.GPUs {
		for _, offer := range gpu.Offers {
			names = append(names, offer.Name)
		}
	}
	return names
}
