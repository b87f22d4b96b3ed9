// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// partition makes a MIG device as an administrator does.
func (r *rig) partition(profile string, start uint32) nvmlsim.Instance {
	r.t.Helper()
	result, err := r.machine.Do(&nvmlsim.CreateMIG{GPU: "0", Profile: profile, Start: &start})
	if err != nil {
		r.t.Fatal(err)
	}
	return result.MIG.Instance
}

// ill are the devices of the first GPU that would be published with a taint, as "device taint…".
func ill(t *testing.T, h *Hardware) []string {
	t.Helper()
	var list []string
	for _, device := range published(t, h) {
		if strings.HasPrefix(device, first) && strings.Contains(device, " ") {
			list = append(list, strings.TrimPrefix(device, first))
		}
	}
	return list
}

// unhealthy are the devices of the first GPU that the kubelet is told to be unhealthy.
func unhealthy(h *Hardware) []string {
	var list []string
	p := &plugin{hardware: h, pool: "node-1"}
	for _, device := range p.health() {
		if strings.HasPrefix(device.DeviceName, first) && device.Health == kubeletplugin.HealthStatusUnhealthy {
			list = append(list, strings.TrimPrefix(device.DeviceName, first))
		}
	}
	return list
}

// TestAFaultOfOneMIGDeviceIsNotOneOfItsSiblings: in the slices and for the kubelet, over a restart of the agent, until it is over; and
// what is wrong with the GPU is wrong with all of them.
func TestAFaultOfOneMIGDeviceIsNotOneOfItsSiblings(t *testing.T) {
	const small, large, other = "-mig-1g10gb-0", "-mig-3g40gb-4", "-mig-1g10gb-1"
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		sick := r.partition("1g.10gb", 0)
		r.partition("1g.10gb", 1)
		r.partition("3g.40gb", 4)
		h := r.found(ctx)
		stop := background(ctx, h.Watch)
		want := func(what string, taint string, devices ...string) {
			t.Helper()
			synctest.Wait()
			var tainted, names []string
			for _, device := range devices {
				tainted, names = append(tainted, device+" "+taint), append(names, device)
			}
			if diff := cmp.Diff(tainted, ill(t, h)); diff != "" {
				t.Errorf("%s: taints (-want +got):\n%s", what, diff)
			}
			if strings.HasSuffix(taint, ":None") {
				names = nil
			}
			if diff := cmp.Diff(names, unhealthy(h)); diff != "" {
				t.Errorf("%s: told to the kubelet (-want +got):\n%s", what, diff)
			}
		}
		time.Sleep(time.Second)
		want("at the start", "")

		r.do(&nvmlsim.RaiseXID{GPU: "0", Code: 43, Instance: &sick})
		want("an application's error", "")
		r.do(&nvmlsim.RaiseXID{GPU: "0", Code: 46, Instance: &sick})
		want("an error of one", "xid=46:NoSchedule", small)

		stop()
		h = r.found(ctx)
		want("the agent is started anew, before it has asked", "xid=46:NoSchedule", small)
		stop = background(ctx, h.Watch)
		time.Sleep(5 * time.Minute)
		want("five minutes later", "xid=46:NoSchedule", small)
		time.Sleep(6 * time.Minute)
		want("after ten quiet minutes", "")

		r.do(&nvmlsim.CountECC{GPU: "0", ECCCounts: nvmlsim.ECCCounts{Uncorrected: 1}, Instance: &sick})
		want("an error of its memory", "ecc-uncorrected=:NoSchedule", small)
		time.Sleep(time.Hour)
		want("an hour later", "ecc-uncorrected=:NoSchedule", small)
		stop()
		h = r.found(ctx)
		stop = background(ctx, h.Watch)
		time.Sleep(time.Minute)
		want("the agent is started anew", "ecc-uncorrected=:NoSchedule", small)

		// Another device is made in its place, with its IDs, by an administrator.
		r.do(&nvmlsim.DestroyMIG{GPU: "0", Instance: sick.GPU})
		if _, err := h.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		if again := r.partition("1g.10gb", 0); again != sick {
			t.Fatalf("the new device is %v, the old one was %v", again, sick)
		}
		if _, err := h.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		want("it is made anew", "")

		r.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119, Instance: &sick})
		want("an error of what they share", "xid=119:NoSchedule", large, small, other)
		time.Sleep(11 * time.Minute)
		want("after ten quiet minutes", "")
		r.do(&nvmlsim.CountECC{GPU: "0", ECCCounts: nvmlsim.ECCCounts{Uncorrected: 1}})
		time.Sleep(time.Minute)
		want("an error of the memory that nobody is told to have", "ecc-uncorrected=:NoSchedule", large, small, other)
		r.do(&nvmlsim.ResetGPU{GPU: "0"})
		time.Sleep(time.Minute)
		r.do(&nvmlsim.LoseGPU{GPU: "0"})
		time.Sleep(time.Minute)
		if got := len(ill(t, h)); got != 3 {
			t.Errorf("of a lost GPU %d MIG devices have taints, want all: %v", got, ill(t, h))
		}
		stop()
	})
}

// TestAFaultOfAPartitionThatIsMadeForAClaimGoesWithIt: until then it is that of its place alone, and of nothing that cannot be made beside it.
func TestAFaultOfAPartitionThatIsMadeForAClaimGoesWithIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		h := r.hardware()
		h.Offer(discovery.Policy{Dynamic: true, Ours: func() discovery.Made {
			return sets.New(discovery.Place{GPU: first}, discovery.Place{GPU: first, At: nvml.Placement{Start: 4, Size: 4}})
		}})
		look := func() {
			t.Helper()
			if _, err := h.Discover(ctx); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		look()
		stop := background(ctx, h.Watch)
		synctest.Wait()
		gpu := h.inventory.node.GPUs[0]
		var profile nvml.MIGProfile
		for _, p := range gpu.MIG.Profiles {
			if p.Name == "3g.40gb" {
				profile = p
			}
		}
		var id uint32
		on := func(f func(d nvml.Device) error) {
			t.Helper()
			if err := h.On(ctx, gpu.Name, gpu.UUID, f); err != nil {
				t.Fatal(err)
			}
		}
		prepare := func(d nvml.Device) (err error) {
			if id, err = d.CreateGPUInstance(profile, nvml.Placement{Start: 4, Size: 4}); err == nil {
				_, err = d.CreateComputeInstance(id)
			}
			return err
		}
		unprepare := func(d nvml.Device) error {
			if err := d.DestroyComputeInstance(id, 0); err != nil {
				return err
			}
			return d.DestroyGPUInstance(id)
		}
		on(func(d nvml.Device) error { return d.SetMIGMode(true) })
		on(prepare)
		r.do(&nvmlsim.RaiseXID{GPU: "0", Code: 46, Instance: &nvmlsim.Instance{GPU: id}})
		synctest.Wait()
		look()
		if diff := cmp.Diff([]string{"-mig-3g40gb-4 xid=46:NoSchedule"}, ill(t, h)); diff != "" {
			t.Errorf("a fault of the claim's device: taints (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]string{"-mig-3g40gb-4"}, unhealthy(h)); diff != "" {
			t.Errorf("told to the kubelet (-want +got):\n%s", diff)
		}
		// Another claim gets the place at once, before anybody has looked.
		was := id
		on(func(d nvml.Device) error {
			if err := unprepare(d); err != nil {
				return err
			}
			return prepare(d)
		})
		if id != was {
			t.Fatalf("the new GPU instance is %d, the old one was %d", id, was)
		}
		if got := append(ill(t, h), unhealthy(h)...); len(got) > 0 {
			t.Errorf("the next claim's device has what was wrong with the one before: %v", got)
		}
		on(unprepare)
		look()
		if got := ill(t, h); len(got) > 0 {
			t.Errorf("taints after all: %v", got)
		}
		stop()
	})
}

// TestAComputeInstanceEndsAlone, and has its faults alone: its GPU instance stays, with another one.
func TestAComputeInstanceEndsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		start := uint32(4)
		result, err := r.machine.Do(&nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &start, Compute: []uint32{1, 1}})
		if err != nil {
			t.Fatal(err)
		}
		sick := result.MIG.Instance
		h := r.found(ctx)
		stop := background(ctx, h.Watch)
		synctest.Wait()
		r.do(&nvmlsim.RaiseXID{GPU: "0", Code: 46, Instance: &sick})
		synctest.Wait()
		if diff := cmp.Diff([]string{"-mig-1c3g40gb-4-0 xid=46:NoSchedule"}, ill(t, h)); diff != "" {
			t.Errorf("taints (-want +got):\n%s", diff)
		}
		gpu := h.inventory.node.GPUs[0]
		if err := h.On(ctx, gpu.Name, gpu.UUID, func(d nvml.Device) error { return d.DestroyComputeInstance(sick.GPU, sick.Compute) }); err != nil {
			t.Fatal(err)
		}
		if got := ill(t, h); len(got) != 0 {
			t.Errorf("taints %v of a device that has ended", got)
		}
		stop()
	})
}

// TestAFaultOfAMIGDeviceEndsWithItWhileAGPUIsLost: another device in its place begins anew, on the last GPU as well.
func TestAFaultOfAMIGDeviceEndsWithItWhileAGPUIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		start := uint32(0)
		partition := func() nvmlsim.Instance {
			result, err := r.machine.Do(&nvmlsim.CreateMIG{GPU: "7", Profile: "1g.10gb", Start: &start})
			if err != nil {
				t.Fatal(err)
			}
			return result.MIG.Instance
		}
		r.do(&nvmlsim.SetMIG{GPU: "7", Enabled: true})
		sick := partition()
		h := r.found(ctx)
		defer background(ctx, h.Watch)()
		want := func(what string, taints ...string) {
			t.Helper()
			time.Sleep(time.Minute)
			synctest.Wait()
			got := slices.DeleteFunc(published(t, h), func(device string) bool { return !strings.HasPrefix(device, "gpu-0000-df-00-0-mig-1g10gb-0 ") })
			if diff := cmp.Diff(taints, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", what, diff)
			}
		}
		r.do(&nvmlsim.LoseGPU{GPU: "2"})
		want("another GPU is lost")
		r.do(&nvmlsim.CountECC{GPU: "7", ECCCounts: nvmlsim.ECCCounts{Uncorrected: 1}, Instance: &sick})
		want("it has a fault", "gpu-0000-df-00-0-mig-1g10gb-0 ecc-uncorrected=:NoSchedule")
		r.do(&nvmlsim.DestroyMIG{GPU: "7", Instance: sick.GPU})
		if err := h.Look(ctx); err != nil {
			t.Fatal(err)
		}
		partition()
		if err := h.Look(ctx); err != nil {
			t.Fatal(err)
		}
		want("another one is in its place")
	})
}
