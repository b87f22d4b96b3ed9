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
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"stowage.dev/stowage/pkg/plugins/deviceclaims"
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
	p, err := newPlacing(ctx, change, opts)
	if err != nil {
		return nil, err
	}
	defer p.close()
	for _, pod := range pods {
		out, err := p.schedule(ctx, pod)
		if err != nil {
			return nil, err
		}
		if len(out.Victims) > 0 && out.Nominated != "" {
			if err := p.evict(ctx, out, pod); err != nil {
				return nil, err
			}
			again, err := p.schedule(ctx, pod)
			if err != nil {
				return nil, err
			}
			again.Victims, again.Nominated = out.Victims, out.Nominated
			out = again
		}
		outcomes = append(outcomes, out)
	}
	return outcomes, nil
}

// placing places pods one after the other on a copy of a cluster.
type placing struct {
	change  *Change
	opts    Options
	cluster *Cluster
	// placed are the pods that have a place in the cluster alone, and bound in no object of the change, in the order in which they got it.
	placed []placement
	// flying are the claims that got devices for these, and are not entered in the cluster.
	flying map[types.NamespacedName]flight
}

// placement is a pod, and what became of it.
type placement struct {
	pod *v1.Pod
	out *Outcome
}

// flight is what a claim got for a pod.
type flight struct {
	pod *v1.Pod
	reservation
}

func newPlacing(ctx context.Context, change *Change, opts Options) (*placing, error) {
	cluster, err := New(ctx, &change.Objects, opts)
	if err != nil {
		return nil, err
	}
	return &placing{change: change, opts: opts, cluster: cluster, flying: map[types.NamespacedName]flight{}}, nil
}

func (p *placing) close() { p.cluster.Close() }

// schedule places a pod. A claim that it shares with one that was placed before is entered first, as it would be when that one was bound:
// until then the scheduler has others wait.
func (p *placing) schedule(ctx context.Context, pod *v1.Pod) (*Outcome, error) {
	for name := range usedBy(pod) {
		f, ok := p.flying[name]
		if !ok {
			continue
		}
		if err := deviceclaims.Enter(p.cluster.plugin, f.pod, f.claim, f.allocation); err != nil {
			return nil, err
		}
		delete(p.flying, name)
	}
	out, err := p.cluster.Schedule(ctx, pod)
	if err == nil && out.Node != "" {
		p.placed = append(p.placed, placement{pod, out})
		for _, r := range out.reserved {
			p.flying[types.NamespacedName{Namespace: r.claim.Namespace, Name: r.claim.Name}] = flight{pod, r}
		}
	}
	return out, err
}

// evict begins again on a cluster without the victims. What was placed before stays where it is, with its devices.
func (p *placing) evict(ctx context.Context, out *Outcome, pod *v1.Pod) error {
	p.bind()
	for _, victim := range out.Victims {
		namespace, name, _ := strings.Cut(victim, "/")
		if err := p.change.Delete(namespace, name); err != nil {
			return err
		}
		p.change.Evicted = append(p.change.Evicted, victim)
	}
	nominated := pod.DeepCopy()
	nominated.Status.NominatedNodeName = out.Nominated
	p.change.replacePod(nominated)
	return p.renew(ctx)
}

// bind binds what was placed, in that order: who shares a claim finds it allocated.
func (p *placing) bind() {
	for _, placed := range p.placed {
		p.change.bind(placed.pod, placed.out)
	}
	p.placed = nil
	clear(p.flying)
}

// renew begins again on the cluster as it has been changed.
func (p *placing) renew(ctx context.Context) error {
	p.cluster.Close()
	next, err := New(ctx, &p.change.Objects, p.opts)
	if err != nil {
		return err
	}
	p.cluster = next
	return nil
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
