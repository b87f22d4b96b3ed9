// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// passthroughNode is a machine whose first GPU can be with a virtual machine.
type passthroughNode struct {
	*testing.T
	ctx     context.Context
	machine *nvmlsim.Machine
	binder  *vfio.Binder
	held    bool
	state   string
}

func newPassthroughNode(t *testing.T) *passthroughNode {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	profile, err := nvmlsim.LoadProfile("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	machine := nvmlsim.NewMachine(profile, "node-1")
	return &passthroughNode{
		T: t, ctx: ctx, machine: machine, state: t.TempDir(), binder: vfio.NewBinder(machine.NVML().Sysfs()),
	}
}

// agent is what an agent knows of the machine that has started and looked.
func (n *passthroughNode) agent() *Hardware {
	n.Helper()
	h := NewHardware(HardwareOptions{
		Open: func() (*nvml.Handle, error) {
			lib := n.machine.NVML() // each agent has one of its own
			return &nvml.Handle{Library: nvml.Adapt(lib, "sim"), Raw: lib, Sysfs: lib.Sysfs(), Machine: n.machine, Simulated: true}, nil
		},
		Clock: clock.RealClock{}, StateDir: n.state, Held: func(string) bool { return n.held },
		Users: vfio.Simulated{Machine: n.machine},
	})
	h.Offer(discovery.Policy{Passthrough: true, Dynamic: true})
	h.Lead(n.ctx)
	if _, err := h.Discover(n.ctx); err != nil {
		n.Fatal(err)
	}
	return h
}

// published is what an agent publishes, as JSON.
func (n *passthroughNode) published(h *Hardware) string {
	n.Helper()
	resources, _ := h.Resources("node-1")
	data, err := json.MarshalIndent(resources, "", " ")
	if err != nil {
		n.Fatal(err)
	}
	return string(data)
}

const passedGPU, passedAddress = "gpu-0000-1b-00-0", "0000:1b:00.0"

// TestSlicesStayWhileAGPUIsWithAVirtualMachine, for the agent that did that, and for its successor. That GPU has given the NVLink domain its name.
func TestSlicesStayWhileAGPUIsWithAVirtualMachine(t *testing.T) {
	n := newPassthroughNode(t)
	first := n.agent()
	before := n.published(first)
	n.held = true
	if err := first.Apart(n.ctx, func(ctx context.Context) error { return n.binder.Take(ctx, passedAddress) }); err != nil {
		t.Fatal(err)
	}
	for name, h := range map[string]*Hardware{"the agent": first, "its successor": n.agent()} {
		if diff := cmp.Diff(before, n.published(h)); diff != "" {
			t.Errorf("%s publishes (-before +now):\n%s", name, diff)
		}
		if err := h.monitor.Check(n.ctx, passedGPU); err != nil || len(h.Health(passedGPU+"-vfio").Faults) > 0 {
			t.Errorf("%s: health %+v, %v", name, h.Health(passedGPU+"-vfio"), err)
		}
		if _, err := h.Find(n.ctx, passedGPU); !errors.Is(err, discovery.ErrBound) {
			t.Errorf("%s finds the GPU for a container: %v", name, err)
		}
		if target, err := h.Find(n.ctx, passedGPU+"-vfio"); err != nil || !target.Passthrough || target.GPU.PCIBusID != passedAddress {
			t.Errorf("%s finds %+v, %v for a virtual machine", name, target, err)
		}
	}
	// It comes back, and both see it.
	if err := n.binder.GiveBack(n.ctx, passedAddress, "nvidia", ""); err != nil {
		t.Fatal(err)
	}
	if err := first.Look(n.ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := first.Find(n.ctx, passedGPU); err != nil || n.published(first) != before {
		t.Errorf("given back: %v\n%s", err, cmp.Diff(before, n.published(first)))
	}
}

// TestGPUsThatAreSharedByTheirIndicesStayTheSameWhenOneIsLost: NVML counts it still. What is remembered of it is of the time when it answered,
// and virtual machines have got GPUs before it since, or have given them back.
func TestGPUsThatAreSharedByTheirIndicesStayTheSameWhenOneIsLost(t *testing.T) {
	const lost, behind = "gpu-0000-52-00-0", "gpu-0000-61-00-0"
	for name, steps := range map[string][]string{
		"a GPU before it is taken afterwards":             {"lose", "take 1b"},
		"two are":                                         {"lose", "take 1b", "take 43"},
		"one is taken before":                             {"take 1b", "lose"},
		"which comes back":                                {"take 1b", "lose", "give 1b"},
		"which comes back, and another is taken":          {"take 1b", "lose", "give 1b", "take 43"},
		"one is taken, and comes back":                    {"lose", "take 1b", "give 1b"},
		"it is there again":                               {"lose", "take 1b", "restore"},
		"it is there again before the other one is":       {"take 1b", "lose", "restore", "give 1b"},
		"two are taken before, and both come back":        {"take 1b", "take 43", "lose", "give 1b", "give 43"},
		"one behind both is taken, and then one before":   {"lose", "take 9d", "take 1b"},
		"one before is taken, it is lost, one more taken": {"take 43", "lose", "take 1b"},
		"a virtual machine has had it":                    {"take 52", "spoil 52"},
		"and has one before it":                           {"take 1b", "take 52", "spoil 52", "give 1b"},
		"one has no driver before it comes back":          {"take 1b", "unbind 1b", "bind 1b"},
		"which comes back while it is lost":               {"take 1b", "unbind 1b", "lose", "take 43", "bind 1b", "give 43"},
		"it is taken out while a claim has it":            {"remove", "take 1b", "add", "give 1b"},
		"one before it is, too":                           {"take 1b", "remove", "give 1b", "take 43", "add"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newPassthroughNode(t)
			n.held = true
			looks := func(h *Hardware, when string) {
				h.Offer(discovery.Policy{Passthrough: true, Shares: discovery.Shares{GPUs: []string{"2", "3"}, MemoryStep: 1 << 30}})
				if err := h.Look(n.ctx); err != nil {
					t.Fatal(err)
				}
				for _, gpu := range h.Node().GPUs {
					is := slices.ContainsFunc(gpu.Offers, func(o discovery.Offer) bool { return o.Shares != nil })
					if is != (gpu.Name == lost || gpu.Name == behind) {
						t.Errorf("%s: %s is shared: %t", when, gpu.Name, is)
					}
				}
			}
			h, sysfs := n.agent(), n.machine.NVML().Sysfs()
			for _, step := range steps {
				what, of, _ := strings.Cut(step, " ")
				address := "0000:" + of + ":00.0"
				var err error
				switch what {
				case "lose":
					_, err = n.machine.Do(&nvmlsim.LoseGPU{GPU: "2"})
				case "restore":
					_, err = n.machine.Do(&nvmlsim.RestoreGPU{GPU: "2"})
				case "take":
					err = h.Apart(n.ctx, func(ctx context.Context) error { return n.binder.Take(ctx, address) })
				case "give":
					err = n.binder.GiveBack(n.ctx, address, "nvidia", "")
				case "unbind":
					err = sysfs.Write("bus/pci/drivers/vfio-pci/unbind", address)
					err = errors.Join(err, sysfs.Write("bus/pci/devices/"+address+"/driver_override", "\n"))
				case "bind":
					err = sysfs.Write("bus/pci/drivers/nvidia/bind", address)
				case "remove":
					_, err = n.machine.Do(&nvmlsim.RemoveGPU{GPU: "2"})
				case "add":
					_, err = n.machine.Do(&nvmlsim.AddGPU{GPU: "2"})
				case "spoil": // it comes back, and does not answer
					err = n.binder.GiveBack(n.ctx, address, "nvidia", "")
					_, lose := n.machine.Do(&nvmlsim.LoseGPU{GPU: "2"})
					err = errors.Join(err, lose)
				}
				if err != nil {
					t.Fatalf("%s: %v", step, err)
				}
				looks(h, step)
				next := n.agent()
				looks(next, step+", the next agent")
				if err := next.Close(n.ctx); err != nil { // whoever has NVML open keeps GPUs with their driver
					t.Fatal(err)
				}
			}
		})
	}
}

// TestAGPUThatIsSharedByItsIndexStaysTheSame while virtual machines have GPUs before it, or have that one.
func TestAGPUThatIsSharedByItsIndexStaysTheSame(t *testing.T) {
	const second = "gpu-0000-43-00-0"
	for name, taken := range map[string][]string{
		"the first":                {passedAddress},
		"it":                       {"0000:43:00.0"},
		"it, and then the first":   {"0000:43:00.0", passedAddress},
		"the first, and then it":   {passedAddress, "0000:43:00.0"},
		"the third":                {"0000:52:00.0"},
		"the first, and the third": {passedAddress, "0000:52:00.0"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newPassthroughNode(t)
			n.held = true
			looks := func(h *Hardware, when string) {
				h.Offer(discovery.Policy{Passthrough: true, Shares: discovery.Shares{GPUs: []string{"1"}, MemoryStep: 1 << 30}})
				if err := h.Look(n.ctx); err != nil {
					t.Fatal(err)
				}
				for _, gpu := range h.Node().GPUs {
					is := slices.ContainsFunc(gpu.Offers, func(o discovery.Offer) bool { return o.Shares != nil })
					if is != (gpu.Name == second) {
						t.Errorf("%s: %s is shared: %t", when, gpu.Name, is)
					}
				}
			}
			h := n.agent()
			looks(h, "before")
			for _, address := range taken {
				if err := h.Apart(n.ctx, func(ctx context.Context) error { return n.binder.Take(ctx, address) }); err != nil {
					t.Fatal(err)
				}
				looks(h, address+" is taken")
				next := n.agent()
				looks(next, address+" is taken, the next agent")
				if err := next.Close(n.ctx); err != nil { // whoever has NVML open keeps GPUs with their driver
					t.Fatal(err)
				}
			}
			for _, address := range taken {
				if err := n.binder.GiveBack(n.ctx, address, "nvidia", ""); err != nil {
					t.Fatal(err)
				}
				looks(h, address+" is back")
			}
		})
	}
}

// TestAGPUThatIsGoneWhileAVirtualMachineHasItIsLost: that is all that can be known of it.
func TestAGPUThatIsGoneWhileAVirtualMachineHasItIsLost(t *testing.T) {
	for name, happens := range map[string]nvmlsim.Command{
		"off the bus":                  &nvmlsim.RemoveGPU{GPU: "0"},
		"on the bus, and dead":         &nvmlsim.LoseGPU{GPU: "0"},
		"a GPU that has nothing is no": nil,
	} {
		t.Run(name, func(t *testing.T) {
			n := newPassthroughNode(t)
			h := n.agent()
			n.held = true
			if err := h.Apart(n.ctx, func(ctx context.Context) error { return n.binder.Take(ctx, passedAddress) }); err != nil {
				t.Fatal(err)
			}
			if happens != nil {
				if _, err := n.machine.Do(happens); err != nil {
					t.Fatal(err)
				}
			}
			if err := h.monitor.Check(n.ctx, passedGPU); errors.Is(err, nvml.ErrGPULost) != (happens != nil) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// TestWhatFailsApartLeavesTheOtherGPUsInReach.
func TestWhatFailsApartLeavesTheOtherGPUsInReach(t *testing.T) {
	n := newPassthroughNode(t)
	h := n.agent()
	ctx, cancel := context.WithCancel(n.ctx)
	err := h.Apart(ctx, func(context.Context) error {
		if n.machine.InUse() {
			t.Error("NVML is open")
		}
		return errors.New("the kernel says no")
	})
	if err == nil || err.Error() != "the kernel says no" {
		t.Errorf("error %v", err)
	}
	if _, err := h.Find(n.ctx, passedGPU); err != nil {
		t.Error(err)
	}
	// Nor does it matter that the kubelet gives up meanwhile.
	ended := make(chan struct{})
	_ = h.Apart(ctx, func(context.Context) error {
		defer close(ended)
		cancel()
		return nil
	})
	<-ended
	if err := h.Look(n.ctx); err != nil {
		t.Error(err)
	}
	if _, err := h.Find(n.ctx, passedGPU); err != nil {
		t.Error(err)
	}
}
