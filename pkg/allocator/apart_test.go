// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

const ownDriver = "gpu.nvidia.com"

// renamed returns the value with another driver in the place of driverA.
func renamed[T any](value T) (out T) {
	raw, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	if err := json.Unmarshal(bytes.ReplaceAll(raw, []byte(driverA), []byte(ownDriver)), &out); err != nil {
		panic(err)
	}
	return out
}

// ours is the world with the node agent's driver, and with the attribute on the devices.
func (w *world) ours(isApart func(device string) bool) *world {
	out := *w
	out.slices, out.classes, out.held, out.shares, out.claims = renamed(w.slices), renamed(w.classes), renamed(w.held), renamed(w.shares), renamed(w.claims)
	for _, slice := range out.slices {
		for i := range slice.Spec.Devices {
			if d := &slice.Spec.Devices[i]; isApart(d.Name) {
				if d.Attributes == nil {
					d.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
				}
				d.Attributes["sharedByNamespace"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}
			}
		}
	}
	return &out
}

// of returns the claims as those of a namespace.
func (w *world) of(namespace string) []*resourceapi.ResourceClaim {
	var claims []*resourceapi.ResourceClaim
	for _, c := range w.claims {
		c = c.DeepCopy()
		c.Namespace = namespace
		claims = append(claims, c)
	}
	return claims
}

// usageIn is the usage in which the i-th share is a claim's of the i-th namespace. Flying ones are not written yet.
func (w *world) usageIn(namespaces []string, flying bool) usage.View {
	index := usage.NewIndex()
	set := func(name, namespace string, result resourceapi.DeviceRequestAllocationResult, flying bool) {
		ref := usage.ClaimRef{UID: types.UID(name), Namespace: namespace, Name: name}
		allocation := &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}}}
		if flying {
			index.Set(ref, nil, allocation)
		} else {
			index.Set(ref, allocation, nil)
		}
	}
	for i, id := range w.held {
		set(fmt.Sprint("holder-", i), "somebody", resourceapi.DeviceRequestAllocationResult{Driver: id.Driver, Pool: id.Pool, Device: id.Device}, false)
	}
	for i, share := range w.shares {
		set(fmt.Sprint("sharer-", i), namespaces[i], share, flying)
	}
	return index.View()
}

func TestSharesOfADeviceAreOneNamespaces(t *testing.T) {
	everywhere := func(string) bool { return true }
	two := func() *world { return rig().node("n1", gpus(2, shareable("memory", "4"))...) }
	one := func() resourceapi.DeviceRequest { return takes(exactly("r", 1), "memory", "1") }
	tests := map[string]struct {
		world *world
		// namespaces are of the world's shares, in order.
		namespaces []string
		apart      func(device string) bool
		foreign    bool // the driver is another one's
		flying     bool
		// want is what a claim of team-b gets, in order; nil if nothing.
		want []string
		text string // of the explanation if nothing
	}{
		"the GPU that nobody has":            {world: two().share("n1/gpu-0", "memory", "1"), namespaces: []string{"team-a"}, want: []string{"gpu-1"}},
		"its own GPU":                        {world: two().share("n1/gpu-0", "memory", "1").share("n1/gpu-1", "memory", "1"), namespaces: []string{"team-a", "team-b"}, want: []string{"gpu-1"}},
		"its own GPU rather than a free one": {world: two().share("n1/gpu-0", "memory", "1"), namespaces: []string{"team-b"}, want: []string{"gpu-0"}},
		"in flight":                          {world: two().share("n1/gpu-0", "memory", "1"), namespaces: []string{"team-a"}, flying: true, want: []string{"gpu-1"}},
		"a GPU that both have, as the flag was set once":   {world: two().share("n1/gpu-0", "memory", "1").share("n1/gpu-0", "memory", "1"), namespaces: []string{"team-a", "team-b"}, want: []string{"gpu-1"}},
		"none where others have all":                       {world: two().share("n1/gpu-0", "memory", "1").share("n1/gpu-1", "memory", "1"), namespaces: []string{"team-a", "team-c"}, text: "2 of 2 gpu.example.com devices shared by another namespace"},
		"none where others have one and the other is held": {world: two().hold("n1/gpu-0").share("n1/gpu-1", "memory", "1"), namespaces: []string{"team-a"}, text: "1 of 2 gpu.example.com devices held, 1 shared by another namespace"},
		"shares that take no capacity are shares":          {world: rig().node("n1", gpus(1, shareable("memory", "4"))...).shareOnly("n1/gpu-0"), namespaces: []string{"team-a"}, text: "shared by another namespace"},
		"the node allows it":                               {world: two().share("n1/gpu-0", "memory", "1"), namespaces: []string{"team-a"}, apart: func(string) bool { return false }, want: []string{"gpu-0"}},
		"one device of the node allows it":                 {world: two().share("n1/gpu-0", "memory", "1").share("n1/gpu-1", "memory", "1"), namespaces: []string{"team-a", "team-a"}, apart: func(device string) bool { return device == "gpu-0" }, want: []string{"gpu-1"}},
		"another driver's attribute of the name":           {world: two().share("n1/gpu-0", "memory", "1"), namespaces: []string{"team-a"}, foreign: true, want: []string{"gpu-0"}},
		"holders of no namespace, as upstream's sets are":  {world: two().share("n1/gpu-0", "memory", "1"), namespaces: []string{""}, want: []string{"gpu-0"}},
		"devices that are not given out in shares":         {world: rig().node("n1", gpus(2)...).hold("n1/gpu-0").claim("c", exactly("r", 1)), want: []string{"gpu-1"}},
		"all devices":  {world: two().share("n1/gpu-0", "memory", "1").claim("c", all("r")), namespaces: []string{"team-a"}, text: "shared by another namespace"},
		"admin access": {world: two().share("n1/gpu-0", "memory", "1").share("n1/gpu-1", "memory", "1").claim("c", adminAccess(one())), namespaces: []string{"team-a", "team-a"}, want: []string{"gpu-0"}},
		"two of which the search takes one for each":         {world: two().share("n1/gpu-0", "memory", "1").claim("c", one(), takes(exactly("s", 1), "memory", "3")), namespaces: []string{"team-a"}, want: []string{"gpu-1", "gpu-1"}},
		"an alternative where the first is another tenant's": {world: two().share("n1/gpu-0", "memory", "1").claim("c", firstOf("r", exactly("a", 1, `device.attributes["a.example.com"].index == 0`), exactly("b", 1))), namespaces: []string{"team-a"}, want: []string{"gpu-1"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := tc.world
			if len(w.claims) == 0 {
				w.claim("c", one())
			}
			if tc.apart == nil {
				tc.apart = everywhere
			}
			if ours := w.ours(tc.apart); !tc.foreign {
				w = ours
			} else {
				w.slices = ours.slices
				for _, slice := range w.slices {
					slice.Spec.Driver = driverA
				}
			}
			view := w.store().View()
			in := Input{Node: w.nodes[0], Inventory: view, Usage: w.usageIn(tc.namespaces, tc.flying), Policy: FirstFit}
			for range 3 { // the third time it is known
				var err error
				if in.Requests, err = Compile(w.of("team-b"), view, DefaultFeatures()); err != nil {
					t.Fatal(err)
				}
				checked, allocated := Check(context.Background(), in), Allocate(context.Background(), in)
				var got []string
				for _, a := range allocated.Allocations {
					for _, r := range a.Devices.Results {
						got = append(got, r.Device)
					}
				}
				if diff := cmp.Diff(tc.want, got); diff != "" || checked.Fits() != allocated.Fits() {
					t.Fatalf("Check fits: %v; devices (-want +got):\n%s", checked.Fits(), diff)
				}
				if tc.want != nil {
					continue
				}
				if !checked.Failure.Resolvable() {
					t.Errorf("a share that goes does not help: %v", checked.Failure)
				}
				e := Explain(in.Requests, func(yield func(string, *Failure) bool) { yield("n1", checked.Failure) }, Naming{})
				if got := e.String(); !bytes.Contains([]byte(got), []byte(tc.text)) {
					t.Errorf("explanation %q, want %q in it", got, tc.text)
				}
			}
		})
	}
}

// A device of which another namespace has shares is like one that somebody has for himself alone, in every way: in one inventory and on
// one usage, whichever namespaces ask in which order.
func TestADeviceOfAnotherNamespaceIsLikeOneThatIsHeld(t *testing.T) {
	ignored := cmp.Options{
		cmpopts.IgnoreFields(RequestCounts{}, "Pool", "Foreign"), sameText,
		cmp.Comparer(func(a, b *inventory.PoolProblem) bool { return fmt.Sprint(a) == fmt.Sprint(b) }),
	}
	differ := 0
	rapid.Check(t, func(t *rapid.T) {
		drawn := drawSharingWorld(t)
		for _, share := range drawn.shares {
			for n := range rapid.IntRange(0, 2).Draw(t, "further shares") {
				share.ShareID = ptr.To(types.UID(fmt.Sprint("share-", n)))
				drawn.shares = append(drawn.shares, share)
			}
		}
		apart := rapid.MapOf(rapid.SampledFrom([]string{"device-0", "device-1", "device-2", "device-3", "device-4", "device-5"}), rapid.Just(true)).Draw(t, "apart")
		w := drawn.ours(func(device string) bool { return apart[device] })
		namespaces := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c"}), len(w.shares), len(w.shares)).Draw(t, "namespaces")
		view, held := w.store().View(), w.usageIn(namespaces, rapid.Bool().Draw(t, "flying"))
		for _, namespace := range rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "d"}), 4, 8).Draw(t, "asking") {
			alike := *drawn.ours(func(string) bool { return false })
			for i, share := range w.shares {
				if apart[share.Device] && namespaces[i] != namespace {
					alike.held = append(alike.held, usage.DeviceID{Driver: share.Driver, Pool: share.Pool, Device: share.Device})
				}
			}
			answer := func(w *world, view *inventory.View, held usage.View) (checked, allocated Result) {
				requests, err := Compile(w.of(namespace), view, DefaultFeatures())
				if err != nil {
					t.Fatal(err)
				}
				shares := 0
				in := Input{
					Requests: requests, Node: w.nodes[0], Inventory: view, Usage: held, Policy: SmallestFit, Scoring: MostAllocated,
					NewShareID: func() types.UID { shares++; return types.UID(fmt.Sprint(shares)) },
				}
				return Check(context.Background(), in), Allocate(context.Background(), in)
			}
			checked, allocated := answer(w, view, held)
			wantChecked, wantAllocated := answer(&alike, alike.store().View(), alike.usageIn(namespaces, false))
			if diff := cmp.Diff(wantChecked, checked, ignored); diff != "" {
				t.Fatalf("Check for namespace %s (-held +shared):\n%s\n%s", namespace, diff, w.dump(w.nodes[0]))
			}
			if diff := cmp.Diff(wantAllocated, allocated, ignored); diff != "" {
				t.Fatalf("Allocate for namespace %s (-held +shared):\n%s\n%s", namespace, diff, w.dump(w.nodes[0]))
			}
			if len(alike.held) > len(w.held) {
				differ++
			}
		}
	})
	if differ == 0 && !testing.Short() { // which draws a fifth
		t.Error("no namespace has met shares of another one")
	}
}

// What is kept on a pool is taken over when something changes in another pool that has the same mark, as all have while few are held, and with it
// whose its devices are.
func TestNamespacesStayApartWhenAnotherPoolChanges(t *testing.T) {
	w := rig().node("n1", gpus(1, shareable("memory", "4"))...).share("n1/gpu-0", "memory", "1").claim("c", takes(exactly("r", 1), "memory", "1"))
	w = w.ours(func(string) bool { return true })
	index, inv := usage.NewIndex(), w.store().View()
	hold := func(name string, result resourceapi.DeviceRequestAllocationResult) {
		allocation := &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}}}
		index.Set(usage.ClaimRef{UID: types.UID(name), Namespace: "team-a", Name: name}, allocation, nil)
	}
	check := func(when string) {
		t.Helper()
		for namespace, want := range map[string]bool{"team-a": true, "team-b": false} {
			requests, err := Compile(w.of(namespace), inv, DefaultFeatures())
			if err != nil {
				t.Fatal(err)
			}
			if got := Check(context.Background(), Input{Requests: requests, Node: w.nodes[0], Inventory: inv, Usage: index.View()}).Fits(); got != want {
				t.Errorf("%s: a claim of %s fits: %v", when, namespace, got)
			}
		}
	}
	hold("sharer", w.shares[0])
	check("at first")
	hold("neighbour", resourceapi.DeviceRequestAllocationResult{Driver: ownDriver, Pool: "n2", Device: "gpu-0"})
	check("when another pool has changed")
}
