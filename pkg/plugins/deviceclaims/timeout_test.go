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
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/wakeup"
)

// nearlyFull asks for 24 shares that have more than enough room together on 8 devices of 1,000, and do not go into them: three fit into one
// device, all sizes are one more than a multiple of three, so at least one is left of each, and less than 8 is left in all. No search
// is known that finds that out in time.
func nearlyFull(c *resourceapi.ResourceClaim) {
	c.Spec.Devices.Requests = nil
	for i := range 24 {
		size := int64(334 + 3*(i-12))
		if i == 23 {
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
				objects: []runtime.Object{class(testClass), slice("node-a", divisible(8)...)},
				claims:  []*resourceapi.ResourceClaim{claim("c", nearlyFull)},
				pods:    []*v1.Pod{pod("p", "c")},
				room:    wakeup.Options{RetryAfter: time.Millisecond},
			}
			for _, name := range others {
				w.nodes = append(w.nodes, node(name))
				w.objects = append(w.objects, slice(name, divisible(24)...))
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
