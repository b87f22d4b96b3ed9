// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
)

func ref(name string) ClaimRef {
	return ClaimRef{UID: types.UID("uid-" + name), Namespace: "default", Name: name}
}

func device(pool, name string) DeviceID {
	return DeviceID{Driver: "gpu.nvidia.com", Pool: pool, Device: name}
}

func result(id DeviceID) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: id.Driver, Pool: id.Pool, Device: id.Device}
}

func share(id DeviceID, shareID types.UID, memory string) resourceapi.DeviceRequestAllocationResult {
	r := result(id)
	r.ShareID = ptr.To(shareID)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}
	return r
}

func admin(id DeviceID) resourceapi.DeviceRequestAllocationResult {
	r := result(id)
	r.AdminAccess = ptr.To(true)
	return r
}

func allocation(results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.AllocationResult {
	return &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
}

func devices(ids ...DeviceID) *resourceapi.AllocationResult {
	a := allocation()
	for _, id := range ids {
		a.Devices.Results = append(a.Devices.Results, result(id))
	}
	return a
}

// contents spells out a view, for comparing.
func contents(v View) map[DeviceID][]string {
	found := map[DeviceID][]string{}
	for id, d := range v.All() {
		for _, h := range d.Holders() {
			found[id] = append(found[id], describe(h))
		}
	}
	return found
}

func describe(h Holder) string {
	s := string(h.Claim.UID)
	if h.InFlight {
		s += " in flight"
	}
	if h.ShareID != nil {
		s += " share " + string(*h.ShareID)
	}
	for _, name := range slices.Sorted(maps.Keys(h.ConsumedCapacity)) {
		q := h.ConsumedCapacity[name]
		s += fmt.Sprintf(" %s=%d", name, q.Value())
	}
	return s
}

func diffUsage(a, b View) string { return cmp.Diff(contents(a), contents(b)) }

func TestSetHoldsWhatTheAllocationsName(t *testing.T) {
	gpu0, gpu1 := device("node-a", "gpu-0"), device("node-a", "gpu-1")
	notAdmin := result(gpu1)
	notAdmin.AdminAccess = ptr.To(false)

	for name, tc := range map[string]struct {
		allocated, inFlight *resourceapi.AllocationResult
		want                map[DeviceID][]string
	}{
		"nothing": {
			want: map[DeviceID][]string{},
		},
		"an allocation in the API": {
			allocated: devices(gpu0, gpu1),
			want:      map[DeviceID][]string{gpu0: {"uid-a"}, gpu1: {"uid-a"}},
		},
		"an allocation in flight": {
			inFlight: devices(gpu0),
			want:     map[DeviceID][]string{gpu0: {"uid-a in flight"}},
		},
		"an allocation in flight that is in the API is one hold": {
			allocated: devices(gpu0, gpu1),
			inFlight:  devices(gpu1, gpu0),
			want:      map[DeviceID][]string{gpu0: {"uid-a"}, gpu1: {"uid-a"}},
		},
		"an allocation in flight and another one in the API are both held": {
			allocated: devices(gpu0),
			inFlight:  devices(gpu1),
			want:      map[DeviceID][]string{gpu0: {"uid-a"}, gpu1: {"uid-a in flight"}},
		},
		"admin access holds nothing": {
			allocated: allocation(result(gpu0), admin(gpu1)),
			want:      map[DeviceID][]string{gpu0: {"uid-a"}},
		},
		"admin access that is false is no admin access": {
			allocated: allocation(notAdmin),
			want:      map[DeviceID][]string{gpu1: {"uid-a"}},
		},
		"two shares of one device are two holds": {
			allocated: allocation(share(gpu0, "s2", "2"), share(gpu0, "s1", "1")),
			want:      map[DeviceID][]string{gpu0: {"uid-a share s1 memory=1", "uid-a share s2 memory=2"}},
		},
		"quantities are compared by amount": {
			allocated: allocation(share(gpu0, "s1", "1Gi")),
			inFlight:  allocation(share(gpu0, "s1", "1024Mi")),
			want:      map[DeviceID][]string{gpu0: {"uid-a share s1 memory=1073741824"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := NewIndex()
			x.Set(ref("a"), tc.allocated, tc.inFlight)
			if diff := cmp.Diff(tc.want, contents(x.View())); diff != "" {
				t.Errorf("usage (-want +got):\n%s", diff)
			}
			if got := x.View().Len(); got != len(tc.want) {
				t.Errorf("Len() = %d, want %d", got, len(tc.want))
			}
			x.Set(ref("a"), nil, nil)
			if diff := cmp.Diff(map[DeviceID][]string{}, contents(x.View())); diff != "" {
				t.Errorf("usage after the claim has gone (-want +got):\n%s", diff)
			}
			for _, id := range []DeviceID{gpu0, gpu1} {
				if pool := x.View().Pool(id.PoolID()); pool != nil {
					t.Errorf("a pool in which nothing is held is not nil: %v", pool)
				}
			}
			if len(x.holds) != 0 {
				t.Errorf("the index remembers claims that hold nothing: %v", x.holds)
			}
		})
	}
}

func TestSetReturnsTheDevicesNoLongerHeldByTheClaim(t *testing.T) {
	a0, a1, b0 := device("node-a", "gpu-0"), device("node-a", "gpu-1"), device("node-b", "gpu-0")
	x := NewIndex()
	for _, step := range []struct {
		name                string
		claim               string
		allocated, inFlight *resourceapi.AllocationResult
		released            []DeviceID
	}{
		{"reserved", "a", nil, devices(a0, b0), nil},
		{"written", "a", devices(a0, b0), devices(a0, b0), nil},
		{"released from flight", "a", devices(a0, b0), nil, nil},
		{"a second holder", "b", devices(a0), nil, nil},
		{"moved", "a", devices(a1), nil, []DeviceID{a0, b0}},
		{"the second holder goes", "b", nil, nil, []DeviceID{a0}},
		{"gone", "a", nil, nil, []DeviceID{a1}},
		{"gone again", "a", nil, nil, nil},
	} {
		if diff := cmp.Diff(step.released, x.Set(ref(step.claim), step.allocated, step.inFlight)); diff != "" {
			t.Errorf("%s: released devices (-want +got):\n%s", step.name, diff)
		}
	}
}

func TestOfTwoHoldersOneGoesAndTheDeviceIsStillHeld(t *testing.T) {
	gpu := device("node-a", "gpu-0")
	x := NewIndex()
	x.Set(ref("a"), devices(gpu), nil)
	x.Set(ref("b"), devices(gpu), nil)
	if got := x.View().Device(gpu).Count(); got != 2 {
		t.Fatalf("holders = %d, want 2", got)
	}
	x.Set(ref("a"), nil, nil)
	if diff := cmp.Diff(map[DeviceID][]string{gpu: {"uid-b"}}, contents(x.View())); diff != "" {
		t.Errorf("usage (-want +got):\n%s", diff)
	}
}

func TestPoolIdentityChangesExactlyWithWhatIsHeldInThePool(t *testing.T) {
	a0, a1, b0 := device("node-a", "gpu-0"), device("node-a", "gpu-1"), device("node-b", "gpu-0")
	for name, tc := range map[string]struct {
		claim               string
		allocated, inFlight *resourceapi.AllocationResult
		changed             bool // of pool node-a, where claim a holds a0, shared s0 in flight
	}{
		"the same again, in another object": {"a", devices(a0, b0), nil, false},
		"a change in another pool":          {"b", devices(b0), nil, false},
		"half of it in another pool":        {"a", devices(a0), nil, false},
		"admin access":                      {"b", allocation(admin(a0)), nil, false},
		"a second holder":                   {"b", devices(a0), nil, true},
		"another device":                    {"b", devices(a1), nil, true},
		"in flight instead of in the API":   {"a", nil, devices(a0, b0), true},
		"a share instead of the whole":      {"a", allocation(share(a0, "s0", "1"), result(b0)), nil, true},
		"gone":                              {"a", nil, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			x := NewIndex()
			x.Set(ref("a"), devices(a0, b0), nil)
			before := x.View()
			x.Set(ref(tc.claim), tc.allocated, tc.inFlight)
			after := x.View()
			if changed := before.Pool(a0.PoolID()) != after.Pool(a0.PoolID()); changed != tc.changed {
				t.Errorf("identity of the pool changed: %t, want %t", changed, tc.changed)
			}
			if same := diffUsage(before, after) == ""; same != (before.Revision() == after.Revision()) {
				t.Errorf("revision %d after %d, though the usage is the same: %t", after.Revision(), before.Revision(), same)
			}
			if diff := cmp.Diff(map[DeviceID][]string{a0: {"uid-a"}, b0: {"uid-a"}}, contents(before)); diff != "" {
				t.Errorf("an older view has changed (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCapacityOfAShareIsPartOfTheIdentity(t *testing.T) {
	gpu := device("node-a", "gpu-0")
	x := NewIndex()
	x.Set(ref("a"), allocation(share(gpu, "s0", "1Gi")), nil)
	before := x.View()
	x.Set(ref("a"), allocation(share(gpu, "s0", "1024Mi")), nil)
	if x.View().Pool(gpu.PoolID()) != before.Pool(gpu.PoolID()) {
		t.Error("the same amount in other words changed the identity of the pool")
	}
	x.Set(ref("a"), allocation(share(gpu, "s0", "2Gi")), nil)
	if x.View().Pool(gpu.PoolID()) == before.Pool(gpu.PoolID()) {
		t.Error("another amount did not change the identity of the pool")
	}
}

func TestZeroViewHoldsNothing(t *testing.T) {
	var v View
	if d := v.Device(device("node-a", "gpu-0")); d != nil || d.Count() != 0 || d.Holders() != nil {
		t.Errorf("Device() = %v", d)
	}
	if p := v.Pool(PoolID{}); p != nil || p.Len() != 0 {
		t.Errorf("Pool() = %v", p)
	}
	for id := range v.Pool(PoolID{}).All() {
		t.Errorf("held: %s", id)
	}
	for id := range v.All() {
		t.Errorf("held: %s", id)
	}
}

// TestIndexIsTheFoldOfItsClaims compares with a list of claims that is counted
// anew after each step, and keeps old views to see whether they change.
func TestIndexIsTheFoldOfItsClaims(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type state struct {
			allocated, inFlight *resourceapi.AllocationResult
		}
		x, claims := NewIndex(), map[string]state{}
		var views []View
		var wants []map[DeviceID][]string

		results := rapid.Map(rapid.IntRange(0, 99), func(i int) resourceapi.DeviceRequestAllocationResult {
			id := device(fmt.Sprintf("node-%d", i%3), fmt.Sprintf("gpu-%d", i/3%12))
			switch {
			case i%10 == 0:
				return admin(id)
			case i%10 < 4:
				return share(id, types.UID(fmt.Sprintf("s%d", i)), fmt.Sprint(i))
			default:
				return result(id)
			}
		})
		allocations := rapid.OneOf(
			rapid.Just((*resourceapi.AllocationResult)(nil)),
			rapid.Map(rapid.SliceOfNDistinct(results, 0, 8, func(r resourceapi.DeviceRequestAllocationResult) string {
				return DeviceOf(&r).String() + string(ptr.Deref(r.ShareID, ""))
			}),
				func(rs []resourceapi.DeviceRequestAllocationResult) *resourceapi.AllocationResult {
					return allocation(rs...)
				}),
		)

		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				for range rapid.IntRange(1, 5).Draw(t, "changes between two views") {
					name := rapid.SampledFrom([]string{"a", "b", "c", "d", "e"}).Draw(t, "claim")
					next := state{allocations.Draw(t, "allocated"), allocations.Draw(t, "inFlight")}
					if rapid.Bool().Draw(t, "written") {
						next.allocated = next.inFlight
					}
					claims[name] = next
					x.Set(ref(name), next.allocated, next.inFlight)
				}
			},
			"": func(t *rapid.T) {
				want := map[DeviceID][]string{}
				for _, name := range slices.Sorted(maps.Keys(claims)) {
					allocated := map[string]bool{}
					for _, flying := range []bool{false, true} {
						from := claims[name].allocated
						if flying {
							from = claims[name].inFlight
						}
						if from == nil {
							continue
						}
						for _, r := range from.Devices.Results {
							h := Holder{Claim: ref(name), ShareID: r.ShareID, ConsumedCapacity: r.ConsumedCapacity}
							key := DeviceOf(&r).String() + describe(h)
							if ptr.Deref(r.AdminAccess, false) || flying && allocated[key] {
								continue
							}
							allocated[key] = true
							h.InFlight = flying
							want[DeviceOf(&r)] = append(want[DeviceOf(&r)], describe(h))
						}
					}
				}
				if got := x.Len(); got != len(want) {
					t.Fatalf("Len() = %d before the view is taken, want %d", got, len(want))
				}
				for _, holders := range want {
					slices.Sort(holders)
				}
				views, wants = append(views, x.View()), append(wants, want)
				for _, i := range []int{0, len(views) / 2, len(views) - 1} {
					got := contents(views[i])
					for _, holders := range got {
						slices.Sort(holders)
					}
					if diff := cmp.Diff(wants[i], got); diff != "" {
						t.Fatalf("view %d of %d (-want +got):\n%s", i, len(views), diff)
					}
					if views[i].Len() != len(wants[i]) {
						t.Fatalf("view %d: Len() = %d, want %d", i, views[i].Len(), len(wants[i]))
					}
				}
			},
		})
	})
}

func BenchmarkSetAndView(b *testing.B) {
	for _, held := range []int{1_000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			x := NewIndex()
			for i := range held {
				x.Set(ref(fmt.Sprint(i)), devices(device(fmt.Sprintf("node-%d", i/8), fmt.Sprintf("gpu-%d", i%8))), nil)
			}
			claim, on := ref("new"), devices(device("node-7", "gpu-7"))
			b.ReportAllocs()
			for b.Loop() {
				x.Set(claim, on, nil)
				if x.View().Device(device("node-7", "gpu-7")) == nil {
					b.Fatal("device is free")
				}
				x.Set(claim, nil, nil)
			}
		})
	}
}

// An index of which nobody takes a view keeps nothing of pools that are not held any more.
func TestAnIndexForgetsPools(t *testing.T) {
	x := NewIndex()
	for i := range 1000 {
		x.Set(ref("a"), devices(device(fmt.Sprint("pool-", i), "gpu-0")), nil)
		x.Set(ref("a"), nil, nil)
	}
	if n := len(x.changed); n > 0 {
		t.Errorf("%d pools are kept, want none", n)
	}
	// The view still has one.
	x.Set(ref("a"), devices(device("pool", "gpu-0")), nil)
	held := x.View()
	x.Set(ref("a"), nil, nil)
	if id := device("pool", "gpu-0").PoolID(); held.Pool(id) == nil || x.View().Pool(id) != nil {
		t.Error("a pool is not held before its claim is gone, or is afterwards")
	}
}
