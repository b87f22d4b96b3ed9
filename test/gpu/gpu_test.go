// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
)

// node is the machine under test.
type node struct {
	// open finds NVML. Each call is another library.
	open func() (*nvml.Handle, error)
	// backend says what containers get.
	backend func(ctx context.Context, library func() *driver.Hardware) (cdi.Backend, error)
}

func TestOnSimulatedGPUs(t *testing.T) {
	proc := t.TempDir()
	if err := os.WriteFile(filepath.Join(proc, "devices"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(t.TempDir(), "sim")
	check(t, node{
		open: func() (*nvml.Handle, error) {
			return nvml.Open("sim:dgx-h100", nvml.OpenOptions{NodeName: "node-1", SimDir: state, ProcRoot: proc})
		},
		backend: func(ctx context.Context, _ func() *driver.Hardware) (cdi.Backend, error) {
			return cdi.NewSimulated(ctx, cdi.SimulatedOptions{DevRoot: filepath.Join(t.TempDir(), "dev"), ProcRoot: proc})
		},
	})
}

// TestOnALibraryOfSimulatedGPUs takes the way of real GPUs as far as there is one without them: the library of the machine's
// driver version is found below a driver root and loaded, and the kernel's tree is in a folder.
func TestOnALibraryOfSimulatedGPUs(t *testing.T) {
	if loaded, _, err := nvml.RealDriverLoaded("/proc"); loaded || err != nil {
		t.Skip("not run: the driver's library is the one of this process, which calls the functions of the first that it loads: ", err)
	}
	root, sys, proc := t.TempDir(), t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(proc, "devices"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	machine, _ := librarytest.Machine(t, librarytest.Profile(t, "dgx-h100"), "node-1")
	if err := os.CopyFS(sys, machine.NVML().Sysfs()); err != nil {
		t.Fatal(err)
	}
	libraries := filepath.Join(root, "usr", "lib64")
	if err := os.MkdirAll(libraries, 0o755); err != nil {
		t.Fatal(err)
	}
	librarytest.Install(t, libraries, machine.DriverVersion())
	check(t, node{
		open: func() (*nvml.Handle, error) {
			handle, err := nvml.Open(nvml.SpecAuto, nvml.OpenOptions{DriverRoot: root, SysRoot: sys})
			if err == nil && handle.Simulated {
				err = errors.New("no library was found")
			}
			return handle, err
		},
		backend: func(ctx context.Context, _ func() *driver.Hardware) (cdi.Backend, error) {
			return cdi.NewSimulated(ctx, cdi.SimulatedOptions{DevRoot: filepath.Join(t.TempDir(), "dev"), ProcRoot: proc})
		},
	})
}

func TestOnRealGPUs(t *testing.T) {
	loaded, version, err := nvml.RealDriverLoaded("/proc")
	if err != nil {
		t.Fatal(err)
	}
	if !loaded {
		t.Skip("not run: no NVIDIA driver is loaded on this machine")
	}
	t.Log(version)
	n := node{
		open: func() (*nvml.Handle, error) { return nvml.Open(nvml.SpecAuto, nvml.OpenOptions{}) },
		backend: func(_ context.Context, hardware func() *driver.Hardware) (cdi.Backend, error) {
			path, _ := exec.LookPath(hook) // not found: nvcdi's own
			return cdi.NewDriver(cdi.DriverOptions{NVML: hardware().NVML, DriverRoot: "/", HookPath: path}), nil
		},
	}
	check(t, n)
	t.Run("MPS in its sandbox", checkMPSSandbox)
	cudaChecks(t, n)
}

// find opens NVML, until the test ends, and looks for GPUs.
func (n node) find(t *testing.T) (nvml.Library, *discovery.Node) {
	handle, err := n.open()
	if err != nil {
		t.Fatal(err)
	}
	if err := handle.Init(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := handle.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	_, ctx := ktesting.NewTestContext(t)
	found, err := discovery.Discover(ctx, handle, handle.Sysfs)
	if err != nil {
		t.Fatal(err)
	}
	if len(found.GPUs) == 0 || len(found.Failures) > 0 {
		t.Fatalf("found %d GPUs, failed %v", len(found.GPUs), found.Failures)
	}
	return handle, found
}

// cudaChecks are those of programs on the GPU, which no simulated one runs.
func cudaChecks(t *testing.T, n node) {
	lib, found := n.find(t)
	t.Run("processes", func(t *testing.T) { checkProcesses(t, lib, found) })
	t.Run("link", func(t *testing.T) { checkLink(t, lib, found) })
	t.Run("containers", func(t *testing.T) { checkContainers(t, n, lib, found) })
	t.Run("a program's fault", func(t *testing.T) { checkFault(t, n, lib, found) })
	t.Run("MPS clients", func(t *testing.T) { checkMPSClients(t, n, lib, found) })
}

func check(t *testing.T, n node) {
	handle, found := n.find(t)
	t.Run("identity", func(t *testing.T) { checkIdentity(t, handle, found) })
	t.Run("readings", func(t *testing.T) { checkReadings(t, handle, found) })
	t.Run("events", func(t *testing.T) { checkEvents(t, handle, found) })
	t.Run("sessions", func(t *testing.T) { checkSessions(t, n) })
	t.Run("metrics", func(t *testing.T) { checkMetrics(t, n) })
	t.Run("health and CDI", func(t *testing.T) { checkHealthAndCDI(t, n) })
}

var uuidPattern = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// checkIdentity: what the agent names a GPU by is complete, and leads back to the GPU.
func checkIdentity(t *testing.T, lib nvml.Library, found *discovery.Node) {
	for _, gpu := range found.GPUs {
		t.Logf("%s: %s at %s, driver %s, %d MiB", gpu.Name, gpu.ProductName, gpu.PCIBusID, found.DriverVersion, gpu.MemoryBytes>>20)
		if !uuidPattern.MatchString(gpu.UUID) || gpu.MemoryBytes == 0 || gpu.ProductName == "" || gpu.CUDAComputeCapability == "" {
			t.Errorf("%+v is not complete", gpu)
		}
		device, err := lib.DeviceAt(gpu.PCIBusID)
		if err != nil {
			t.Errorf("%s is not found by its UUID: %v", gpu.Name, err)
			continue
		}
		if address, err := device.PCIBusID(); err != nil || address != gpu.PCIBusID {
			t.Errorf("%s is at %s by its UUID, and at %s by its index: %v", gpu.Name, address, gpu.PCIBusID, err)
		}
	}
	if _, err := lib.DeviceAt("ffff:ff:1f.0"); !errors.Is(err, nvml.ErrNotFound) {
		t.Errorf("a GPU that is not there: %v, want ErrNotFound", err)
	}
}

// checkReadings: they come, and are what they are taken to be.
func checkReadings(t *testing.T, lib nvml.Library, found *discovery.Node) {
	for _, gpu := range found.GPUs {
		device, err := lib.DeviceAt(gpu.PCIBusID)
		if err != nil {
			t.Fatal(err)
		}
		r, err := device.Readings()
		if err != nil {
			t.Errorf("%s: %v", gpu.Name, err)
			continue
		}
		if r.Odd != nil {
			t.Errorf("%s: readings that fail: %v", gpu.Name, r.Odd)
		}
		if r.TemperatureC == nil || *r.TemperatureC < 5 || *r.TemperatureC > 110 {
			t.Errorf("%s: temperature %v", gpu.Name, r.TemperatureC)
		}
		if r.SlowdownC != nil && *r.SlowdownC > 0 && r.TemperatureC != nil && *r.SlowdownC < *r.TemperatureC {
			t.Errorf("%s: hotter (%d) than where it slows down (%d), and not throttled?", gpu.Name, *r.TemperatureC, *r.SlowdownC)
		}
		if r.PCIe == nil || r.PCIe.Width < 1 || r.PCIe.MaxWidth < r.PCIe.Width {
			t.Errorf("%s: PCIe link %+v", gpu.Name, r.PCIe)
		}
		if _, err := device.Processes(); err != nil {
			t.Errorf("%s: processes: %v", gpu.Name, err)
		}
		if _, err := device.ComputeMode(); err != nil && !errors.Is(err, nvml.ErrNotSupported) {
			t.Errorf("%s: compute mode: %v", gpu.Name, err)
		}
	}
}

// checkEvents: an event set for one GPU can be made, waits no longer than it should, and can be closed between two waits.
func checkEvents(t *testing.T, lib nvml.Library, found *discovery.Node) {
	for _, gpu := range found.GPUs {
		device, err := lib.DeviceAt(gpu.PCIBusID)
		if err != nil {
			t.Fatal(err)
		}
		events, err := device.Watch()
		if errors.Is(err, nvml.ErrNotSupported) {
			t.Logf("%s tells no events", gpu.Name)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", gpu.Name, err)
			continue
		}
		began := time.Now()
		if event, err := events.Wait(200 * time.Millisecond); err != nil && !errors.Is(err, nvml.ErrTimeout) {
			t.Errorf("%s: event %+v: %v", gpu.Name, event, err)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("%s: a wait for 200 ms took %s", gpu.Name, took)
		}
		if err := events.Close(); err != nil {
			t.Errorf("%s: close: %v", gpu.Name, err)
		}
	}
}

// checkSessions: NVML can be opened and closed again and again, as happens when the driver is loaded anew, without leaving files open.
func checkSessions(t *testing.T, n node) {
	session := func() {
		handle, err := n.open()
		if err != nil {
			t.Fatal(err)
		}
		if err := handle.Init(); err != nil {
			t.Fatal(err)
		}
		if count, err := handle.DeviceCount(); err != nil || count == 0 {
			t.Errorf("%d GPUs, %v", count, err)
		}
		if err := handle.Shutdown(); err != nil {
			t.Error(err)
		}
		if _, err := handle.DeviceCount(); !errors.Is(err, nvml.ErrNoSession) {
			t.Errorf("a question after the end of the session: %v, want ErrNoSession", err)
		}
	}
	session()
	before := openFiles(t)
	for range 20 {
		session()
	}
	if after := openFiles(t); after > before+2 {
		t.Errorf("%d open files after 20 sessions, %d before", after, before)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// checkHealthAndCDI: the agent's own view of the machine. GPUs that nothing is wrong with are healthy, and what containers get for each is
// there.
func checkHealthAndCDI(t *testing.T, n node) {
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	hardware := driver.NewHardware(driver.HardwareOptions{Open: n.open, Clock: clock.RealClock{}})
	found, err := hardware.Discover(ctx)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); hardware.Watch(ctx) }()
	defer func() { cancel(); <-done }()
	backend, err := n.backend(ctx, func() *driver.Hardware { return hardware })
	if err != nil {
		t.Fatal(err)
	}
	store := cdi.NewStore(durable.OS{}, t.TempDir(), "/")
	for i, gpu := range found.GPUs {
		deadline := time.Now().Add(30 * time.Second)
		verdict := hardware.Health(gpu.Name)
		for ; verdict.Status == health.Unknown && time.Now().Before(deadline); verdict = hardware.Health(gpu.Name) {
			time.Sleep(50 * time.Millisecond)
		}
		if verdict.Status != health.Healthy {
			t.Errorf("%s is %s: %s", gpu.Name, verdict.Status, verdict.Message())
		}
		claim := types.UID(fmt.Sprint("claim-", i))
		spec, err := cdi.BuildSpec(ctx, backend, claim, []cdi.Device{{Request: "gpu", Name: gpu.Name, GPU: cdi.GPU{Name: gpu.Name, UUID: gpu.UUID, Minor: gpu.Minor}}})
		if err != nil {
			t.Errorf("%s: %v", gpu.Name, err)
			continue
		}
		data, err := cdi.Encode(spec)
		if err == nil {
			_, err = store.Restore(claim, data)
		}
		if err == nil {
			err = store.Verify(claim, []string{cdi.DeviceID(claim, "gpu", gpu.Name)})
		}
		if err != nil {
			t.Errorf("%s: %v", gpu.Name, err)
		}
	}
}
