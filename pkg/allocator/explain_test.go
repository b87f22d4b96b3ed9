// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

func TestExplainSaysInOneLineWhatIsMissing(t *testing.T) {
	h100 := `device.attributes["a.example.com"].index >= 6`
	tests := map[string]struct {
		world *world
		want  string
	}{
		"held, filtered and tainted": {
			world: rig().node("n1", gpus(8, taint("gpu-lost", 7))...).hold("n1/gpu-6").claim("train", exactly("gpu", 1, h100)),
			want:  `request "gpu" of claim train: 1 of 8 gpu.example.com devices held, 6 filtered by selector 'device.attributes["a.example.com"].index >= 6', 1 tainted gpu-lost`,
		},
		"tainted, and some held, too": {
			world: rig().node("n1", gpus(8, taint("gpu-lost", 0, 1, 2, 3, 4, 5, 6, 7))...).hold("n1/gpu-0", "n1/gpu-1").claim("train", exactly("gpu", 1)),
			want:  `request "gpu" of claim train: 8 of 8 gpu.example.com devices tainted gpu-lost`,
		},
		"held, and some tainted, too": {
			world: rig().node("n1", gpus(4, taint("gpu-lost", 2, 3))...).hold("n1/gpu-0", "n1/gpu-1", "n1/gpu-2").claim("train", exactly("gpu", 3)),
			want:  `request "gpu" of claim train: 2 of 4 gpu.example.com devices held, 2 tainted gpu-lost`,
		},
		"free, but not enough on one node": {
			world: rig().node("n1", gpus(4)...).node("n2", gpus(4)...).hold("n1/gpu-0", "n2/gpu-0").claim("train", exactly("gpu", 4)),
			want:  `request "gpu" of claim train: 2 of 8 gpu.example.com devices held, 6 free (4 wanted on one node)`,
		},
		"no device at all": {
			world: rig().node("n1").claim("train", exactly("gpu", 1)),
			want:  `request "gpu" of claim train: no ResourceSlice offers devices to the nodes`,
		},
		"constraint": {
			world: rig().node("n1", gpus(8)...).claim("train", exactly("gpu", 4)).matchAttribute("a.example.com/root"),
			want:  `request "gpu" of claim train: 8 of 8 gpu.example.com devices free (4 wanted on one node); at most 2 free devices of one node share a.example.com/root (claim train wants 4)`,
		},
		"two claims want the same devices": {
			world: rig().node("n1", gpus(3)...).claim("one", exactly("gpu", 2)).claim("two", exactly("gpu", 2)),
			want: `request "gpu" of claim one: 3 of 3 gpu.example.com devices free (2 wanted on one node); ` +
				`request "gpu" of claim two: 3 of 3 gpu.example.com devices free (2 wanted on one node); ` +
				`1 node(s) have free devices for each request, but not for all together`,
		},
		"selector fails on a device": {
			world: rig().node("n1", gpus(1, without("index", 0))...).claim("train", exactly("gpu", 1, h100)),
			want: `request "gpu" of claim train: 1 of 1 gpu.example.com devices failing a selector; ` +
				`claim default/train, request "gpu": selector 'device.attributes["a.example.com"].index >= 6' failed, for example on device a.example.com/n1/gpu-0: no such key: index. consider using CEL optional chaining (.? followed by orValue()) or guarding the check with has() for optional fields`,
		},
	}
	var choices resourceapi.DeviceRequest
	choices.Name = "gpu"
	for i, selector := range []string{"index > 90", "index > 80", "index == 1", "index > 70", "index == 2", "index > 60"} {
		sub := exactly("", 1, `device.attributes["a.example.com"].`+selector).Exactly
		choices.FirstAvailable = append(choices.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: fmt.Sprintf("choice-%d", i), DeviceClassName: sub.DeviceClassName, AllocationMode: sub.AllocationMode, Count: 1, Selectors: sub.Selectors,
		})
	}
	tests["of many alternatives those that match something"] = struct {
		world *world
		want  string
	}{
		world: rig().node("n1", gpus(3)...).hold("n1/gpu-1", "n1/gpu-2").claim("train", choices, exactly("other", 4)),
		want: `request "gpu/choice-2" of claim train: 1 of 3 gpu.example.com devices held, 2 filtered by selector 'device.attributes["a.example.com"].index == 1'; ` +
			`request "gpu/choice-4" of claim train: 1 of 3 gpu.example.com devices held, 2 filtered by selector 'device.attributes["a.example.com"].index == 2'; ` +
			`request "gpu/choice-0" of claim train: 3 of 3 gpu.example.com devices filtered by selector 'device.attributes["a.example.com"].index > 90' (and 3 more alternatives); ` +
			`request "other" of claim train: 2 of 3 gpu.example.com devices held, 1 free (4 wanted on one node)`,
	}
	cpus := func(i int, d *resourceapi.Device) {
		if i < 2 {
			d.NodeAllocatableResources = map[v1.ResourceName]resourceapi.NodeAllocatableResource{v1.ResourceCPU: {}}
		}
	}
	const standing = `standing for CPU or memory of a node (nodeAllocatableResources), which only kube-scheduler itself can account for`
	tests["devices that stand for CPU"] = struct {
		world *world
		want  string
	}{
		world: rig().node("n1", gpus(3, cpus)...).claim("train", exactly("gpu", 2)),
		want:  `request "gpu" of claim train: 2 of 3 gpu.example.com devices ` + standing + `, 1 free (2 wanted on one node)`,
	}
	tests["all devices, some of which stand for CPU"] = struct {
		world *world
		want  string
	}{
		world: rig().node("n1", gpus(3, cpus)...).claim("train", all("gpu")),
		want:  `request "gpu" of claim train: 2 of 3 gpu.example.com devices ` + standing + `, 1 free (all of a node wanted)`,
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			requests, failures := tc.world.failures(t, context.Background())
			if len(failures) != len(tc.world.nodes) {
				t.Fatalf("%d of %d nodes refused", len(failures), len(tc.world.nodes))
			}
			if diff := cmp.Diff(tc.want, Explain(requests, maps.All(failures), Naming{}).String()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Whether others have the devices, or nobody has so many: the first is waited for, the second is not.
func TestExplainTellsContentionFromWhatCanNeverBe(t *testing.T) {
	eight := func() *world { return rig().node("n1", gpus(8)...).node("n2", gpus(4)...) }
	memory := func(quantity string) func(int, *resourceapi.Device) {
		return func(_ int, d *resourceapi.Device) {
			d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse(quantity)}}
		}
	}
	of := func(request resourceapi.DeviceRequest, quantity string) resourceapi.DeviceRequest {
		return takes(request, "memory", quantity)
	}
	low, none := `device.attributes["a.example.com"].index < 3`, `device.driver == "other.example.com"`
	all8 := []string{"n1/gpu-0", "n1/gpu-1", "n1/gpu-2", "n1/gpu-3", "n1/gpu-4", "n1/gpu-5", "n1/gpu-6", "n1/gpu-7"}
	for name, tc := range map[string]struct {
		world *world
		held  map[string][]string
		want  string
	}{
		"as many as a node has, held by others": {
			world: eight().claim("train", exactly("gpu", 8)), held: map[string][]string{"a": all8},
			want: `request "gpu" of claim train: 8 of 12 gpu.example.com devices held, 4 free (8 wanted on one node); ` +
				`would fit on node n1 if claim default/a were released`,
		},
		"more than any node has": {
			world: eight().claim("train", exactly("gpu", 9)), held: map[string][]string{"a": all8},
			want: `request "gpu" of claim train: asks for 9 gpu.example.com devices of one node, the largest has 8`,
		},
		"more than any node has of what the selector matches": {
			world: eight().claim("train", exactly("gpu", 4, low)),
			want:  `request "gpu" of claim train: asks for 4 gpu.example.com devices of one node, the largest has 3 that match its selectors`,
		},
		"two requests that are too much together": {
			world: eight().claim("train", exactly("a", 5), exactly("b", 5)),
			want: `request "a" of claim train: with 1 more request of the pod asks for 10 gpu.example.com devices of one node, the largest has 8; ` +
				`request "b" of claim train: 12 of 12 gpu.example.com devices free (5 wanted on one node); ` +
				`1 node(s) have free devices for each request, but not for all together`,
		},
		"no device with the value that all must share": {
			world: eight().claim("train", exactly("gpu", 4)).matchAttribute("a.example.com/root"), held: map[string][]string{"a": all8},
			want: `request "gpu" of claim train: 8 of 12 gpu.example.com devices held, 4 free (4 wanted on one node); ` +
				`at most 2 free devices of one node share a.example.com/root (claim train wants 4); ` +
				`no node could satisfy the pod's requests together, even if all its devices were free`,
		},
		"more memory than any device has": {
			world: rig().node("n1", gpus(2, memory("80Gi"))...).node("n2", gpus(2, memory("40Gi"))...).claim("train", of(exactly("gpu", 1), "200Gi")),
			want:  `request "gpu" of claim train: asks for 200Gi memory, the largest gpu.example.com device has 80Gi`,
		},
		"memory, of which no device has any": {
			world: rig().node("n1", gpus(2)...).claim("train", of(exactly("gpu", 1), "1Gi")),
			want:  `request "gpu" of claim train: asks for 1Gi memory, and no gpu.example.com device has any`,
		},
		"fewer with so much memory than are asked for": {
			world: rig().node("n1", append(gpus(1, memory("80Gi")), gpus(3, memory("40Gi"))[1:]...)...).claim("train", of(exactly("gpu", 2), "60Gi")),
			want:  `request "gpu" of claim train: asks for 2 gpu.example.com devices of one node, the largest has 1`,
		},
		"tainted devices may come back": {
			world: rig().node("n1", gpus(4, taint("gpu-lost", 3))...).claim("train", exactly("gpu", 4)),
			want:  `request "gpu" of claim train: 1 of 4 gpu.example.com devices tainted gpu-lost, 3 free (4 wanted on one node)`,
		},
		"a tainted device does not hide what can never be": {
			world: rig().node("n1", gpus(4, taint("gpu-lost", 3))...).claim("train", exactly("gpu", 3)).matchAttribute("a.example.com/root"),
			want: `request "gpu" of claim train: 1 of 4 gpu.example.com devices tainted gpu-lost, 3 free (3 wanted on one node); ` +
				`at most 2 free devices of one node share a.example.com/root (claim train wants 3); no node could satisfy the pod's requests together, even if all its devices were free`,
		},
		"a class that matches nothing": {
			world: func() *world {
				w := eight().claim("train", exactly("gpu", 1))
				w.classes[0].Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: none}}}
				return w
			}(),
			want: `request "gpu" of claim train: 0 of 12 devices match class gpu.example.com's selectors`,
		},
		"a shared device that is full": {
			world: rig().node("n1", gpus(1, shareable("memory", "10", 0))...).claim("train", of(exactly("gpu", 1), "6")),
			held:  map[string][]string{"a": {"n1/gpu-0=5"}},
			want: `request "gpu" of claim train: 1 of 1 gpu.example.com devices shared by others, with too little capacity left; ` +
				`would fit on node n1 if claim default/a were released`,
		},
		"a partition beside others": {
			world: rig().node("n1", gpus(2, consumes("gpu", "memory", "2", 0), consumes("gpu", "memory", "1", 1))...).counters("n1", "gpu", "memory", "2").
				claim("train", exactly("gpu", 1, `device.attributes["a.example.com"].index == 0`)),
			held: map[string][]string{"a": {"n1/gpu-1"}},
			want: `request "gpu" of claim train: 1 of 2 gpu.example.com devices blocked by devices in use that take from the same shared counters, ` +
				`1 filtered by selector 'device.attributes["a.example.com"].index == 0'; would fit on node n1 if claim default/a were released`,
		},
		"a selector that fails on every device": {
			world: rig().node("n1", gpus(2, without("index", 0, 1))...).node("n2", gpus(2, without("index", 0, 1))...).claim("train", exactly("gpu", 1, low)),
			want: `request "gpu" of claim train: 4 of 4 gpu.example.com devices failing a selector; claim default/train, request "gpu": ` +
				`selector 'device.attributes["a.example.com"].index < 3' failed, for example on device a.example.com/n1/gpu-0: ` +
				`no such key: index. consider using CEL optional chaining (.? followed by orValue()) or guarding the check with has() for optional fields`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := tc.world.explain(t, tc.held).String()
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// What is told is certain: who claims that no node ever does is not contradicted by an empty node, and the other way round.
func TestWhatCanNeverBeIsSaidExactlyWhenNoEmptyNodeWouldDo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawTightWorld(t)
		for i := range w.slices[0].Spec.Devices {
			if rapid.IntRange(0, 4).Draw(t, "tainted") == 0 {
				taint("gpu-lost", i)(i, &w.slices[0].Spec.Devices[i])
			}
		}
		view := w.store().View()
		requests, err := Compile(w.claims, view, DefaultFeatures())
		if err != nil {
			t.Skip(err)
		}
		in := Input{Requests: requests, Inventory: view, Usage: w.usage(), Node: w.nodes[0]}
		result := Check(context.Background(), in)
		if result.Fits() {
			t.Skip("it fits")
		}
		e := Explain(requests, maps.All(map[string]*Failure{"node": result.Failure}), Naming{})
		FindLimits(context.Background(), in, e, slices.Values(w.nodes))
		never := e.NeverTogether
		for _, r := range e.Requests {
			never = never || r.Limit != nil
		}
		in.Usage = usage.NewIndex().View()
		whole := DefaultFeatures()
		whole.DeviceTaints = false
		if in.Requests, err = Compile(w.claims, view, whole); err != nil {
			t.Fatal(err)
		}
		fits := Check(context.Background(), in).Fits()
		judged := !slices.ContainsFunc(e.Requests, func(r explain.Request) bool { return r.Failing+r.Unsupported > 0 })
		if never && fits || judged && !never && !fits {
			t.Fatalf("never: %t, but the empty node without taints would do: %t: %s", never, fits, e)
		}
	})
}

// Whatever is the matter with devices, and however much of it: each is counted once.
func TestEachDeviceIsCountedOnce(t *testing.T) {
	several := 0
	rapid.Check(t, func(t *rapid.T) {
		w := drawSharingWorld(t)
		for i := range w.slices[0].Spec.Devices {
			if rapid.IntRange(0, 3).Draw(t, "tainted") == 0 {
				taint("gpu-lost", i)(i, &w.slices[0].Spec.Devices[i])
			}
		}
		if rapid.IntRange(0, 2).Draw(t, "counters are not supported") == 0 {
			w.features = func(f *inventory.Features) { f.PartitionableDevices = false }
		}
		view := w.store().View()
		requests, err := Compile(w.claims, view, DefaultFeatures())
		if err != nil {
			t.Skip(err)
		}
		for _, node := range w.nodes {
			result := Check(context.Background(), Input{Requests: requests, Inventory: view, Usage: w.usage(), Node: node})
			if result.Fits() {
				continue
			}
			for i := range result.Failure.Requests {
				c := &result.Failure.Requests[i]
				tainted, reasons := 0, 0
				for _, n := range c.Taints {
					tainted += n
				}
				for _, n := range []int{c.Unsupported, tainted, c.Held, c.Incompatible, c.Exhausted} {
					reasons += min(1, n)
				}
				if reasons > 1 {
					several++
				}
				if sum := c.Unsupported + tainted + c.Held + c.Incompatible + c.Exhausted + c.Free; sum != c.Matching || tainted != c.Tainted ||
					c.Full > c.Exhausted || c.NodeAllocatable+c.Skipping > c.Unsupported {
					t.Fatalf("%d of %d: %+v", sum, c.Matching, c)
				}
			}
		}
	})
	if several == 0 && !testing.Short() {
		t.Error("no pool had devices of several kinds: the test proves nothing")
	}
}

// A device that is not supported does not count as tainted by a rule either.
func TestRulesThatTaintAreNamedForSupportedDevices(t *testing.T) {
	w := rig().node("n1", gpus(3, taint("gpu-lost", 0, 1, 2))...)
	w.slices[0].Spec.Devices[1].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{
		CounterSet: "gpu", Counters: map[string]resourceapi.Counter{"x": {Value: resource.MustParse("1")}},
	}}
	w.counters("n1", "gpu", "x", "1").claim("train", exactly("gpu", 1))
	w.features = func(f *inventory.Features) { f.PartitionableDevices = false }
	requests, failures := w.failures(t, context.Background())
	rules := Naming{Rule: func(inventory.PoolID, string, *resourceapi.DeviceTaint) string { return "drain" }}
	want := `request "gpu" of claim train: 2 of 3 gpu.example.com devices tainted gpu-lost by DeviceTaintRule drain, 1 with features that are not supported`
	if diff := cmp.Diff(want, Explain(requests, maps.All(failures), rules).String()); diff != "" {
		t.Error(diff)
	}
}

func TestExplainIsBoundedAndCountsASharedPoolOnce(t *testing.T) {
	w := rig().node("n1", gpus(2)...)
	w.slices[0].Spec.NodeName, w.slices[0].Spec.AllNodes = nil, ptr.To(true)
	w.nodes = append(w.nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2"}})
	w.claim("train", exactly("gpu", 3))
	requests, failures := w.failures(t, context.Background())
	want := `request "gpu" of claim train: 2 of 2 gpu.example.com devices free (3 wanted on one node)`
	if diff := cmp.Diff(want, Explain(requests, maps.All(failures), Naming{}).String()); diff != "" {
		t.Error(diff)
	}

	w.claims = nil
	for i := range 20 {
		w.claim(fmt.Sprintf("claim-%d", i), exactly("gpu", 3, strings.Repeat("!", 400)+"false"))
	}
	requests, failures = w.failures(t, context.Background())
	if n := len(Explain(requests, maps.All(failures), Naming{}).String()); n > maxExplanation {
		t.Errorf("explanation has %d bytes, want at most %d", n, maxExplanation)
	}
}

// explain explains why the claims of the world fit nowhere, as the plugin does. Of what is held, "node/device=amount" is a share of memory.
func (w *world) explain(t *testing.T, held map[string][]string) *explain.Explanation {
	t.Helper()
	requests, in := w.compile(t)
	index := usage.NewIndex()
	for name, devices := range held {
		a := &resourceapi.AllocationResult{}
		for _, text := range devices {
			id, amount, shared := strings.Cut(text, "=")
			pool, device, _ := strings.Cut(id, "/")
			result := resourceapi.DeviceRequestAllocationResult{Driver: driverA, Pool: pool, Device: device}
			if shared {
				result.ShareID = ptr.To(types.UID("share-of-" + name))
				result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(amount)}
			}
			a.Devices.Results = append(a.Devices.Results, result)
		}
		index.Set(usage.ClaimRef{UID: types.UID(name), Namespace: "default", Name: name}, a, nil)
	}
	in.Usage = index.View()
	failures := make(map[string]*Failure)
	for _, node := range w.nodes {
		in.Node = node
		result := Check(context.Background(), in)
		if result.Fits() {
			t.Fatalf("it fits node %s", node.Name)
		}
		failures[node.Name] = result.Failure
	}
	e := Explain(requests, maps.All(failures), Naming{})
	if e.Holders = FindHolders(context.Background(), in, maps.All(failures), w.nodeNamed, HolderOptions{}); len(e.Holders) == 0 {
		FindLimits(context.Background(), in, e, slices.Values(w.nodes))
	}
	return e
}
