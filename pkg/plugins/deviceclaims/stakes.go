package deviceclaims

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

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// stake is a claim that holds devices, and for whom.
type stake struct {
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
func (s *stake) isFor(pods func(types.UID) bool) bool {
	if s.foreign || len(s.pods) == 0 {
		return false
	}
	return !slices.ContainsFunc(s.pods, func(c consumer) bool { return !pods(c.uid) })
}

// stakes knows the stakes of one scheduling attempt. What has been looked up once stays as it is, so that all that is
// tried in the attempt is tried on the same facts. Safe for concurrent use.
type stakes struct {
	pl *Plugin
	// own are the claims of the pod that is being scheduled, and do not change. They never count as somebody else's.
	own sets.Set[types.UID]

	mutex sync.Mutex
	// budgets are the time for what nominated pods are going to get, by namespace, of all its pods together.
	budgets  map[string]*budget
	byClaim  map[types.UID]*stake
	byPod    map[types.UID][]*stake
	nominees map[types.UID]*nominee
}

func newStakes(pl *Plugin) *stakes {
	return &stakes{
		pl: pl, own: sets.New[types.UID](), budgets: map[string]*budget{},
		byClaim: map[types.UID]*stake{}, byPod: map[types.UID][]*stake{}, nominees: map[types.UID]*nominee{},
	}
}

// budgetFor returns the time for what a nominated pod is going to get. It is its namespace's: a pod of another one does not pay for it.
func (s *stakes) budgetFor(nominee *v1.Pod) *budget {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	b := s.budgets[nominee.Namespace]
	if b == nil {
		b = newBudget(s.pl.filterTimeout, s.pl.shared.shares.of(nominee))
		s.budgets[nominee.Namespace] = b
	}
	return b
}

// ofPod returns the stakes that a pod has a part in.
func (s *stakes) ofPod(pod *v1.Pod) []*stake {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if known, ok := s.byPod[pod.UID]; ok {
		return known
	}
	var refs []usage.ClaimRef
	for _, name := range podclaims.NamedBy(pod) {
		if claim, err := s.pl.shared.tracker.Get(pod.Namespace, name); err == nil {
			refs = append(refs, usage.RefOf(claim))
		}
	}
	// The status of a pod that is being bound may not name its claim yet.
	for _, claim := range s.pl.shared.tracker.OwnedBy(pod.Namespace, pod.UID) {
		refs = append(refs, usage.RefOf(claim))
	}
	refs = append(refs, s.pl.shared.tracker.InFlightFor(pod.UID)...)
	var found []*stake
	for _, ref := range refs {
		st := s.ofClaimLocked(ref)
		if st != nil && !slices.Contains(found, st) && slices.ContainsFunc(st.pods, func(c consumer) bool { return c.uid == pod.UID }) {
			found = append(found, st)
		}
	}
	s.byPod[pod.UID] = found
	return found
}

// ofClaim returns the stake of a claim, nil if it holds nothing or is the pod's own.
func (s *stakes) ofClaim(ref usage.ClaimRef) *stake {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.ofClaimLocked(ref)
}

func (s *stakes) ofClaimLocked(ref usage.ClaimRef) *stake {
	if s.own.Has(ref.UID) {
		return nil
	}
	known, ok := s.byClaim[ref.UID]
	if !ok {
		known = newStake(ref, s.pl.shared.tracker.Holding(ref))
		s.byClaim[ref.UID] = known
	}
	return known
}

// newStake returns nil for a claim that holds nothing.
func newStake(ref usage.ClaimRef, holding tracker.Holding) *stake {
	s := &stake{claim: ref, known: holding, foreign: holding.Group != ""}
	s.addPools(holding.InFlight)
	for _, owner := range holding.Owners {
		s.addPod(consumer{uid: owner})
	}
	if holding.Claim != nil {
		s.addPools(holding.Claim.Status.Allocation)
		for _, user := range holding.Claim.Status.ReservedFor {
			if user.APIGroup != "" || user.Resource != "pods" {
				s.foreign = true
				continue
			}
			s.addPod(consumer{types.NamespacedName{Namespace: ref.Namespace, Name: user.Name}, user.UID})
		}
	}
	if len(s.pools) == 0 {
		return nil
	}
	return s
}

func (s *stake) addPools(allocation *resourceapi.AllocationResult) {
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

func (s *stake) addPod(c consumer) {
	for i := range s.pods {
		if s.pods[i].uid == c.uid {
			if s.pods[i].Name == "" {
				s.pods[i] = c
			}
			return
		}
	}
	s.pods = append(s.pods, c)
}

// without returns the usage without what the stakes hold.
func without(view usage.View, stakes []*stake) usage.View {
	if len(stakes) == 0 {
		return view
	}
	var pools []usage.PoolID
	gone := sets.New[types.UID]()
	for _, s := range stakes {
		gone.Insert(s.claim.UID)
		for _, pool := range s.pools {
			if !slices.Contains(pools, pool) {
				pools = append(pools, pool)
			}
		}
	}
	return view.Without(pools, func(claim usage.ClaimRef) bool { return gone.Has(claim.UID) })
}

// releasedWith returns the stakes that end when the pods go: those that are for these pods and for nobody else.
func (s *stakes) releasedWith(pods map[types.UID]*v1.Pod) []*stake {
	isGoing := func(uid types.UID) bool { return pods[uid] != nil }
	released := sets.New[*stake]()
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
func (s *stakes) withoutPods(view usage.View, pools []usage.PoolID, pods podSet) usage.View {
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
// going, have ended, or will not be bound. preemptor is the pod that waits for that, nil if nobody does; see [Plugin.isLeaving].
func (s *stakes) isLeaving(st *stake, preemptor *v1.Pod) bool {
	if st.foreign {
		return false
	}
	if len(st.pods) == 0 {
		return st.known.Claim != nil && st.known.Claim.DeletionTimestamp != nil
	}
	return !slices.ContainsFunc(st.pods, func(c consumer) bool { return !s.pl.isLeaving(c, preemptor) })
}

// mayBeEvictedFor tells whether the claim ends if all pods of lower priority are evicted.
func (s *stakes) mayBeEvictedFor(st *stake, pod *v1.Pod) bool {
	if s.isLeaving(st, nil) {
		return true
	}
	return !st.foreign && len(st.pods) > 0 && !slices.ContainsFunc(st.pods, func(c consumer) bool {
		other := s.pl.podOf(c)
		return other != nil && corev1helpers.PodPriority(other) >= corev1helpers.PodPriority(pod)
	})
}

// podOf returns the pod as it is known, nil if it has gone or its name is not known.
func (pl *Plugin) podOf(c consumer) *v1.Pod {
	if attempt := pl.shared.attempts.Of(c.uid); attempt != nil {
		return attempt.Pod
	}
	pod, err := pl.handle.SharedInformerFactory().Core().V1().Pods().Lister().Pods(c.Namespace).Get(c.Name)
	if err != nil || pod.UID != c.uid {
		return nil
	}
	return pod
}

// isLeaving tells whether a pod will make no more use of its claims.
//
// A preemptor waits for a pod that is being deleted only if it may have evicted that pod itself, as the scheduler's own preemption does
// (PodEligibleToPreemptOthers): others may take as long as they like. And what is not certain, see podmemory.Attempts, is enough to wait for.
func (pl *Plugin) isLeaving(c consumer, preemptor *v1.Pod) bool {
	certain := preemptor == nil
	attempt := pl.shared.attempts.Of(c.uid)
	if attempt != nil {
		c.NamespacedName = types.NamespacedName{Namespace: attempt.Pod.Namespace, Name: attempt.Pod.Name}
		if attempt.IsCancelled(certain) {
			return true
		}
	}
	if c.Name == "" {
		return !certain // its attempt has ended meanwhile
	}
	pod, err := pl.handle.SharedInformerFactory().Core().V1().Pods().Lister().Pods(c.Namespace).Get(c.Name)
	switch {
	case err != nil:
		return apierrors.IsNotFound(err)
	case pod.UID != c.uid, pod.Status.Phase == v1.PodSucceeded, pod.Status.Phase == v1.PodFailed:
		return true
	case preemptor != nil:
		return preemption.PodTerminatingByPreemption(pod) && pl.groups.PriorityOf(pod) < pl.groups.PriorityOf(preemptor)
	}
	return pod.DeletionTimestamp != nil
}

// leavingOn returns the stakes in devices of a node that are about to end, or have ended since the view was taken. What is only
// predicted must not be in the view: it would look as if it had ended.
func (s *stakes) leavingOn(pools []usage.PoolID, view usage.View, preemptor *v1.Pod) []*stake {
	return s.stakesOn(pools, view, func(st *stake) bool { return s.isLeaving(st, preemptor) })
}

// stakesOn returns the stakes in devices of some pools that are of a kind, or have ended since the view was taken.
func (s *stakes) stakesOn(pools []usage.PoolID, view usage.View, is func(*stake) bool) []*stake {
	var found []*stake
	seen := sets.New[types.UID]()
	for _, id := range pools {
		for _, device := range view.Pool(id).All() {
			for _, holder := range device.Holders() {
				if seen.Has(holder.Claim.UID) {
					continue
				}
				seen.Insert(holder.Claim.UID)
				switch st := s.ofClaim(holder.Claim); {
				case st == nil && !s.own.Has(holder.Claim.UID) && s.pl.shared.trial.allocation(holder.Claim.UID) == nil:
					found = append(found, &stake{claim: holder.Claim, pools: pools, left: true})
				case st != nil && is(st):
					found = append(found, st)
				}
			}
		}
	}
	return found
}
