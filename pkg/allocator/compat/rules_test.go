// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	internalapi "k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/apis/resource/validation"
	"k8s.io/kubernetes/pkg/features"
)

// What the API server validates depends on its features; fuzzWorld has this one.
func init() {
	utilruntime.Must(utilfeature.DefaultMutableFeatureGate.SetFromMap(map[string]bool{string(features.DRAFractionalCapacityRange): true}))
}

// rules returns nil if the API says what the allocation is: each object is one that the API server would store, by its
// own validation, and slices of one pool agree. Otherwise nothing says whose answer is right, ours or upstream's.
func (w *world) rules() error {
	for _, class := range w.classes {
		if err := stored(class, &internalapi.DeviceClass{}, validation.ValidateDeviceClass); err != nil {
			return fmt.Errorf("class %s: %w", class.Name, err)
		}
	}
	for _, claim := range w.claims {
		if err := stored(claim, &internalapi.ResourceClaim{}, validation.ValidateResourceClaim); err != nil {
			return fmt.Errorf("claim %s: %w", claim.Name, err)
		}
	}
	type generation struct {
		driver, pool string
		generation   int64
	}
	names, counts := sets.New[string](), map[generation]int64{}
	for _, slice := range w.slices {
		if err := stored(slice, &internalapi.ResourceSlice{}, validation.ValidateResourceSlice); err != nil {
			return fmt.Errorf("slice %s: %w", slice.Name, err)
		}
		if names.Has(slice.Name) {
			return fmt.Errorf("two slices %s", slice.Name)
		}
		names.Insert(slice.Name)
		pool := slice.Spec.Pool
		key := generation{slice.Spec.Driver, pool.Name, pool.Generation}
		if count, found := counts[key]; found && count != pool.ResourceSliceCount {
			return fmt.Errorf("slice %s: pool %s has %d slices, and %d by another of its slices", slice.Name, pool.Name, pool.ResourceSliceCount, count)
		}
		counts[key] = pool.ResourceSliceCount
	}
	return nil
}

// stored tells why the API server would not store the object.
func stored[T any](object runtime.Object, internal T, validate func(T) field.ErrorList) error {
	object = object.DeepCopyObject()
	legacyscheme.Scheme.Default(object)
	if err := legacyscheme.Scheme.Convert(object, internal, nil); err != nil {
		return err
	}
	return validate(internal).ToAggregate()
}

// overcommits tells what, if anything, the claims are given that is not there: a device that somebody else has for
// itself alone, less than nothing of a capacity, or more than is left. What several slices say of a device counts once,
// at its most.
func (w *world) overcommits(given []resourceapi.AllocationResult) error {
	type device struct{ driver, pool, name string }
	type capacity struct {
		device
		name resourceapi.QualifiedName
	}
	left := map[capacity]resource.Quantity{}
	for _, slice := range w.slices {
		for _, d := range slice.Spec.Devices {
			for name, has := range d.Capacity {
				c := capacity{device{slice.Spec.Driver, slice.Spec.Pool.Name, d.Name}, name}
				if most, found := left[c]; !found || most.Cmp(has.Value) < 0 {
					left[c] = has.Value
				}
			}
		}
	}
	taken := sets.New[device]()
	take := func(claims []resourceapi.AllocationResult) error {
		var err error
		for _, claim := range claims {
			for _, result := range claim.Devices.Results {
				d := device{result.Driver, result.Pool, result.Device}
				if result.AdminAccess != nil && *result.AdminAccess {
					continue
				}
				if result.ShareID == nil {
					if taken.Has(d) {
						err = fmt.Errorf("%v is given twice", d)
					}
					taken.Insert(d)
				}
				for name, amount := range result.ConsumedCapacity {
					rest := left[capacity{d, name}].DeepCopy()
					rest.Sub(amount)
					left[capacity{d, name}] = rest
					if amount.Sign() < 0 || rest.Sign() < 0 {
						err = fmt.Errorf("%v gives %s of %s, which leaves %s", d, amount.String(), name, rest.String())
					}
				}
			}
		}
		return err
	}
	_ = take(w.held) // which a fuzzer may have made impossible
	return take(given)
}
