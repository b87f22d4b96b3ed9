// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryapi

import (
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/apis/resource/validation"
	"k8s.io/utils/ptr"
)

// validStatus refuses what the real API server refuses of a claim's status.
func validStatus(stored, next runtime.Object) error {
	was, ok := stored.(*resourceapi.ResourceClaim)
	if !ok {
		return nil
	}
	is := next.(*resourceapi.ResourceClaim)
	var before, after resource.ResourceClaim
	if err := errors.Join(legacyscheme.Scheme.Convert(was, &before, nil), legacyscheme.Scheme.Convert(is, &after, nil)); err != nil {
		return fmt.Errorf("convert claim %s: %w", was.Name, err)
	}
	if findings := validation.ValidateResourceClaimStatusUpdate(&after, &before); len(findings) > 0 {
		return apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), was.Name, findings)
	}
	return nil
}

// dropDeallocated takes the status of devices out of a claim that it had and has no longer, as the real API server does.
func dropDeallocated(stored, next runtime.Object) {
	was, ok := stored.(*resourceapi.ResourceClaim)
	if !ok {
		return
	}
	is := next.(*resourceapi.ResourceClaim)
	before, after := devicesOf(was), devicesOf(is)
	is.Status.Devices = slices.DeleteFunc(is.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
		id := deviceID{d.Driver, d.Pool, d.Device, ptr.Deref(d.ShareID, "")}
		return before.Has(id) && !after.Has(id)
	})
	if len(is.Status.Devices) == 0 {
		is.Status.Devices = nil
	}
}

type deviceID struct{ driver, pool, device, share string }

func devicesOf(claim *resourceapi.ResourceClaim) sets.Set[deviceID] {
	devices := sets.New[deviceID]()
	if claim.Status.Allocation != nil {
		for _, r := range claim.Status.Allocation.Devices.Results {
			devices.Insert(deviceID{r.Driver, r.Pool, r.Device, string(ptr.Deref(r.ShareID, ""))})
		}
	}
	return devices
}

// fieldManagers are those of claims, by subresource. Nobody here asks who wrote a field of another kind.
var fieldManagers = map[string]*managedfields.FieldManager{"": newFieldManager(""), "status": newFieldManager("status")}

func newFieldManager(subresource string) *managedfields.FieldManager {
	gvk := resourceapi.SchemeGroupVersion.WithKind("ResourceClaim")
	manager, err := managedfields.NewDefaultFieldManager(applyconfigurations.NewTypeConverter(scheme.Scheme),
		scheme.Scheme, scheme.Scheme, scheme.Scheme, gvk, gvk.GroupVersion(), subresource, nil)
	if err != nil {
		panic(err) // the client's own types
	}
	return manager
}

// managed notes in managedFields which manager wrote what of a claim.
func managed(stored, next runtime.Object, manager, subresource string) (runtime.Object, error) {
	if _, ok := next.(*resourceapi.ResourceClaim); !ok {
		return next, nil
	}
	next.GetObjectKind().SetGroupVersionKind(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim"))
	if stored == nil {
		empty := &resourceapi.ResourceClaim{}
		empty.SetGroupVersionKind(next.GetObjectKind().GroupVersionKind())
		next.(metav1.Object).SetManagedFields(nil)
		stored = empty
	}
	noted, err := fieldManagers[subresource].Update(stored, next, manager)
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("note who wrote claim %s: %w", next.(metav1.Object).GetName(), err))
	}
	return noted, nil
}
