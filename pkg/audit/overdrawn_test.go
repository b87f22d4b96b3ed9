// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// nothing is an inventory without devices.
var nothing = inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()}).View()

// parted has 80Gi of memory that partitions take 40Gi of, and one everything that is given out in shares; a GPU without counters; and
// devices of two compatibility groups, without any, and with both.
func parted() *inventory.View {
	takes := func(memory string) []resourceapi.DeviceCounterConsumption {
		return []resourceapi.DeviceCounterConsumption{{CounterSet: "gpu", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse(memory)}}}}
	}
	spec := resourceapi.ResourceSliceSpec{
		Driver: "gpu.example.com", NodeName: ptr.To("node-a"), Pool: resourceapi.ResourcePool{Name: "node-a", ResourceSliceCount: 2},
	}
	devices, counters := spec, spec
	for _, name := range []string{"part-0", "part-1", "part-2"} {
		devices.Devices = append(devices.Devices, resourceapi.Device{Name: name, ConsumesCounters: takes("40Gi")})
	}
	devices.Devices = append(devices.Devices, resourceapi.Device{Name: "gpu-0"}, resourceapi.Device{
		Name: "all", AllowMultipleAllocations: ptr.To(true), ConsumesCounters: takes("80Gi"),
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
	})
	for name, groups := range map[string][]string{"red": {"red"}, "blue": {"blue"}, "both": {"blue", "red"}, "bare": nil} {
		taken := takes("1Gi")
		taken[0].CounterSet, taken[0].CompatibilityGroups = "fabric", groups
		devices.Devices = append(devices.Devices, resourceapi.Device{Name: name, ConsumesCounters: taken})
	}
	for _, name := range []string{"gpu", "fabric"} {
		counters.SharedCounters = append(counters.SharedCounters, resourceapi.CounterSet{
			Name: name, Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("80Gi")}},
		})
	}
	features := inventory.DefaultFeatures()
	features.CompatibilityGroups = true
	store := inventory.NewStore(inventory.Options{Features: features})
	store.SetSlice(&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "devices"}, Spec: devices})
	store.SetSlice(&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "counters"}, Spec: counters})
	return store.View()
}

// sharing has a share of "all".
func sharing(name, memory string) *resourceapi.ResourceClaim {
	c := claim(name, 1, "all")
	c.Status.Allocation.Devices.Results[0].ShareID = ptr.To(types.UID(name + "-share"))
	c.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}
	return c
}

func TestOverdrawn(t *testing.T) {
	const counter, capacity = "counter memory of set gpu", "capacity memory"
	const groups = "compatibility groups of counter set fabric"
	inFlight := usage.NewIndex()
	inFlight.Set(usage.RefOf(claim("a", 1)), allocation("part-0", "part-1"), nil)
	inFlight.Set(usage.RefOf(claim("b", 1)), nil, allocation("part-2"))
	for name, tc := range map[string]struct {
		view     usage.View
		device   string
		want     []string
		wantWhat string
	}{
		"nothing is held":                   {view: viewOf(), device: "part-0"},
		"partitions that fit":               {view: viewOf(claim("a", 1, "part-0"), claim("b", 1, "part-1")), device: "part-0"},
		"partitions that do not":            {view: viewOf(claim("a", 1, "part-0", "part-1"), claim("b", 1, "part-2")), device: "part-2", want: []string{"team-a/a", "team-a/b"}, wantWhat: counter},
		"of one claim alone":                {view: viewOf(claim("a", 1, "part-0", "part-1", "part-2")), device: "part-2", want: []string{"team-a/a"}, wantWhat: counter},
		"a device that takes none of it":    {view: viewOf(claim("a", 1, "part-0", "part-1"), claim("b", 1, "part-2", "gpu-0")), device: "gpu-0"},
		"a device that nobody has any more": {view: viewOf(claim("a", 1, "part-0", "part-1"), sharing("b", "1Gi")), device: "part-2"},
		"one of them in flight":             {view: inFlight.View(), device: "part-0"},
		"shares take the counter once":      {view: viewOf(sharing("a", "30Gi"), sharing("b", "30Gi")), device: "all"},
		"shares beside a partition":         {view: viewOf(sharing("b", "30Gi"), sharing("a", "30Gi"), claim("c", 1, "part-0")), device: "all", want: []string{"team-a/a", "team-a/b", "team-a/c"}, wantWhat: counter},
		"shares of more than there is":      {view: viewOf(sharing("a", "50Gi"), sharing("b", "31Gi")), device: "all", want: []string{"team-a/a", "team-a/b"}, wantWhat: capacity},
		"groups that go together":           {view: viewOf(claim("a", 1, "red"), claim("b", 1, "both")), device: "both"},
		"groups that do not":                {view: viewOf(claim("a", 1, "red"), claim("b", 1, "blue")), device: "blue", want: []string{"team-a/a", "team-a/b"}, wantWhat: groups},
		"three of which each two do":        {view: viewOf(claim("a", 1, "red"), claim("b", 1, "both"), claim("c", 1, "blue")), device: "both", want: []string{"team-a/a", "team-a/b", "team-a/c"}, wantWhat: groups},
		"a group beside none":               {view: viewOf(claim("a", 1, "bare"), claim("b", 1, "blue")), device: "bare", want: []string{"team-a/a", "team-a/b"}, wantWhat: groups},
		"a device of no slice":              {view: viewOf(claim("a", 1, "gone")), device: "gone"},
	} {
		t.Run(name, func(t *testing.T) {
			claims, what := Overdrawn(device(tc.device), tc.view, parted())
			if diff := cmp.Diff(tc.want, names(claims)); diff != "" || what != tc.wantWhat {
				t.Errorf("too little of %q, want %q; claims differ (-want +got):\n%s", what, tc.wantWhat, diff)
			}
			if claims, what := Overdrawn(device(tc.device), tc.view, nothing); claims != nil {
				t.Errorf("too little of %s of unknown devices", what)
			}
		})
	}
}

// What is overdrawn is told like what is held twice: after the grace period, and when it is over. A device that is held twice is not told
// of once more for what it takes.
func TestDoublesFindWhatIsOverdrawn(t *testing.T) {
	d, inv := NewDoubles(grace), parted()
	over := viewOf(claim("a", 1, "part-0", "part-1"), claim("b", 1, "part-2"))
	look := func(after time.Duration, view usage.View) (found, over []DoubleHold) {
		return d.Look(start.Add(after), view, inv, slices.Values([]usage.DeviceID{device("part-2")}))
	}
	look(0, over)
	want := []DoubleHold{{Device: device("part-2"), Claims: []usage.ClaimRef{usage.RefOf(claim("a", 1)), usage.RefOf(claim("b", 1))}, What: "counter memory of set gpu", Since: start}}
	if found, _ := look(grace, over); cmp.Diff(want, found) != "" {
		t.Errorf("found (-want +got):\n%s", cmp.Diff(want, found))
	}
	// A driver that publishes its slices anew leaves them incomplete for a moment. Nothing is over then, nor does it begin again.
	for after, known := range []*inventory.View{nothing, inv} {
		inv = known
		if found, ended := look(grace+time.Duration(after+1)*time.Second, over); len(found)+len(ended) > 0 {
			t.Errorf("found %v, over %v, while nothing has changed but what is known", found, ended)
		}
	}
	if found, ended := look(3*grace, over); len(found)+len(ended) > 0 {
		t.Errorf("found %v, over %v, while nothing has changed", found, ended)
	}
	if _, ended := look(4*grace, viewOf(claim("b", 1, "part-2"))); cmp.Diff(want, ended) != "" {
		t.Errorf("over (-want +got):\n%s", cmp.Diff(want, ended))
	}
	twice := viewOf(claim("a", 1, "part-0", "part-1", "part-2"), claim("b", 1, "part-2"))
	look(5*grace, twice)
	if found, _ := look(6*grace, twice); len(found) != 1 || found[0].What != "" {
		t.Errorf("found %v, want the device that is held twice", found)
	}
}

// Where it is not known what there is, only what was told of and may go on stays as it is.
func TestDoublesEndWhereDevicesAreNotKnown(t *testing.T) {
	over := viewOf(claim("a", 1, "part-0", "part-1"), claim("b", 1, "part-2"))
	twice := viewOf(claim("a", 1, "part-2"), claim("b", 1, "part-2"))
	for name, tc := range map[string]struct {
		first usage.View
		told  bool
		then  usage.View
		over  int
	}{
		"nobody has the device any more": {over, true, viewOf(claim("a", 1, "part-0")), 1},
		"one of two who had it":          {twice, true, viewOf(claim("a", 1, "part-2")), 1},
		"what is not told of yet":        {over, false, over, 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := NewDoubles(grace)
			now := start
			look := func(view usage.View, inv *inventory.View) (found, over []DoubleHold) {
				return d.Look(now, view, inv, slices.Values([]usage.DeviceID{device("part-2")}))
			}
			look(tc.first, parted())
			if tc.told {
				now = now.Add(grace)
				if found, _ := look(tc.first, parted()); len(found) != 1 {
					t.Fatalf("found %v", found)
				}
			}
			if _, ended := look(tc.then, nothing); len(ended) != tc.over {
				t.Errorf("over %v, want %d", ended, tc.over)
			}
			if next, ok := d.Next(); ok || d.Len() > 0 {
				t.Errorf("%d devices are kept, something is due at %v: %t", d.Len(), next, ok)
			}
		})
	}
}

// Where two nodes of one pool call devices alike, nobody may have the other node's: so that one being too small is no finding.
func TestWhatSufficesOnOneNodeIsNotOverdrawn(t *testing.T) {
	const most, little = "80Gi", "1Gi"
	for name, tc := range map[string]struct {
		memory []string // of n0's and n1's
		ahead  int64    // generations that n1 is ahead
		want   string
	}{
		"enough on both":       {memory: []string{most, most}},
		"too little on one":    {memory: []string{most, little}},
		"too little on other":  {memory: []string{little, most}},
		"too little on either": {memory: []string{little, little}, want: "capacity memory"},

		"too little on one that is behind":                      {memory: []string{little, most}, ahead: 1},
		"too little on one that is ahead":                       {memory: []string{most, little}, ahead: 1},
		"too little on either, each in a generation of its own": {memory: []string{little, little}, ahead: 1, want: "capacity memory"},
	} {
		t.Run(name, func(t *testing.T) {
			store := inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()})
			for i, memory := range tc.memory {
				node, quantity := fmt.Sprint("n", i), resource.MustParse(memory)
				spec := resourceapi.ResourceSliceSpec{Driver: "gpu.example.com", NodeName: &node, Pool: resourceapi.ResourcePool{Name: "node-a", ResourceSliceCount: 2}}
				spec.Pool.Generation = int64(i) * tc.ahead
				sets := spec
				sets.SharedCounters = []resourceapi.CounterSet{{Name: "gpu", Counters: map[string]resourceapi.Counter{"memory": {Value: quantity}}}}
				spec.Devices = []resourceapi.Device{
					{Name: "all", AllowMultipleAllocations: ptr.To(true), Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: quantity}}},
					{Name: "part", ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
						CounterSet: "gpu", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("10Gi")}},
					}}},
				}
				store.SetSlice(&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-sets"}, Spec: sets})
				store.SetSlice(&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: spec})
			}
			view := viewOf(sharing("a", "10Gi"), claim("b", 1, "part"))
			wants := map[string]string{"all": tc.want, "part": ""}
			if tc.want != "" {
				wants["part"] = "counter memory of set gpu"
			}
			for name, want := range wants {
				if claims, what := Overdrawn(device(name), view, store.View()); what != want || (claims == nil) != (want == "") {
					t.Errorf("device %s: %q of %v, want %q", name, what, claims, want)
				}
			}
		})
	}
}

// BenchmarkOverdrawn is what a look at one device costs where it takes of a counter of which all other devices of its pool take, each of them held,
// and all in a compatibility group.
func BenchmarkOverdrawn(b *testing.B) {
	for _, n := range []int{64, 125 * 64} {
		b.Run(fmt.Sprint(n, " devices"), func(b *testing.B) {
			features := inventory.DefaultFeatures()
			features.CompatibilityGroups = true
			store := inventory.NewStore(inventory.Options{Features: features})
			const each = 64
			spec := resourceapi.ResourceSliceSpec{
				Driver: "gpu.example.com", NodeName: ptr.To("node-a"), Pool: resourceapi.ResourcePool{Name: "node-a", ResourceSliceCount: int64(1 + n/each)},
			}
			counters := spec
			counters.SharedCounters = []resourceapi.CounterSet{{Name: "x", Counters: map[string]resourceapi.Counter{"slots": {Value: resource.MustParse("1Ei")}}}}
			store.SetSlice(&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "counters"}, Spec: counters})
			all := claim("all", 1)
			all.Status.Allocation = &resourceapi.AllocationResult{}
			for first := 0; first < n; first += each {
				devices := spec
				for i := first; i < first+each; i++ {
					device := resourceapi.Device{Name: fmt.Sprint("d", i), ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
						CounterSet: "x", Counters: map[string]resourceapi.Counter{"slots": {Value: resource.MustParse("1")}}, CompatibilityGroups: []string{"red"},
					}}}
					devices.Devices = append(devices.Devices, device)
					all.Status.Allocation.Devices.Results = append(all.Status.Allocation.Devices.Results,
						resourceapi.DeviceRequestAllocationResult{Driver: "gpu.example.com", Pool: "node-a", Device: device.Name})
				}
				store.SetSlice(&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("devices-", first)}, Spec: devices})
			}
			index := usage.NewIndex()
			index.Set(usage.RefOf(all), all.Status.Allocation, nil)
			if poolOf(usage.DeviceOf(&all.Status.Allocation.Devices.Results[0]), store.View()) == nil {
				b.Fatal("the pool is not usable")
			}
			b.ReportAllocs()
			for b.Loop() {
				if claims, what := Overdrawn(usage.DeviceOf(&all.Status.Allocation.Devices.Results[0]), index.View(), store.View()); claims != nil {
					b.Fatal(what)
				}
			}
		})
	}
}
