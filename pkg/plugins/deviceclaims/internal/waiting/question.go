// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package waiting

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/wakeup"
)

// Profile has the pods of one profile wait.
type Profile struct {
	Handle fwk.PodActivator
	Setup  *Setup
	Demand *demand.Reader
	Rivals *contention.Rivals
	// Binder knows which claims cannot be used for now.
	Binder interface {
		WhyBroken(claim *resourceapi.ResourceClaim) string
		Deadline(claim *resourceapi.ResourceClaim) time.Time
		AdoptedUntil(claim *resourceapi.ResourceClaim, users ...types.UID) time.Time
	}
	// Places knows how much room a claim has for further users.
	Places interface {
		Left(claim *resourceapi.ResourceClaim, user types.UID) int
	}
	// Gate knows the pods that PreEnqueue keeps back.
	Gate interface {
		// Keep notes why a pod is kept back. It is false for a pod that is gone.
		Keep(pod *v1.Pod, err error) bool
		Keeps(pod *v1.Pod) bool
	}
	// Limit is how long it may take to find out what a pod asks for.
	Limit time.Duration
}

// look says what a waiting pod asks for now.
func (p *Profile) look(pod *v1.Pod, inv *inventory.View) *wakeup.Question {
	claims, err := podclaims.Usable(p.Demand.Claims, pod)
	if err != nil {
		p.Gate.Keep(pod, err) // it may be another reason than before, or the first one since the pod was tried
		return &wakeup.Question{Err: err, Claims: err.Error()}
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), p.Limit, demand.ErrEvaluation)
	defer cancel()
	asked, err := p.Demand.Of(ctx, pod, claims, inv, nil)
	if err != nil && p.Gate.Keeps(pod) {
		return &wakeup.Question{} // to be tried, so that it is told what is the matter now
	}
	q := p.Question(ctx, pod, asked, inv, err)
	if err == nil && podclaims.GroupOf(pod) == "" && !p.Gate.Keeps(pod) {
		q.Places = p.placesOf(pod, asked)
	}
	return q
}

// placesOf are how many more users the claims have room for that the pod is not a user of. One that is to be allocated has room for the pod
// that it is allocated for, and for others only afterwards. Not asked for are pods of groups, which are tried together, and pods that
// PreEnqueue keeps back, which have to be tried once to be told what is true.
func (p *Profile) placesOf(pod *v1.Pod, a *demand.Asked) map[types.UID]int {
	places := map[types.UID]int{}
	for _, pc := range a.Claims {
		switch {
		case podclaims.IsReservedFor(pc.Claim, pod.UID):
		case pc.Claim.Status.Allocation == nil:
			places[pc.Claim.UID] = 1
		default:
			places[pc.Claim.UID] = p.Places.Left(pc.Claim, pod.UID)
		}
	}
	return places
}

// Question puts what a pod asks for in the form of the waiting room. err is why it cannot be asked.
// Expressions are compiled until ctx ends.
func (p *Profile) Question(ctx context.Context, pod *v1.Pod, a *demand.Asked, inv *inventory.View, err error) *wakeup.Question {
	ofGroup := podclaims.GroupOf(pod) != ""
	q := &wakeup.Question{
		Err: err, Undecided: errors.Is(err, demand.ErrEvaluation), Requests: a.Requests,
		Classes: map[string]*inventory.Class{}, Uncertain: ofGroup,
	}
	unallocated := a.Unallocated
	if a.Extended != nil && err == nil {
		var v *extended.Variant
		if v, q.Opaque = p.Demand.Extended.Asked(ctx, a.Extended); v != nil {
			q.Requests, unallocated = v.Requests, append(slices.Clip(unallocated), v.Claim)
		}
	}
	for _, claim := range unallocated {
		for _, name := range classesOf(claim) {
			q.Classes[name] = inv.Class(name)
		}
	}
	if a.Extended != nil {
		// Also where the claim cannot be compiled, or differs by node: the resolver may know a class that the inventory does not know yet.
		for _, name := range a.Extended.Names {
			if class := p.Demand.Extended.ClassOf(name); class != nil {
				q.Classes[class.Name] = inv.Class(class.Name)
			}
		}
	}
	if contention.MayPreempt(pod) && !ofGroup {
		q.Evicts = evictsOf(corev1helpers.PodPriority(pod), a)
	}
	// What has been given on trial is going to be decided anew.
	onTrial := func(pc podclaims.Claim) bool { return pc.Shared != nil }
	q.Opaque = q.Opaque || slices.ContainsFunc(a.Claims, onTrial)
	pins := slices.DeleteFunc(slices.Clone(a.Claims), func(pc podclaims.Claim) bool { return pc.Nodes == nil || onTrial(pc) })
	if len(pins) > 0 {
		q.OnNode = func(node *v1.Node) bool {
			return !slices.ContainsFunc(pins, func(pc podclaims.Claim) bool { return !pc.Nodes.Match(node) })
		}
		p.askElsewhere(ctx, q, pins, unallocated, inv)
	}
	var state []byte
	for _, pc := range a.Claims {
		broken, adoptedUntil := p.Binder.WhyBroken(pc.Claim) != "", p.Binder.AdoptedUntil(pc.Claim, pod.UID, pc.User.UID)
		state = fmt.Appendf(state, "%s/%x/%t/%t;", pc.Claim.UID, allocationHash(pc.Claim), broken, !adoptedUntil.IsZero())
		if !broken {
			q.ChangesAt = sooner(q.ChangesAt, p.Binder.Deadline(pc.Claim))
		}
		q.ChangesAt = sooner(q.ChangesAt, adoptedUntil)
	}
	for _, claim := range a.Extended.Made() {
		state = fmt.Appendf(state, "%s/%s;", claim.Namespace, claim.Name)
		q.ChangesAt = sooner(q.ChangesAt, p.Binder.AdoptedUntil(claim, pod.UID))
	}
	if err != nil {
		state = append(state, err.Error()...)
	}
	q.Claims = string(state)
	return q
}

// sooner returns the earlier one of two times, of which zero is none.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// evictsOf tells apart which claims pods of a priority may have others evicted for: none that they use themselves.
func evictsOf(priority int32, a *demand.Asked) string {
	evicts := fmt.Sprint(priority)
	for _, pc := range a.Claims {
		if pc.Claim.Status.Allocation != nil {
			evicts += " " + string(pc.Claim.UID)
		}
	}
	return evicts
}

// askElsewhere adds what the pod asks for on nodes where its claims cannot be used as they are allocated, if PostFilter may give these
// allocations up. It does so when such a node would do.
func (p *Profile) askElsewhere(ctx context.Context, q *wakeup.Question, pins []podclaims.Claim,
	unallocated []*resourceapi.ResourceClaim, inv *inventory.View,
) {
	others := func(pc podclaims.Claim) bool {
		return slices.ContainsFunc(pc.Claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool {
			return ref.UID != pc.User.UID && ref.Resource != "podgroups" // of a pod without a node, that is its own group
		})
	}
	if slices.ContainsFunc(pins, others) {
		return
	}
	q.Movable = true
	claims := slices.Clip(unallocated)
	for _, pc := range pins {
		for _, name := range classesOf(pc.Claim) {
			q.Classes[name] = inv.Class(name)
		}
	}
	if len(pins) == 1 { // else it depends on the node which of them have to move
		anew := pins[0].Claim.DeepCopy()
		anew.Status = resourceapi.ResourceClaimStatus{}
		claims = append(claims, anew)
	}
	q.Elsewhere, _ = p.Demand.Compile(ctx, claims, inv) // nil with an error
}

var allocationSeed = maphash.MakeSeed()

// allocationHash tells allocations apart, 0 stands for none.
func allocationHash(claim *resourceapi.ResourceClaim) uint64 {
	if claim.Status.Allocation == nil {
		return 0
	}
	content, err := claim.Status.Allocation.Marshal()
	if err != nil {
		content = []byte(claim.ResourceVersion) // as if every change of the claim were one of its allocation
	}
	return maphash.Bytes(allocationSeed, content) | 1
}

// classesOf are the names of the classes that a claim asks for.
func classesOf(claim *resourceapi.ResourceClaim) []string {
	var classes []string
	for i := range claim.Spec.Devices.Requests {
		request := &claim.Spec.Devices.Requests[i]
		if request.Exactly != nil {
			classes = append(classes, request.Exactly.DeviceClassName)
		}
		for j := range request.FirstAvailable {
			classes = append(classes, request.FirstAvailable[j].DeviceClassName)
		}
	}
	return classes
}

// queueKey is what the order of the scheduling queue looks at. A pod's age counts from its creation and not from its last attempt, so
// that nobody is overtaken by being tried.
func queueKey(pod *v1.Pod) *framework.QueuedPodInfo {
	return &framework.QueuedPodInfo{
		PodInfo:        &framework.PodInfo{Pod: pod},
		QueueingParams: framework.QueueingParams{Timestamp: pod.CreationTimestamp.Time},
	}
}
