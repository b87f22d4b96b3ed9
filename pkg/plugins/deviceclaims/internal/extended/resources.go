// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package extended turns the extended resources that a pod asks for into a claim (KEP-5004): which nodes need one, what is in it, and its
// way to the API and back. It knows which devices a device plugin has, and not how devices are chosen.
package extended

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	resourcehelper "k8s.io/component-helpers/resource"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/util"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podmemory"
	"stowage.dev/stowage/pkg/usage"
)

// unbornPrefix begins the name of a claim for extended resources before it is created, in messages. No claim that exists has such a name.
const unbornPrefix = "<extended-resources of "

// IsUnborn tells whether a claim has the name of one that is not created yet.
func IsUnborn(name string) bool { return strings.HasPrefix(name, unbornPrefix) }

// ResourcesOf returns the names under which a pod asks for extended resources that a DeviceClass may
// stand for, ordered.
func ResourcesOf(pod *v1.Pod) []v1.ResourceName {
	var names []v1.ResourceName
	for name, quantity := range resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true}) {
		if !quantity.IsZero() && util.IsDRAExtendedResourceName(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Resources knows the extended resources of one profile's pods, and the claims for them.
type Resources struct {
	Handle interface {
		SharedDRAManager() fwk.SharedDRAManager
	}
	Claims interface {
		OwnedBy(namespace string, owner types.UID) []*resourceapi.ResourceClaim
		InFlightFor(pod types.UID) []usage.ClaimRef
		Move(from types.UID, to *resourceapi.ResourceClaim) error
	}
	// Recorded are the pods whose status may name a claim.
	Recorded *podmemory.RecordedPods
	Binder   *binding.Binder
}

// ClassOf returns the class that stands for an extended resource, nil if there is none. The resolver is the one
// that NodeResourcesFit decides by.
func (r *Resources) ClassOf(name v1.ResourceName) *resourceapi.DeviceClass {
	manager := r.Handle.SharedDRAManager()
	if manager == nil {
		return nil // then NodeResourcesFit leaves nothing to others
	}
	return manager.DeviceClassResolver().GetDeviceClass(name)
}

// NeedsDevices tells whether devices that the tracker and the inventory know of can be what a pod waits for.
func (r *Resources) NeedsDevices(pod *v1.Pod) bool {
	return len(pod.Spec.ResourceClaims) > 0 ||
		slices.ContainsFunc(ResourcesOf(pod), func(name v1.ResourceName) bool { return r.ClassOf(name) != nil })
}

// MadeFor returns the claims that were made for the extended resources of a pod.
func (r *Resources) MadeFor(pod *v1.Pod) []*resourceapi.ResourceClaim {
	return slices.DeleteFunc(r.Claims.OwnedBy(pod.Namespace, pod.UID), func(claim *resourceapi.ResourceClaim) bool {
		return claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] != "true"
	})
}

// UnbornFor returns the claim that will be made for the extended resources of another pod if it comes to the node, nil
// if it needs none there or has one already.
func (r *Resources) UnbornFor(pod *v1.Pod, node *v1.Node) *resourceapi.ResourceClaim {
	if !podclaims.AsksForExtended(pod) || len(r.MadeFor(pod)) > 0 || len(r.Claims.InFlightFor(pod.UID)) > 0 {
		return nil
	}
	var backings []backing
	for _, name := range ResourcesOf(pod) {
		if class := r.ClassOf(name); class != nil && node.Status.Allocatable.Name(name, resource.DecimalSI).IsZero() {
			backings = append(backings, backing{name, class.Name})
		}
	}
	if len(backings) == 0 {
		return nil
	}
	claim := unbornClaim(pod)
	claim.Spec.Devices.Requests = layOut(pod, backings).requests
	return claim
}

// mayAdopt tells whether the claim of an earlier attempt may be used as it is, as far as it can be told without
// a node. The scheduler may have ended between the claim's allocation and the pod's binding.
func mayAdopt(claim *resourceapi.ResourceClaim, pod *v1.Pod) bool {
	return claim.DeletionTimestamp == nil && claim.Status.Allocation != nil && podclaims.UsedOnlyBy(claim, pod.UID)
}
