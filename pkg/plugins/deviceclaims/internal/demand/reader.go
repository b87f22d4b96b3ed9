// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package demand says what a pod asks for: its claims, those of them that need an allocation compiled, and its extended resources. It knows
// neither nodes nor who competes for the devices.
package demand

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/features"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// EvaluationTime is how long the CEL expressions of one pod may be evaluated in one attempt, by all who do so together. What was
// said of devices until then is kept for the next attempt. It is enough for 10,000 nodes of 8 GPUs that nobody has
// looked at before: one selector takes some microseconds on a device. CEL's own limit is some hundred milliseconds.
const EvaluationTime = 2 * time.Second

// ErrEvaluation is why an evaluation ended that had no time left.
var ErrEvaluation = fmt.Errorf("CEL expressions took longer than %s, or than the pod's namespace has left", EvaluationTime)

// Reader finds out what the pods of one profile ask for.
type Reader struct {
	Claims *tracker.Tracker
	// Places knows whether a claim has room for another user.
	Places interface {
		Check(claim *resourceapi.ResourceClaim, user types.UID) error
	}
	// Pods knows the pods that are being bound.
	Pods interface {
		PodOf(name types.NamespacedName, uid types.UID) *v1.Pod
	}
	Extended *extended.Resources
	Features allocator.Features
}

// Asked is what a pod asks for.
type Asked struct {
	Claims []podclaims.Claim
	// Unallocated are those of the claims that need an allocation, Requests what they ask for; nil if there are none.
	Unallocated []*resourceapi.ResourceClaim
	Requests    *allocator.Requests
	// Extended is about the pod's extended resources, nil if it has none.
	Extended *extended.Plan
}

// Of looks at a pod's claims and compiles those without allocation. The error says why the pod cannot be tried on any node; what is
// known by then is returned with it. Claims are compiled until ctx ends. given returns what other pods of the group have been given in this
// cycle, if it is one of the group; else it is nil.
func (r *Reader) Of(ctx context.Context, pod *v1.Pod, names []podclaims.Name, inv *inventory.View,
	given func(claim types.UID) *resourceapi.AllocationResult,
) (*Asked, error) {
	a := &Asked{}
	for _, name := range names {
		claim, err := podclaims.Get(r.Claims, pod, name)
		if err != nil {
			return a, err
		}
		pc := podclaims.Claim{Claim: claim, User: podclaims.UserOf(pod)}
		if claim.Status.Allocation == nil {
			if pending, _ := r.Claims.Pending(claim.UID); pending != nil {
				return a, podevents.Postpone(podevents.ReasonClaimBusy, claim, r.beingAllocated(pod, claim))
			}
			if given != nil {
				pc.Shared = given(claim.UID)
			}
			if pc.Shared == nil {
				a.Unallocated = append(a.Unallocated, claim)
			} else if pc.Nodes, err = podclaims.NodesOf(claim, pc.Shared); err != nil {
				return a, err
			}
		} else if pc.Nodes, err = r.usableAllocation(pod, claim); err != nil {
			return a, err
		}
		a.Claims = append(a.Claims, pc)
	}
	var err error
	if a.Requests, err = r.Compile(ctx, a.Unallocated, inv); err != nil {
		return a, err
	}
	if names := extended.ResourcesOf(pod); len(names) > 0 {
		return a, r.askExtended(pod, names, a, inv)
	}
	return a, nil
}

// askExtended adds to what the pod asks for what it asks for as extended resources.
func (r *Reader) askExtended(pod *v1.Pod, names []v1.ResourceName, a *Asked, inv *inventory.View) error {
	a.Extended = r.Extended.Plan(pod, names, a.Requests,
		func(ctx context.Context, claim *resourceapi.ResourceClaim) (*allocator.Requests, error) {
			return r.Compile(ctx, append(slices.Clip(a.Unallocated), claim), inv)
		})
	adopted := a.Extended.Adopted
	if adopted == nil {
		return nil
	}
	nodes, err := r.usableAllocation(pod, adopted)
	if err != nil {
		return err
	}
	a.Claims = append(a.Claims, podclaims.Claim{Claim: adopted, Nodes: nodes, User: podclaims.UserOf(pod)})
	return nil
}

// beingAllocated says for whom a claim of the pod is being allocated just now. With it the pod is tried again.
func (r *Reader) beingAllocated(pod *v1.Pod, claim *resourceapi.ResourceClaim) error {
	var others []string
	for _, owner := range r.Claims.Holding(usage.RefOf(claim)).Owners {
		if owner == pod.UID {
			continue
		}
		if other := r.Pods.PodOf(types.NamespacedName{}, owner); other != nil {
			others = append(others, "pod "+other.Name)
		}
	}
	slices.Sort(others)
	of := "which the pod uses"
	if n := len(others); n > 0 {
		of = "which the pod shares with " + strings.Join(others, ", ")
	}
	return fmt.Errorf("claim %s, %s, is being allocated: the pod is tried again with it", klog.KObj(claim), of)
}

// Compile compiles claims, to nil if there are none.
func (r *Reader) Compile(ctx context.Context, claims []*resourceapi.ResourceClaim, inv *inventory.View) (*allocator.Requests, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	return allocator.CompileWithin(ctx, claims, inv, r.Features)
}

// usableAllocation returns the nodes on which a pod can use a claim that is allocated, nil for all, or why it
// cannot.
func (r *Reader) usableAllocation(pod *v1.Pod, claim *resourceapi.ResourceClaim) (*nodeaffinity.NodeSelector, error) {
	if !resourceclaim.IsReservedForPod(pod, claim, utilfeature.DefaultFeatureGate.Enabled(features.DRAWorkloadResourceClaims)) {
		if !resourceclaim.CanBeReserved(claim) {
			return nil, fmt.Errorf("claim %s is in use", klog.KObj(claim))
		}
		if err := r.Places.Check(claim, pod.UID); err != nil {
			return nil, err
		}
	}
	return podclaims.NodesOf(claim, claim.Status.Allocation)
}
