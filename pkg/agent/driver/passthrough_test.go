// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
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
	held    bool            // all
	holds   map[string]bool // some, by their names
	leftOut string          // the address of a GPU that the driver has and NVML does not number
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
		T: t, ctx: ctx, machine: machine, state: t.TempDir(), binder: vfio.NewBinder(machine.NVML().Sysfs()), holds: map[string]bool{},
	}
}

// leavesOut is NVML where the driver has a GPU that is not numbered, as with its option NVreg_ExcludedGpus. That GPU answers the driver.
type leavesOut struct {
	nvml.Library
	sysfs   fs.ReadLinkFS
	address string
}

// index is what it would have, or how many there are: also if it is lost, so the kernel is asked.
func (l leavesOut) index() (index int) {
	gpus, _ := vfio.GPUs(l.sysfs)
	for _, gpu := range gpus {
		if gpu.Address == l.address {
			break
		}
		if gpu.Driver == "nvidia" {
			index++
		}
	}
	return index
}

func (l leavesOut) DeviceCount() (int, error) {
	count, err := l.Library.DeviceCount()
	if l.index() < count {
		count--
	}
	return count, err
}

func (l leavesOut) Device(index int) (nvml.Device, error) {
	if index >= l.index() {
		index++
	}
	return l.Library.Device(index)
}

func (l leavesOut) DeviceAt(address string) (nvml.Device, error) {
	if address == l.address {
		return nil, errors.New("no GPU is there")
	}
	return l.Library.DeviceAt(address)
}

// agent is what an agent knows of the machine that has started and looked.
func (n *passthroughNode) agent() *Hardware {
	n.Helper()
	h := NewHardware(HardwareOptions{
		Open: func() (*nvml.Handle, error) {
			lib := n.machine.NVML() // each agent has one of its own
			return &nvml.Handle{Library: leavesOut{nvml.Adapt(lib, "sim"), lib.Sysfs(), n.leftOut}, Raw: lib, Sysfs: lib.Sysfs(), Machine: n.machine, Simulated: true}, nil
		},
		Clock: clock.RealClock{}, StateDir: n.state, Held: func(gpu string) bool { return n.held || n.holds[gpu] },
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
		leavingOut(t, name, steps, func(n *passthroughNode, buses []string) {
			n.held = true
			h := n.agent()
			for _, step := range steps {
				n.do(h, step)
				n.sharesByIndex(h, step, []string{"2", "3"}, names(buses[2:4]))
			}
		})
	}
}

// leavingOut tests with all GPUs, and then where NVML leaves out one that no step is about. The test gets the buses of those that are numbered.
func leavingOut(t *testing.T, name string, steps []string, test func(n *passthroughNode, buses []string)) {
	for _, out := range []string{"", "61", "df"} {
		if slices.ContainsFunc(steps, func(step string) bool { return out != "" && strings.HasSuffix(step, " "+out) }) {
			continue
		}
		t.Run(name+" "+out, func(t *testing.T) {
			n := newPassthroughNode(t)
			n.leftOut = "0000:" + out + ":00.0"
			all := []string{"1b", "43", "52", "61", "9d", "c3", "d1", "df"}
			test(n, slices.DeleteFunc(all, func(bus string) bool { return bus == out }))
		})
	}
}

// names are of the devices at these buses.
func names(buses []string) (list []string) {
	for _, bus := range buses {
		list = append(list, "gpu-0000-"+bus+"-00-0")
	}
	return list
}

// sharesByIndex looks, and again as the next agent, which knows what is written down. Of the indices these are to be the GPUs.
func (n *passthroughNode) sharesByIndex(h *Hardware, when string, indices, want []string) {
	n.Helper()
	looks := func(h *Hardware, when string) {
		h.Offer(discovery.Policy{Passthrough: true, Shares: discovery.Shares{GPUs: indices, MemoryStep: 1 << 30}})
		if err := h.Look(n.ctx); err != nil {
			n.Fatal(err)
		}
		var shared []string
		for _, gpu := range h.Node().GPUs {
			if slices.ContainsFunc(gpu.Offers, func(o discovery.Offer) bool { return o.Shares != nil }) {
				shared = append(shared, gpu.Name)
			}
		}
		if diff := cmp.Diff(want, shared); diff != "" {
			n.Errorf("%s: shared are (-want +got):\n%s", when, diff)
		}
	}
	looks(h, when)
	next := n.agent()
	looks(next, when+", the next agent")
	if err := next.Close(n.ctx); err != nil { // whoever has NVML open keeps GPUs with their driver
		n.Fatal(err)
	}
}

// do does a step: what, and with which GPU, by its bus. The empty step does nothing.
func (n *passthroughNode) do(h *Hardware, step string) {
	n.Helper()
	sysfs := n.machine.NVML().Sysfs()
	what, of, _ := strings.Cut(step, " ")
	address := "0000:" + of + ":00.0"
	simulated := func(commands ...nvmlsim.Command) (err error) {
		for _, c := range commands {
			_, e := n.machine.Do(c)
			err = errors.Join(err, e)
		}
		return err
	}
	place := map[string]string{"1b": "0", "43": "1"}[of]
	if place == "" {
		place = "2"
	}
	var err error
	switch what {
	case "lose":
		err = simulated(&nvmlsim.LoseGPU{GPU: place})
	case "restore":
		err = simulated(&nvmlsim.RestoreGPU{GPU: place})
	case "take":
		n.holds["gpu-0000-"+of+"-00-0"] = true
		err = h.Apart(n.ctx, func(ctx context.Context) error { return n.binder.Take(ctx, address) })
	case "seize": // as take, without a claim
		err = h.Apart(n.ctx, func(ctx context.Context) error { return n.binder.Take(ctx, address) })
	case "give":
		err = n.binder.GiveBack(n.ctx, address, "nvidia", "")
		delete(n.holds, "gpu-0000-"+of+"-00-0")
	case "hold":
		n.holds["gpu-0000-"+of+"-00-0"] = true
	case "free":
		delete(n.holds, "gpu-0000-"+of+"-00-0")
	case "unbind":
		err = sysfs.Write("bus/pci/drivers/vfio-pci/unbind", address)
		err = errors.Join(err, sysfs.Write("bus/pci/devices/"+address+"/driver_override", "\n"))
	case "bind":
		err = sysfs.Write("bus/pci/drivers/nvidia/bind", address)
	case "remove":
		err = simulated(&nvmlsim.RemoveGPU{GPU: place})
	case "add":
		err = simulated(&nvmlsim.AddGPU{GPU: place})
	case "spoil": // it comes back, and does not answer
		err = n.binder.GiveBack(n.ctx, address, "nvidia", "")
		err = errors.Join(err, simulated(&nvmlsim.LoseGPU{GPU: place}))
	}
	if err != nil {
		n.Fatalf("%s: %v", step, err)
	}
}

// TestIndicesFollowGPUsThatNoClaimHas: NVML numbers the rest anew, and one that is lost among them. Its index is today's.
func TestIndicesFollowGPUsThatNoClaimHas(t *testing.T) {
	for name, steps := range map[string][]string{
		"one is taken out": {"lose", "remove 1b"},
		"two are":          {"lose", "remove 1b", "remove 43"},
		"one is taken out, and another is claimed": {"lose", "remove 1b", "take 43"},
		"one is claimed, and another taken out":    {"lose", "take 43", "remove 1b", "give 43"},
		"a claim ends of one that was taken out":   {"lose", "hold 1b", "remove 1b", "free 1b"},
		"the administrator has one":                {"lose", "seize 1b"},
		"the administrator has two, and a claim":   {"lose", "seize 1b", "take 9d", "seize 43"},
		"and gives it back":                        {"lose", "seize 1b", "give 1b"},
		"and a claim takes it":                     {"seize 1b", "lose", "give 1b", "take 1b"},
		"one is put in":                            {"remove 1b", "lose", "add 1b"},
		"one is put in, and claimed":               {"remove 1b", "lose", "add 1b", "take 1b"},
		"two are put in, and claimed":              {"remove 1b", "remove 43", "lose", "add 1b", "add 43", "take 43", "take 1b"},
		"the lost one is there again":              {"lose", "remove 1b", "restore"},
	} {
		leavingOut(t, name, steps, func(n *passthroughNode, buses []string) {
			h := n.agent()
			out := map[string]bool{} // what no index counts
			for _, step := range steps {
				n.do(h, step)
				switch what, of, _ := strings.Cut(step, " "); what {
				case "remove", "seize":
					out[of] = true
				case "add", "give":
					delete(out, of)
				}
				var counted []string
				for i, gpu := range names(buses) {
					if !out[buses[i]] || n.holds[gpu] {
						counted = append(counted, gpu)
					}
				}
				n.sharesByIndex(h, step, []string{"1", "2"}, counted[1:3])
			}
		})
	}
}

// TestIndicesCountALostGPUThatNobodyKnows, or of which nobody knows more than its address, before one that is passed through.
func TestIndicesCountALostGPUThatNobodyKnows(t *testing.T) {
	for name, happens := range map[string]func(n *passthroughNode) *Hardware{
		"it was lost before the first agent came": func(n *passthroughNode) *Hardware {
			if _, err := n.machine.Do(&nvmlsim.LoseGPU{GPU: "0"}); err != nil {
				n.Fatal(err)
			}
			return n.agent()
		},
		"an administrator had it by then": func(n *passthroughNode) *Hardware {
			if err := n.binder.Take(n.ctx, passedAddress); err != nil {
				n.Fatal(err)
			}
			h := n.agent()
			n.do(h, "spoil 1b")
			return h
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newPassthroughNode(t)
			h := happens(n)
			for _, step := range []string{"", "take 43", "take 61", "give 43"} {
				n.do(h, step)
				n.sharesByIndex(h, step, []string{"1", "3"}, names([]string{"43", "61"}))
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
