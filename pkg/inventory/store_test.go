// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const driver = "gpu.example.com"

func newStore() *Store { return NewStore(Options{Features: DefaultFeatures()}) }

func node(name string, labels ...string) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	for _, label := range labels {
		n.Labels[label] = "true"
	}
	return n
}

// slice makes a slice for one node in the pool of the same name.
func slice(name, nodeName string, modify ...func(*resourceapi.ResourceSlice)) *resourceapi.ResourceSlice {
	s := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: ptr.To(nodeName),
			Pool:    resourceapi.ResourcePool{Name: nodeName, Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: name + "-device"}},
		},
	}
	for _, fn := range modify {
		fn(s)
	}
	return s
}

func pool(name string, generation, count int64) func(*resourceapi.ResourceSlice) {
	return func(s *resourceapi.ResourceSlice) {
		s.Spec.Pool = resourceapi.ResourcePool{Name: name, Generation: generation, ResourceSliceCount: count}
	}
}

func devices(names ...string) func(*resourceapi.ResourceSlice) {
	return func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices = nil
		for _, name := range names {
			s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: name})
		}
	}
}

func allNodes(s *resourceapi.ResourceSlice) { s.Spec.NodeName, s.Spec.AllNodes = nil, ptr.To(true) }

func labelled(label string) *v1.NodeSelector {
	return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
		MatchExpressions: []v1.NodeSelectorRequirement{{Key: label, Operator: v1.NodeSelectorOpExists}},
	}}}
}

func nodesWith(label string) func(*resourceapi.ResourceSlice) {
	return func(s *resourceapi.ResourceSlice) { s.Spec.NodeName, s.Spec.NodeSelector = nil, labelled(label) }
}

// describe lists what a node can reach: "pool/device" for each device, in order, then the problems.
func describe(d *NodeDevices) []string {
	var out []string
	for _, p := range d.Pools {
		for i := range p.Len() {
			if p.visible == nil || p.visible.Has(i) {
				out = append(out, p.ID().Pool+"/"+p.Device(i).Name)
			}
		}
	}
	for _, problem := range d.Problems {
		out = append(out, problem.String())
	}
	return out
}

// A pool of as many slices as may be is usable, one of more is invalid: each change of a slice looks at all of its pool.
func TestAPoolOfTooManySlicesIsInvalid(t *testing.T) {
	for name, tc := range map[string]struct {
		slices int
		want   []string
	}{
		"as many as may be": {slices: maxSlices},
		"one more":          {slices: maxSlices + 1, want: []string{"pool gpu.example.com/net is invalid: 1025 slices of generation 1, at most 1024 are looked at"}},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			for i := range tc.slices {
				store.SetSlice(slice(fmt.Sprint("s", i), "", pool("net", 1, int64(tc.slices)), allNodes))
			}
			var got []string
			for problem := range store.View().Problems() {
				got = append(got, problem.String())
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
			if devices := describe(store.View().ForNode(node("n1"))); tc.want == nil && len(devices) != tc.slices {
				t.Errorf("%d devices, want %d", len(devices), tc.slices)
			}
		})
	}
}

// Devices, counters and what devices take of counters are counted together, those of the newest generation first. A pool of as many as are looked at
// is usable, one of more is not.
func TestAPoolOfTooManyParticularsIsInvalid(t *testing.T) {
	set := func(names ...string) map[string]resourceapi.Counter {
		all := map[string]resourceapi.Counter{}
		for _, name := range names {
			all[name] = resourceapi.Counter{Value: resource.MustParse("1")}
		}
		return all
	}
	counting := []*resourceapi.ResourceSlice{ // 2 devices that take 3 of 4 counters
		slice("counters", "n1", pool("n1", 1, 2), devices(), func(s *resourceapi.ResourceSlice) {
			s.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "x", Counters: set("a", "b", "c")}, {Name: "y", Counters: set("a")}}
		}),
		slice("devices", "n1", pool("n1", 1, 2), devices("d", "e"), func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices[0].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "x", Counters: set("a", "b")}, {CounterSet: "y", Counters: set("a")}}
		}),
	}
	updated := []*resourceapi.ResourceSlice{ // which n1 sees, and 4 that it does not
		slice("new", "n2", pool("p", 2, 1), devices("a", "b", "c", "d")), slice("old", "n1", pool("p", 1, 1), devices("e", "f", "g")),
	}
	// Who has one device sees it, whatever node evil adds in a slice for each device.
	hostile := func(name string, generation, devicesOfEvil int) (all []*resourceapi.ResourceSlice) {
		own := slice("own", name, pool("p", 1, 1), devices("own"))
		if name == "" {
			own = slice("own", "", pool("p", 1, 1), devices("own"), allNodes)
		}
		for i := range devicesOfEvil {
			all = append(all, slice(fmt.Sprintf("evil-%d", i), "evil", pool("p", int64(generation), int64(devicesOfEvil)), devices(fmt.Sprint("d", i))))
		}
		return append(all, own)
	}
	tooMany := func(pool string, generation, most int) []string {
		const text = "pool gpu.example.com/%s is invalid: the slices of generation %d have more devices, counters and uses of counters than are looked at, which are %d of all its generations"
		return []string{fmt.Sprintf(text, pool, generation, most)}
	}
	for name, tc := range map[string]struct {
		slices []*resourceapi.ResourceSlice
		most   int
		want   []string
	}{
		"as many as are looked at":                  {counting, 9, []string{"n1/d", "n1/e"}},
		"one more":                                  {counting, 8, tooMany("n1", 1, 8)},
		"as many in two generations":                {updated, 7, []string{"p/e", "p/f", "p/g"}},
		"one more in those of another node":         {updated, 6, []string{"p/e", "p/f", "p/g"}},
		"more than are looked at of another node":   {updated, 3, []string{"p/e", "p/f", "p/g"}},
		"more than are looked at of its own":        {updated, 2, tooMany("p", 1, 2)},
		"beside another's pool":                     {hostile("n1", 2, 5), 4, []string{"p/own"}},
		"beside another's, of the same generation":  {hostile("n1", 1, 5), 4, []string{"p/own"}},
		"for all beside another's":                  {hostile("", 2, 5), 4, []string{"p/own"}},
		"for all beside another's, of the same one": {hostile("", 1, 5), 4, []string{"p/own"}},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			store.View().caches.limits.particulars = tc.most
			store.SetSlice(slice("beside", "n1", pool("beside", 1, 1), devices("x")))
			for _, s := range tc.slices {
				store.SetSlice(s)
			}
			if diff := cmp.Diff(append([]string{"beside/x"}, tc.want...), describe(store.View().ForNode(node("n1")))); diff != "" {
				t.Error(diff)
			}
			if tc.slices[0].Name != "evil-0" || tc.slices[len(tc.slices)-1].Spec.AllNodes != nil { // which evil sees, too
				return
			}
			evil := strings.Join(describe(store.View().ForNode(node("evil"))), "\n")
			if text := "the slices of node evil have more devices, counters and uses of counters than there is room for beside others, at most 4"; !strings.Contains(evil, text) {
				t.Errorf("node evil is told %q, want %q", evil, text)
			}
		})
	}
}

// However many slices a pool has, of whatever sort, a change of one costs no more than it does in a pool that has as many as are looked at. Work is
// counted by what it allocates.
func TestAChangeOfASliceCostsABoundedAmountOfWork(t *testing.T) {
	for name, make := range map[string]func(i int) *resourceapi.ResourceSlice{
		"for all nodes": func(i int) *resourceapi.ResourceSlice {
			return slice(fmt.Sprint("s", i), "", pool("net", 1, 1), allNodes)
		},
		"for a node each": func(i int) *resourceapi.ResourceSlice {
			return slice(fmt.Sprint("s", i), fmt.Sprint("n", i), pool("net", 1, 1))
		},
		"for one node": func(i int) *resourceapi.ResourceSlice { return slice(fmt.Sprint("s", i), "n1", pool("n1", 1, 1)) },
		"in another node's pool": func(i int) *resourceapi.ResourceSlice {
			return slice(fmt.Sprint("s", i), fmt.Sprint("n", i), pool("n0", 1, 1))
		},
		"each of its own generation": func(i int) *resourceapi.ResourceSlice {
			return slice(fmt.Sprint("s", i), fmt.Sprint("n", i), pool("net", int64(i+1), 1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			store.SetSlice(make(0))
			changed, have := 0, 1
			change := func() {
				changed++
				s := make(0)
				s.Spec.Devices[0].Name = fmt.Sprint("changed-", changed)
				store.SetSlice(s)
			}
			costWith := func(n int) float64 {
				for ; have < n; have++ { // all at once, which is quicker than one after the other
					object := make(have)
					store.slices[object.Name] = newSlice(object, store.features)
					store.members[poolOf(object)].add(store.slices[object.Name])
				}
				return testing.AllocsPerRun(1, change)
			}
			few, many, more := costWith(maxMembers), costWith(4*maxMembers), costWith(8*maxMembers)
			t.Logf("%v allocations with %d slices, %v with %d", few, maxMembers, many, 4*maxMembers)
			if few > 25*maxMembers || many > few*11/10 {
				t.Errorf("%v allocations with %d slices, %v with %d, want at most %d, and no more with more", few, maxMembers, many, 4*maxMembers, 25*maxMembers)
			}
			if more > many*11/10+16 {
				t.Errorf("%v allocations with %d slices, %v with %d, want no more", many, 4*maxMembers, more, 8*maxMembers)
			}
		})
	}
}

// Where other nodes add more slices to a node's pool than are looked at, the node keeps its devices. So it does in a pool that is called after no node
// if one other node adds them. Of more nodes than are put in order none has any. Those whose slices are not looked at are told why, until there are
// fewer; no other node is, and the one with its devices misses none.
func TestTooManySlicesOfOtherNodes(t *testing.T) {
	const tooMany = "pool gpu.example.com/%s is invalid: %d slices, at most 2048 are looked at"
	for name, want := range map[string]struct {
		others            int
		of                string // empty if each has one
		devices, problems []string
	}{
		"n0":  {others: maxMembers, devices: []string{"n0/d"}, problems: []string{fmt.Sprintf(tooMany, "n0", maxMembers+1)}},
		"net": {others: maxMembers, of: "n7", devices: []string{"net/d"}, problems: []string{fmt.Sprintf(tooMany, "net", maxMembers+1)}},
		"gpus": {
			others:   2 * maxMembers,
			devices:  []string{fmt.Sprintf(tooMany, "gpus", 2*maxMembers+1)},
			problems: []string{fmt.Sprintf(tooMany, "gpus", 2*maxMembers+1)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			own := func(generation int64) *resourceapi.ResourceSlice {
				return slice("own", "n0", pool(name, generation, 1), devices("d"))
			}
			store.SetSlice(own(1))
			for i := range want.others {
				of := want.of
				if of == "" {
					of = fmt.Sprint("n", i+1)
				}
				object := slice(fmt.Sprint("s", i), of, pool(name, 1, 1))
				store.slices[object.Name] = newSlice(object, store.features)
				store.members[poolOf(object)].add(store.slices[object.Name])
			}
			store.SetSlice(own(2))
			var problems []string
			for problem := range store.View().Problems() {
				problems = append(problems, problem.String())
			}
			if diff := cmp.Diff(want.problems, problems); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(want.devices, describe(store.View().ForNode(node("n0")))); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(want.problems, describe(store.View().ForNode(node("n7")))); diff != "" {
				t.Errorf("a stranger (-want +got):\n%s", diff)
			}
			if got := describe(store.View().ForNode(node("innocent"))); got != nil {
				t.Errorf("a node without slices: %v", got)
			}
			for i := range want.others - maxMembers {
				s := store.slices[fmt.Sprint("s", i)]
				delete(store.slices, s.Object.Name)
				store.members[poolOf(s.Object)].remove(s)
			}
			store.DeleteSlice(fmt.Sprint("s", want.others-maxMembers))
			if diff := cmp.Diff([]string{name + "/d"}, describe(store.View().ForNode(node("n0")))); diff != "" {
				t.Errorf("devices, with one slice less (-want +got):\n%s", diff)
			}
		})
	}
}

func TestANodeReachesTheDevicesOfItsPools(t *testing.T) {
	binding := func(s *resourceapi.ResourceSlice) { s.Spec.Devices[0].BindingConditions = []string{"ready"} }
	amountOf := func(amount []string) resourceapi.Counter {
		return resourceapi.Counter{Value: resource.MustParse(append(amount, "0")[0])}
	}
	counters := func(name, set string, amount ...string) *resourceapi.ResourceSlice {
		return slice(name, "n1", pool("n1", 1, 2), func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices = nil
			s.Spec.SharedCounters = []resourceapi.CounterSet{{Name: set, Counters: map[string]resourceapi.Counter{"memory": amountOf(amount)}}}
		})
	}
	consuming := func(set, counter string, amount ...string) func(*resourceapi.ResourceSlice) {
		return func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices[0].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: map[string]resourceapi.Counter{counter: amountOf(amount)}}}
		}
	}
	perDevice := func(s *resourceapi.ResourceSlice) {
		s.Spec.NodeName, s.Spec.PerDeviceNodeSelection = nil, ptr.To(true)
		s.Spec.Devices = []resourceapi.Device{
			{Name: "here", NodeName: ptr.To("n1")},
			{Name: "there", NodeName: ptr.To("n2")},
			{Name: "fast", NodeSelector: labelled("fast")},
			{Name: "everywhere", AllNodes: ptr.To(true)},
		}
	}
	tests := map[string]struct {
		slices []*resourceapi.ResourceSlice
		node   *v1.Node
		want   []string
	}{
		"only its own": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1"), slice("b", "n2")},
			want:   []string{"n1/a-device"},
		},
		"slices by name, devices as listed": {
			slices: []*resourceapi.ResourceSlice{slice("b", "n1", pool("n1", 1, 2), devices("z", "y")), slice("a", "n1", pool("n1", 1, 2), devices("x"))},
			want:   []string{"n1/x", "n1/z", "n1/y"},
		},
		"pools by name, those with binding conditions last": {
			slices: []*resourceapi.ResourceSlice{slice("s3", "n1", pool("c", 1, 1)), slice("s1", "n1", pool("a", 1, 1), binding), slice("s2", "n1", pool("b", 1, 1), allNodes)},
			want:   []string{"b/s2-device", "c/s3-device", "a/s1-device"},
		},
		"those for all nodes and for its labels": {
			slices: []*resourceapi.ResourceSlice{slice("a", "", pool("net", 1, 3), allNodes), slice("b", "", pool("net", 1, 3), nodesWith("fast")), slice("c", "", pool("net", 1, 3), nodesWith("slow"))},
			node:   node("n1", "fast"),
			want:   []string{"net/a-device", "net/b-device"},
		},
		"devices that choose their nodes": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", perDevice)},
			node:   node("n1", "fast"),
			want:   []string{"n1/here", "n1/fast", "n1/everywhere"},
		},
		"of the highest generation only": {
			slices: []*resourceapi.ResourceSlice{slice("old", "n1", pool("n1", 1, 1)), slice("new", "n1", pool("n1", 2, 1))},
			want:   []string{"n1/new-device"},
		},
		"of a whole outdated generation if the newer one is for another node": {
			slices: []*resourceapi.ResourceSlice{slice("old", "n1", pool("p", 1, 1)), slice("new", "n2", pool("p", 2, 1))},
			want:   []string{"p/old-device"},
		},
		"of the newest outdated generation that the node sees": {
			slices: []*resourceapi.ResourceSlice{
				slice("older", "n1", pool("p", 1, 1)), slice("old", "n1", pool("p", 2, 1)), slice("new", "n2", pool("p", 3, 1)),
			},
			want: []string{"p/old-device"},
		},
		"none of an outdated generation that is not all for the node": {
			slices: []*resourceapi.ResourceSlice{
				slice("old-a", "n1", pool("p", 1, 2)), slice("old-b", "n2", pool("p", 1, 2)), slice("new", "n2", pool("p", 2, 1)),
			},
		},
		"none of an outdated generation of which a slice is gone": {
			slices: []*resourceapi.ResourceSlice{slice("old-a", "n1", pool("p", 1, 2)), slice("new", "n2", pool("p", 2, 1))},
		},
		"none of an outdated generation whose newest slice the node sees is incomplete": {
			slices: []*resourceapi.ResourceSlice{
				slice("older", "n1", pool("p", 1, 1)), slice("old", "n1", pool("p", 2, 2)), slice("new", "n2", pool("p", 3, 1)),
			},
		},
		"none of an incomplete pool": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("n1", 3, 2)), slice("ok", "n1", pool("z", 1, 1))},
			want:   []string{"z/ok-device", "pool gpu.example.com/n1 is incomplete: 1 of 2 slices of generation 3"},
		},
		"none while a newer generation is incomplete": {
			slices: []*resourceapi.ResourceSlice{slice("old", "n1", pool("n1", 1, 1)), slice("new", "n1", pool("n1", 2, 2))},
			want:   []string{"pool gpu.example.com/n1 is incomplete: 1 of 2 slices of generation 2"},
		},
		"a pool whose other slices are for other nodes": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("p", 1, 2)), slice("b", "n2", pool("p", 1, 2))},
			want:   []string{"p/a-device"},
		},
		"a node's own pool beside a slice that another node adds": {
			slices: []*resourceapi.ResourceSlice{
				slice("a", "n1", pool("n1", 1, 2)), slice("b", "n1", pool("n1", 1, 2)), slice("c", "n2", pool("n1", 1, 2)), slice("d", "n3", pool("n1", 9, 1)),
			},
			want: []string{"n1/a-device", "n1/b-device"},
		},
		"none of a pool of another node's name": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n2", pool("n2/mig", 1, 1)), slice("b", "n1", pool("n2/mig", 9, 1))},
			want:   []string{"pool gpu.example.com/n2/mig is invalid: the slices of node n1 do not count: the pool is whole without them"},
		},
		"a pool called as another node's is": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("gpus", 1, 2)), slice("b", "n1", pool("gpus", 1, 2)), slice("c", "n2", pool("gpus", 1, 1))},
			want:   []string{"gpus/a-device", "gpus/b-device"},
		},
		"a pool with a device called as another node's is": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("gpus", 1, 1), devices("x")), slice("b", "n2", pool("gpus", 1, 1), devices("x"))},
			want:   []string{"gpus/x"},
		},
		"none of a pool of which another node has all slices": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("gpus", 1, 2)), slice("b", "n2", pool("gpus", 1, 1))},
			want:   []string{"pool gpu.example.com/gpus is invalid: the slices of node n1 do not count: the pool is whole without them"},
		},
		"its own and those for all nodes beside a slice that another node adds": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("p", 1, 2)), slice("b", "", pool("p", 1, 2), allNodes), slice("c", "n2", pool("p", 1, 2), devices("a-device"))},
			want:   []string{"p/a-device", "p/b-device"},
		},
		"the newest of its own among generations for other nodes": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("p", 3, 1)), slice("b", "n1", pool("p", 2, 1)), slice("c", "n2", pool("p", 4, 1)), slice("d", "n2", pool("p", 5, 1))},
			want:   []string{"p/a-device"},
		},
		"a pool for many nodes beside a slice that this node adds": {
			slices: []*resourceapi.ResourceSlice{slice("a", "", pool("net", 1, 2), allNodes), slice("b", "", pool("net", 1, 2), allNodes), slice("c", "n1", pool("net", 1, 2))},
			want:   []string{"net/a-device", "net/b-device"},
		},
		"a pool of single nodes none of which is whole": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("p", 1, 3)), slice("b", "n2", pool("p", 1, 3))},
			want:   []string{"pool gpu.example.com/p is incomplete: 2 of 3 slices of generation 1"},
		},
		"none of a pool with different counts": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("n1", 1, 2)), slice("b", "n1", pool("n1", 1, 3))},
			want:   []string{"pool gpu.example.com/n1 is invalid: slices of generation 1 disagree about their number: a says 2, b says 3"},
		},
		"none of a pool with a name twice": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("n1", 1, 2), devices("x")), slice("b", "n1", pool("n1", 1, 2), devices("x"))},
			want:   []string{"pool gpu.example.com/n1 is invalid: duplicate device name x"},
		},
		"a name that only another node sees, too": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("p", 1, 2), devices("x")), slice("b", "n2", pool("p", 1, 2), devices("x"))},
			want:   []string{"p/x"},
		},
		"counters that exist": {
			slices: []*resourceapi.ResourceSlice{counters("a", "set"), slice("b", "n1", pool("n1", 1, 2), consuming("set", "memory"))},
			want:   []string{"n1/b-device"},
		},
		"none of a pool without the counter set": {
			slices: []*resourceapi.ResourceSlice{counters("a", "other"), slice("b", "n1", pool("n1", 1, 2), consuming("set", "memory"))},
			want:   []string{"pool gpu.example.com/n1 is invalid: device b-device consumes from counter set set, which does not exist"},
		},
		"none of a pool without the counter": {
			slices: []*resourceapi.ResourceSlice{counters("a", "set"), slice("b", "n1", pool("n1", 1, 2), consuming("set", "cores"))},
			want:   []string{"pool gpu.example.com/n1 is invalid: device b-device consumes counter cores, which counter set set does not have"},
		},
		"none of a pool with a counter set twice": {
			slices: []*resourceapi.ResourceSlice{counters("a", "set"), counters("b", "set")},
			want:   []string{"pool gpu.example.com/n1 is invalid: duplicate counter set name set"},
		},
		"none of a pool with a negative counter": {
			slices: []*resourceapi.ResourceSlice{counters("a", "set", "-1"), slice("b", "n1", pool("n1", 1, 2), consuming("set", "memory"))},
			want:   []string{"pool gpu.example.com/n1 is invalid: counter memory of counter set set is negative"},
		},
		"none of a pool with a device that gives instead of taking": {
			slices: []*resourceapi.ResourceSlice{counters("a", "set"), slice("b", "n1", pool("n1", 1, 2), consuming("set", "memory", "-1"))},
			want:   []string{"pool gpu.example.com/n1 is invalid: device b-device consumes a negative amount of counter memory of counter set set"},
		},
		"none of a pool with a bad selector": {
			slices: []*resourceapi.ResourceSlice{slice("a", "n1", pool("p", 1, 2)), slice("b", "", pool("p", 1, 2), nodesWith("in valid"))},
			want:   []string{`pool gpu.example.com/p is invalid: slice b: nodeSelector: nodeSelectorTerms[0].matchExpressions[0].key: Invalid value: "in valid": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')`},
		},
		"its outdated one while the newest uses compatibility groups": {
			slices: []*resourceapi.ResourceSlice{
				slice("old", "n1", pool("p", 1, 1)),
				slice("new", "n1", pool("p", 2, 2), func(s *resourceapi.ResourceSlice) {
					s.Spec.Devices[0].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CompatibilityGroups: []string{"x"}}}
				}),
				slice("other", "n2", pool("p", 2, 2)),
			},
			want: []string{"p/old-device"},
		},
		"none of a pool with compatibility groups": {
			slices: []*resourceapi.ResourceSlice{
				slice("a", "n1", pool("n1", 1, 2)),
				slice("b", "n1", pool("n1", 1, 2), func(s *resourceapi.ResourceSlice) {
					s.Spec.Devices[0].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CompatibilityGroups: []string{"x"}}}
				}),
			},
			want: []string{"pool gpu.example.com/n1 is incomplete: 1 of 2 slices of generation 1, 1 ignored because they use compatibility groups, which are not enabled"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.node == nil {
				tc.node = node("n1")
			}
			store := newStore()
			for _, s := range tc.slices {
				store.SetSlice(s)
			}
			if diff := cmp.Diff(tc.want, describe(store.View().ForNode(tc.node))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestAViewNeverChanges(t *testing.T) {
	store := newStore()
	empty := store.View()
	store.SetSlice(slice("a", "n1"))
	store.SetClass(&resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}})
	before := store.View()
	store.SetSlice(slice("a", "n1", devices("other")))
	store.SetSlice(slice("b", "n1", pool("net", 1, 1), allNodes))
	store.DeleteClass("gpu")
	after := store.View()
	store.DeleteSlice("a")
	store.DeleteSlice("b")
	gone := store.View()

	for i, tc := range []struct {
		view  *View
		want  []string
		class bool
	}{
		{empty, nil, false},
		{before, []string{"n1/a-device"}, true},
		{after, []string{"n1/other", "net/b-device"}, false},
		{gone, nil, false},
	} {
		if diff := cmp.Diff(tc.want, describe(tc.view.ForNode(node("n1")))); diff != "" {
			t.Errorf("view %d: %s", i, diff)
		}
		if got := tc.view.Class("gpu") != nil; got != tc.class {
			t.Errorf("view %d: class %v, want %v", i, got, tc.class)
		}
	}
	if n := gone.local.Len() + gone.pools.Len() + len(gone.shared); n != 0 {
		t.Errorf("%d entries are left of deleted slices", n)
	}
	if !slices.IsSorted([]uint64{empty.Generation(), before.Generation(), after.Generation(), gone.Generation()}) {
		t.Error("generations do not grow")
	}
}

func TestAnEventThatChangesNothingKeepsTheView(t *testing.T) {
	store := newStore()
	store.SetSlice(slice("a", "n1"))
	before := store.View()
	again := slice("a", "n1")
	again.ResourceVersion = "2"
	store.SetSlice(again)
	store.DeleteSlice("unknown")
	if store.View() != before {
		t.Error("the view changed")
	}
}

func TestOnlyTheChangedPoolIsReplaced(t *testing.T) {
	store := newStore()
	store.SetSlice(slice("a", "n1"))
	store.SetSlice(slice("b", "n2"))
	before := store.View().ForNode(node("n2"))
	store.SetSlice(slice("a", "n1", devices("x", "y")))
	if after := store.View().ForNode(node("n2")); after != before {
		t.Error("a node that was not touched has new devices")
	}
}

func TestNodesThatSeeTheSameShareIt(t *testing.T) {
	store := newStore()
	store.SetSlice(slice("a", "", pool("net", 1, 2), nodesWith("fast")))
	store.SetSlice(slice("b", "", pool("net", 1, 2), allNodes))
	view := store.View()
	see := func(n *v1.Node) *NodePool { return view.ForNode(n).Pools[0] }
	if see(node("n1", "fast")) != see(node("n2", "fast")) || see(node("n3")) != see(node("n4")) {
		t.Error("equal nodes have different pools")
	}
	if see(node("n1", "fast")) == see(node("n3")) {
		t.Error("different nodes have the same pool")
	}
}

// TestTheOrderOfEventsDoesNotMatter compares a store after many random events with one that only ever saw what
// is left, in a random order. With small limits most pools are beyond one.
func TestTheOrderOfEventsDoesNotMatter(t *testing.T) {
	small := limits{slices: 3, members: 5, generations: 1, particulars: 5, local: 2}
	usual := newStore().View().caches.limits
	for name, tc := range map[string]struct {
		limits limits
		pools  []string
	}{
		"as usual":              {usual, []string{"p0", "p1", "p2"}},
		"small limits":          {small, []string{"p0", "p1"}},
		"small, a node's pool":  {small, []string{"n0", "n1/mig"}},
		"small, a single pool":  {small, []string{"net"}},
		"usual, a node's pools": {usual, []string{"n0", "n1/mig"}},
	} {
		t.Run(name, func(t *testing.T) { compareOrders(t, tc.limits, tc.pools) })
	}
}

func compareOrders(t *testing.T, limits limits, pools []string) {
	rng := rand.New(rand.NewPCG(1, 2))
	nodes := []*v1.Node{node("n0"), node("n1", "fast"), node("n2"), node("n3", "fast")}
	limited := func() *Store {
		store := newStore()
		store.View().caches.limits = limits
		return store
	}
	store, exists := limited(), map[string]*resourceapi.ResourceSlice{}
	steps := 3000
	if testing.Short() {
		steps = 600
	}
	for step := range steps {
		name := fmt.Sprintf("s%d", rng.IntN(12))
		if rng.IntN(3) == 0 {
			delete(exists, name)
			store.DeleteSlice(name)
		} else {
			s := drawn(rng, name, fmt.Sprintf("n%d", rng.IntN(4)), pools[rng.IntN(len(pools))], 3)
			switch rng.IntN(8) {
			case 0:
				allNodes(s)
			case 1:
				nodesWith("fast")(s)
			case 2:
				perDevice("fast")(s)
			}
			exists[name] = s
			store.SetSlice(s)
		}
		fresh := limited()
		for _, s := range exists { // in random order
			fresh.SetSlice(s)
		}
		for _, n := range nodes {
			want, got := fresh.View().ForNode(n), store.View().ForNode(n)
			if diff := cmp.Diff(describeAll(want), describeAll(got)); diff != "" {
				t.Fatalf("step %d, node %s: (-fresh, +incremental)\n%s", step, n.Name, diff)
			}
		}
		if diff := cmp.Diff(problemsOf(fresh), problemsOf(store)); diff != "" {
			t.Fatalf("step %d, problems: (-fresh, +incremental)\n%s", step, diff)
		}
	}
}

func TestReadersAndWritersAtTheSameTime(t *testing.T) {
	store := newStore()
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for w := range 2 {
		writers.Go(func() {
			for i := range 200 {
				name := fmt.Sprintf("n%d", (i+w)%5)
				store.SetSlice(slice(name, name, devices(fmt.Sprintf("d%d", i), "x")))
				store.SetSlice(slice("net-"+name, "", pool("net-"+name, 1, 1), allNodes, devices(fmt.Sprintf("d%d", i))))
				store.SetClass(&resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}})
				if i%7 == 0 {
					store.DeleteSlice(name)
				}
			}
		})
	}
	for range 3 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				view := store.View()
				matcher, err := view.Matcher(context.Background(), MatcherSpec{Selectors: []string{`device.driver == "gpu.example.com"`}})
				if err != nil {
					t.Error(err)
					return
				}
				for i := range 5 {
					for _, p := range view.ForNode(node(fmt.Sprintf("n%d", i))).Pools {
						if judged(matcher, p).Match.Count() != p.Len() {
							t.Error("a device does not match")
						}
						p.Attribute("example.com/none")
						p.Index("x")
					}
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
}

// The cost of an event must not grow with the square of the generations that a node publishes in a pool.
func BenchmarkSetSliceAmongGenerations(b *testing.B) {
	for _, n := range []int{500, 4000} {
		b.Run(fmt.Sprintf("%dgenerations", n), func(b *testing.B) {
			store := newStore()
			for i := range n {
				store.SetSlice(slice(fmt.Sprint("s", i), "n", pool("p", int64(i), 1)))
			}
			b.ResetTimer()
			for i := range b.N {
				store.SetSlice(slice("s7", "n", pool("p", 7, 1), devices(fmt.Sprint("d", i))))
			}
		})
	}
}

// The cost of an event must not grow with the number of nodes.
func BenchmarkSetSlice(b *testing.B) {
	for _, n := range []int{500, 5000, 50000} {
		b.Run(fmt.Sprintf("%dnodes", n), func(b *testing.B) {
			store := newStore()
			for i := range n {
				name := fmt.Sprintf("n%d", i)
				store.SetSlice(slice(name, name, devices("d0", "d1", "d2", "d3", "d4", "d5", "d6", "d7")))
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				store.SetSlice(slice("n7", "n7", devices("d0", "d1", "d2", "d3", "d4", "d5", "d6", fmt.Sprintf("d%d", i))))
			}
		})
	}
}

// Whether namespaces matter follows the slices, of whichever generation, and is about the node agent's shares alone.
func TestAViewMindsNamespacesWhileADeviceDoes(t *testing.T) {
	tests := map[string]struct {
		driver string
		shared bool
		name   resourceapi.QualifiedName
		value  resourceapi.DeviceAttribute
		want   bool
	}{
		"the agent's":                     {ownDriver, true, "sharedByNamespace", resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}, true},
		"the agent's, with its domain":    {ownDriver, true, "gpu.nvidia.com/sharedByNamespace", resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}, true},
		"false":                           {ownDriver, true, "sharedByNamespace", resourceapi.DeviceAttribute{BoolValue: ptr.To(false)}, false},
		"of another kind":                 {ownDriver, true, "sharedByNamespace", resourceapi.DeviceAttribute{StringValue: ptr.To("true")}, false},
		"of another domain":               {ownDriver, true, "example.com/sharedByNamespace", resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}, false},
		"a device that nobody shares":     {ownDriver, false, "sharedByNamespace", resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}, false},
		"another driver's":                {driver, true, "sharedByNamespace", resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}, false},
		"another driver's, in our domain": {driver, true, "gpu.nvidia.com/sharedByNamespace", resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}, false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			with := func(generation int64, attribute bool) *resourceapi.ResourceSlice {
				return slice("a", "n1", pool("n1", generation, 1), func(s *resourceapi.ResourceSlice) {
					s.Spec.Driver = tc.driver
					s.Spec.Devices = []resourceapi.Device{{Name: "plain"}, {Name: "shared", AllowMultipleAllocations: &tc.shared}}
					if attribute {
						s.Spec.Devices[1].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{tc.name: tc.value}
					}
				})
			}
			store := newStore()
			check := func(what string, want bool) {
				t.Helper()
				var apart []int
				for _, p := range store.View().ForNode(node("n1")).Pools {
					for i := p.Apart().Next(0); i >= 0; i = p.Apart().Next(i + 1) {
						apart = append(apart, i)
					}
				}
				if got := store.View().MindsNamespaces(); got != want || slices.Equal(apart, []int{1}) != want {
					t.Errorf("%s: namespaces matter: %v, of devices %v; want %v", what, got, apart, want)
				}
			}
			check("empty", false)
			store.SetSlice(with(1, true))
			check("published", tc.want)
			store.SetSlice(with(2, true))
			check("published anew", tc.want)
			store.SetSlice(with(2, false))
			check("not any more", false)
			store.SetSlice(with(2, true))
			check("again", tc.want)
			store.DeleteSlice("a")
			check("gone", false)
		})
	}
}
