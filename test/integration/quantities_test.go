// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// The API server reads quantities on which arithmetic never ends. The admission policy stops them, wherever one can be.
func TestQuantitiesThatNeverEndAreRefusedByTheAPI(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(h100, 1)...)
	class := w.addClass("class")
	dryRun := []string{metav1.DryRunAll}
	create, update := metav1.CreateOptions{DryRun: dryRun}, metav1.UpdateOptions{DryRun: dryRun}

	claim := func(q resource.Quantity, change ...func(*resourceapi.ExactDeviceRequest)) resourceapi.ResourceClaimSpec {
		request := w.exactly("gpu", 1)
		request.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": q}}
		for _, fn := range change {
			fn(request.Exactly)
		}
		return spec(request)
	}
	createClaim := func(ctx context.Context, spec resourceapi.ResourceClaimSpec) error {
		_, err := w.client.ResourceV1().ResourceClaims(w.name).Create(ctx,
			&resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "quantity"}, Spec: spec}, create)
		return err
	}
	w.awaitPolicy(func(ctx context.Context) error { return createClaim(ctx, claim(resource.MustParse("1e2147483647"))) })

	allocated := w.allocate(w.addClaim("allocated", spec(w.exactly("gpu", 1))), "a", "gpu-0")
	unallocated := w.addClaim("unallocated", spec(w.exactly("gpu", 1)))
	createSlice := func(change func(*resourceapi.ResourceSliceSpec)) error {
		slice := w.slice("a", gpus(h100, 1)...)
		slice.Name += "-quantity"
		change(&slice.Spec)
		_, err := w.client.ResourceV1().ResourceSlices().Create(w.ctx, slice, create)
		return err
	}
	withCapacity := func(capacity resourceapi.DeviceCapacity) error {
		return createSlice(func(s *resourceapi.ResourceSliceSpec) {
			s.Devices[0].AllowMultipleAllocations = ptr.To(true)
			s.Devices[0].Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": capacity}
		})
	}
	counter := func(q resource.Quantity) map[string]resourceapi.Counter {
		return map[string]resourceapi.Counter{"memory": {Value: q}}
	}
	one := resource.MustParse("1")

	// Where nothing is asked for and nothing limited, there is nothing to refuse.
	if err := createClaim(w.ctx, resourceapi.ResourceClaimSpec{}); err != nil {
		t.Errorf("a claim without requests: %v", err)
	}
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: "quantity"}}
	if _, err := w.client.ResourceV1().ResourceClaimTemplates(w.name).Create(w.ctx, template, create); err != nil {
		t.Errorf("a template without requests: %v", err)
	}
	if err := withCapacity(resourceapi.DeviceCapacity{Value: one, RequestPolicy: &resourceapi.CapacityRequestPolicy{}}); err != nil {
		t.Errorf("a request policy without a default: %v", err)
	}
	if _, err := w.client.ResourceV1().DeviceClasses().Create(w.ctx,
		&resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: w.name + "-all"}}, create); err != nil {
		t.Errorf("a class without selectors: %v", err)
	}
	if err := createSlice(func(s *resourceapi.ResourceSliceSpec) { s.Devices = nil }); err != nil {
		t.Errorf("a slice without devices: %v", err)
	}

	entries := map[string]struct {
		write   func(resource.Quantity) error
		message string
	}{
		"a claim's request": {message: "a requested capacity is out of bounds", write: func(q resource.Quantity) error {
			return createClaim(w.ctx, claim(q))
		}},
		"an alternative of a claim": {message: "a requested capacity is out of bounds", write: func(q resource.Quantity) error {
			s := claim(q)
			exact := s.Devices.Requests[0].Exactly
			s.Devices.Requests[0].Exactly = nil
			s.Devices.Requests[0].FirstAvailable = []resourceapi.DeviceSubRequest{{
				Name: "sub", DeviceClassName: exact.DeviceClassName, AllocationMode: exact.AllocationMode, Count: exact.Count, Capacity: exact.Capacity,
			}}
			return createClaim(w.ctx, s)
		}},
		"a template's request": {message: "a requested capacity is out of bounds", write: func(q resource.Quantity) error {
			_, err := w.client.ResourceV1().ResourceClaimTemplates(w.name).Create(w.ctx, &resourceapi.ResourceClaimTemplate{
				ObjectMeta: metav1.ObjectMeta{Name: "quantity"}, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: claim(q)},
			}, create)
			return err
		}},
		"a claim's selector": {message: "a quantity in a selector is out of bounds", write: func(q resource.Quantity) error {
			return createClaim(w.ctx, claim(one, func(r *resourceapi.ExactDeviceRequest) {
				r.Selectors = w.selectors(`quantity("1").isLessThan(quantity( "` + q.String() + `"))`)
			}))
		}},
		"a class's selector": {message: "a quantity in a selector is out of bounds", write: func(q resource.Quantity) error {
			changed := class.DeepCopy()
			changed.Spec.Selectors = w.selectors(`quantity("1").isLessThan(quantity('` + q.String() + `'))`)
			_, err := w.client.ResourceV1().DeviceClasses().Update(w.ctx, changed, update)
			return err
		}},
		"a share of an allocation": {message: "a consumed capacity is out of bounds", write: func(q resource.Quantity) error {
			changed := w.claim(unallocated.Name)
			changed.Status.Allocation = allocated.Status.Allocation.DeepCopy()
			changed.Status.Allocation.Devices.Results[0].ShareID = ptr.To(changed.UID)
			changed.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": q}
			_, err := w.client.ResourceV1().ResourceClaims(w.name).UpdateStatus(w.ctx, changed, update)
			return err
		}},
		"a capacity": {message: "a capacity is out of bounds", write: func(q resource.Quantity) error {
			return withCapacity(resourceapi.DeviceCapacity{Value: q})
		}},
		// The API server compares the other fields of a policy with each other before any policy of admission is asked.
		"the default of a policy": {message: "a quantity of a request policy is out of bounds", write: func(q resource.Quantity) error {
			return withCapacity(resourceapi.DeviceCapacity{Value: one, RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &q}})
		}},
		"a shared counter": {message: "a counter is out of bounds", write: func(q resource.Quantity) error {
			return createSlice(func(s *resourceapi.ResourceSliceSpec) {
				s.Devices, s.SharedCounters = nil, []resourceapi.CounterSet{{Name: "set", Counters: counter(q)}}
			})
		}},
		"a consumed counter": {message: "a counter is out of bounds", write: func(q resource.Quantity) error {
			return createSlice(func(s *resourceapi.ResourceSliceSpec) {
				s.Devices[0].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "set", Counters: counter(q)}}
			})
		}},
	}
	for name, entry := range entries {
		t.Run(name, func(t *testing.T) {
			for _, text := range []string{"1e2147483647", "-1e2147483646", "1e999"} {
				if err := entry.write(resource.MustParse(text)); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), entry.message) {
					t.Errorf("%s: %v, want it invalid with %q", text, err, entry.message)
				}
			}
			for _, text := range []string{"2", "8Ei", "9E", "40Gi", "9e18"} {
				if err := entry.write(resource.MustParse(text)); err != nil {
					t.Errorf("%s: %v", text, err)
				}
			}
		})
	}
}
