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
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
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
		for _, request := range requestsOf(claim) {
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

// anyRequest has what exact requests and the alternatives of firstAvailable have in common.
type anyRequest struct {
	// position is that of the request in the claim.
	position int
	// sub is the position of the alternative; -1 for an exact request.
	sub int
	// name is the request's, or the alternative's own.
	name, class string
	mode        resourceapi.DeviceAllocationMode
}

// requestsOf are the exact requests and the alternatives of the others, in order.
func requestsOf(claim *resourceapi.ResourceClaim) (out []anyRequest) {
	for i := range claim.Spec.Devices.Requests {
		request := &claim.Spec.Devices.Requests[i]
		for j := range request.FirstAvailable {
			sub := &request.FirstAvailable[j]
			out = append(out, anyRequest{position: i, sub: j, name: sub.Name, class: sub.DeviceClassName, mode: sub.AllocationMode})
		}
		if exact := request.Exactly; exact != nil && len(request.FirstAvailable) == 0 {
			out = append(out, anyRequest{position: i, sub: -1, name: request.Name, class: exact.DeviceClassName, mode: exact.AllocationMode})
		}
	}
	return out
}

// only returns a copy of the claim that has the given request, or alternative, alone.
func only(claim *resourceapi.ResourceClaim, request anyRequest) *resourceapi.ResourceClaim {
	reduced := claim.DeepCopy()
	one := reduced.Spec.Devices.Requests[request.position]
	if request.sub >= 0 {
		one.FirstAvailable = one.FirstAvailable[request.sub : request.sub+1]
	}
	reduced.Spec.Devices.Requests = []resourceapi.DeviceRequest{one}
	return reduced
}

// usageOf turns upstream's three sets into holders. Upstream knows neither the claims nor what each share takes, so
// one claim holds everything: devices for itself alone, shares by their IDs, and the sum of what all shares of a
// device take as one more share of it.
func usageOf(allocated structured.AllocatedState) usage.View {
	results := make([]resourceapi.DeviceRequestAllocationResult, 0,
		len(allocated.AllocatedDevices)+len(allocated.AllocatedSharedDeviceIDs)+len(allocated.AggregatedCapacity))
	hold := func(id structured.DeviceID, share *types.UID, capacity map[resourceapi.QualifiedName]resource.Quantity) {
		results = append(results, resourceapi.DeviceRequestAllocationResult{
			Driver: id.Driver.String(), Pool: id.Pool.String(), Device: id.Device.String(), ShareID: share, ConsumedCapacity: capacity,
		})
	}
	for id := range allocated.AllocatedDevices {
		hold(id, nil, nil)
	}
	for id := range allocated.AllocatedSharedDeviceIDs {
		share := types.UID(id.ShareID.String())
		hold(id.GetDeviceID(), &share, nil)
	}
	for id, consumed := range allocated.AggregatedCapacity {
		share := types.UID("all shares")
		capacity := make(map[resourceapi.QualifiedName]resource.Quantity, len(consumed))
		for name, quantity := range consumed {
			capacity[name] = quantity.DeepCopy()
		}
		hold(id, &share, capacity)
	}
	index := usage.NewIndex()
	index.Set(usage.ClaimRef{UID: "allocated"}, &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: results},
	}, nil)
	return index.View()
}

func inventoryFeatures(f structured.Features) inventory.Features {
	return inventory.Features{
		PartitionableDevices:    f.PartitionableDevices,
		ConsumableCapacity:      f.ConsumableCapacity,
		FractionalCapacityRange: f.FractionalCapacityRange,
		ListTypeAttributes:      f.ListTypeAttributes,
		CompatibilityGroups:     f.CompatibilityGroups,
		OptionalNodeOperations:  f.OptionalNodeOperations,
		DerivedAttributes:       f.DerivedAttributes,
		// Upstream's callers do that, not its allocator.
		NodeAllocatableResources: true,
	}
}

func allocatorFeatures(f structured.Features) allocator.Features {
	return allocator.Features{
		AdminAccess:             f.AdminAccess,
		PrioritizedList:         f.PrioritizedList,
		DeviceTaints:            f.DeviceTaints,
		DeviceBindingConditions: f.DeviceBindingAndStatus,
	}
}
