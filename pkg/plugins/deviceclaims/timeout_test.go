package deviceclaims

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/wakeup"
)

// nearlyFull asks for 30 shares that have more than enough room together on 10 devices of 1,000, and do not go into them: three fit into one
// device, all sizes are one more than a multiple of three, so at least one is left of each, and less than 10 is left in all. No search
// is known that finds that out in time.
func nearlyFull(c *resourceapi.ResourceClaim) {
	c.Spec.Devices.Requests = nil
	for i := range 30 {
		size := int64(334 + 3*(i-15))
		if i == 29 {
			size += 18
		}
		c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: fmt.Sprintf("share-%d", i), Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: testClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
			Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": *resource.NewQuantity(size, resource.DecimalSI)}},
		}})
	}
}

// divisible makes devices of 1,000 that can be shared.
func divisible(n int) []resourceapi.Device {
	var devices []resourceapi.Device
	for i := range n {
		devices = append(devices, device(fmt.Sprintf("gpu-%d", i), func(d *resourceapi.Device) {
			d.AllowMultipleAllocations = ptr.To(true)
			d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("1000")}}
		}))
	}
	return devices
}

// A node on which the search comes to no end is given up when its time is over. The pod goes to another one; if there is none, it is
// tried again without anything having changed.
func TestNodeThatTakesTooLongIsGivenUp(t *testing.T) {
	for name, others := range map[string][]string{"another node fits": {"node-b"}, "that was all": nil} {
		t.Run(name, func(t *testing.T) {
			w := world{
				nodes:   []*v1.Node{node("node-a")},
				objects: []runtime.Object{class(testClass), slice("node-a", divisible(10)...)},
				claims:  []*resourceapi.ResourceClaim{claim("c", nearlyFull)},
				pods:    []*v1.Pod{pod("p", "c")},
				room:    wakeup.Options{RetryAfter: time.Millisecond},
			}
			for _, name := range others {
				w.nodes = append(w.nodes, node(name))
				w.objects = append(w.objects, slice(name, divisible(30)...))
			}
			h := newHarness(t, w)
			h.plugin.filterTimeout = time.Second // of which node-b takes a thousandth
			ctx, cancel := context.WithTimeout(h.ctx, patience)
			defer cancel()
			h.ctx = ctx // so that the test ends, and fails, even so
			a := h.filterAll(w.pods[0])
			if !a.preFilter.IsSuccess() {
				t.Fatal(a.preFilter)
			}
			want := map[string]string{"node-a": string(allocator.ReasonUndecided)}
			for _, name := range others {
				want[name] = ""
			}
			if diff := cmp.Diff(want, a.filter); diff != "" {
				t.Fatalf("reasons of Filter (-want +got):\n%s", diff)
			}
			if len(others) > 0 {
				a.bind(others[0])
				return
			}
			if status := a.postFilter(); status.Code() != fwk.Unschedulable {
				t.Errorf("PostFilter: %v", status)
			}
			h.eventually("the pod is tried again", func() bool { return len(h.activator.taken()) > 0 })
		})
	}
}

// What Filter has found may take a search without end in Reserve, where devices are left to pods that are nominated to the node, or others
// have taken some meanwhile. It must not keep the scheduler from all other pods.
func TestReserveIsGivenUpInTime(t *testing.T) {
	one := func(c *resourceapi.ResourceClaim) {
		nearlyFull(c)
		c.Spec.Devices.Requests = c.Spec.Devices.Requests[:1]
	}
	for name, tc := range map[string]struct {
		wants, nominee func(*resourceapi.ResourceClaim)
		devices        int
		fits           bool
	}{
		"the pod's own devices":                          {wants: nearlyFull, nominee: counted(20), devices: 30},
		"those of the nominated pod, which does not fit": {wants: one, nominee: nearlyFull, devices: 10, fits: true},
	} {
		for how, inGroup := range map[string]bool{"alone": false, "in a group": true} {
			t.Run(name+", "+how, func(t *testing.T) {
				h := newHarness(t, world{
					nodes:   []*v1.Node{node("node-a")},
					objects: []runtime.Object{class(testClass), slice("node-a", divisible(tc.devices)...)},
					claims:  []*resourceapi.ResourceClaim{claim("c", tc.wants), claim("kept", tc.nominee)},
				})
				h.nominator.nominate("node-a", pending("nominee", 5, "kept"))
				h.plugin.filterTimeout = 500 * time.Millisecond
				ctx, cancel := context.WithTimeout(h.ctx, patience)
				defer cancel()
				h.ctx = ctx // so that the test ends, and fails, even so
				state := framework.NewCycleState()
				if inGroup {
					state.SetPodGroupSchedulingCycle(framework.NewCycleState())
				}
				a := h.filterAllIn(state, pending("p", 5, "c"))
				if len(a.fits()) == 0 {
					t.Fatal(a.preFilter, a.filter)
				}
				status := h.plugin.Reserve(h.ctx, a.state, a.pod, "node-a")
				if ctx.Err() != nil {
					t.Fatalf("still searching after %s", patience)
				}
				if status.IsSuccess() != tc.fits || !tc.fits && status.Message() != string(allocator.ReasonUndecided) {
					t.Errorf("Reserve: %v", status)
				}
			})
		}
	}
}
