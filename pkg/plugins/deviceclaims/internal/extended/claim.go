// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package extended

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler/util"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
)

// Binding is what is done about the claim for a pod's extended resources from Reserve on.
type Binding struct {
	// Variant is what was decided for the node.
	Variant *Variant
	// Created is the claim once it is in the API.
	Created *resourceapi.ResourceClaim
	// recorded tells that the pod's status may name the claim.
	recorded bool
}

// unbornClaim returns a claim that may be made for the pod's extended resources, without requests. By the annotation
// and the owner, kube-controller-manager, quota and the kubelet know what it is for.
func unbornClaim(pod *v1.Pod) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace:    pod.Namespace,
		Name:         unbornPrefix + pod.Name + ">",
		UID:          uuid.NewUUID(),
		GenerateName: namePrefix(pod.Name),
		Annotations:  map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"},
		OwnerReferences: []metav1.OwnerReference{{
			APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: ptr.To(true),
		}},
	}}
}

// namePrefix is what the claim's name begins with: as much of the pod's name as leaves room for the
// rest of a name of 63 characters.
func namePrefix(pod string) string {
	const suffix, random = "-extended-resources-", 5
	if longest := 63 - random - len(suffix); len(pod) > longest {
		pod = strings.TrimRight(pod[:longest], "-.")
	}
	return pod + suffix
}

// Create removes what earlier attempts have left, and makes the claim that was decided for the node.
// Its allocation in flight passes over to it, so that it is like any other claim from here on.
//
// A claim whose creation failed with an unknown outcome holds nothing. The next attempt finds it by its owner.
//
// reserved are the pod's allocations in flight.
func (r *Resources) Create(ctx context.Context, pod *v1.Pod, e *Plan, b *Binding, reserved []tracker.Reservation) error {
	if e == nil {
		return nil
	}
	for _, claim := range e.Leftovers {
		if err := r.remove(ctx, pod, claim, anyClaim); err != nil {
			return fmt.Errorf("remove claim %s of an earlier attempt: %w", klog.KObj(claim), err)
		}
		decisions.Log(ctx, decisions.GivenBack, pod, "", claim, claim.Status.Allocation,
			"an earlier attempt made the claim for the pod's extended resources, and it is not needed")
	}
	if b.Variant == nil || b.Variant.Claim == nil {
		return nil
	}
	claim := b.Variant.Claim.DeepCopy()
	// The name is chosen here, so that a lost answer does not make a claim that nobody knows the name of.
	claim.Name, claim.UID = names.SimpleNameGenerator.GenerateName(claim.GenerateName), ""
	created, err := r.Binder.Client.ResourceV1().ResourceClaims(claim.Namespace).
		Create(ctx, claim, metav1.CreateOptions{FieldManager: r.Binder.FieldManager})
	binding.CountWrite(binding.WriteCreation, err)
	if err != nil {
		// Without the claim's name, which is another one each time: the pod's events count what is the same.
		return fmt.Errorf("create the claim for the pod's extended resources: %w", err)
	}
	b.Created = created
	r.Binder.Assume(ctx, created)
	for i := range reserved {
		if flying := &reserved[i]; flying.Claim.UID == b.Variant.Claim.UID {
			if err := r.Claims.Move(flying.Claim.UID, created); err != nil {
				return err
			}
			flying.Claim = created
		}
	}
	klog.FromContext(ctx).V(3).Info("Claim made for extended resources", "pod", klog.KObj(pod), "claim", klog.KObj(created))
	return nil
}

// Record writes into the pod's status which claim, and which requests of it, its containers use for
// their extended resources. The kubelet prepares that claim. The entry can be replaced, but not be taken back, so
// this is the last thing that PreBind does.
func (r *Resources) Record(ctx context.Context, pod *v1.Pod, e *Plan, b *Binding) error {
	if e == nil || b.Variant == nil {
		return nil
	}
	claim := cmp.Or(b.Created, e.Adopted)
	if claim == nil {
		return nil
	}
	status := &v1.PodExtendedResourceClaimStatus{ResourceClaimName: claim.Name, RequestMappings: b.Variant.mappings}
	if apiequality.Semantic.DeepEqual(status, pod.Status.ExtendedResourceClaimStatus) {
		return nil
	}
	// With the UID, the patch does not hit another pod of the same name.
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status":   map[string]any{"extendedResourceClaimStatus": status},
	})
	if err != nil {
		return fmt.Errorf("encode the pod's status: %w", err)
	}
	b.recorded = true
	err = retry.OnError(retry.DefaultBackoff, util.Retriable, func() error {
		_, err := r.Binder.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
		if binding.IsRefusal(err) {
			b.recorded = false
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("write claim %s into the pod's status: %w", klog.KObj(claim), err)
	}
	return nil
}

// Undo removes the claim that was made for the pod. What cannot be removed is found again by the
// pod's next attempt, or goes with the pod. A pod that is bound, because only the answer to its binding was lost, keeps
// its claim; so does one that may be, which Undo has found out: the claim is among those that it kept.
func (r *Resources) Undo(ctx context.Context, pod *v1.Pod, b *Binding, kept sets.Set[types.UID]) {
	if b.recorded {
		// The next attempt may come before the informer has the new status.
		r.Recorded.Add(pod)
	}
	if b.Created == nil || kept.Has(b.Created.UID) {
		return
	}
	// The scheduling cycle's context may have ended, which may be why the pod is unreserved.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), binding.UndoTimeout)
	defer cancel()
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "pod", klog.KObj(pod), "claim", klog.KObj(b.Created))
	switch bound, err := r.Binder.HasNode(ctx, pod, false); { // Undo has waited already
	case err != nil:
		logger.Error(err, "Cannot find out whether a pod is bound, keeping the claim for its extended resources")
		return
	case bound:
		return
	}
	unused := func(claim *resourceapi.ResourceClaim) error {
		if binding.IsAdopted(claim, pod.UID, r.Binder.FieldManager) {
			return errors.New("another scheduler uses it for the pod")
		}
		return nil
	}
	if err := r.remove(ctx, pod, b.Created, unused); err != nil {
		logger.Error(err, "Cannot remove the claim for the extended resources of a pod that was not bound, its next attempt will")
	}
}

// anyClaim is for remove.
func anyClaim(*resourceapi.ResourceClaim) error { return nil }

// remove gives up the claim's allocation and deletes it, if check has nothing against the claim as it is then. It fails if
// others than the pod use it, or if the pod turns out to be bound.
func (r *Resources) remove(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim,
	check func(*resourceapi.ResourceClaim) error,
) error {
	client := r.Binder.Client.ResourceV1().ResourceClaims(claim.Namespace)
	options := metav1.UpdateOptions{FieldManager: r.Binder.FieldManager}
	get := r.Binder.Known
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		current, err := get(ctx, claim)
		get = r.Binder.Read
		if err != nil {
			return err
		}
		if current.UID != claim.UID {
			return apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), claim.Name)
		}
		if !podclaims.UsedOnlyBy(current, pod.UID) {
			return errors.New("it is reserved for others than the pod that owns it")
		}
		if err := check(current); err != nil {
			return err
		}
		if err := r.Binder.CheckUnused(ctx, pod, current); err != nil {
			return err
		}
		// First the status: only then is it certain that the device is free when the claim is gone.
		if current.Status.Allocation != nil || len(current.Status.ReservedFor) > 0 {
			updated := current.DeepCopy()
			updated.Status.Allocation, updated.Status.ReservedFor, updated.Status.Devices = nil, nil, nil
			current, err = client.UpdateStatus(ctx, updated, options)
			binding.CountWrite(binding.WriteDeallocation, err)
			if err != nil {
				r.Binder.Doubts.Note(updated, err)
				return fmt.Errorf("give up the allocation: %w", err)
			}
			r.Binder.Assume(ctx, current)
		}
		if i := slices.Index(current.Finalizers, resourceapi.Finalizer); i >= 0 {
			updated := current.DeepCopy()
			updated.Finalizers = slices.Delete(updated.Finalizers, i, i+1)
			current, err = client.Update(ctx, updated, options)
			binding.CountWrite(binding.WriteFinalizer, err)
			if err != nil {
				return fmt.Errorf("remove the finalizer: %w", err)
			}
		}
		if current.DeletionTimestamp != nil {
			return nil
		}
		err = client.Delete(ctx, current.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{
			UID: &current.UID, ResourceVersion: &current.ResourceVersion,
		}})
		binding.CountWrite(binding.WriteDeletion, err)
		return err
	})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// GiveUp removes what earlier attempts made that holds devices, because the pod finds no node: it may
// with other devices. It returns the removed claims' names.
func (r *Resources) GiveUp(ctx context.Context, pod *v1.Pod, made []*resourceapi.ResourceClaim) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, binding.GiveUpTimeout)
	defer cancel()
	var removed []string
	for _, claim := range made {
		if claim.Status.Allocation == nil {
			continue
		}
		if err := r.remove(ctx, pod, claim, anyClaim); err != nil {
			return removed, fmt.Errorf("claim %s: %w", klog.KObj(claim), err)
		}
		decisions.Log(ctx, decisions.GivenBack, pod, "", claim, claim.Status.Allocation,
			"an earlier attempt made the claim for the pod's extended resources, and no node fits with it")
		removed = append(removed, klog.KObj(claim).String())
	}
	return removed, nil
}
