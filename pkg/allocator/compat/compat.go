// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"context"
	"fmt"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// NewAllocator returns an allocator over the given state of the cluster. It is meant for one scheduling cycle and
// may be used by any number of goroutines. Slices and classes must not change while it is in use.
//
// celCache serves only the wording of one error, for which upstream's library is asked, see constraintError.
func NewAllocator(ctx context.Context,
	features structured.Features,
	allocated structured.AllocatedState,
	classes structured.DeviceClassLister,
	slices []*resourceapi.ResourceSlice,
	celCache *cel.Cache,
) (structured.Allocator, error) {
	a := &firstFit{
		features: features,
		classes:  classes,
		store:    inventory.NewStore(inventory.Options{Features: inventoryFeatures(features)}),
		usage:    usageOf(allocated),
		upstream: sync.OnceValues(func() (structured.Allocator, error) {
			return structured.NewAllocator(ctx, features, allocated, classes, slices, celCache)
		}),
	}
	a.learnSlices(slices)
	return a, nil
}

// firstFit is ours behind upstream's interface.
type firstFit struct {
	features structured.Features
	classes  structured.DeviceClassLister
	store    *inventory.Store
	usage    usage.View
	// upstream makes upstream's allocator when it is first needed.
	upstream func() (structured.Allocator, error)
}

var _ structured.Allocator = &firstFit{}

// Allocate implements [structured.Allocator].
func (a *firstFit) Allocate(ctx context.Context, node *v1.Node,
	claims []*resourceapi.ResourceClaim,
) ([]resourceapi.AllocationResult, error) {
	if err := a.learnClasses(claims); err != nil {
		return nil, err
	}
	view := a.store.View()
	requests, err := allocator.Compile(claims, view, allocatorFeatures(a.features))
	if err != nil {
		return nil, claimError(err, claims)
	}
	result := allocator.Allocate(ctx, allocator.Input{
		Requests: requests, Node: node, Inventory: view, Usage: a.usage, Policy: allocator.FirstFit,
	})
	if result.Fits() {
		return result.Allocations, nil
	}
	return nil, a.failureError(ctx, node, claims, result.Failure)
}

// learnSlices puts the slices into the inventory, which tells them apart by name. Upstream's allocator does not
// care about names, and its callers may use one twice.
func (a *firstFit) learnSlices(slices []*resourceapi.ResourceSlice) {
	seen := make(map[string]int, len(slices))
	for _, slice := range slices {
		n := seen[slice.Name]
		seen[slice.Name]++
		if n > 0 {
			again := *slice
			// Comes right after the first of that name, and cannot be the name of another slice.
			again.Name = fmt.Sprintf("%s\x00%06d", slice.Name, n)
			slice = &again
		}
		a.store.SetSlice(slice)
	}
}

// learnClasses puts the classes that the claims name into the inventory. Those that do not exist are found
// missing when the claims are compiled.
func (a *firstFit) learnClasses(claims []*resourceapi.ResourceClaim) error {
	for _, claim := range claims {
		for request := range requestsOf(claim) {
			if request.class == "" {
				continue
			}
			class, err := a.classes.Get(request.class)
			switch {
			case apierrors.IsNotFound(err):
			case err != nil:
				return fmt.Errorf("claim %s, request %s: could not retrieve device class %s: %w", klog.KObj(claim), request.name, request.class, err)
			default:
				if known := a.store.View().Class(request.class); known == nil || known.Object != class {
					a.store.SetClass(class)
				}
			}
		}
	}
	return nil
}
