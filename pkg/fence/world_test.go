// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"fmt"
	"strconv"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

const driver = "gpu.example.com"

// slice is the whole pool of a node.
func slice(pool string, devices ...resourceapi.Device) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: pool + "-devices"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: driver, NodeName: ptr.To(pool), Devices: devices,
		Pool: resourceapi.ResourcePool{Name: pool, ResourceSliceCount: 1},
	}}
}

// withCounters are the two slices of a pool whose devices take of shared counters.
func withCounters(pool string, counters map[string]string, devices ...resourceapi.Device) []*resourceapi.ResourceSlice {
	list, sets := slice(pool, devices...), slice(pool)
	list.Spec.Pool.ResourceSliceCount, sets.Spec.Pool.ResourceSliceCount = 2, 2
	sets.Name = pool + "-counters"
	set := resourceapi.CounterSet{Name: "gpu", Counters: map[string]resourceapi.Counter{}}
	for name, value := range counters {
		set.Counters[name] = resourceapi.Counter{Value: resource.MustParse(value)}
	}
	sets.Spec.SharedCounters = []resourceapi.CounterSet{set}
	return []*resourceapi.ResourceSlice{list, sets}
}

// whole is a device that shares nothing.
func whole(name string) resourceapi.Device { return resourceapi.Device{Name: name} }

// partition is a device that takes memory of the counter set.
func partition(name, memory string) resourceapi.Device {
	return resourceapi.Device{Name: name, ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
		CounterSet: "gpu", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse(memory)}},
	}}}
}

// shareable is a device whose memory is given out in shares.
func shareable(name, memory string) resourceapi.Device {
	return resourceapi.Device{Name: name, AllowMultipleAllocations: ptr.To(true), Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		"memory": {Value: resource.MustParse(memory)},
	}}
}

func inventoryOf(slices ...*resourceapi.ResourceSlice) *inventory.Store {
	features := inventory.DefaultFeatures()
	features.CompatibilityGroups = true
	store := inventory.NewStore(inventory.Options{Features: features})
	for _, s := range slices {
		store.SetSlice(s)
	}
	return store
}

// result names a device of a pool: "gpu-0", or "gpu-0*" with admin access, or "gpu-0=10Gi" for a share of its memory.
type results []resourceapi.DeviceRequestAllocationResult

func (r results) device(pool, name string) results {
	return append(r, resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: driver, Pool: pool, Device: name})
}

func (r results) admin(pool, name string) results {
	r = r.device(pool, name)
	r[len(r)-1].AdminAccess = ptr.To(true)
	return r
}

func (r results) share(pool, name, id, memory string) results {
	r = r.device(pool, name)
	r[len(r)-1].ShareID = ptr.To(types.UID(id))
	r[len(r)-1].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}
	return r
}

func (r results) allocation() *resourceapi.AllocationResult {
	return &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: r}}
}

// claim is claim default/<name> with the UID <name> at a revision.
func claim(name string, revision int, allocation results) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: name, UID: types.UID(name), ResourceVersion: strconv.Itoa(revision),
	}}
	if allocation != nil {
		c.Status.Allocation = allocation.allocation()
	}
	return c
}

// scheduler is what one process has of all this.
type scheduler struct {
	tracker *tracker.Tracker
	store   *inventory.Store
}

func newScheduler(slices ...*resourceapi.ResourceSlice) *scheduler {
	store := inventoryOf(slices...)
	return &scheduler{tracker: tracker.New(klog.Logger{}, tracker.WithJudge(NewJudge(store.View))), store: store}
}

func (s *scheduler) list(revision int, claims ...*resourceapi.ResourceClaim) {
	objects := []any{}
	for _, c := range claims {
		objects = append(objects, c)
	}
	if err := s.tracker.Store().Replace(objects, strconv.Itoa(revision)); err != nil {
		panic(err)
	}
}

func (s *scheduler) watch(c *resourceapi.ResourceClaim) {
	if err := s.tracker.Store().Update(c); err != nil {
		panic(err)
	}
}

func decidedElsewhere(*resourceapi.ResourceClaim) usage.View { return usage.View{} }

// wantVerdict asks for a claim that the scheduler has decided about on the given usage.
func (s *scheduler) wantVerdict(t testing.TB, c *resourceapi.ResourceClaim, decidedOn usage.View, want tracker.Outcome, other string) {
	t.Helper()
	got, err := s.tracker.Verdict(usage.RefOf(c), c.Status.Allocation, decidedOn)
	if err != nil {
		t.Fatalf("claim %s: %v", c.Name, err)
	}
	if got.Outcome != want || got.Other.Name != other {
		t.Errorf("claim %s: %s, want %s because of %q", c.Name, fmt.Sprintf("%s: %v", got.Outcome, got), want, other)
	}
}
