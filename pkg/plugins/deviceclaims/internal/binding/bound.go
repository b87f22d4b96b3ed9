// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"context"
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/pager"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/usage"
)

// PodsThatRun selects pods that have a node and have not ended.
var PodsThatRun = fields.AndSelectors(
	fields.OneTermNotEqualSelector("spec.nodeName", ""),
	fields.OneTermNotEqualSelector("status.phase", string(v1.PodSucceeded)),
	fields.OneTermNotEqualSelector("status.phase", string(v1.PodFailed)),
).String()

// BoundError says that a pod which may use a claim has a node, of which the scheduler has not heard yet.
type BoundError struct {
	pod  klog.ObjectRef
	node string
}

func (e *BoundError) Error() string {
	return fmt.Sprintf("pod %s is bound to node %s already, and keeps its claims", e.pod, e.node)
}

// CheckUnused fails with a BoundError if the claim is in use by the pod that is being scheduled, or by its group. The pod is tried as if
// it had no node, but the scheduler may only not know: the answer to the binding was lost, or another scheduler bound the pod, and
// the informer lags behind. So before a claim that is reserved is taken from it, the API is asked. It fails with an AdoptedError if another
// scheduler may be binding the pod.
//
// A claim that is reserved for others must not come here, see [podclaims.UsedOnlyBy].
func (b *Binder) CheckUnused(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim) error {
	switch {
	case len(claim.Status.ReservedFor) == 0:
		return nil
	case !podclaims.UsedOnlyBy(claim, pod.UID):
		for _, user := range claim.Status.ReservedFor {
			if err := b.CheckNotAdopted(claim, user.UID); err != nil {
				return err
			}
		}
		return b.CheckGroupUnbound(ctx, pod, claim)
	}
	return b.checkUnbound(ctx, pod, claim)
}

// checkUnbound fails with a BoundError if the pod has a node, and with an AdoptedError if another scheduler may be binding it, whoever else
// uses the claim.
func (b *Binder) checkUnbound(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim) error {
	if err := b.CheckNotAdopted(claim, pod.UID); err != nil {
		return err
	}
	current, err := b.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("find out whether the pod is bound: %w", err)
	case current.UID == pod.UID && current.Spec.NodeName != "":
		return &BoundError{klog.KObj(current), current.Spec.NodeName}
	}
	return nil
}

// CheckGroupUnbound fails with a BoundError if any pod of the pod's group uses the claim, has a node and has not ended.
func (b *Binder) CheckGroupUnbound(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim) error {
	list := func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		return b.Client.CoreV1().Pods(pod.Namespace).List(ctx, options)
	}
	err := pager.New(list).EachListItem(ctx, metav1.ListOptions{FieldSelector: PodsThatRun}, func(obj runtime.Object) error {
		if other, ok := obj.(*v1.Pod); ok && other.Spec.NodeName != "" && podclaims.GroupOf(other) == podclaims.GroupOf(pod) &&
			podclaims.Uses(other, usage.RefOf(claim)) {
			return &BoundError{klog.KObj(other), other.Spec.NodeName}
		}
		return nil
	})
	var bound *BoundError
	if err != nil && !errors.As(err, &bound) {
		return fmt.Errorf("find out whether pods of the pod's group are bound: %w", err)
	}
	return err
}
