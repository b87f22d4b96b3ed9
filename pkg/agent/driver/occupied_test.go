// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// offersPartitions is an agent that offers all partitions of the node's GPUs, and an API server that knows the claims.
func (r *rig) offersPartitions(ctx context.Context, claims ...runtime.Object) (*Agent, *apiServer) {
	r.t.Helper()
	api := newAPIServer(append(claims, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}})...)
	agent := r.agent(ctx, api)
	agent.opts.Hardware.Offer(discovery.Policy{Dynamic: true, Ours: agent.claims.Made})
	if _, err := agent.opts.Hardware.Discover(ctx); err != nil {
		r.t.Fatal(err)
	}
	return agent, api
}

// TestALeftoverPartitionKeepsNobodyOffTheOthers: while somebody may use it, what overlaps it has the taint and nothing else, and what runs in
// the other partitions of its GPU does not keep it.
func TestALeftoverPartitionKeepsNobodyOffTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		left, runs := allocatedClaim("left", first+"-mig-1g10gb-6"), allocatedClaim("runs", first+"-mig-3g40gb-0")
		agent, api := r.offersPartitions(ctx, left, runs)
		h := agent.opts.Hardware
		agent.registered.Store(time.Now().Add(-time.Hour).UnixNano())
		p := agent.newPlugin(func(error) {})
		stop := background(ctx, agent.watch)
		defer stop()
		time.Sleep(10 * time.Second)
		mustPrepare(t, ctx, p, left, runs)
		place := func(start uint32) *nvmlsim.Instance {
			t.Helper()
			for _, instance := range r.machine.State().GPUs[0].Instances {
				if instance.Start == start {
					return &nvmlsim.Instance{GPU: instance.ID, Compute: instance.Compute[0].ID}
				}
			}
			t.Fatalf("no instance at memory slice %d", start)
			return nil
		}
		for pid, start := range map[uint32]uint32{41: 0, 42: 6} {
			r.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 100, Instance: place(start)}})
		}
		held := func() bool {
			t.Helper()
			records, err := ledger.Open(durable.OS{}, agent.reporter.ledger.Dir())
			if err != nil {
				t.Fatal(err)
			}
			record, err := records.Get("left-uid")
			if err != nil {
				t.Fatal(err)
			}
			return record != nil
		}
		if err := api.ResourceV1().ResourceClaims("default").Delete(ctx, "left", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		if diff := cmp.Diff(overlapsSlice6("left-uid"), ill(t, h), cmpopts.SortSlices(strings.Compare)); diff != "" || !held() {
			t.Errorf("while a process is in it: held %v, devices with taints (-want +got):\n%s", held(), diff)
		}
		r.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 42})
		time.Sleep(3 * time.Minute)
		if diff := cmp.Diff([]string(nil), ill(t, h)); diff != "" || held() {
			t.Errorf("after the process has ended: held %v, devices with taints (-want +got):\n%s", held(), diff)
		}
		if now := r.machine.State().GPUs[0]; len(now.Instances) != 1 || len(now.Processes) != 1 {
			t.Errorf("instances %v, processes %v; want those of the claim that runs", now.Instances, now.Processes)
		}
	})
}

// overlapsSlice6 are the devices of the first GPU that overlap its memory slice 6, which the claim has.
func overlapsSlice6(claim string) []string {
	devices := []string{"", "-mig-1g10gb-6", "-mig-1g10gb-me-6", "-mig-1g20gb-6", "-mig-3g40gb-4", "-mig-7g80gb-0"}
	for i := range devices {
		devices[i] += " occupied=" + claim + ":NoSchedule"
	}
	return devices
}

// TestAPartitionInQuarantineKeepsNobodyOffTheOthers: while DCGM watches it, or a process does not end, it cannot be removed.
func TestAPartitionInQuarantineKeepsNobodyOffTheOthers(t *testing.T) {
	for what, tc := range map[string]struct {
		happens func(nvmlsim.Instance) nvmlsim.Command
		ends    nvmlsim.Command
	}{
		"DCGM watches it": {
			func(nvmlsim.Instance) nvmlsim.Command {
				return &nvmlsim.AddClient{Client: nvmlsim.Client{PID: 801, Command: "nv-hostengine", GPUs: []int{0}, Watches: true}}
			},
			&nvmlsim.RemoveClient{PID: 801},
		},
		"a process does not end": {
			func(in nvmlsim.Instance) nvmlsim.Command {
				return &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{
					PID: 42, Kind: nvmlsim.ProcessCompute, Pod: "pod-uid", Stuck: true, Instance: &in,
				}}
			},
			&nvmlsim.RemoveProcess{GPU: "0", PID: 42},
		},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				r := newRig(t, "dgx-h100")
				stuck, next := allocatedClaim("stuck", first+"-mig-1g10gb-6"), allocatedClaim("next", first+"-mig-3g40gb-0")
				stuck.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "pod-uid"}}
				agent, _ := r.offersPartitions(ctx, stuck, next)
				h := agent.opts.Hardware
				p := agent.newPlugin(func(error) {})
				defer background(ctx, agent.watch)()
				time.Sleep(10 * time.Second)
				mustPrepare(t, ctx, p, stuck)
				r.do(tc.happens(nvmlsim.Instance{GPU: r.machine.State().GPUs[0].Instances[0].ID}))
				results, err := p.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{UID: "stuck-uid"}})
				if err != nil || results["stuck-uid"] != nil {
					t.Fatalf("unprepare: %v, %v", results, err)
				}
				agent.lookForForeign(ctx)
				if diff := cmp.Diff(overlapsSlice6("stuck-uid"), ill(t, h), cmpopts.SortSlices(strings.Compare)); diff != "" {
					t.Errorf("devices with taints (-want +got):\n%s", diff)
				}
				if results, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{next}); err != nil || results["next-uid"].Err != nil {
					t.Errorf("another partition: %v, %v", results, err)
				}
				r.do(tc.ends)
				time.Sleep(2 * time.Minute)
				if diff := cmp.Diff([]string(nil), ill(t, h)); diff != "" {
					t.Errorf("when it can be removed, devices with taints (-want +got):\n%s", diff)
				}
				if now := r.machine.State().GPUs[0]; len(now.Instances) != 1 || !now.MIG {
					t.Errorf("MIG is %t, instances %v; want that of the claim that runs", now.MIG, now.Instances)
				}
			})
		})
	}
}

func mustPrepare(t *testing.T, ctx context.Context, p *plugin, claims ...*resourceapi.ResourceClaim) {
	t.Helper()
	results, err := p.PrepareResourceClaims(ctx, claims)
	for _, claim := range claims {
		if err != nil || results[claim.UID].Err != nil {
			t.Fatalf("prepare claim %s: %v, %v", claim.Name, results, err)
		}
	}
}

// TestWhatAPartitionInQuarantineHasAloneIsNotOffered: the scheduler takes what its claim had for free, and a GPU has one OFA engine.
func TestWhatAPartitionInQuarantineHasAloneIsNotOffered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		stuck, next := allocatedClaim("stuck", first+"-mig-1g10gb-me-6"), allocatedClaim("next", first+"-mig-1g10gb-me-0")
		agent, _ := r.offersPartitions(ctx, stuck, next)
		h := agent.opts.Hardware
		p := agent.newPlugin(func(error) {})
		defer background(ctx, agent.watch)()
		time.Sleep(10 * time.Second)
		mustPrepare(t, ctx, p, stuck)
		r.do(&nvmlsim.AddClient{Client: nvmlsim.Client{PID: 801, Command: "nv-hostengine", GPUs: []int{0}, Watches: true}})
		if results, err := p.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{UID: "stuck-uid"}}); err != nil || results["stuck-uid"] != nil {
			t.Fatalf("unprepare: %v, %v", results, err)
		}
		want := overlapsSlice6("stuck-uid")
		for i := range 6 {
			want = append(want, fmt.Sprintf("-mig-1g10gb-me-%d occupied=stuck-uid:NoSchedule", i))
		}
		if diff := cmp.Diff(want, ill(t, h), cmpopts.SortSlices(strings.Compare)); diff != "" {
			t.Errorf("devices with taints (-want +got):\n%s", diff)
		}
		// So it is: the driver makes no second one.
		if results, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{next}); err != nil || results["next-uid"].Err == nil {
			t.Errorf("a second one: %v, %v", results, err)
		}
	})
}

// TestOnlyAChangeOfWhatIsOccupiedIsOne: each change has the slices written anew.
func TestOnlyAChangeOfWhatIsOccupiedIsOne(t *testing.T) {
	h := NewHardware(HardwareOptions{})
	at := func(start uint32) *ledger.Partition { return &ledger.Partition{Start: start, Size: 1} }
	for i, step := range []struct {
		places  []occupiedPlace
		changed bool
	}{
		{nil, false},
		{[]occupiedPlace{{gpu: "gpu-0", at: nil, claim: "a"}}, true},
		{[]occupiedPlace{{gpu: "gpu-0", at: nil, claim: "a"}}, false},
		{[]occupiedPlace{{gpu: "gpu-0", at: at(0), claim: "a"}}, true},
		{[]occupiedPlace{{gpu: "gpu-0", at: at(0), claim: "a"}}, false},
		{[]occupiedPlace{{gpu: "gpu-0", at: at(1), claim: "a"}}, true},
		{[]occupiedPlace{{gpu: "gpu-1", at: at(1), claim: "a"}}, true},
		{[]occupiedPlace{{gpu: "gpu-1", at: at(1), claim: "b"}}, true},
		{[]occupiedPlace{{gpu: "gpu-1", at: nil, claim: "b"}}, true},
		{[]occupiedPlace{}, true},
		{nil, false},
	} {
		if changed := h.withheld.setOccupied(step.places); changed != step.changed {
			t.Errorf("step %d, %v: changed %v", i, step.places, changed)
		}
	}
}

// TestWhereADeviceIs that is known by its name alone.
func TestWhereADeviceIs(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRig(t, "dgx-h100")
	h := r.hardware()
	if gpu, at := h.inventory.placeOf(first + "-mig-3g40gb-4"); gpu != first+"-mig-3g40gb-4" || at != nil {
		t.Errorf("before the first look: %s, %v", gpu, at)
	}
	start := uint32(0)
	r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
	r.do(&nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &start, Compute: []uint32{1, 1}})
	h.Offer(discovery.Policy{Dynamic: true})
	if _, err := h.Discover(ctx); err != nil {
		t.Fatal(err)
	}
	type where struct {
		GPU string
		At  *ledger.Partition
	}
	for device, want := range map[string]where{
		first:                            {first, nil},
		first + "-mig-2g20gb-4":          {first, &ledger.Partition{Profile: "2g.20gb", ProfileID: 14, Start: 4, Size: 2}},
		first + "-mig-1c3g40gb-0-1":      {first, &ledger.Partition{Profile: "3g.40gb", ProfileID: 9, Start: 0, Size: 4, ComputeStart: 1, ComputeSize: 1}},
		first + "-mig-not-offered-now-0": {first, nil},
		"gpu-9":                          {"gpu-9", nil},
	} {
		gpu, at := h.inventory.placeOf(device)
		if diff := cmp.Diff(want, where{gpu, at}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", device, diff)
		}
	}
}

// TestWhatWaitsForNVMLIsDoneWhenItIsThere, and not with the next look at the ledger: until then the GPU is nobody's.
func TestWhatWaitsForNVMLIsDoneWhenItIsThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		const gpu = "gpu-0000-00-1b-0"
		claim := allocatedClaim("was", gpu)
		api := newAPIServer(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}}, claim)
		before := r.agent(ctx, api)
		p := before.newPlugin(func(error) {})
		defer background(ctx, before.watch)()
		mustPrepare(t, ctx, p, claim)

		// The next agent has not found the driver yet when the kubelet unprepares the claim.
		agent := r.blindAgent(ctx, api)
		h := agent.opts.Hardware
		defer background(ctx, agent.watch)()
		time.Sleep(time.Second)
		if err := agent.claims.Unprepare(ctx, "was-uid"); err != nil {
			t.Fatal(err)
		}
		if list, err := agent.claims.Quarantined(); err != nil || len(list) != 1 {
			t.Fatalf("in quarantine: %v, %v; want the GPU", list, err)
		}
		time.Sleep(time.Second)
		if _, err := h.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if list, err := agent.claims.Quarantined(); err != nil || len(list) != 0 {
			t.Errorf("in quarantine a second after the driver was found: %v, %v", list, err)
		}
		if got := published(t, h)[0]; got != gpu {
			t.Errorf("published %q, want no taint", got)
		}
		// Another look finds nothing new, and asks for none.
		if _, err := h.Discover(ctx); err != nil || len(h.reached) > 0 {
			t.Errorf("a look that finds what was there: %v, %d times said", err, len(h.reached))
		}
	})
}

// TestAQuarantineThatCannotBeReadStaysAsItWas: what cannot be read ends no quarantine.
func TestAQuarantineThatCannotBeReadStaysAsItWas(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRig(t, "t4")
	agent := r.agent(ctx, newAPIServer())
	const gpu = "gpu-0000-00-1b-0"
	folder, away := prepare.QuarantineDir(r.state), filepath.Join(r.state, "away")
	file := filepath.Join(folder, gpu+"_was-uid"+prepare.QuarantineSuffix)
	writeFile(t, file, "{")
	agent.noteQuarantined()
	taint := published(t, agent.opts.Hardware)[0]
	if !strings.HasPrefix(taint, gpu+" occupied=") {
		t.Fatalf("in quarantine: %q, want it occupied", taint)
	}
	if err := os.Rename(folder, away); err != nil {
		t.Fatal(err)
	}
	for what, note := range map[string]func(){"the quarantines": agent.noteQuarantined, "the ledger": func() { agent.noteLeft(nil) }} {
		if note(); published(t, agent.opts.Hardware)[0] != taint {
			t.Errorf("a look at %s when the folder cannot be read: %q, want %q", what, published(t, agent.opts.Hardware)[0], taint)
		}
	}
	if err := errors.Join(os.Rename(away, folder), os.Remove(file)); err != nil {
		t.Fatal(err)
	}
	agent.noteQuarantined()
	if got := published(t, agent.opts.Hardware)[0]; got != gpu {
		t.Errorf("when the quarantine has ended: %q, want no taint", got)
	}
}
