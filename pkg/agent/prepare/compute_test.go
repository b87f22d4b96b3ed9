// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

const (
	part0 = gpu0 + "-mig-1c3g40gb-4-0"
	part1 = gpu0 + "-mig-1c3g40gb-4-1"
)

// inParts lets an administrator make two compute instances in one GPU instance.
func (n *node) inParts(t *testing.T) {
	t.Helper()
	four := uint32(4)
	n.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &four, Compute: []uint32{1, 1}})
	n.hardware.discover(t, dynamic)
}

func TestComputeInstancesOfOneGPUInstanceAreHeldSideBySide(t *testing.T) {
	n := newNode(t)
	n.inParts(t)
	m := n.manager()
	before := n.state()
	var seen []string
	for name, device := range map[string]string{"one": part0, "two": part1} {
		got := n.visible(n.prepared(m, reservedFor(claim(name, result("mig="+device)), "pod-one")))
		seen = append(seen, got...)
	}
	if len(seen) != 2 || seen[0] == seen[1] || !strings.HasPrefix(seen[0], "MIG-") {
		t.Errorf("the containers have %v", seen)
	}
	// Beside them, but not in their place, partitions can be made.
	n.prepared(m, claim("beside", "mig="+gpu0+"-mig-1g10gb-0"))
	n.unprepare(m, "beside-uid")
	for _, device := range []string{part0, gpu0 + "-mig-1g10gb-5"} {
		if _, err := m.Prepare(n.ctx, claim("three", result("mig="+device))); err == nil {
			t.Errorf("%s is prepared a second time", device)
		}
	}
	// Each is taken back from its own processes alone.
	instance := n.gpu(0).Instances[0].ID
	n.do(
		&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 1, Kind: nvmlsim.ProcessCompute, Pod: "pod-one", Instance: &nvmlsim.Instance{GPU: instance, Compute: 0}}},
		&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 2, Kind: nvmlsim.ProcessCompute, Pod: "pod-one", Instance: &nvmlsim.Instance{GPU: instance, Compute: 1}}},
	)
	n.unprepare(m, "one-uid")
	if diff := cmp.Diff([]uint32{2}, n.pids()); diff != "" {
		t.Errorf("processes after the first went (-want +got):\n%s", diff)
	}
	n.unprepare(m, "two-uid")
	if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("after all (-before +after):\n%s", diff)
	}
}

func TestAComputeInstanceThatIsNotAsItWas(t *testing.T) {
	four := uint32(4)
	again := func(compute ...uint32) []nvmlsim.Command {
		return []nvmlsim.Command{&nvmlsim.DestroyMIG{GPU: "0", Instance: 2}, &nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &four, Compute: compute}}
	}
	tests := map[string]struct {
		changed []nvmlsim.Command
		want    string
	}{
		"gone":            {[]nvmlsim.Command{&nvmlsim.DestroyMIG{GPU: "0", Instance: 2}}, "there is no MIG device 1c.3g.40gb at slice 4, compute slice 1"},
		"one that is all": {again(3), "there is no MIG device 1c.3g.40gb at slice 4, compute slice 1: 3g.40gb has 1 others"},
		"MIG is off":      {[]nvmlsim.Command{&nvmlsim.DestroyMIG{GPU: "0", Instance: 2}, &nvmlsim.SetMIG{GPU: "0"}}, "there is no MIG device"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.inParts(t)
			if id := n.gpu(0).Instances[0].ID; id != 2 {
				t.Fatalf("the GPU instance is %d", id)
			}
			n.do(tc.changed...)
			before := n.hardware.machine.State().GPUs
			_, err := n.manager().Prepare(n.ctx, claim("one", result("mig="+part1)))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
			if diff := cmp.Diff(before, n.hardware.machine.State().GPUs, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("the agent has changed the GPU (-before +after):\n%s", diff)
			}
		})
	}
}

// TestAWholeInstanceThatWasDivided is not handed out as if it were one device.
func TestAWholeInstanceThatWasDivided(t *testing.T) {
	n := newNode(t)
	four := uint32(4)
	n.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &four})
	n.hardware.discover(t, dynamic)
	n.do(&nvmlsim.DestroyMIG{GPU: "0", Instance: 2}, &nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &four, Compute: []uint32{2, 1}})
	if _, err := n.manager().Prepare(n.ctx, claim("one", result("mig="+gpu0+"-mig-3g40gb-4"))); err == nil || !strings.Contains(err.Error(), "has 2 compute instances now") {
		t.Errorf("error %v", err)
	}
}

// withoutParts is a GPU that an administrator has just taken the compute instances from.
type withoutParts struct{ nvml.Device }

func (d withoutParts) GPUInstances() ([]nvml.GPUInstance, error) {
	instances, err := d.Device.GPUInstances()
	for i := range instances {
		instances[i].Devices = nil
	}
	return instances, err
}

// TestAComputeInstanceThatIsGoneIsNotMade: it was there when it was found, and nothing is recorded for it.
func TestAComputeInstanceThatIsGoneIsNotMade(t *testing.T) {
	n := newNode(t)
	n.inParts(t)
	n.hardware.wrap = func(d nvml.Device) nvml.Device { return withoutParts{d} }
	for _, device := range []string{part0, part1} {
		steps := &durabletest.Faulty{FS: n.disk}
		n.fsys = steps
		m := n.manager()
		folders := len(steps.Steps())
		_, err := m.Prepare(n.ctx, claim("train", result("mig="+device)))
		if err == nil || !strings.Contains(err.Error(), "there is no MIG device") || len(steps.Steps()) > folders {
			t.Errorf("%s: error %v, written %v", device, err, steps.Steps()[folders:])
		}
	}
}
