package deviceclaims

import (
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
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler/util"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// extendedBinding is what is done about the claim for a pod's extended resources from Reserve on.
type extendedBinding struct {
	// variant is what was decided for the node.
	variant *variant
	// created is the claim once it is in the API.
	created *resourceapi.ResourceClaim
	// recorded tells that the pod's status may name the claim.
	recorded bool
}

// newExtendedClaim returns a claim for a pod's extended resources, without a name and requests. By the annotation
// and the owner, kube-controller-manager, quota and the kubelet know what it is for.
func newExtendedClaim(pod *v1.Pod) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace:    pod.Namespace,
		GenerateName: extendedClaimPrefix(pod.Name),
		Annotations:  map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"},
		OwnerReferences: []metav1.OwnerReference{{
			APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: ptr.To(true),
		}},
	}}
}

// extendedClaimPrefix is what the claim's name begins with: as much of the pod's name as leaves room for the
// rest of a name of 63 characters.
func extendedClaimPrefix(pod string) string {
	const suffix, random = "-extended-resources-", 5
	if longest := 63 - random - len(suffix); len(pod) > longest {
		pod = strings.TrimRight(pod[:longest], "-.")
	}
	return pod + suffix
}

// isForExtendedResources tells whether a claim was made for the extended resources of the pod that owns it.
func isForExtendedResources(claim *resourceapi.ResourceClaim) bool {
	return claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] == "true"
}

// bindingClaims are the pod's claims as they were when it was reserved, with the one that has been made for its extended resources.
func (c *cycle) bindingClaims() []podclaims.Claim {
	claims := slices.Clone(c.claims)
	for i := range claims {
		if joined := c.binding.joined[claims[i].Claim.UID]; joined != nil {
			claims[i].Claim = joined
		}
	}
	if created := c.binding.extended.created; created != nil {
		claims = append(claims, podclaims.Claim{Claim: created, User: podclaims.UserOf(c.extended.pod)})
	}
	return claims
}

// changesExtendedClaims tells whether PreBind has to make or to remove a claim for extended resources.
func (c *cycle) changesExtendedClaims() bool {
	wanted := c.binding.extended.variant
	return c.extended != nil && (len(c.extended.leftovers) > 0 || wanted != nil && wanted.claim != nil)
}

// createExtendedClaim removes what earlier attempts have left, and makes the claim that was decided for the node.
// Its allocation in flight passes over to it, so that it is like any other claim from here on.
//
// A claim whose creation failed with an unknown outcome holds nothing. The next attempt finds it by its owner.
func (pl *Plugin) createExtendedClaim(ctx context.Context, pod *v1.Pod, c *cycle) error {
	if c.extended == nil {
		return nil
	}
	for _, claim := range c.extended.leftovers {
		if err := pl.removeExtendedClaim(ctx, pod, claim, anyClaim); err != nil {
			return fmt.Errorf("remove claim %s of an earlier attempt: %w", klog.KObj(claim), err)
		}
		decisions.Log(ctx, decisions.GivenBack, pod, "", claim, claim.Status.Allocation, "an earlier attempt made the claim for the pod's extended resources, and it is not needed")
	}
	b := &c.binding.extended
	if b.variant == nil || b.variant.claim == nil {
		return nil
	}
	claim := b.variant.claim.DeepCopy()
	// The name is chosen here, so that a lost answer does not make a claim that nobody knows the name of.
	claim.Name, claim.UID = names.SimpleNameGenerator.GenerateName(claim.GenerateName), ""
	created, err := pl.binder.Client.ResourceV1().ResourceClaims(claim.Namespace).Create(ctx, claim, metav1.CreateOptions{FieldManager: pl.shared.books.FieldManager})
	binding.CountWrite(binding.WriteCreation, err)
	if err != nil {
		// Without the claim's name, which is another one each time: the pod's events count what is the same.
		return fmt.Errorf("create the claim for the pod's extended resources: %w", err)
	}
	b.created = created
	pl.binder.Assume(ctx, created)
	for i := range c.binding.reserved {
		if r := &c.binding.reserved[i]; r.Claim.UID == b.variant.claim.UID {
			if err := pl.shared.tracker.Move(r.Claim.UID, created); err != nil {
				return err
			}
			r.Claim = created
		}
	}
	klog.FromContext(ctx).V(3).Info("Claim made for extended resources", "pod", klog.KObj(pod), "claim", klog.KObj(created))
	return nil
}

// recordExtendedClaim writes into the pod's status which claim, and which requests of it, its containers use for
// their extended resources. The kubelet prepares that claim. The entry can be replaced, but not be taken back, so
// this is the last thing that PreBind does.
func (pl *Plugin) recordExtendedClaim(ctx context.Context, pod *v1.Pod, c *cycle) error {
	if c.extended == nil || c.binding.extended.variant == nil {
		return nil
	}
	b := &c.binding.extended
	claim := b.created
	if claim == nil {
		claim = c.extended.adopted
	}
	if claim == nil {
		return nil
	}
	status := &v1.PodExtendedResourceClaimStatus{ResourceClaimName: claim.Name, RequestMappings: b.variant.mappings}
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
		_, err := pl.binder.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
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

// undoExtendedClaim removes the claim that was made for the pod. What cannot be removed is found again by the
// pod's next attempt, or goes with the pod. A pod that is bound, because only the answer to its binding was lost, keeps
// its claim; so does one that may be, which Undo has found out: the claim is among those that it kept.
func (pl *Plugin) undoExtendedClaim(ctx context.Context, pod *v1.Pod, b *extendedBinding, kept sets.Set[types.UID]) {
	if b.recorded {
		// The next attempt may come before the informer has the new status.
		pl.shared.recorded.Add(pod)
	}
	if b.created == nil || kept.Has(b.created.UID) {
		return
	}
	// The scheduling cycle's context may have ended, which may be why the pod is unreserved.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), binding.UndoTimeout)
	defer cancel()
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "pod", klog.KObj(pod), "claim", klog.KObj(b.created))
	switch bound, err := pl.binder.HasNode(ctx, pod, false); { // Undo has waited already
	case err != nil:
		logger.Error(err, "Cannot find out whether a pod is bound, keeping the claim for its extended resources")
		return
	case bound:
		return
	}
	unused := func(claim *resourceapi.ResourceClaim) error {
		if binding.IsAdopted(claim, pod.UID, pl.shared.books.FieldManager) {
			return errors.New("another scheduler uses it for the pod")
		}
		return nil
	}
	if err := pl.removeExtendedClaim(ctx, pod, b.created, unused); err != nil {
		logger.Error(err, "Cannot remove the claim for the extended resources of a pod that was not bound, its next attempt will")
	}
}

// anyClaim is for removeExtendedClaim.
func anyClaim(*resourceapi.ResourceClaim) error { return nil }

// removeExtendedClaim gives up the claim's allocation and deletes it, if check has nothing against the claim as it is then. It fails if
// others than the pod use it, or if the pod turns out to be bound.
func (pl *Plugin) removeExtendedClaim(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim, check func(*resourceapi.ResourceClaim) error) error {
	client := pl.binder.Client.ResourceV1().ResourceClaims(claim.Namespace)
	options := metav1.UpdateOptions{FieldManager: pl.shared.books.FieldManager}
	get := pl.binder.Known
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		current, err := get(ctx, claim)
		get = pl.binder.Read
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
		if err := pl.binder.CheckUnused(ctx, pod, current); err != nil {
			return err
		}
		// First the status: only then is it certain that the device is free when the claim is gone.
		if current.Status.Allocation != nil || len(current.Status.ReservedFor) > 0 {
			updated := current.DeepCopy()
			updated.Status.Allocation, updated.Status.ReservedFor, updated.Status.Devices = nil, nil, nil
			current, err = client.UpdateStatus(ctx, updated, options)
			binding.CountWrite(binding.WriteDeallocation, err)
			if err != nil {
				pl.shared.books.Doubts.Note(updated, err)
				return fmt.Errorf("give up the allocation: %w", err)
			}
			pl.binder.Assume(ctx, current)
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

// giveUpExtendedClaims removes what earlier attempts left that holds devices, because the pod finds no node: it may
// with other devices. It returns the removed claims' names.
func (pl *Plugin) giveUpExtendedClaims(ctx context.Context, pod *v1.Pod, e *extendedPlan) ([]string, error) {
	if e == nil {
		return nil, nil
	}
	holding := slices.DeleteFunc(slices.Clone(e.leftovers), func(claim *resourceapi.ResourceClaim) bool {
		return claim.Status.Allocation == nil
	})
	if e.adopted != nil {
		holding = append(holding, e.adopted)
	}
	ctx, cancel := context.WithTimeout(ctx, deallocateTimeout)
	defer cancel()
	var removed []string
	for _, claim := range holding {
		if err := pl.removeExtendedClaim(ctx, pod, claim, anyClaim); err != nil {
			return removed, fmt.Errorf("claim %s: %w", klog.KObj(claim), err)
		}
		decisions.Log(ctx, decisions.GivenBack, pod, "", claim, claim.Status.Allocation, "an earlier attempt made the claim for the pod's extended resources, and no node fits with it")
		removed = append(removed, klog.KObj(claim).String())
	}
	return removed, nil
}
