// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package passage

import (
	"context"
	"errors"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// withdraw takes the pod's reservation from claims that must give way, and also their allocation where nobody else has
// reserved them, whoever wrote it: as long as it stands it keeps others from the devices.
//
// The pod is looked up first. Somebody may have bound it, such as a leader before us that is about to end; then its
// claims are in use.
//
// What is reserved for the pod's group is taken from it when no pod of the group is left that may use it. That is asked before each
// attempt to write, after the claim has been read: a pod that comes to use it meanwhile moves its version.
func (p *Passage) withdraw(ctx context.Context, pod *v1.Pod, c *cycle.State, yields []*fence.YieldError) {
	if len(yields) == 0 {
		return
	}
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(p.Ended, cancel)()
	if state, err := p.Binder.ReadPod(ctx, pod); err != nil || state == binding.PodGone || state == binding.PodBound {
		logger.V(2).Info("Keeping claims that must give way, because the pod is bound or not to be found", "pod", klog.KObj(pod), "err", err)
		return
	}
	p.Attempts.GiveWay(pod)
	for _, yield := range yields {
		never := func() bool { return false }
		err := p.Binder.Persist(ctx, never, func(ctx context.Context) error { return p.writeWithdrawal(ctx, pod, yield, c) })
		if err != nil {
			logger.Error(err, "Cannot give up the allocation of a claim that must give way", "pod", klog.KObj(pod),
				"claim", klog.KRef(yield.Claim.Namespace, yield.Claim.Name))
		}
	}
}

func (p *Passage) writeWithdrawal(ctx context.Context, pod *v1.Pod, yield *fence.YieldError, c *cycle.State) error {
	user := c.UserOf(yield.Claim.UID)
	client := p.Binder.Client.ResourceV1().ResourceClaims(yield.Claim.Namespace)
	claim, err := client.Get(ctx, yield.Claim.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	p.Binder.Assume(ctx, claim) // it may have been written with the answer lost
	if claim.UID != yield.Claim.UID || claim.Status.Allocation == nil ||
		!podclaims.SameAllocation(claim.Status.Allocation, yield.Allocation) || !podclaims.IsReservedFor(claim, user) ||
		!binding.IsUsedLastBy(claim, user, p.Binder.FieldManager) { // whoever uses it has a fence of its own
		return nil
	}
	if user != pod.UID {
		if leaves, err := p.GroupLeaves(ctx, pod, claim); err != nil || !leaves {
			return err
		}
	}
	claim = claim.DeepCopy()
	podclaims.RemoveUser(claim, user)
	if len(claim.Status.ReservedFor) == 0 {
		claim.Status.Allocation = nil
		claim.Status.Devices = nil
	}
	written, err := client.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
	binding.CountWrite(binding.WriteWithdrawal, err)
	if err != nil {
		p.Binder.Doubts.Note(claim, err)
		return err
	}
	for _, w := range c.Binding.Writes {
		w.Withdrawn = w.Withdrawn || w.Planned.UID == claim.UID
	}
	p.Binder.Assume(ctx, written)
	return nil
}

// GroupLeaves tells whether no pod of the pod's group is left that may use a claim of the group: those that have a node use none, and those
// that are being bound to one have given way and not tried again since. The API is asked, too: another scheduler may have bound one.
func (p *Passage) GroupLeaves(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim) (bool, error) {
	left := p.Attempts.HaveGivenWay(pod)
	users, err := p.Groups.ScheduledUsers(pod, claim)
	if err != nil || slices.ContainsFunc(users, func(member *v1.Pod) bool { return !left.Has(member.UID) }) {
		return false, nil //nolint:nilerr // a group that is not known may have any pods
	}
	err = p.Binder.CheckGroupUnbound(ctx, pod, claim)
	if _, bound := errors.AsType[*binding.BoundError](err); bound {
		return false, nil
	}
	return err == nil, err
}
