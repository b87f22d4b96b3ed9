// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"encoding/json"
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
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/usage"
)

// heldBy returns the usage in which claims hold "pool/device"s.
func heldBy(claims map[string][]string) usage.View {
	index := usage.NewIndex()
	for name, devices := range claims {
		namespace, name, found := strings.Cut(name, "/")
		if !found {
			namespace, name = "default", namespace
		}
		a := &resourceapi.AllocationResult{}
		for _, device := range devices {
			pool, device, _ := strings.Cut(device, "/")
			a.Devices.Results = append(a.Devices.Results, resourceapi.DeviceRequestAllocationResult{Driver: driverA, Pool: pool, Device: device})
		}
		index.Set(usage.ClaimRef{UID: types.UID(name + "-uid"), Namespace: namespace, Name: name}, a, nil)
	}
	return index.View()
}

// findHolders explains why the claims of the world fit nowhere, with this usage.
func (w *world) findHolders(t *testing.T, held map[string][]string, opts HolderOptions) []explain.NodeHolders {
	t.Helper()
	requests, in := w.compile(t)
	in.Usage = heldBy(held)
	failures := make(map[string]*Failure)
	for _, node := range w.nodes {
		in.Node = node
		if result := Check(context.Background(), in); result.Failure != nil {
			failures[node.Name] = result.Failure
		}
	}
	if len(failures) != len(w.nodes) {
		t.Fatalf("only %d of %d nodes are refused", len(failures), len(w.nodes))
	}
	in.Requests = requests
	return FindHolders(context.Background(), in, maps.All(failures), w.nodeNamed, opts)
}

func (w *world) nodeNamed(name string) *v1.Node {
	for _, node := range w.nodes {
		if node.Name == name {
			return node
		}
	}
	return nil
}

func TestFindHoldersNamesWhoseReleaseWouldHelp(t *testing.T) {
	// The whole of a GPU, its two halves, and a simple device.
	parts := func(index int) *world {
		return rig().node("n1", gpus(4, consumes("gpu", "memory", "2", 0), consumes("gpu", "memory", "1", 1, 2))...).
			counters("n1", "gpu", "memory", "2").
			claim("c", exactly("gpu", 1, fmt.Sprintf(`device.attributes["a.example.com"].index == %d`, index)))
	}
	upper := `device.attributes["a.example.com"].index >= 2`
	tests := map[string]struct {
		world *world
		held  map[string][]string
		opts  HolderOptions
		// want is "node: claims to release / all holders", in order.
		want []string
	}{
		"the holder of the only device": {
			world: rig().node("n1", gpus(1)...).claim("c", exactly("gpu", 1)),
			held:  map[string][]string{"a": {"n1/gpu-0"}},
			want:  []string{"n1: a / a"},
		},
		"of two holders the one that has fewer devices": {
			world: rig().node("n1", gpus(4)...).claim("c", exactly("gpu", 1)),
			held:  map[string][]string{"big": {"n1/gpu-0", "n1/gpu-1", "n1/gpu-2"}, "small": {"n1/gpu-3"}},
			want:  []string{"n1: small / small big"},
		},
		"one big holder rather than several small ones": {
			world: rig().node("n1", gpus(4)...).claim("c", exactly("gpu", 2)),
			held:  map[string][]string{"big": {"n1/gpu-0", "n1/gpu-1"}, "one": {"n1/gpu-2"}, "two": {"n1/gpu-3"}},
			want:  []string{"n1: big / one two big"},
		},
		"what is free already need not be released": {
			world: rig().node("n1", gpus(4)...).claim("c", exactly("gpu", 3)),
			held:  map[string][]string{"one": {"n1/gpu-0"}, "two": {"n1/gpu-1"}},
			want:  []string{"n1: one / one two"},
		},
		"only holders of devices that are asked for": {
			world: rig().node("n1", gpus(4)...).claim("c", exactly("gpu", 1, upper)),
			held:  map[string][]string{"no-use": {"n1/gpu-0"}, "other": {"n1/gpu-1"}, "a": {"n1/gpu-2"}, "b": {"n1/gpu-3"}},
			want:  []string{"n1: a / a b"},
		},
		"all devices means all holders": {
			world: rig().node("n1", gpus(3)...).claim("c", all("gpu")),
			held:  map[string][]string{"a": {"n1/gpu-0"}, "b": {"n1/gpu-2"}},
			want:  []string{"n1: a b / a b"},
		},
		"the constraint decides who": {
			world: rig().node("n1", gpus(6)...).claim("c", exactly("gpu", 2)).matchAttribute("a.example.com/root"),
			held:  map[string][]string{"a": {"n1/gpu-0"}, "b": {"n1/gpu-1"}, "c": {"n1/gpu-2", "n1/gpu-3"}, "d": {"n1/gpu-4"}},
			want:  []string{"n1: d / a b d c"},
		},
		"a device with two holders needs both to go": {
			world: rig().node("n1", gpus(1)...).claim("c", exactly("gpu", 1)),
			held:  map[string][]string{"a": {"n1/gpu-0"}, "b": {"n1/gpu-0"}},
			want:  []string{"n1: a b / a b"},
		},
		"the node with the fewest to release comes first": {
			world: rig().node("n1", gpus(2)...).node("n2", gpus(2)...).node("n3", gpus(2)...).claim("c", exactly("gpu", 2)),
			held:  map[string][]string{"a": {"n1/gpu-0"}, "b": {"n1/gpu-1"}, "c": {"n2/gpu-0", "n2/gpu-1"}, "d": {"n3/gpu-1"}},
			want:  []string{"n3: d / d", "n2: c / c", "n1: a b / a b"},
		},
		"only the most promising nodes are looked at": {
			world: rig().node("n1", gpus(2)...).node("n2", gpus(2)...).node("n3", gpus(2)...).claim("c", exactly("gpu", 2)),
			held:  map[string][]string{"a": {"n1/gpu-0"}, "b": {"n1/gpu-1"}, "c": {"n2/gpu-0", "n2/gpu-1"}, "d": {"n3/gpu-1"}},
			opts:  HolderOptions{Nodes: 1},
			want:  []string{"n3: d / d"},
		},
		"not where the devices would not do anyway": {
			world: rig().node("n1", gpus(1)...).node("n2", gpus(2, taint("lost", 0))...).node("n3", gpus(2)...).claim("c", exactly("gpu", 2)),
			held:  map[string][]string{"a": {"n1/gpu-0"}, "b": {"n2/gpu-0"}, "c": {"n3/gpu-0"}},
			want:  []string{"n3: c / c"},
		},
		"admin access waits for nobody who holds a device": {
			world: rig().node("n1", gpus(2)...).claim("c", exactly("b", 2)).claim("m", adminAccess(exactly("a", 1))),
			held:  map[string][]string{"x": {"n1/gpu-0"}, "y": {"n1/gpu-1"}},
			want:  []string{"n1: x y / x y"},
		},
		"who uses up the counters that are needed": {
			world: parts(0),
			held:  map[string][]string{"x": {"n1/gpu-1"}, "y": {"n1/gpu-2"}, "other": {"n1/gpu-3"}},
			want:  []string{"n1: x y / x y"},
		},
		"who uses up the counters, and who has the device itself": {
			world: parts(2),
			held:  map[string][]string{"x": {"n1/gpu-2"}, "y": {"n1/gpu-0"}},
			want:  []string{"n1: x y / x y"},
		},
		"of equals the claim of the pod's own namespace": {
			world: rig().node("n1", gpus(3)...).claim("c", exactly("gpu", 1)),
			held:  map[string][]string{"red/a": {"n1/gpu-0"}, "team/z": {"n1/gpu-1"}, "zoo/b": {"n1/gpu-2"}},
			opts:  HolderOptions{Namespace: "team"},
			want:  []string{"n1: z / z a b"},
		},
		"of several": {
			world: rig().node("n1", gpus(3)...).claim("c", exactly("gpu", 2)),
			held:  map[string][]string{"red/a": {"n1/gpu-0"}, "team/z": {"n1/gpu-1"}, "team/y": {"n1/gpu-2"}},
			opts:  HolderOptions{Namespace: "team"},
			want:  []string{"n1: y z / y z a"},
		},
		"and of equal nodes that with such claims": {
			world: rig().node("n1", gpus(1)...).node("n2", gpus(1)...).claim("c", exactly("gpu", 1)),
			held:  map[string][]string{"red/a": {"n1/gpu-0"}, "team/z": {"n2/gpu-0"}},
			opts:  HolderOptions{Namespace: "team"},
			want:  []string{"n2: z / z", "n1: a / a"},
		},
		"fewer claims go first, whosever they are": {
			world: rig().node("n1", gpus(4)...).claim("c", exactly("gpu", 2)),
			held:  map[string][]string{"red/big": {"n1/gpu-0", "n1/gpu-1"}, "team/y": {"n1/gpu-2"}, "team/z": {"n1/gpu-3"}},
			opts:  HolderOptions{Namespace: "team"},
			want:  []string{"n1: big / y z big"},
		},
		"claims that have to stay": {
			world: rig().node("n1", gpus(2)...).claim("c", exactly("gpu", 1)),
			held:  map[string][]string{"mine": {"n1/gpu-0"}, "other": {"n1/gpu-1"}},
			opts:  HolderOptions{Keep: sets.New[types.UID]("mine-uid")},
			want:  []string{"n1: other / other"},
		},
		"nobody, where those who have to stay suffice to keep the pod off": {
			world: rig().node("n1", gpus(2)...).claim("c", exactly("gpu", 2)),
			held:  map[string][]string{"mine": {"n1/gpu-0"}, "other": {"n1/gpu-1"}},
			opts:  HolderOptions{Keep: sets.New[types.UID]("mine-uid")},
		},
		"nobody, where the budget is too small to tell": {
			world: rig().node("n1", gpus(3)...).claim("c", exactly("gpu", 3)),
			held:  map[string][]string{"a": {"n1/gpu-0"}, "b": {"n1/gpu-1"}},
			opts:  HolderOptions{Decisions: 2},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, h := range tc.world.findHolders(t, tc.held, tc.opts) {
				got = append(got, h.Node+": "+claimNames(h.Release)+" / "+claimNames(h.Holders))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func claimNames(holders []explain.ClaimHolder) string {
	var names []string
	for _, h := range holders {
		names = append(names, h.Claim)
	}
	return strings.Join(names, " ")
}

func TestHoldersSayWhatTheyHoldOfTheNode(t *testing.T) {
	w := rig().node("n1", gpus(3)...).node("n2", gpus(1)...).claim("c", exactly("gpu", 3))
	index := usage.NewIndex()
	result := func(device string) resourceapi.DeviceRequestAllocationResult {
		pool, name, _ := strings.Cut(device, "/")
		return resourceapi.DeviceRequestAllocationResult{Driver: driverA, Pool: pool, Device: name}
	}
	allocation := func(devices ...string) *resourceapi.AllocationResult {
		a := &resourceapi.AllocationResult{}
		for _, d := range devices {
			a.Devices.Results = append(a.Devices.Results, result(d))
		}
		return a
	}
	index.Set(usage.ClaimRef{UID: "1", Namespace: "team", Name: "a"}, allocation("n1/gpu-2", "n2/gpu-0", "n1/gpu-0", "n1/gone"), nil)
	index.Set(usage.ClaimRef{UID: "2", Namespace: "team", Name: "b"}, nil, allocation("n1/gpu-1"))
	_, in := w.compile(t)
	in.Usage, in.Node = index.View(), w.nodes[0]
	got := Blockers(context.Background(), in, HolderOptions{})
	b := explain.ClaimHolder{Namespace: "team", Claim: "b", UID: "2", InFlight: true, Devices: []string{"a.example.com/n1/gpu-1"}}
	a := explain.ClaimHolder{Namespace: "team", Claim: "a", UID: "1", Devices: []string{"a.example.com/n1/gpu-0", "a.example.com/n1/gpu-2"}}
	want := &explain.NodeHolders{Node: "n1", Release: []explain.ClaimHolder{b, a}, Holders: []explain.ClaimHolder{b, a}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got := Blockers(context.Background(), in, HolderOptions{Keep: sets.New[types.UID]("1", "2")}); got != nil {
		t.Errorf("nobody may be released, got %+v", got)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if got := Blockers(ended, in, HolderOptions{}); got != nil {
		t.Errorf("there is no time left, got %+v", got)
	}
}

func TestHoldersOfSharesLeaveRoomTogether(t *testing.T) {
	w := rig().node("n1", gpus(2, shareable("memory", "10", 0))...).claim("c", takes(exactly("gpu", 1), "memory", "6"))
	index := usage.NewIndex()
	for i, amount := range []string{"3", "3", "4"} {
		name := string(rune('a' + i))
		index.Set(usage.ClaimRef{UID: types.UID(name), Namespace: "default", Name: name}, &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
				Driver: driverA, Pool: "n1", Device: "gpu-0", ShareID: ptr.To(types.UID("share-of-" + name)),
				ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(amount)},
			}}},
		}, nil)
	}
	_, in := w.compile(t)
	in.Usage, in.Node = index.View(), w.nodes[0]
	got := Blockers(context.Background(), in, HolderOptions{})
	if got == nil || claimNames(got.Release) != "a b" || claimNames(got.Holders) != "a b c" {
		t.Errorf("got %v, want the release of a and b", got)
	}
}

// Whoever is named: without them the node does, with any one of them it does not.
func TestReleaseAdmitsThePodAndNobodyIsNamedInVain(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawTightWorld(t)
		held := make(map[string][]string)
		for i, slice := range w.slices {
			for _, device := range slice.Spec.Devices {
				if holder := rapid.IntRange(0, 4).Draw(t, "holder"); holder > 0 {
					name := fmt.Sprintf("holder-%d", holder)
					held[name] = append(held[name], w.slices[i].Spec.Pool.Name+"/"+device.Name)
				}
			}
		}
		view := w.store().View()
		requests, err := Compile(w.claims, view, DefaultFeatures())
		if err != nil {
			t.Skip(err)
		}
		in := Input{Requests: requests, Inventory: view, Usage: heldBy(held), Node: w.nodes[0]}
		fits := func(gone ...string) bool {
			left := maps.Clone(held)
			for _, name := range gone {
				delete(left, name)
			}
			again := in
			again.Usage = heldBy(left)
			return Check(context.Background(), again).Fits()
		}
		blockers := Blockers(context.Background(), in, HolderOptions{Decisions: 1000})
		if blockers == nil {
			if !fits() && fits(slices.Collect(maps.Keys(held))...) {
				t.Fatal("without all holders the node would do, but nobody is named")
			}
			return
		}
		var names []string
		for _, h := range blockers.Release {
			names = append(names, h.Claim)
		}
		if fits() {
			return // that nobody has to be released is not for Blockers to find out
		}
		if !fits(names...) {
			t.Fatalf("without %v the node would not do", names)
		}
		for i := range names {
			if rest := slices.Delete(slices.Clone(names), i, i+1); fits(rest...) {
				t.Fatalf("the release of %v is enough, got %v", rest, names)
			}
		}
	})
}

// The explanation survives being written, and is the same for the same failures in any order.
func TestExplanationIsAValue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		odd := rapid.SampledFrom([]string{"x", "ünïcode-ключ", "a\nb\tc", "\x00\xff", strings.Repeat("long", 300), `"quo'ted` + "`", "%s%d"})
		for _, claim := range w.claims {
			claim.Name = odd.Draw(t, "claim name")
		}
		holders := make(map[string][]string)
		for i, id := range w.held {
			name := fmt.Sprintf("%s%d", odd.Draw(t, "holder"), i%5)
			holders[name] = append(holders[name], id.Pool+"/"+id.Device)
		}
		view := w.store().View()
		requests, err := Compile(w.claims, view, DefaultFeatures())
		if err != nil {
			t.Skip(err)
		}
		in := Input{Requests: requests, Inventory: view, Usage: heldBy(holders)}
		failures := make(map[string]*Failure)
		for _, node := range w.nodes {
			in.Node = node
			if f := Check(context.Background(), in).Failure; f != nil {
				failures[node.Name] = f
			}
		}
		explained := func() *explain.Explanation {
			e := Explain(requests, maps.All(failures), Naming{})
			e.Holders = FindHolders(context.Background(), in, maps.All(failures), w.nodeNamed, HolderOptions{})
			e.PerNode = ExplainNodes(requests, maps.All(failures), 2)
			return e
		}
		e := explained()
		if diff := cmp.Diff(e, explained()); diff != "" {
			t.Fatalf("explained twice (-first +second):\n%s", diff)
		}
		text := e.String()
		if len(text) > maxExplanation || strings.ContainsAny(text, "\n\t") || (text == "") != (len(failures) == 0) {
			t.Fatalf("%d failures in %d bytes: %q", len(failures), len(text), text)
		}
		data, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		var again explain.Explanation
		if err := json.Unmarshal(data, &again); err != nil {
			t.Fatal(err)
		}
		if want, got := strings.ToValidUTF8(text, "?"), again.String(); want != got && !strings.Contains(text, "?") && !strings.Contains(text, "…") {
			t.Fatalf("after reading it again:\n%s\nwant\n%s", got, want)
		}
	})
}

func TestExplanationInYAML(t *testing.T) {
	w := rig().node("n1", gpus(4, taint("gpu-lost", 3))...).
		claim("train", exactly("gpu", 3, `device.attributes["a.example.com"].index >= 1`)).matchAttribute("a.example.com/root")
	w.slices[0].Spec.Devices = append(w.slices[0].Spec.Devices, resourceapi.Device{Name: "gpu-4", Attributes: gpus(5)[4].Attributes})
	w.nodes = append(w.nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2"}})
	requests, in := w.compile(t)
	in.Usage = heldBy(map[string][]string{"other": {"n1/gpu-2"}})
	failures := make(map[string]*Failure)
	for _, node := range w.nodes {
		in.Node = node
		failures[node.Name] = Check(context.Background(), in).Failure
	}
	e := Explain(requests, maps.All(failures), Naming{})
	in.Node = w.nodes[0]
	e.Holders = []explain.NodeHolders{{
		Node:    "n1",
		Release: []explain.ClaimHolder{{Namespace: "default", Claim: "other", UID: "u", Devices: []string{"a.example.com/n1/gpu-2"}}},
		Holders: []explain.ClaimHolder{{Namespace: "default", Claim: "other", UID: "u", Devices: []string{"a.example.com/n1/gpu-2"}}},
	}}
	got, err := yaml.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	want := `holders:
- holders:
  - claim: other
    devices:
    - a.example.com/n1/gpu-2
    namespace: default
    uid: u
  node: n1
  release:
  - claim: other
    devices:
    - a.example.com/n1/gpu-2
    namespace: default
    uid: u
nodes: 2
reasons:
  matching devices are held by other claims: 1
  not enough devices match the claim: 1
requests:
- claim: train
  deviceClass: gpu.example.com
  devices: 5
  filteredBy:
  - devices: 1
    expression: device.attributes["a.example.com"].index >= 1
  free: 2
  held: 1
  matching: 4
  namespace: default
  offered: 5
  request: gpu
  tainted: 1
  taints:
    gpu-lost: 1
  wanted: 3
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Error(diff)
	}
}
