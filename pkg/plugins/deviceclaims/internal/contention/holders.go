// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/kubernetes/pkg/scheduler/framework/preemption"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Holder is a claim that holds devices, and for whom.
type Holder struct {
	claim usage.ClaimRef
	// known is what the rest was made from.
	known tracker.Holding
	// pools are where its devices are.
	pools []usage.PoolID
	// pods are all that the claim is reserved for, or is being allocated for.
	pods []consumer
	// foreign tells that it is reserved for something besides pods, or is going to be.
	foreign bool
	// left tells that it holds nothing any more. Only what the attempt decides on still has it.
	left bool
}

// consumer is a pod that a claim is for. The name of one for which the claim is in flight is not known.
type consumer struct {
	types.NamespacedName
	uid types.UID
}

// isFor tells whether the claim is for these pods and nobody else. A claim that nobody uses is for none.
func (s *Holder) isFor(pods func(types.UID) bool) bool {
	if s.foreign || len(s.pods) == 0 {
		return false
	}
	return !slices.ContainsFunc(s.pods, func(c consumer) bool { return !pods(c.uid) })
}

// Holders knows the claims that hold devices, for one scheduling attempt. What has been looked up once stays as it is, so that all that is
// tried in the attempt is tried on the same facts. Safe for concurrent use.
type Holders struct {
	rivals *Rivals
	// Own are the claims of the pod that is being scheduled, and do not change. They never count as somebody else's.
	Own sets.Set[types.UID]

	mutex sync.Mutex
	// times are what there is for what nominated pods are going to get, by namespace, for all its pods together.
	times    map[string]allocator.Attempt
	byClaim  map[types.UID]*Holder
	byPod    map[types.UID][]*Holder
	nominees map[types.UID]*nominee
}

// NewHolders begins an attempt.
func (r *Rivals) NewHolders() *Holders {
	return &Holders{
		rivals: r, Own: sets.New[types.UID](), times: map[string]allocator.Attempt{},
		byClaim: map[types.UID]*Holder{}, byPod: map[types.UID][]*Holder{}, nominees: map[types.UID]*nominee{},
	}
}

// timeFor returns the time for what a nominated pod is going to get. It is its namespace's: a pod of another one does not pay for it.
func (s *Holders) timeFor(nominee *v1.Pod) allocator.Attempt {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	t := s.times[nominee.Namespace]
	if t == nil {
		t = s.rivals.Time.Attempt(nominee)
		s.times[nominee.Namespace] = t
	}
	return t
}

// ofPod returns the claims that a pod has a part in.
func (s *Holders) ofPod(pod *v1.Pod) []*Holder {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if known, ok := s.byPod[pod.UID]; ok {
		return known
	}
	var refs []usage.ClaimRef
	for _, name := range podclaims.NamedBy(pod) {
		if claim, err := s.rivals.Claims.Get(pod.Namespace, name); err == nil {
			refs = append(refs, usage.RefOf(claim))
		}
	}
	// The status of a pod that is being bound may not name its claim yet.
	for _, claim := range s.rivals.Claims.OwnedBy(pod.Namespace, pod.UID) {
		refs = append(refs, usage.RefOf(claim))
	}
	refs = append(refs, s.rivals.Claims.InFlightFor(pod.UID)...)
	var found []*Holder
	for _, ref := range refs {
		st := s.ofClaimLocked(ref)
		if st != nil && !slices.Contains(found, st) && st.has(pod.UID) {
			found = append(found, st)
		}
	}
	s.byPod[pod.UID] = found
	return found
}

// ofClaim returns a claim with what it holds, nil if it holds nothing or is the pod's own.
func (s *Holders) ofClaim(ref usage.ClaimRef) *Holder {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.ofClaimLocked(ref)
}

func (s *Holders) ofClaimLocked(ref usage.ClaimRef) *Holder {
	if s.Own.Has(ref.UID) {
		return nil
	}
	known, ok := s.byClaim[ref.UID]
	if !ok {
		known = newHolder(ref, s.rivals.Claims.Holding(ref))
		s.byClaim[ref.UID] = known
	}
	return known
}

// newHolder returns nil for a claim that holds nothing.
func newHolder(ref usage.ClaimRef, holding tracker.Holding) *Holder {
	s := &Holder{claim: ref, known: holding, foreign: holding.Group != ""}
	s.addPools(holding.InFlight)
	if holding.Claim != nil {
		s.addPools(holding.Claim.Status.Allocation)
		for _, user := range holding.Claim.Status.ReservedFor {
			if user.APIGroup != "" || user.Resource != "pods" {
				s.foreign = true
				continue
			}
			s.pods = append(s.pods, consumer{types.NamespacedName{Namespace: ref.Namespace, Name: user.Name}, user.UID})
		}
	}
	for _, owner := range holding.Owners {
		if !s.has(owner) {
			s.pods = append(s.pods, consumer{uid: owner})
		}
	}
	if len(s.pools) == 0 {
		return nil
	}
	return s
}

func (s *Holder) addPools(allocation *resourceapi.AllocationResult) {
	if allocation == nil {
		return
	}
	for i := range allocation.Devices.Results {
		pool := usage.DeviceOf(&allocation.Devices.Results[i]).PoolID()
		if !slices.Contains(s.pools, pool) {
			s.pools = append(s.pools, pool)
		}
	}
}

// has tells whether the pod is one that the claim is for.
func (s *Holder) has(pod types.UID) bool {
	return slices.ContainsFunc(s.pods, func(c consumer) bool { return c.uid == pod })
}

// without returns the usage without what some claims hold.
func without(view usage.View, holders []*Holder) usage.View {
	if len(holders) == 0 {
		return view
	}
	pools, gone := sets.New[usage.PoolID](), sets.New[types.UID]()
	for _, s := range holders {
		gone.Insert(s.claim.UID)
		pools.Insert(s.pools...)
	}
	return view.Without(pools.UnsortedList(), func(claim usage.ClaimRef) bool { return gone.Has(claim.UID) })
}

// WithoutClaims returns the usage without what the claims have allocated.
func WithoutClaims(view usage.View, claims []*resourceapi.ResourceClaim) usage.View {
	var holders []*Holder
	for _, claim := range claims {
		st := &Holder{claim: usage.RefOf(claim)}
		st.addPools(claim.Status.Allocation)
		holders = append(holders, st)
	}
	return without(view, holders)
}

// releasedWith returns the claims that end when the pods go: those that are for these pods and for nobody else.
func (s *Holders) releasedWith(pods map[types.UID]*v1.Pod) []*Holder {
	isGoing := func(uid types.UID) bool { return pods[uid] != nil }
	released := sets.New[*Holder]()
	for _, pod := range pods {
		for _, st := range s.ofPod(pod) {
			if st.isFor(isGoing) {
				released.Insert(st)
			}
		}
	}
	return released.UnsortedList()
}

// withoutPods returns the usage without what ends in some pools when the pods go.
func (s *Holders) withoutPods(view usage.View, pools []usage.PoolID, pods podSet) usage.View {
	if pods.Len() == 0 {
		return view
	}
	isGoing := func(uid types.UID) bool {
		_, going := pods.Get(uid)
		return going
	}
	return view.Without(pools, func(claim usage.ClaimRef) bool {
		st := s.ofClaim(claim)
		return st != nil && st.isFor(isGoing)
	})
}

// isLeaving tells whether the claim is about to give up its devices, because all pods that it is for have gone, are
// going, have ended, or will not be bound. preemptor is the pod that waits for that, nil if nobody does; see [Rivals.isLeaving].
func (s *Holders) isLeaving(st *Holder, preemptor *v1.Pod) bool {
	if st.foreign {
		return false
	}
	if len(st.pods) == 0 {
		return st.known.Claim != nil && st.known.Claim.DeletionTimestamp != nil
	}
	return !slices.ContainsFunc(st.pods, func(c consumer) bool { return !s.rivals.isLeaving(c, preemptor) })
}

// mayBeEvictedFor tells whether the claim ends if all pods of lower priority are evicted.
func (s *Holders) mayBeEvictedFor(st *Holder, pod *v1.Pod) bool {
	if s.isLeaving(st, nil) {
		return true
	}
	return !st.foreign && len(st.pods) > 0 && !slices.ContainsFunc(st.pods, func(c consumer) bool {
		other := s.rivals.PodOf(c.NamespacedName, c.uid)
		return other != nil && corev1helpers.PodPriority(other) >= corev1helpers.PodPriority(pod)
	})
}

// PodOf returns the pod as it is known, nil if it has gone, or if it is not being bound and its name is not given.
func (r *Rivals) PodOf(name types.NamespacedName, uid types.UID) *v1.Pod {
	if attempt := r.Attempts.Of(uid); attempt != nil {
		return attempt.Pod
	}
	pod, err := r.Pods.Pods(name.Namespace).Get(name.Name)
	if err != nil || pod.UID != uid {
		return nil
	}
	return pod
}

// isLeaving tells whether a pod will make no more use of its claims.
//
// A preemptor waits for a pod that is being deleted only if it may have evicted that pod itself, as the scheduler's own preemption does
// (PodEligibleToPreemptOthers): others may take as long as they like. And what is not certain, see
// podmemory.Attempts, is enough to wait for.
func (r *Rivals) isLeaving(c consumer, preemptor *v1.Pod) bool {
	certain := preemptor == nil
	attempt := r.Attempts.Of(c.uid)
	if attempt != nil {
		c.NamespacedName = types.NamespacedName{Namespace: attempt.Pod.Namespace, Name: attempt.Pod.Name}
		if attempt.IsCancelled(certain) {
			return true
		}
	}
	if c.Name == "" {
		return !certain // its attempt has ended meanwhile
	}
	pod, err := r.Pods.Pods(c.Namespace).Get(c.Name)
	switch {
	case err != nil:
		return apierrors.IsNotFound(err)
	case pod.UID != c.uid, pod.Status.Phase == v1.PodSucceeded, pod.Status.Phase == v1.PodFailed:
		return true
	case preemptor != nil:
		return preemption.PodTerminatingByPreemption(pod) && r.Groups.PriorityOf(pod) < r.Groups.PriorityOf(preemptor)
	}
	return pod.DeletionTimestamp != nil
}

// leavingOn returns the claims with devices of a node that are about to end, or have ended since the view was taken. What is only
// predicted must not be in the view: it would look as if it had ended.
func (s *Holders) leavingOn(pools []usage.PoolID, view usage.View, preemptor *v1.Pod) []*Holder {
	return s.holdersOn(pools, view, func(st *Holder) bool { return s.isLeaving(st, preemptor) })
}

// holdersOn returns the claims with devices of some pools that are of a kind, or have ended since the view was taken.
func (s *Holders) holdersOn(pools []usage.PoolID, view usage.View, is func(*Holder) bool) []*Holder {
	var found []*Holder
	seen := sets.New[types.UID]()
	for _, id := range pools {
		for _, device := range view.Pool(id).All() {
			for _, holder := range device.Holders() {
				if seen.Has(holder.Claim.UID) {
					continue
				}
				seen.Insert(holder.Claim.UID)
				switch st := s.ofClaim(holder.Claim); {
				case st == nil && !s.Own.Has(holder.Claim.UID) && s.rivals.Trial.Allocation(holder.Claim.UID) == nil:
					found = append(found, &Holder{claim: holder.Claim, pools: pools, left: true})
				case st != nil && is(st):
					found = append(found, st)
				}
			}
		}
	}
	return found
}
