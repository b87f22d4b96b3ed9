// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview_test

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// A GPU's state follows from who holds what of it, and whether it can be had.
func TestStates(t *testing.T) {
	c := snapshottest.New(3, 4)
	c.Run("a", "one", 0, 0, 1)
	_, admin := c.Run("a", "monitor", 0, 0, 0)
	admin.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	c.Taint(0, 2, "xid")
	_, gone := c.Run("b", "old", 0, 1, 0)
	gone.Status.Allocation.Devices.Results[0].Device = "gpu-lost"
	slice := c.ResourceSlices[1]
	slice.Spec.Devices[1].AllowMultipleAllocations = ptr.To(true)
	for _, name := range []string{"s1", "s2"} {
		_, claim := c.Run("b", name, 0, 1, 1)
		claim.Status.Allocation.Devices.Results[0].ShareID = ptr.To(types.UID(name))
		claim.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("10Gi")}
	}
	// What another scheduler has allocated, or another driver publishes, may be more than the API allows, of which 64 bits have only the end.
	const tooMany = "999999999999999999999999"
	_, endless := c.Run("b", "endless", 0, 1, 1)
	endless.Status.Allocation.Devices.Results[0].ShareID = ptr.To[types.UID]("endless")
	endless.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(tooMany)}
	c.ResourceSlices[2].Spec.Devices[0].Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse(tooMany)}}
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	for _, place := range []string{"0", "4"} {
		slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{
			Name: "gpu-2-mig-3g40gb-" + place,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"type": text("mig"), "parentUUID": text("GPU-1-2"), "profile": text("3g.40gb"),
			},
		})
	}
	_, part := c.Run("b", "part", 0, 1, 2)
	part.Status.Allocation.Devices.Results[0].Device = "gpu-2-mig-3g40gb-4"
	c.DeviceTaintRules = append(c.DeviceTaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: ptr.To("worker-1"), Device: ptr.To("gpu-3")},
		Taint:          resourceapi.DeviceTaint{Key: "drain", Effect: resourceapi.DeviceTaintEffectNoExecute},
	}}, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{Taint: resourceapi.DeviceTaint{
		Key:    "none",
		Effect: resourceapi.DeviceTaintEffectNoExecute,
	}}})

	got := map[string]string{}
	gpus := clusterview.GPUs(c.Snapshot())
	for _, g := range gpus {
		got[g.Node+"/"+g.Device] = string(g.State) + " " + g.Layout()
		if g.SharedMemoryBytes != nil && *g.SharedMemoryBytes != 20<<30 {
			t.Errorf("shares take %d", *g.SharedMemoryBytes)
		}
		if g.Node == "worker-2" && g.Device == "gpu-0" && g.MemoryBytes != 0 {
			t.Errorf("memory that is no number of bytes counts as %d", g.MemoryBytes)
		}
	}
	if diff := cmp.Diff(map[string]string{
		"worker-0/gpu-0": "free ", "worker-0/gpu-1": "held ", "worker-0/gpu-2": "tainted ", "worker-0/gpu-3": "free ",
		"worker-1/gpu-0": "free ", "worker-1/gpu-1": "shared ", "worker-1/gpu-2": "partitioned 3g.40gb", "worker-1/gpu-3": "tainted ", "worker-1/gpu-lost": "gone ",
		"worker-2/gpu-0": "incomplete ", "worker-2/gpu-1": "incomplete ", "worker-2/gpu-2": "incomplete ", "worker-2/gpu-3": "incomplete ",
	}, got); diff != "" {
		t.Error(diff)
	}
	totals := clusterview.Total(gpus)
	if diff := cmp.Diff(&clusterview.Group{Node: "worker-0", Size: 2, Link: clusterview.NVLink}, totals.LargestFree); diff != "" {
		t.Error(diff)
	}
	sizes := clusterview.Sizes(gpus)
	if s := sizes[1]; s.GPUs != 2 || s.Fit != 1 || s.Ideal != 1 || s.Linked != 1 {
		t.Errorf("pairs: %+v", s)
	}
}

// A device that is not there is not free, even if somebody merely looks at it; and those of the network are on no node.
func TestWhatIsOnNoNode(t *testing.T) {
	c := snapshottest.New(1, 2)
	_, admin := c.Run("a", "monitor", 0, 0, 0)
	admin.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	admin.Status.Allocation.Devices.Results[0].Device = "gpu-lost"
	network := c.ResourceSlices[0].DeepCopy()
	network.Name, network.Spec.Pool.Name, network.Spec.NodeName, network.Spec.AllNodes = "network", "network", nil, ptr.To(true)
	for g := range 2 {
		network.Spec.Devices = append(network.Spec.Devices, *network.Spec.Devices[g].DeepCopy())
		network.Spec.Devices[2+g].Name += "-more"
		network.Spec.Devices[2+g].Attributes["uuid"] = resourceapi.DeviceAttribute{StringValue: ptr.To(network.Spec.Devices[2+g].Name)}
	}
	c.ResourceSlices = append(c.ResourceSlices, network)
	gpus := clusterview.GPUs(c.Snapshot())
	totals := clusterview.Total(gpus)
	if diff := cmp.Diff(clusterview.Totals{
		Nodes: 1, GPUs: 7, States: map[clusterview.State]int{clusterview.Free: 6, clusterview.Gone: 1},
		LargestFree: &clusterview.Group{Node: "worker-0", Size: 2, Link: clusterview.NVLink},
	}, totals); diff != "" {
		t.Error(diff)
	}
	if sizes := clusterview.Sizes(gpus); sizes[len(sizes)-1].GPUs != 2 || sizes[0].Fit != 2 {
		t.Errorf("%+v", sizes[0])
	}
}

// Machines have the same addresses on their buses: devices of two nodes in one pool are two GPUs, and so are devices of a network.
func TestEqualAddressesOfTwoMachines(t *testing.T) {
	for name, tc := range map[string]struct {
		nodes []string
		uuids bool
		want  int
	}{
		"of two nodes":               {[]string{"worker-0", "worker-1"}, true, 2},
		"of two nodes, without UUID": {[]string{"worker-0", "worker-1"}, false, 2},
		"of the network":             {[]string{"", ""}, true, 2},
		"network, without UUID":      {[]string{"", ""}, false, 2},
		"of one node, without UUID":  {[]string{"worker-0", "worker-0"}, false, 1},
	} {
		c := snapshottest.New(2, 2)
		c.ResourceSlices = c.ResourceSlices[:1]
		spec := &c.ResourceSlices[0].Spec
		spec.NodeName, spec.PerDeviceNodeSelection, spec.Pool.Name = nil, ptr.To(true), "rack"
		for i, node := range tc.nodes {
			d := &spec.Devices[i]
			if d.NodeName = &node; node == "" {
				d.NodeName, d.AllNodes = nil, ptr.To(true)
			}
			d.Attributes["resource.kubernetes.io/pciBusID"] = resourceapi.DeviceAttribute{StringValue: ptr.To("0000:01:00.0")}
			if !tc.uuids {
				delete(d.Attributes, "uuid")
			}
		}
		if got := len(clusterview.GPUs(c.Snapshot())); got != tc.want {
			t.Errorf("%s: %d GPUs, want %d", name, got, tc.want)
		}
	}
}

// A device of which nothing is reported is not ready.
func TestReadiness(t *testing.T) {
	c := snapshottest.New(1, 2)
	_, claim := c.Run("a", "one", 0, 0, 0, 1)
	claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: snapshottest.Driver, Pool: "worker-0", Device: "gpu-0", Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue}},
	}}
	if got := clusterview.Claims(c.Snapshot())[0].Ready; got != "1/2" {
		t.Errorf("ready %s", got)
	}
}

func TestFreeGroups(t *testing.T) {
	place := func(domain string, numa int) *clusterview.GPU {
		return &clusterview.GPU{Node: "n", State: clusterview.Free, Place: clusterview.Place{NVLinkDomain: domain, NUMANode: &numa}}
	}
	for name, tc := range map[string]struct {
		gpus []*clusterview.GPU
		want []clusterview.Group
	}{
		"none": {},
		"one":  {[]*clusterview.GPU{place("a", 0)}, []clusterview.Group{{Node: "n", Size: 1}}},
		"farther is larger": {
			[]*clusterview.GPU{place("a", 0), place("a", 0), place("b", 0), place("c", 1)},
			[]clusterview.Group{{"n", 2, clusterview.NVLink}, {"n", 3, clusterview.SameNUMA}, {"n", 4, clusterview.System}},
		},
		"bridges across NUMA nodes": {
			[]*clusterview.GPU{place("a", 0), place("b", 0), place("a", 1), place("b", 1)},
			[]clusterview.Group{{"n", 2, clusterview.NVLink}, {"n", 4, clusterview.System}},
		},
		"all are linked": {[]*clusterview.GPU{place("a", 0), place("a", 1)}, []clusterview.Group{{"n", 2, clusterview.NVLink}}},
	} {
		if diff := cmp.Diff(tc.want, clusterview.FreeGroups(tc.gpus)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// A taint on one partition keeps claims off that one alone. On each partition, or on the whole GPU, it keeps them off the GPU, and is told once.
func TestTaintsOfPartitions(t *testing.T) {
	taint := resourceapi.DeviceTaint{Key: "ill", Effect: resourceapi.DeviceTaintEffectNoSchedule}
	on := func(partition string) clusterview.Taint {
		return clusterview.Taint{Key: "ill", Effect: "NoSchedule", Partition: partition}
	}
	for name, tc := range map[string]struct {
		whole   bool // is published
		tainted []int
		state   clusterview.State
		taints  []clusterview.Taint
	}{
		"one of two":                    {tainted: []int{1}, state: clusterview.Free, taints: []clusterview.Taint{on("gpu-0-mig-1")}},
		"both":                          {tainted: []int{1, 2}, state: clusterview.Tainted, taints: []clusterview.Taint{on("")}},
		"one of two, beside the whole":  {whole: true, tainted: []int{2}, state: clusterview.Free, taints: []clusterview.Taint{on("gpu-0-mig-2")}},
		"the whole and both partitions": {whole: true, tainted: []int{0, 1, 2}, state: clusterview.Tainted, taints: []clusterview.Taint{on("")}},
		"the whole":                     {whole: true, tainted: []int{0}, state: clusterview.Tainted, taints: []clusterview.Taint{on("")}},
	} {
		c := snapshottest.New(1, 1)
		devices := &c.ResourceSlices[0].Spec.Devices
		text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
		for _, place := range []string{"1", "2"} {
			*devices = append(*devices, resourceapi.Device{Name: "gpu-0-mig-" + place, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"type": text("mig"), "parentUUID": text("GPU-0-0"), "profile": text("3g.40gb"),
			}})
		}
		for _, i := range tc.tainted {
			(*devices)[i].Taints = []resourceapi.DeviceTaint{taint}
		}
		if !tc.whole {
			*devices = (*devices)[1:]
		}
		gpus := clusterview.GPUs(c.Snapshot())
		if len(gpus) != 1 || gpus[0].State != tc.state {
			t.Errorf("%s: %d GPUs, state %s, want %s", name, len(gpus), gpus[0].State, tc.state)
		}
		if diff := cmp.Diff(tc.taints, gpus[0].Taints); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// A GPU that offers partitions alone is free, and in no group of whole GPUs that are.
func TestPartitionsAreNoWholeGPU(t *testing.T) {
	for _, whole := range []bool{false, true} {
		c := snapshottest.New(1, 1)
		spec := &c.ResourceSlices[0].Spec
		part := *spec.Devices[0].DeepCopy()
		part.Name = "gpu-0-mig-1"
		for name, value := range map[resourceapi.QualifiedName]string{"type": "mig", "parentUUID": "GPU-0-0", "uuid": "MIG-1", "profile": "7g.80gb"} {
			part.Attributes[name] = resourceapi.DeviceAttribute{StringValue: &value}
		}
		if spec.Devices = append(spec.Devices, part); !whole {
			spec.Devices = spec.Devices[1:]
		}
		gpus := clusterview.GPUs(c.Snapshot())
		sizes, group := clusterview.Sizes(gpus), clusterview.Total(gpus).LargestFree
		if len(gpus) != 1 || gpus[0].State != clusterview.Free || (sizes[0].Fit > 0) != whole || sizes[0].Fit != sizes[0].Ideal || (group != nil) != whole {
			t.Errorf("whole %v: %d GPUs, state %s, %+v, %+v", whole, len(gpus), gpus[0].State, sizes[0], group)
		}
	}
}

// A driver may say by counters alone which devices exclude each other: what claims leave too little for is not free.
func TestCountersOfOthers(t *testing.T) {
	counters := func(n string) map[string]resourceapi.Counter {
		return map[string]resourceapi.Counter{"cores": {Value: resource.MustParse(n)}, "none": {}}
	}
	for name, tc := range map[string]struct {
		held []string
		want string
	}{
		"none":                        {nil, "whole free, half-0 free, half-1 free"},
		"a part":                      {[]string{"half-1"}, "whole partitioned a/half-1 of half-1, half-0 free, half-1 held a/half-1 of "},
		"the whole":                   {[]string{"whole"}, "whole held a/whole of , half-0 held a/whole of whole, half-1 held a/whole of whole"},
		"both parts":                  {[]string{"half-0", "half-1"}, "whole held a/half-0 of half-0 a/half-1 of half-1, half-0 held a/half-0 of , half-1 held a/half-1 of "},
		"one looks on, and one holds": {[]string{"admin", "half-0"}, "whole partitioned a/admin of  a/half-0 of half-0, half-0 held a/half-0 of , half-1 free"},
		"one looks on":                {[]string{"admin"}, "whole free a/admin of , half-0 free, half-1 free"},
	} {
		c := snapshottest.New(1, 0)
		devices := c.ResourceSlices[0]
		devices.Spec.Driver, devices.Spec.Pool.ResourceSliceCount = "npu.example.com", 2
		for _, d := range [][2]string{{"whole", "8"}, {"half-0", "4"}, {"half-1", "4"}} {
			devices.Spec.Devices = append(devices.Spec.Devices, resourceapi.Device{
				Name: d[0], ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "npu", Counters: counters(d[1])}},
			})
		}
		sets := devices.DeepCopy()
		sets.Name, sets.UID, sets.Spec.Devices = "counters", "counters", nil
		sets.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "npu", Counters: counters("8")}}
		c.ResourceSlices = append(c.ResourceSlices, sets)
		for _, device := range tc.held {
			_, claim := c.Run("a", device, 0, 0, 0)
			r := &claim.Status.Allocation.Devices.Results[0]
			if r.Driver, r.Device = "npu.example.com", device; device == "admin" {
				r.Device, r.AdminAccess = "whole", ptr.To(true)
			}
		}
		var got []string
		for _, device := range []string{"whole", "half-0", "half-1"} {
			for _, g := range clusterview.GPUs(c.Snapshot()) {
				if g.Device != device {
					continue
				}
				text := device + " " + string(g.State)
				for _, h := range g.Holders {
					text += " " + h.Namespace + "/" + h.Claim + " of " + h.Device
				}
				got = append(got, text)
			}
		}
		if diff := cmp.Diff(tc.want, strings.Join(got, ", ")); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// Those are named who have of the counters of which too little is left, in one order, wherever the pool has its counter sets.
func TestWhoHasTheCounters(t *testing.T) {
	for name, sets := range map[string]func(*resourceapi.ResourceSliceSpec){
		"of the node":                 func(*resourceapi.ResourceSliceSpec) {},
		"of all nodes":                func(s *resourceapi.ResourceSliceSpec) { s.NodeName, s.AllNodes = nil, ptr.To(true) },
		"of another node of the pool": func(s *resourceapi.ResourceSliceSpec) { s.NodeName = ptr.To("worker-1") },
	} {
		c := snapshottest.New(2, 0)
		devices := c.ResourceSlices[0]
		c.ResourceSlices = c.ResourceSlices[:1]
		devices.Spec.Driver, devices.Spec.Pool.Name, devices.Spec.Pool.ResourceSliceCount = "npu.example.com", "rack", 2
		for _, d := range [][3]string{{"a", "1", "0"}, {"b", "0", "1"}, {"one-of-each", "1", "1"}, {"two", "2", "1"}} {
			devices.Spec.Devices = append(devices.Spec.Devices, resourceapi.Device{
				Name: d[0], ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "npu", Counters: map[string]resourceapi.Counter{
					"cores": {Value: resource.MustParse(d[1])}, "memory": {Value: resource.MustParse(d[2])},
				}}},
			})
		}
		counters := devices.DeepCopy()
		counters.Name, counters.UID, counters.Spec.Devices = "counters", "counters", nil
		counters.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "npu", Counters: map[string]resourceapi.Counter{
			"cores": {Value: resource.MustParse("2")}, "memory": {Value: resource.MustParse("1")},
		}}}
		sets(&counters.Spec)
		c.ResourceSlices = append(c.ResourceSlices, counters)
		for _, device := range []string{"a", "b"} {
			_, claim := c.Run("team", device, 0, 0, 0)
			r := &claim.Status.Allocation.Devices.Results[0]
			r.Driver, r.Pool, r.Device = "npu.example.com", "rack", device
		}
		for range 20 {
			var got []string
			for _, g := range clusterview.GPUs(c.Snapshot()) {
				text := g.Device + " " + string(g.State)
				for _, h := range g.Holders {
					text += " " + h.Claim
				}
				got = append(got, text)
			}
			if diff := cmp.Diff([]string{"a held a", "b held b", "one-of-each partitioned b", "two partitioned a b"}, got); diff != "" {
				t.Errorf("%s: %s", name, diff)
				break
			}
		}
	}
}

// A driver may call pools and devices alike on each node: each node has its devices, and its claims hold them.
func TestDevicesCalledAlikeOnTwoNodes(t *testing.T) {
	c := snapshottest.New(2, 2)
	_, claim := c.Run("a", "one", 0, 1, 1)
	for _, slice := range c.ResourceSlices {
		slice.Spec.Pool.Name = "gpus"
	}
	claim.Status.Allocation.Devices.Results[0].Pool = "gpus"
	var got []string
	for _, g := range clusterview.GPUs(c.Snapshot()) {
		got = append(got, g.Node+"/"+g.Device+" "+string(g.State))
	}
	if diff := cmp.Diff([]string{"worker-0/gpu-0 free", "worker-0/gpu-1 free", "worker-1/gpu-0 free", "worker-1/gpu-1 held"}, got); diff != "" {
		t.Error(diff)
	}
}

// A node that takes no pods has no place for any size.
func TestNodesThatTakeNoPods(t *testing.T) {
	taint := func(key string, effect v1.TaintEffect) func(*snapshottest.Cluster) {
		return func(c *snapshottest.Cluster) { c.Nodes[0].Spec.Taints = []v1.Taint{{Key: key, Effect: effect}} }
	}
	for name, tc := range map[string]struct {
		change func(*snapshottest.Cluster)
		closed bool
	}{
		"cordoned":       {func(c *snapshottest.Cluster) { c.Nodes[0].Spec.Unschedulable = true }, true},
		"not ready":      {taint(v1.TaintNodeNotReady, v1.TaintEffectNoExecute), true},
		"gone":           {func(c *snapshottest.Cluster) { c.Nodes = c.Nodes[1:] }, true},
		"for GPUs alone": {taint("nvidia.com/gpu", v1.TaintEffectNoSchedule), false},
		"no nodes known": {func(c *snapshottest.Cluster) { c.Nodes = nil }, false},
	} {
		c := snapshottest.New(2, 2)
		c.Run("a", "one", 0, 1, 0)
		tc.change(c)
		gpus := clusterview.GPUs(c.Snapshot())
		totals, sizes, want := clusterview.Total(gpus), clusterview.Sizes(gpus), []string{}
		if tc.closed {
			want = append(want, "worker-0")
		}
		if diff := cmp.Diff(want, append([]string{}, clusterview.Closed(gpus)...)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if (totals.LargestFree.Node == "worker-1") != tc.closed || (sizes[1].Fit == 0) != tc.closed || (sizes[0].Ideal == 1) != tc.closed {
			t.Errorf("%s: %+v, %+v, %+v", name, totals.LargestFree, sizes[0], sizes[1])
		}
		if totals.States[clusterview.Free] != 3 {
			t.Errorf("%s: %v", name, totals.States)
		}
	}
}

// Devices of a pool of which a slice is missing are not free, and no size of them fits; what is held stays so.
func TestAnIncompletePool(t *testing.T) {
	c := snapshottest.New(2, 2)
	c.Run("a", "one", 0, 0, 0)
	c.ResourceSlices[0].Spec.Pool.ResourceSliceCount = 2
	old := c.ResourceSlices[0].DeepCopy() // another slice, and not of this generation
	old.Name, old.Spec.Pool.Generation, old.Spec.Devices = "old", 0, nil
	c.ResourceSlices = append(c.ResourceSlices, old)
	totals := clusterview.Total(clusterview.GPUs(c.Snapshot()))
	if diff := cmp.Diff(map[clusterview.State]int{clusterview.Held: 1, clusterview.Incomplete: 1, clusterview.Free: 2}, totals.States); diff != "" {
		t.Error(diff)
	}
	if totals.LargestFree.Node != "worker-1" {
		t.Errorf("the largest group is on %s", totals.LargestFree.Node)
	}
}

// The scheduler gives out no device of a pool that contradicts itself: none of them is free.
func TestAnInvalidPool(t *testing.T) {
	c := snapshottest.New(1, 2)
	c.ResourceSlices[0].Spec.Devices[1].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "nowhere"}}
	gpus := clusterview.GPUs(c.Snapshot())
	if totals := clusterview.Total(gpus); totals.States[clusterview.Incomplete] != 2 || totals.LargestFree != nil {
		t.Errorf("%+v", totals)
	}
	if sizes := clusterview.Sizes(gpus); sizes[0].Fit != 0 {
		t.Errorf("%d fit", sizes[0].Fit)
	}
}

// Of memory, and of shares of it, that 64 bits do not have, there is as much as they have.
func TestMoreMemoryThan64BitsHave(t *testing.T) {
	for memory, want := range map[string]int64{"5e21": math.MaxInt64, "9223372036854775808": math.MaxInt64, "9223372036854775807": math.MaxInt64, "-5e21": 0, "5": 5} {
		for share, wantShared := range map[string]int64{"5e18": math.MaxInt64, "5e21": math.MaxInt64, "4e18": 8e18} {
			c := snapshottest.New(1, 1)
			device := &c.ResourceSlices[0].Spec.Devices[0]
			device.AllowMultipleAllocations = ptr.To(true)
			device.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse(memory)}}
			for _, name := range []string{"s1", "s2"} {
				_, claim := c.Run("a", name, 0, 0, 0)
				claim.Status.Allocation.Devices.Results[0].ShareID = ptr.To(types.UID(name))
				claim.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(share)}
			}
			g := clusterview.GPUs(c.Snapshot())[0]
			if g.MemoryBytes != want || *g.SharedMemoryBytes != wantShared {
				t.Errorf("%s bytes, of which two have %s each, are %d and %d, want %d and %d", memory, share, g.MemoryBytes, *g.SharedMemoryBytes, want, wantShared)
			}
		}
	}
}

// What another node's kubelet adds to a pool called after a node hides nothing there, and replaces nothing. In a pool that is called alike on several
// nodes, each node's newest are shown.
func TestAKubeletHidesNoDevicesOfAnotherNode(t *testing.T) {
	for name, tc := range map[string]struct {
		pool  string // empty: each node's is called after it
		other resourceapi.ResourcePool
	}{
		"a newer generation":             {other: resourceapi.ResourcePool{Generation: math.MaxInt64, ResourceSliceCount: 1}},
		"devices of the same names":      {other: resourceapi.ResourcePool{Generation: 1, ResourceSliceCount: 1}},
		"another number of slices":       {other: resourceapi.ResourcePool{Generation: 1, ResourceSliceCount: 7}},
		"a newer one of a pool of nodes": {pool: "gpus", other: resourceapi.ResourcePool{Generation: math.MaxInt64, ResourceSliceCount: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			c := snapshottest.New(2, 2)
			own := c.ResourceSlices[0]
			own.Spec.Pool.Generation, own.Spec.Pool.ResourceSliceCount = 1, 1
			if tc.pool != "" {
				own.Spec.Pool.Name = tc.pool
			}
			other := own.DeepCopy()
			other.Name, other.Spec.NodeName = "a", ptr.To("other")
			tc.other.Name = own.Spec.Pool.Name
			other.Spec.Pool = tc.other
			if tc.pool != "" {
				other.Spec.Devices = []resourceapi.Device{{Name: "gpu-9"}}
			}
			c.ResourceSlices = append([]*resourceapi.ResourceSlice{other}, c.ResourceSlices...)
			n := 0
			for _, d := range clusterview.Devices(c.Snapshot()) {
				if d.Node == *own.Spec.NodeName && d.Object != nil && !d.Incomplete {
					n++
				}
			}
			if n != 2 {
				t.Errorf("%s has %d devices that are not incomplete, want 2", *own.Spec.NodeName, n)
			}
		})
	}
}

// Network interfaces, CPUs and channels are no GPUs, also when they are gone; accelerators of any driver are.
func TestWhatIsNoGPU(t *testing.T) {
	c := snapshottest.New(1, 1)
	add := func(driver, attribute, value string) {
		slice := c.ResourceSlices[0].DeepCopy()
		slice.Name, slice.Spec.Driver, slice.Spec.Pool.Name = driver, driver, "pool-"+driver
		slice.Spec.Devices = []resourceapi.Device{{Name: "device", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			resourceapi.QualifiedName(attribute): {StringValue: &value},
		}}}
		c.ResourceSlices = append(c.ResourceSlices, slice)
	}
	add("dra.net", "dra.net/pciAddress", "0000:01:00.0")
	add("fabric.example.com", "fabric.example.com/ifName", "eth1")
	add("domains.example.com", "type", "channel")
	add("dra.cpu", "numaNodeID", "0")
	add("npu.example.com", "model", "N1")
	add("gpu.example.net", "model", "N2")
	add("net.dra.example.com", "model", "N3")
	_, gone := c.Run("a", "one", 0, 0, 0)
	gone.Status.Allocation.Devices.Results[0].Driver = "fabric.example.com"
	var got []string
	for _, g := range clusterview.GPUs(c.Snapshot()) {
		got = append(got, g.Driver)
	}
	if diff := cmp.Diff([]string{"gpu.example.net", "gpu.nvidia.com", "npu.example.com"}, got); diff != "" {
		t.Error(diff)
	}
}
