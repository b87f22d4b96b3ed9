package prepare_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
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
	t        *testing.T
	ctx      context.Context // logs to the test
	root     string
	fsys     durable.FS
	hardware *hardware
	timeout  time.Duration
	// mknod lets device nodes be made, which needs root.
	mknod bool
}

func newNode(t *testing.T) *node {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	return &node{t: t, ctx: ctx, root: t.TempDir(), fsys: durable.OS{}, hardware: newHardware(t), timeout: 10 * time.Second}
}

func (n *node) cdiDir() string    { return filepath.Join(n.root, "cdi") }
func (n *node) claimsDir() string { return filepath.Join(n.root, "state", "claims") }

// manager starts an agent's manager on the machine, without Recover.
func (n *node) manager() *prepare.Manager {
	n.t.Helper()
	m, err := n.tryManager()
	if err != nil {
		n.t.Fatal(err)
	}
	return m
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
	backend, err := cdi.NewSimulated(n.ctx, options)
	if err != nil {
		return nil, err
	}
	return prepare.New(prepare.Options{
		Driver:      driverName,
		Pool:        pool,
		StateDir:    filepath.Join(n.root, "state"),
		CDIDir:      n.cdiDir(),
		Backend:     backend,
		Hardware:    n.hardware,
		FS:          n.fsys,
		LockTimeout: n.timeout,
	})
}

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

// visible resolves the CDI names as a container runtime does and returns the GPUs that the container gets.
func (n *node) visible(devices []prepare.Device) []string {
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
	var uuids []string
	for _, env := range container.Process.Env {
		if name, value, _ := strings.Cut(env, "="); strings.HasPrefix(name, "STOWAGE_") {
			uuids = append(uuids, value)
		}
	}
	slices.Sort(uuids)
	return uuids
}

// hardware is a simulated machine of eight H100, asked directly.
type hardware struct {
	gpus map[string]discovery.GPU
	// broken GPUs do not answer.
	broken map[string]error
}

func newHardware(t *testing.T) *hardware {
	t.Helper()
	handle, err := nvml.Open("sim:dgx-h100", nvml.OpenOptions{NodeName: pool, ProcRoot: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if err := handle.Init(); err != nil {
		t.Fatal(err)
	}
	found, err := discovery.Discover(t.Context(), handle, handle.Sysfs)
	if err != nil {
		t.Fatal(err)
	}
	h := &hardware{gpus: map[string]discovery.GPU{}, broken: map[string]error{}}
	for _, gpu := range found.GPUs {
		h.gpus[gpu.Name] = gpu
	}
	return h
}

func (h *hardware) GPU(_ context.Context, device string) (cdi.GPU, error) {
	gpu, ok := h.gpus[device]
	if !ok {
		return cdi.GPU{}, fmt.Errorf("this node has no GPU of that name")
	}
	return cdi.GPU{Name: gpu.Name, UUID: gpu.UUID, Minor: gpu.Minor}, h.broken[device]
}

func (h *hardware) uuid(device string) string { return h.gpus[device].UUID }

// result is one allocation result, in the form "request=device", with "+admin" for admin access.
type result string

// claim returns an allocated claim.
func claim(name string, results ...result) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")}}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, r := range results {
		plain, admin := strings.CutSuffix(string(r), "+admin")
		request, device, _ := strings.Cut(plain, "=")
		allocated := resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driverName, Pool: pool, Device: device}
		if admin {
			allocated.AdminAccess = ptr.To(true)
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, allocated)
	}
	return c
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
