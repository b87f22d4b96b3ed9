// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator/internal/answers"
	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/evaluation"
	"stowage.dev/stowage/pkg/allocator/internal/poolstate"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

const driver, class, node = "a.example.com", "gpu.example.com", "n1"

// question is what a search is about: a node with one pool of devices, and a claim.
type question struct {
	features func(*inventory.Features) // changes the default
	devices  []resourceapi.Device
	counters []resourceapi.CounterSet
	held     []string
	claim    resourceapi.DeviceClaim
}

// open begins a search.
func (q *question) open(t *testing.T) *Search {
	t.Helper()
	features := inventory.DefaultFeatures()
	if q.features != nil {
		q.features(&features)
	}
	store := inventory.NewStore(inventory.Options{Features: features})
	store.SetClass(&resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: class}})
	contents := []resourceapi.ResourceSliceSpec{{Devices: q.devices}}
	if q.counters != nil {
		contents = append(contents, resourceapi.ResourceSliceSpec{SharedCounters: q.counters})
	}
	for i, spec := range contents {
		spec.Driver, spec.NodeName = driver, ptr.To(node)
		spec.Pool = resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: int64(len(contents))}
		store.SetSlice(&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i)}, Spec: spec})
	}
	index := usage.NewIndex()
	for _, device := range q.held {
		index.Set(usage.ClaimRef{UID: types.UID(device)}, &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: driver, Pool: node, Device: device}},
		}}, nil)
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"}, Spec: resourceapi.ResourceClaimSpec{Devices: q.claim}}
	requests, err := compiled.Compile(t.Context(), []*resourceapi.ResourceClaim{claim}, store.View(), compiled.DefaultFeatures())
	if err != nil {
		t.Fatal(err)
	}
	devices := store.View().ForNode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}})
	if len(devices.Problems) > 0 {
		t.Fatal(devices.Problems[0])
	}
	in := Input{Evaluator: evaluation.Evaluator{Ctx: t.Context()}, Requests: requests, Answers: new(answers.Table)}
	s := New(in, devices, func(p *inventory.NodePool) *poolstate.State {
		return poolstate.New(p, index.View().Pool(usage.PoolID(p.ID())))
	})
	t.Cleanup(s.Release)
	return s
}

// prepare is a search that knows which devices each request may have.
func (q *question) prepare(t *testing.T) *Search {
	t.Helper()
	s := q.open(t)
	for _, a := range s.reqs.Lanes {
		if !s.prepare(a) {
			t.Fatal("too few devices for a request")
		}
	}
	return s
}

// fits is what the search comes to in the end.
func (q *question) fits(t *testing.T) bool {
	t.Helper()
	s := q.open(t)
	fits := s.Run()
	if s.Err != nil || s.SelectorError != nil || s.TooMany {
		t.Errorf("the search ended with %v, %v, too many devices: %t", s.Err, s.SelectorError, s.TooMany)
	}
	return fits
}

// devices makes some with integer attributes.
func devices(n int, attributes map[resourceapi.QualifiedName]func(i int) int) []resourceapi.Device {
	list := make([]resourceapi.Device, n)
	for i := range list {
		list[i] = resourceapi.Device{Name: fmt.Sprintf("device-%d", i), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}}
		for name, value := range attributes {
			list[i].Attributes[name] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(value(i)))}
		}
	}
	return list
}

func exactly(name string, count int64, selectors ...string) resourceapi.DeviceRequest {
	request := resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	for _, selector := range selectors {
		request.Selectors = append(request.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: selector}})
	}
	return resourceapi.DeviceRequest{Name: name, Exactly: &request}
}

// match are constraints for all requests.
func match(attributes ...resourceapi.FullyQualifiedName) (constraints []resourceapi.DeviceConstraint) {
	for i := range attributes {
		constraints = append(constraints, resourceapi.DeviceConstraint{MatchAttribute: &attributes[i]})
	}
	return constraints
}
