// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// consumes makes devices consume a counter; given for several counter sets, several.
func consumes(set, counter, quantity string, devices ...int) func(int, *resourceapi.Device) {
	return func(i int, d *resourceapi.Device) {
		if len(devices) > 0 && !contains(devices, i) {
			return
		}
		d.ConsumesCounters = append(d.ConsumesCounters, resourceapi.DeviceCounterConsumption{
			CounterSet: set, Counters: map[string]resourceapi.Counter{counter: {Value: resource.MustParse(quantity)}},
		})
	}
}

// shareable makes devices allow multiple allocations, with the given capacity.
func shareable(capacity, quantity string, devices ...int) func(int, *resourceapi.Device) {
	return func(i int, d *resourceapi.Device) {
		if len(devices) > 0 && !contains(devices, i) {
			return
		}
		d.AllowMultipleAllocations = ptr.To(true)
		d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{resourceapi.QualifiedName(capacity): {Value: resource.MustParse(quantity)}}
	}
}

func policy(p *resourceapi.CapacityRequestPolicy) func(int, *resourceapi.Device) {
	return func(_ int, d *resourceapi.Device) {
		for name, capacity := range d.Capacity {
			capacity.RequestPolicy = p
			d.Capacity[name] = capacity
		}
	}
}

func contains(list []int, i int) bool {
	for _, j := range list {
		if i == j {
			return true
		}
	}
	return false
}

// counters adds a counter set to the pool of a node, in a slice of its own.
func (w *world) counters(pool, set, counter, quantity string) *world {
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: pool + "-" + set},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driverA, NodeName: ptr.To(pool), Pool: resourceapi.ResourcePool{Name: pool, Generation: 1},
			SharedCounters: []resourceapi.CounterSet{{Name: set, Counters: map[string]resourceapi.Counter{counter: {Value: resource.MustParse(quantity)}}}},
		},
	}
	w.slices = append(w.slices, slice)
	return w.recount(pool)
}

// recount makes the slices of a pool say how many there are.
func (w *world) recount(pool string) *world {
	n := int64(0)
	for _, slice := range w.slices {
		if slice.Spec.Pool.Name == pool {
			n++
		}
	}
	for _, slice := range w.slices {
		if slice.Spec.Pool.Name == pool {
			slice.Spec.Pool.ResourceSliceCount = n
		}
	}
	return w
}

// share lets a claim have a share of "pool/device".
func (w *world) share(device, capacity, quantity string) *world {
	pool, name, _ := strings.Cut(device, "/")
	w.shares = append(w.shares, resourceapi.DeviceRequestAllocationResult{
		Driver: driverA, Pool: pool, Device: name, ShareID: ptr.To(types.UID(fmt.Sprintf("share-%d", len(w.shares)))),
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{resourceapi.QualifiedName(capacity): resource.MustParse(quantity)},
	})
	return w
}

// shareOnly lets a claim have a share of "pool/device" that takes no capacity.
func (w *world) shareOnly(device string) *world {
	w.share(device, "none", "0")
	w.shares[len(w.shares)-1].ConsumedCapacity = nil
	return w
}

func noCapacity(_ int, d *resourceapi.Device) { d.Capacity = nil }

// takes makes a request require capacity.
func takes(request resourceapi.DeviceRequest, capacity, quantity string) resourceapi.DeviceRequest {
	request.Exactly.Capacity = &resourceapi.CapacityRequirements{
		Requests: map[resourceapi.QualifiedName]resource.Quantity{resourceapi.QualifiedName(capacity): resource.MustParse(quantity)},
	}
	return request
}

func adminAccess(request resourceapi.DeviceRequest) resourceapi.DeviceRequest {
	request.Exactly.AdminAccess = ptr.To(true)
	return request
}

func distinctAttribute(w *world, name string) *world {
	devices := &w.claims[len(w.claims)-1].Spec.Devices
	devices.Constraints = append(devices.Constraints, resourceapi.DeviceConstraint{DistinctAttribute: ptr.To(resourceapi.FullyQualifiedName(name))})
	return w
}

// firstOf asks for the first of the given requests that can be satisfied.
func firstOf(name string, requests ...resourceapi.DeviceRequest) resourceapi.DeviceRequest {
	out := resourceapi.DeviceRequest{Name: name}
	for _, r := range requests {
		out.FirstAvailable = append(out.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: r.Name, DeviceClassName: r.Exactly.DeviceClassName, Selectors: r.Exactly.Selectors,
			AllocationMode: r.Exactly.AllocationMode, Count: r.Exactly.Count, Capacity: r.Exactly.Capacity,
			DerivedAttributes: r.Exactly.DerivedAttributes,
		})
	}
	return out
}

// TestSharedCountersAndCapacity has one case for each rule of KEP-4815 (partitionable devices) and KEP-5075
// (consumable capacity), and asks upstream's allocator for its opinion, too.
func TestSharedCountersAndCapacity(t *testing.T) {
	const set, memory = "set", "memory"
	values := func(quantities ...string) (list []resource.Quantity) {
		for _, q := range quantities {
			list = append(list, resource.MustParse(q))
		}
		return list
	}
	quantity := func(q string) *resource.Quantity { return ptr.To(resource.MustParse(q)) }
	// Two GPUs with 4 slices of memory each, as one partition of 4, two of 2 and four of 1.
	mig := func() *world {
		var devices []resourceapi.Device
		for gpu := range 2 {
			for _, size := range []int{4, 2, 2, 1, 1, 1, 1} {
				device := resourceapi.Device{
					Name: fmt.Sprintf("gpu-%d-%d-%d", gpu, size, len(devices)),
					Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
						"size": {IntValue: ptr.To(int64(size))}, "gpu": {IntValue: ptr.To(int64(gpu))},
					},
				}
				consumes(fmt.Sprintf("gpu-%d", gpu), memory, fmt.Sprint(size))(0, &device)
				devices = append(devices, device)
			}
		}
		return rig().node("n1", devices...).counters("n1", "gpu-0", memory, "4").counters("n1", "gpu-1", memory, "4")
	}
	size := func(name string, n, count int64) resourceapi.DeviceRequest {
		return exactly(name, count, fmt.Sprintf(`device.attributes["a.example.com"].size == %d`, n))
	}
	// A pool that two nodes share: devices for either of them, one counter for both.
	network := func() *world {
		w := rig().node("n1", gpus(2, consumes(set, memory, "2"))...).node("n2")
		w.slices = w.slices[:1]
		spec := &w.slices[0].Spec
		spec.NodeName, spec.PerDeviceNodeSelection = nil, ptr.To(true)
		spec.Devices[0].NodeName, spec.Devices[1].NodeName = ptr.To("n1"), ptr.To("n2")
		return w.counters("n1", set, memory, "3")
	}

	for name, tc := range map[string]struct {
		world *world
		want  []string // "request device consumed" for node n1; nil if refused
	}{
		"a partition for which enough is left": {
			world: mig().hold("n1/gpu-0-2-1").claim("c", size("r", 2, 1)),
			want:  []string{"r gpu-0-2-2"},
		},
		"the partition of another GPU where the first has too little left": {
			world: mig().hold("n1/gpu-0-1-3").claim("c", size("r", 4, 1)),
			want:  []string{"r gpu-1-4-7"},
		},
		"no partition where both GPUs have too little left": {
			world: mig().hold("n1/gpu-0-1-3", "n1/gpu-1-1-10").claim("c", size("r", 4, 1)),
		},
		"partitions of one request share counters": {
			world: mig().claim("c", size("r", 2, 4)),
			want:  []string{"r gpu-0-2-1", "r gpu-0-2-2", "r gpu-1-2-8", "r gpu-1-2-9"},
		},
		"not more than counters allow": {
			world: mig().claim("c", size("r", 1, 7), size("s", 2, 1)),
		},
		"partitions of two requests share counters": {
			world: mig().claim("c", size("r", 2, 1), size("s", 4, 1)),
			want:  []string{"r gpu-0-2-1", "s gpu-1-4-7"},
		},
		"partitions of two claims share counters": {
			world: mig().claim("c", size("r", 2, 1)).claim("d", size("s", 4, 1)),
			want:  []string{"r gpu-0-2-1", "s gpu-1-4-7"},
		},
		"an earlier request is taken back": {
			world: mig().hold("n1/gpu-1-1-10").claim("c", size("r", 2, 1), size("s", 4, 1)),
			want:  []string{"r gpu-1-2-8", "s gpu-0-4-0"},
		},
		"the second alternative where the first has no counters": {
			world: mig().hold("n1/gpu-0-1-3", "n1/gpu-1-1-10").claim("c", firstOf("r", size("large", 4, 1), size("small", 2, 1))),
			want:  []string{"r/small gpu-0-2-1"},
		},
		"an alternative that may do without counters beside one that may not": {
			world: rig().node("n1", gpus(3, consumes(set, memory, "3", 0, 1))...).counters("n1", set, memory, "3").
				claim("c", exactly("r", 1, `device.attributes["a.example.com"].index == 0`)).
				claim("d", firstOf("s", exactly("any", 1), exactly("large", 1, `device.attributes["a.example.com"].index < 2`))),
			want: []string{"r gpu-0", "s/any gpu-2"},
		},
		"partitions of one GPU by matchAttribute": {
			world: mig().hold("n1/gpu-0-1-3").claim("c", size("r", 2, 2)).matchAttribute("a.example.com/gpu"),
			want:  []string{"r gpu-1-2-8", "r gpu-1-2-9"},
		},
		"a held device that is not for this node consumes, too": {
			world: network().hold("n1/gpu-1").claim("c", exactly("r", 1)),
		},
		"a free device that is not for this node does not": {
			world: network().claim("c", exactly("r", 1)),
			want:  []string{"r gpu-0"},
		},
		"a held device that is gone does not": {
			world: network().hold("n1/gpu-9").claim("c", exactly("r", 1)),
			want:  []string{"r gpu-0"},
		},
		"all devices, if counters allow": {
			world: rig().node("n1", gpus(2, consumes(set, memory, "2"))...).counters("n1", set, memory, "4").claim("c", all("r")),
			want:  []string{"r gpu-0", "r gpu-1"},
		},
		"not all devices, if counters do not allow": {
			world: rig().node("n1", gpus(2, consumes(set, memory, "2"))...).counters("n1", set, memory, "3").claim("c", all("r")),
		},
		"admin access to a held device takes counters a second time": {
			world: rig().node("n1", gpus(1, consumes(set, memory, "2"))...).counters("n1", set, memory, "3").hold("n1/gpu-0").claim("c", adminAccess(exactly("r", 1))),
		},
		"admin access to a held device while counters are left": {
			world: rig().node("n1", gpus(1, consumes(set, memory, "2"))...).counters("n1", set, memory, "4").hold("n1/gpu-0").claim("c", adminAccess(exactly("r", 1))),
			want:  []string{"r gpu-0"},
		},
		"nothing of a pool with an overdrawn counter, though another counter would do": {
			world: rig().node("n1", gpus(3, consumes(set, memory, "3", 0, 1), consumes("other", memory, "1", 2))...).
				counters("n1", set, memory, "5").counters("n1", "other", memory, "5").hold("n1/gpu-0", "n1/gpu-1").claim("c", exactly("r", 1)),
		},
		"a device without counters of a pool with an overdrawn counter": {
			world: rig().node("n1", gpus(3, consumes(set, memory, "3", 0, 1))...).
				counters("n1", set, memory, "5").hold("n1/gpu-0", "n1/gpu-1").claim("c", exactly("r", 1)),
			want: []string{"r gpu-2"},
		},

		"a share of what is left": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"))...).share("n1/gpu-0", memory, "7").claim("c", takes(exactly("r", 1), memory, "3")),
			want:  []string{"r gpu-0 memory=3"},
		},
		"no share of less": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"))...).share("n1/gpu-0", memory, "7").claim("c", takes(exactly("r", 1), memory, "4")),
		},
		"the next device where too little is left": {
			world: rig().node("n1", gpus(2, shareable(memory, "10"))...).share("n1/gpu-0", memory, "7").claim("c", takes(exactly("r", 1), memory, "4")),
			want:  []string{"r gpu-1 memory=4"},
		},
		"without a request all of the capacity": {
			world: rig().node("n1", gpus(2, shareable(memory, "10"))...).share("n1/gpu-0", memory, "1").claim("c", exactly("r", 1)),
			want:  []string{"r gpu-1 memory=10"},
		},
		"shares of one device for several requests": {
			world: rig().node("n1", gpus(2, shareable(memory, "10"))...).
				claim("c", takes(exactly("r", 1), memory, "6"), takes(exactly("s", 1), memory, "6"), takes(exactly("t", 1), memory, "4")),
			want: []string{"r gpu-0 memory=6", "s gpu-1 memory=6", "t gpu-0 memory=4"},
		},
		"one request has no two shares of a device": {
			world: rig().node("n1", gpus(2, shareable(memory, "10"))...).claim("c", takes(exactly("r", 2), memory, "1")),
			want:  []string{"r gpu-0 memory=1", "r gpu-1 memory=1"},
		},
		"one request wants more devices than there are": {
			world: rig().node("n1", gpus(2, shareable(memory, "10"))...).claim("c", takes(exactly("r", 3), memory, "1")),
		},
		"equal requests have shares of the same devices": {
			world: rig().node("n1", gpus(2, shareable(memory, "10"))...).claim("c", takes(exactly("r", 2), memory, "4"), takes(exactly("s", 2), memory, "4")),
			want:  []string{"r gpu-0 memory=4", "r gpu-1 memory=4", "s gpu-0 memory=4", "s gpu-1 memory=4"},
		},
		"distinctAttribute keeps shares apart": {
			world: distinctAttribute(rig().node("n1", gpus(2, shareable(memory, "10"))...).
				claim("c", takes(exactly("r", 1), memory, "1"), takes(exactly("s", 1), memory, "1")), "a.example.com/index"),
			want: []string{"r gpu-0 memory=1", "s gpu-1 memory=1"},
		},
		"matchAttribute keeps shares together": {
			world: rig().node("n1", gpus(4, shareable(memory, "10"))...).share("n1/gpu-0", memory, "8").
				claim("c", takes(exactly("r", 1), memory, "5"), takes(exactly("s", 1), memory, "5"), takes(exactly("t", 1), memory, "5")).matchAttribute("a.example.com/root"),
			want: []string{"r gpu-2 memory=5", "s gpu-2 memory=5", "t gpu-3 memory=5"},
		},
		"a shareable device that somebody has for itself": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"))...).hold("n1/gpu-0").claim("c", takes(exactly("r", 1), memory, "1")),
		},
		"admin access to a share": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"))...).share("n1/gpu-0", memory, "7").claim("c", adminAccess(takes(exactly("r", 1), memory, "3"))),
			want:  []string{"r gpu-0 memory=3"},
		},
		"admin access takes capacity": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"))...).share("n1/gpu-0", memory, "7").claim("c", adminAccess(takes(exactly("r", 1), memory, "4"))),
		},
		"a device that lacks the capacity": {
			world: rig().node("n1", gpus(2, shareable("cores", "10", 0), shareable(memory, "10", 1))...).claim("c", takes(exactly("r", 1), memory, "1")),
			want:  []string{"r gpu-1 memory=1"},
		},
		"a device that is not shareable and has the capacity": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), func(_ int, d *resourceapi.Device) { d.AllowMultipleAllocations = nil })...).
				claim("c", takes(exactly("r", 1), memory, "10"), takes(exactly("s", 1), memory, "0")),
		},
		"all shareable devices": {
			world: rig().node("n1", gpus(2, shareable(memory, "10"))...).share("n1/gpu-0", memory, "7").claim("c", takes(all("r"), memory, "3")),
			want:  []string{"r gpu-0 memory=3", "r gpu-1 memory=3"},
		},
		"not all shareable devices, if one has too little left": {
			world: rig().node("n1", gpus(2, shareable(memory, "10"))...).share("n1/gpu-0", memory, "8").claim("c", takes(all("r"), memory, "3")),
		},
		"all are those that are large enough": {
			world: rig().node("n1", gpus(2, shareable(memory, "10", 0), shareable(memory, "2", 1))...).claim("c", takes(all("r"), memory, "3")),
			want:  []string{"r gpu-0 memory=3"},
		},
		"the first share takes counters, the next does not": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), consumes(set, memory, "4"))...).counters("n1", set, memory, "5").
				claim("c", takes(exactly("r", 1), memory, "1"), takes(exactly("s", 1), memory, "1")),
			want: []string{"r gpu-0 memory=1", "s gpu-0 memory=1"},
		},
		"a share of a device that is shared takes no counters": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), consumes(set, memory, "4"))...).counters("n1", set, memory, "5").
				share("n1/gpu-0", memory, "1").share("n1/gpu-0", memory, "1").claim("c", takes(exactly("r", 1), memory, "1")),
			want: []string{"r gpu-0 memory=1"},
		},
		"a share keeps the partitions off that its device overlaps": {
			world: rig().node("n1", gpus(2, shareable(memory, "10", 0), consumes(set, memory, "4"))...).counters("n1", set, memory, "5").
				share("n1/gpu-0", memory, "1").claim("c", exactly("r", 1, `device.attributes["a.example.com"].index == 1`)),
		},
		"a share without capacity has taken the counters of its device once": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), consumes(set, memory, "4"), noCapacity)...).counters("n1", set, memory, "5").
				shareOnly("n1/gpu-0").claim("c", exactly("r", 1)),
			want: []string{"r gpu-0"},
		},
		"what was tried and refused for a taint leaves its counters": {
			world: rig().node("n1", gpus(2, taint("lost", 0), consumes(set, memory, "4"))...).counters("n1", set, memory, "5").claim("c", exactly("r", 1)),
			want:  []string{"r gpu-1"},
		},
		"what was tried and refused for a constraint leaves its counters": {
			world: rig().node("n1", gpus(4, consumes(set, memory, "3"))...).counters("n1", set, memory, "6").
				claim("c", exactly("r", 1, `device.attributes["a.example.com"].index == 3`), exactly("s", 1, `device.attributes["a.example.com"].index != 3`)).
				matchAttribute("a.example.com/root"),
			want: []string{"r gpu-3", "s gpu-2"},
		},
		"a share that was tried and taken back leaves its counters": {
			world: rig().node("n1", gpus(3, shareable(memory, "10", 0), consumes(set, memory, "4", 0), consumes(set, memory, "5", 1))...).counters("n1", set, memory, "5").
				claim("c", exactly("r", 1), exactly("s", 1, `device.attributes["a.example.com"].index == 1`)),
			want: []string{"r gpu-2", "s gpu-1"},
		},
		"admin access gives a claim no device twice": {
			world: rig().node("n1", gpus(1)...).hold("n1/gpu-0").claim("c", adminAccess(exactly("r", 1)), adminAccess(exactly("s", 1))),
		},
		"admin access gives a second claim the device of the first": {
			world: rig().node("n1", gpus(1)...).hold("n1/gpu-0").claim("c", adminAccess(exactly("r", 1))).claim("d", adminAccess(exactly("s", 1))),
			want:  []string{"r gpu-0", "s gpu-0"},
		},
		"all devices as the second alternative": {
			world: rig().node("n1", gpus(3)...).claim("c", firstOf("r", exactly("five", 5), all("rest"))),
			want:  []string{"r/rest gpu-0", "r/rest gpu-1", "r/rest gpu-2"},
		},
		"an alternative beside all devices of another request": {
			world: rig().node("n1", gpus(3)...).
				claim("c", all("r", `device.attributes["a.example.com"].index < 2`), firstOf("s", all("those", `device.attributes["a.example.com"].index < 2`), exactly("one", 1))),
			want: []string{"r gpu-0", "r gpu-1", "s/one gpu-2"},
		},
		"no share if counters are used up": {
			world: rig().node("n1", gpus(2, shareable(memory, "10", 0), consumes(set, memory, "3"))...).counters("n1", set, memory, "5").
				hold("n1/gpu-1").claim("c", exactly("r", 1)),
		},

		"the default of the policy": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), policy(&resourceapi.CapacityRequestPolicy{Default: quantity("2")}))...).claim("c", exactly("r", 1)),
			want:  []string{"r gpu-0 memory=2"},
		},
		"rounded up to a valid value": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), policy(&resourceapi.CapacityRequestPolicy{Default: quantity("2"), ValidValues: values("2", "4", "8")}))...).
				claim("c", takes(exactly("r", 1), memory, "3")),
			want: []string{"r gpu-0 memory=4"},
		},
		"more than all valid values": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), policy(&resourceapi.CapacityRequestPolicy{Default: quantity("2"), ValidValues: values("2", "4", "8")}))...).
				claim("c", takes(exactly("r", 1), memory, "9")),
		},
		"raised to the least of the range": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), policy(&resourceapi.CapacityRequestPolicy{
				Default: quantity("2"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity("2")},
			}))...).claim("c", takes(exactly("r", 1), memory, "1")),
			want: []string{"r gpu-0 memory=2"},
		},
		"rounded up to a step": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), policy(&resourceapi.CapacityRequestPolicy{
				Default: quantity("1"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity("1"), Step: quantity("3")},
			}))...).claim("c", takes(exactly("r", 1), memory, "5")),
			want: []string{"r gpu-0 memory=7"},
		},
		"rounded up to a step in thousandths": {
			world: rig().node("n1", gpus(1, shareable(memory, "1"), policy(&resourceapi.CapacityRequestPolicy{
				Default: quantity("100m"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity("100m"), Step: quantity("50m")},
			}))...).claim("c", takes(exactly("r", 1), memory, "210m")),
			want: []string{"r gpu-0 memory=250m"},
		},
		"more than the most of the range": {
			world: rig().node("n1", gpus(1, shareable(memory, "10"), policy(&resourceapi.CapacityRequestPolicy{
				Default: quantity("1"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity("1"), Max: quantity("5"), Step: quantity("3")},
			}))...).claim("c", takes(exactly("r", 1), memory, "5")),
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := tc.world
			requests, in := w.compile(t)
			in.Requests, in.Node = requests, w.nodes[0]
			n := 0
			in.NewShareID = func() types.UID { n++; return types.UID(fmt.Sprintf("new-%d", n)) }
			result := Allocate(context.Background(), in)
			if diff := cmp.Diff(tc.want, describe(result.Allocations)); diff != "" {
				t.Errorf("allocation (-want +got):\n%s\n%v", diff, result.Failure)
			}
			if check := Check(context.Background(), in); check.Fits() != result.Fits() {
				t.Errorf("Check says %v, Allocate %v", check.Failure, result.Failure)
			}
			upstream, err := allocateUpstream(newUpstream(t, w), w.nodes[0], w.claims, time.Second)
			if err != nil && !strings.Contains(err.Error(), "constraint") {
				t.Fatal(err)
			}
			if diff := cmp.Diff(upstream, result.Allocations, cmpopts.IgnoreFields(resourceapi.DeviceRequestAllocationResult{}, "ShareID")); diff != "" {
				t.Errorf("allocation (-upstream +ours):\n%s", diff)
			}
			checkShareIDs(t, w, result.Allocations)
		})
	}
}

func describe(allocations []resourceapi.AllocationResult) (out []string) {
	for _, allocation := range allocations {
		for _, r := range allocation.Devices.Results {
			text := r.Request + " " + r.Device
			for name, quantity := range r.ConsumedCapacity {
				text += fmt.Sprintf(" %s=%s", name, quantity.String())
			}
			out = append(out, text)
		}
	}
	return out
}

// checkShareIDs wants an ID of its own for each share, and none for devices that are not shareable.
func checkShareIDs(t *testing.T, w *world, allocations []resourceapi.AllocationResult) {
	t.Helper()
	shareable := make(map[string]bool)
	for _, slice := range w.slices {
		for _, device := range slice.Spec.Devices {
			shareable[slice.Spec.Pool.Name+"/"+device.Name] = ptr.Deref(device.AllowMultipleAllocations, false)
		}
	}
	seen := make(map[types.UID]bool)
	for _, allocation := range allocations {
		for _, r := range allocation.Devices.Results {
			if (r.ShareID != nil) != shareable[r.Pool+"/"+r.Device] {
				t.Errorf("%s: share ID %v", r.Device, ptr.Deref(r.ShareID, "none"))
			}
			if r.ShareID != nil && seen[*r.ShareID] {
				t.Errorf("share ID %s twice", *r.ShareID)
			}
			seen[ptr.Deref(r.ShareID, "")] = true
		}
	}
}

func TestShareIDsAreRandomByDefault(t *testing.T) {
	w := rig().node("n1", gpus(1, shareable("memory", "10"))...).claim("c", takes(exactly("r", 1), "memory", "1"))
	requests, in := w.compile(t)
	in.Requests, in.Node = requests, w.nodes[0]
	ids := make(map[types.UID]bool)
	for range 10 {
		ids[*Allocate(context.Background(), in).Allocations[0].Devices.Results[0].ShareID] = true
	}
	if len(ids) != 10 {
		t.Errorf("10 shares have %d IDs", len(ids))
	}
}
