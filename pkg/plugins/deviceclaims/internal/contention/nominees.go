// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"cmp"
	"context"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/usage"
)

// nominee is a pod that other pods were evicted for, and that has not been scheduled yet.
type nominee struct {
	// unallocated are its claims without allocation, and the one that is still to be made for its extended resources.
	unallocated []*resourceapi.ResourceClaim
	// requests are what the pod still needs when some of these claims have been given devices already, by the UIDs of the others. Nil
	// if that is nothing, or if it cannot be compiled.
	requests map[string]*allocator.Requests
}

// nominee returns what a pod still needs that is nominated to the node, besides what given has. Claims that it shares with the pod that is
// being scheduled are left out: they are allocated once, for both.
// They are compiled in the time of the nominated pod's namespace.
func (s *Holders) nominee(ctx context.Context, pod *v1.Pod, node *v1.Node, inv *inventory.View,
	given sets.Set[types.UID],
) *allocator.Requests {
	time := s.timeFor(pod)
	s.mutex.Lock()
	defer s.mutex.Unlock()
	n := s.nominees[pod.UID]
	if n == nil {
		n = &nominee{unallocated: s.unallocatedOf(pod, node), requests: map[string]*allocator.Requests{}}
		s.nominees[pod.UID] = n
	}
	needed := slices.DeleteFunc(slices.Clone(n.unallocated), func(claim *resourceapi.ResourceClaim) bool { return given.Has(claim.UID) })
	if len(needed) == 0 {
		return nil
	}
	var key strings.Builder
	for _, claim := range needed {
		key.WriteString(string(claim.UID) + " ")
	}
	requests, known := n.requests[key.String()]
	if !known {
		var err error
		within, done := time.Evaluate(ctx)
		requests, err = allocator.CompileWithin(within, needed, inv, s.rivals.Features)
		done()
		if err != nil {
			klog.FromContext(ctx).V(4).Info("No devices are kept for a nominated pod, because its claims cannot be used",
				"nominatedPod", klog.KObj(pod), "reason", err.Error())
		}
		n.requests[key.String()] = requests
	}
	return requests
}

// unallocatedOf returns the claims of a pod nominated to the node that have no devices yet and that nobody is being given devices
// for. It is none if the pod cannot come: it waits for one of its claims, or another one has been allocated meanwhile, cannot be
// used on the node, and is in use by others.
func (s *Holders) unallocatedOf(pod *v1.Pod, node *v1.Node) []*resourceapi.ResourceClaim {
	if _, err := podclaims.Usable(s.rivals.Claims, pod); err != nil {
		return nil
	}
	var unallocated []*resourceapi.ResourceClaim
	for _, name := range podclaims.NamedBy(pod) {
		claim, err := s.rivals.Claims.Get(pod.Namespace, name)
		if err != nil || s.Own.Has(claim.UID) {
			continue
		}
		if allocation := claim.Status.Allocation; allocation != nil {
			if nodes, err := podclaims.NodesOf(claim, allocation); err == nil && nodes != nil && !nodes.Match(node) &&
				!podclaims.UsedOnlyBy(claim, pod.UID) {
				return nil
			}
			continue
		}
		if pending, _ := s.rivals.Claims.Pending(claim.UID); pending == nil && s.rivals.Trial.Allocation(claim.UID) == nil {
			unallocated = append(unallocated, claim)
		}
	}
	if claim := s.rivals.Extended.UnbornFor(pod, node); claim != nil {
		unallocated = append(unallocated, claim)
	}
	return unallocated
}

// WithNominees returns the usage with the devices that pods nominated to the node are going to get, one pod after the
// other; a claim that several of them share gets its devices with the first. Where too few are free they may choose among those of
// claims which are about to leave, because it is for these pods that they leave. Between the nomination and the moment at which the
// victims are seen to go, nothing tells who they are: then any pod of lower priority may be one. A pod that would not fit even then
// keeps nobody from anything, nor does one for which there is no time left: all of a namespace together have as much as a node has
// in Filter, and as the namespace has saved.
func (s *Holders) WithNominees(ctx context.Context, pods []*v1.Pod, node *v1.Node, inv *inventory.View, view usage.View) usage.View {
	if len(pods) > 0 {
		var cancel context.CancelFunc
		ctx, cancel = s.rivals.Time.OnNode(ctx)
		defer cancel()
	}
	pools, base := PoolsOf(node, inv), view
	given := sets.New[types.UID]()
	for _, pod := range pods {
		requests := s.nominee(ctx, pod, node, inv, given)
		if requests == nil {
			continue
		}
		input := allocator.Input{
			Requests: requests, Node: node, Inventory: inv, Usage: view, Policy: s.rivals.Policy,
			Scoring: s.rivals.Scoring, Attempt: s.timeFor(pod),
		}
		result := allocator.Allocate(ctx, input)
		if !result.Fits() {
			input.Usage = without(view, s.leavingOn(pools, base, nil))
			result = allocator.Allocate(ctx, input)
		}
		if !result.Fits() {
			input.Usage = without(view, s.holdersOn(pools, base, func(st *Holder) bool { return s.mayBeEvictedFor(st, pod) }))
			result = allocator.Allocate(ctx, input)
		}
		for i := range result.Allocations {
			claim := requests.Claims()[i]
			given.Insert(claim.UID)
			view = view.With(usage.RefOf(claim), &result.Allocations[i])
		}
	}
	return view
}

// NominatedBefore returns the pods that are nominated to the node and that the pod has to make way for, as the framework
// chooses them for Filter.
func (r *Rivals) NominatedBefore(pod *v1.Pod, node string) []*v1.Pod {
	var pods []*v1.Pod
	for _, info := range r.Handle.NominatedPodsForNode(node) {
		other := info.GetPod()
		if other.UID != pod.UID && corev1helpers.PodPriority(other) >= corev1helpers.PodPriority(pod) && r.MakesWay(pod, other, node) {
			pods = append(pods, other)
		}
	}
	return pods
}

// MakesWay tells whether a pod leaves another one that is nominated to the node what that is going to get there.
func (r *Rivals) MakesWay(pod, other *v1.Pod, node string) bool {
	return podclaims.UsesDevices(other) && !goesBefore(pod, other, node) && r.Nominations.keep(other, node)
}

// goesBefore tells whether a pod does not make way for another one that is nominated to the node and has the same priority: it is nominated
// to it, too, and came first. Would each make way for the other when somebody else got a device, nobody got those that are left.
func goesBefore(pod, other *v1.Pod, node string) bool {
	// Asked for each node and nominee: the scheduling queue, which may know of the nomination earlier, is not asked. Nor is the
	// informer, which may know more than the queue: the attempt would contradict itself, as the framework looks at the queue's
	// pod. When the queue has the new one, the pod is looked at again, see waiting.Hints.
	if pod.Status.NominatedNodeName != node || corev1helpers.PodPriority(pod) != corev1helpers.PodPriority(other) {
		return false
	}
	return cmp.Or(pod.CreationTimestamp.Compare(other.CreationTimestamp.Time), cmp.Compare(pod.UID, other.UID)) < 0
}

// isNominated tells whether the node is the one that pods were evicted from for this pod.
func (r *Rivals) isNominated(pod *v1.Pod, node string) bool {
	if pod.Status.NominatedNodeName != "" {
		return pod.Status.NominatedNodeName == node
	}
	// The scheduler may have decided so and not have heard of its own write to the pod.
	return slices.ContainsFunc(r.Handle.NominatedPodsForNode(node), func(info fwk.PodInfo) bool { return info.GetPod().UID == pod.UID })
}

// PoolsOf are the pools that the node sees.
func PoolsOf(node *v1.Node, inv *inventory.View) []usage.PoolID {
	var pools []usage.PoolID
	for _, pool := range inv.ForNode(node).Pools {
		pools = append(pools, usage.PoolID(pool.ID()))
	}
	return pools
}
