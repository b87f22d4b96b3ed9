// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"cmp"
	"context"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"stowage.dev/stowage/pkg/snapshot"
)

// Waiting are the pods that have no node and want one, in the order in which the scheduling queue takes them: by priority, then by age.
func Waiting(objects *snapshot.Objects) []*v1.Pod {
	var pods []*v1.Pod
	for _, pod := range objects.Pods {
		if pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && !isOver(pod) {
			pods = append(pods, pod)
		}
	}
	inOrder(pods)
	return pods
}

func inOrder(pods []*v1.Pod) {
	slices.SortStableFunc(pods, func(a, b *v1.Pod) int {
		return cmp.Or(cmp.Compare(corev1helpers.PodPriority(b), corev1helpers.PodPriority(a)),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
}

// Place tries pods of a changed cluster one after the other, by priority and age. Where preemption evicts others for one, they are taken
// away, and it is placed. An outcome names those, and its reason is why the pod had to evict.
func Place(ctx context.Context, change *Change, pods []*v1.Pod, opts Options) ([]*Outcome, error) {
	pods = slices.Clone(pods)
	inOrder(pods)
	var outcomes []*Outcome
	cluster, err := New(ctx, &change.Objects, opts)
	if err != nil {
		return nil, err
	}
	defer func() { cluster.Close() }()
	placed := map[*v1.Pod]*Outcome{}
	for _, pod := range pods {
		out, err := cluster.Schedule(ctx, pod)
		if err != nil {
			return nil, err
		}
		if len(out.Victims) > 0 && out.Nominated != "" {
			if cluster, err = evict(ctx, cluster, change, out, pod, placed, opts); err != nil {
				return nil, err
			}
			again, err := cluster.Schedule(ctx, pod)
			if err != nil {
				return nil, err
			}
			again.Victims, again.Nominated = out.Victims, out.Nominated
			out = again
		}
		placed[pod] = out
		outcomes = append(outcomes, out)
	}
	return outcomes, nil
}

// evict begins again on a cluster without the victims. What was placed before stays where it is, with its devices.
func evict(ctx context.Context, old *Cluster, change *Change, out *Outcome, pod *v1.Pod, placed map[*v1.Pod]*Outcome,
	opts Options,
) (*Cluster, error) {
	old.Close()
	for p, o := range placed {
		if o.Node != "" {
			change.bind(p, o)
			delete(placed, p)
		}
	}
	for _, victim := range out.Victims {
		namespace, name, _ := strings.Cut(victim, "/")
		if err := change.Delete(namespace, name); err != nil {
			return old, err
		}
		change.Evicted = append(change.Evicted, victim)
	}
	nominated := pod.DeepCopy()
	nominated.Status.NominatedNodeName = out.Nominated
	change.replacePod(nominated)
	next, err := New(ctx, &change.Objects, opts)
	if err != nil {
		return old, err
	}
	return next, nil
}

// bind writes into the copy what the scheduler would write for a pod that was placed.
func (c *Change) bind(pod *v1.Pod, out *Outcome) {
	bound := pod.DeepCopy()
	bound.Spec.NodeName, bound.Status.Phase, bound.Status.NominatedNodeName = out.Node, v1.PodRunning, ""
	uses := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID}
	for _, r := range out.reserved {
		i := slices.IndexFunc(c.ResourceClaims, func(o *resourceapi.ResourceClaim) bool {
			return o.Namespace == r.claim.Namespace && o.Name == r.claim.Name
		})
		if i < 0 { // made by the scheduler, for extended resources
			i = len(c.ResourceClaims)
			c.ResourceClaims = append(c.ResourceClaims, r.claim)
		}
		claim := c.ResourceClaims[i].DeepCopy()
		claim.Status.Allocation = r.allocation
		if !slices.Contains(claim.Status.ReservedFor, uses) {
			claim.Status.ReservedFor = append(claim.Status.ReservedFor, uses)
		}
		c.ResourceClaims[i] = claim
	}
	for i := range bound.Spec.ResourceClaims { // those that were allocated already
		name, _, err := resourceclaim.Name(bound, &bound.Spec.ResourceClaims[i])
		if err != nil || name == nil {
			continue
		}
		for k, claim := range c.ResourceClaims {
			if claim.Namespace == pod.Namespace && claim.Name == *name && claim.Status.Allocation != nil &&
				!slices.Contains(claim.Status.ReservedFor, uses) {
				claim = claim.DeepCopy()
				claim.Status.ReservedFor = append(claim.Status.ReservedFor, uses)
				c.ResourceClaims[k] = claim
			}
		}
	}
	c.replacePod(bound)
}

// replacePod puts a pod in the place of the one with its UID.
func (c *Change) replacePod(pod *v1.Pod) {
	if i := slices.IndexFunc(c.Pods, func(p *v1.Pod) bool { return p.UID == pod.UID }); i >= 0 {
		c.Pods[i] = pod
	}
}
