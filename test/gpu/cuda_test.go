// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// The checks of this file change nothing of a GPU: they are CUDA programs, as anybody may run.

// checkProcesses: a program on the GPU is among its processes, with its memory, and when it is killed both are gone, in a time that the agent
// has for it. So an agent that finds a process knows whose it is, and a GPU with nobody on it has its memory.
func checkProcesses(t *testing.T, lib nvml.Library, found *discovery.Node) {
	device := firstGPU(t, lib, found)
	before := used(t, device)
	c := localClient(t, "a program")
	if uuid := c.must("open"); uuid != found.GPUs[0].UUID {
		t.Errorf("CUDA's first GPU is %s, NVML's %s", uuid, found.GPUs[0].UUID)
	}
	c.must("compute")
	const mib = 8 << 10
	c.must("alloc 8192")
	p, ok := listed(t, device, c.cmd.Process.Pid)
	t.Logf("NVML says %+v, and of the GPU %d MiB more than before", p, (used(t, device)-before)>>20)
	if !ok || p.MemoryBytes < mib<<20 {
		t.Errorf("process %d has %d MiB, and NVML says %+v", c.cmd.Process.Pid, mib, p)
	}
	began := time.Now()
	c.kill()
	ended := time.Since(began)
	gone, back := time.Duration(0), time.Duration(0)
	for time.Since(began) < time.Minute && (gone == 0 || back == 0) {
		if _, there := listed(t, device, c.cmd.Process.Pid); !there && gone == 0 {
			gone = time.Since(began)
		}
		if used(t, device) <= before && back == 0 {
			back = time.Since(began)
		}
		time.Sleep(time.Millisecond)
	}
	t.Logf("killed: reaped after %s, not listed after %s, the memory is back after %s", ended, gone, back)
	if gone == 0 || back == 0 {
		t.Errorf("a minute after the end of the only process: listed %t, %d MiB more are used than before", gone == 0, (int64(used(t, device))-int64(before))>>20)
	}
}

// checkFault: a program that writes where it has no memory raises an XID, which comes as an event. The GPU is not to blame: it stays healthy
// and the next program computes.
func checkFault(t *testing.T, n node, lib nvml.Library, found *discovery.Node) {
	device := firstGPU(t, lib, found)
	events, err := device.Watch()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := events.Close(); err != nil {
			t.Error(err)
		}
	}()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	hardware := driver.NewHardware(driver.HardwareOptions{Open: n.open, Clock: clock.RealClock{}})
	if _, err := hardware.Discover(ctx); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); hardware.Watch(ctx) }()
	defer func() { cancel(); <-done }()

	other := localClient(t, "another program on the GPU")
	other.must("open")
	other.must("compute")
	c := localClient(t, "a program that faults")
	c.must("open")
	if _, err := c.ask("fault"); err == nil || !strings.Contains(err.Error(), "CUDA_ERROR_ILLEGAL_ADDRESS") {
		t.Errorf("writing to no memory: %v", err)
	}
	began := time.Now()
	var seen []nvml.Event
	ofProgram := func(e nvml.Event) bool { return e.Kind == nvml.EventXID && (e.Data == 31 || e.Data == 13) }
	for deadline := time.Now().Add(10 * time.Second); !slices.ContainsFunc(seen, ofProgram) && time.Now().Before(deadline); {
		event, err := events.Wait(time.Second)
		if errors.Is(err, nvml.ErrTimeout) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, event)
	}
	t.Logf("events within %s: %+v", time.Since(began), seen)
	if !slices.ContainsFunc(seen, ofProgram) {
		t.Errorf("no XID of a fault of the program (13, 31) among %+v", seen)
	}
	other.must("compute")
	localClient(t, "the next program").must("open")
	var verdict health.Verdict
	for deadline := time.Now().Add(3 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		verdict = hardware.Health(found.GPUs[0].Name)
	}
	if verdict.Status != health.Healthy {
		t.Errorf("after a program's fault the GPU is %s: %s", verdict.Status, verdict.Message())
	}
}

// checkLink: the PCIe link has as many lanes while the GPU idles as while it computes.
func checkLink(t *testing.T, lib nvml.Library, found *discovery.Node) {
	device := firstGPU(t, lib, found)
	idle, err := device.Readings()
	if err != nil {
		t.Fatal(err)
	}
	c := localClient(t, "a program")
	c.must("open")
	c.must("compute")
	busy, err := device.Readings()
	if err != nil {
		t.Fatal(err)
	}
	if idle.PCIe == nil || busy.PCIe == nil || idle.PCIe.Width != busy.PCIe.Width {
		t.Errorf("lanes: idle %+v, busy %+v", idle.PCIe, busy.PCIe)
	}
}

func firstGPU(t *testing.T, lib nvml.Library, found *discovery.Node) nvml.Device {
	t.Helper()
	device, err := lib.DeviceAt(found.GPUs[0].PCIBusID)
	if err != nil {
		t.Fatal(err)
	}
	return device
}

func used(t *testing.T, device nvml.Device) uint64 {
	t.Helper()
	bytes, err := device.MemoryUsedBytes()
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// listed is what NVML says of a process.
func listed(t *testing.T, device nvml.Device, pid int) (nvml.Process, bool) {
	t.Helper()
	all, err := device.Processes()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if int(p.PID) == pid {
			return p, true
		}
	}
	return nvml.Process{}, false
}
