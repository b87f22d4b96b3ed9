package deviceclaims

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
)

// PreFilter looks up the pod's claims, refuses the pod where no node could help, compiles the claims that need
// an allocation, and takes the views of inventory and usage on which all nodes are judged.
//
// Claims that are allocated already limit the nodes to those that the allocation can be used on.
func (pl *Plugin) PreFilter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, _ []fwk.NodeInfo) (*fwk.PreFilterResult, *fwk.Status) {
	extended := extendedResources(pod)
	if len(pod.Spec.ResourceClaims) == 0 && len(extended) == 0 {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	state.Delete(stateKey)
	c, status := pl.newCycle(ctx, pod, extended)
	if !status.IsSuccess() {
		klog.FromContext(ctx).V(5).Info("Pod cannot be scheduled", "pod", klog.KObj(pod), "reason", status.Message())
		return nil, status
	}
	state.Write(stateKey, c)
	return c.preFilterResult(), nil
}

func (pl *Plugin) newCycle(ctx context.Context, pod *v1.Pod, extended []v1.ResourceName) (*cycle, *fwk.Status) {
	c := &cycle{plan: &plan{extended: extended}, results: newResults(nil), binding: &binding{}}
	if len(pod.Spec.ResourceClaims) == 0 {
		return c, nil
	}
	if len(pod.Status.NodeAllocatableResourceClaimStatuses) > 0 {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
			"status.nodeAllocatableResourceClaimStatuses is set: claims for CPU or memory of a node are not supported")
	}
	names, err := claimNames(pod)
	if err != nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}
	if err := pl.shared.waitForSync(ctx); err != nil {
		return nil, fwk.AsStatus(err)
	}

	// Noted as waiting before anything is looked at: whatever changes later than that wakes the pod.
	pl.shared.waiting.addForDevices(pl.handle, pod, namespacedNames(names))
	c.usage = pl.shared.tracker.Snapshot().Usage
	c.inventory = pl.shared.store.View()

	var unallocated []*resourceapi.ResourceClaim
	for _, name := range names {
		claim, err := pl.shared.claimOf(pod, name)
		if err != nil {
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
		}
		pc := podClaim{claim: claim}
		if claim.Status.Allocation == nil {
			if pending, _ := pl.shared.tracker.Pending(claim.UID); pending != nil {
				return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
					fmt.Sprintf("claim %s is being allocated for another pod", name))
			}
			unallocated = append(unallocated, claim)
		} else if pc.nodes, err = usableAllocation(pod, claim); err != nil {
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
		}
		c.claims = append(c.claims, pc)
	}
	if len(unallocated) == 0 {
		return c, nil
	}
	if c.requests, err = allocator.Compile(unallocated, c.inventory, pl.features); err != nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}
	return c, nil
}

// usableAllocation returns the nodes on which a pod can use a claim that is allocated, nil for all, or why it
// cannot.
func usableAllocation(pod *v1.Pod, claim *resourceapi.ResourceClaim) (*nodeaffinity.NodeSelector, error) {
	if !isReservedFor(claim, pod) {
		if !resourceclaim.CanBeReserved(claim) {
			return nil, fmt.Errorf("claim %s is in use", klog.KObj(claim))
		}
		if err := checkReservedForLimit(claim); err != nil {
			return nil, err
		}
	}
	selector := claim.Status.Allocation.NodeSelector
	if selector == nil {
		return nil, nil
	}
	nodes, err := nodeaffinity.NewNodeSelector(selector)
	if err != nil {
		return nil, fmt.Errorf("claim %s, status.allocation.nodeSelector: %w", klog.KObj(claim), err)
	}
	return nodes, nil
}

// checkReservedForLimit fails if no further pod can use the claim.
func checkReservedForLimit(claim *resourceapi.ResourceClaim) error {
	if n := len(claim.Status.ReservedFor); n >= resourceapi.ResourceClaimReservedForMaxSize {
		return fmt.Errorf("claim %s is already reserved for %d pods, the limit is %d", klog.KObj(claim), n, resourceapi.ResourceClaimReservedForMaxSize)
	}
	return nil
}

// preFilterResult limits the nodes to those that the allocated claims name. Nil means no limit.
func (p *plan) preFilterResult() *fwk.PreFilterResult {
	var nodes sets.Set[string]
	for _, pc := range p.claims {
		if pc.nodes == nil {
			continue
		}
		names := nodesByName(pc.claim.Status.Allocation.NodeSelector)
		switch {
		case names == nil:
		case nodes == nil:
			nodes = names
		default:
			nodes = nodes.Intersection(names)
		}
	}
	if nodes == nil {
		return nil
	}
	return &fwk.PreFilterResult{NodeNames: nodes}
}

// nodesByName returns the nodes that a selector lists by name, nil if it selects in another way. That is how
// allocations of node-local devices look.
func nodesByName(selector *v1.NodeSelector) sets.Set[string] {
	names := sets.New[string]()
	for _, term := range selector.NodeSelectorTerms {
		if len(term.MatchExpressions) != 0 || len(term.MatchFields) != 1 {
			return nil
		}
		field := term.MatchFields[0]
		if field.Key != metav1.ObjectNameField || field.Operator != v1.NodeSelectorOpIn {
			return nil
		}
		names.Insert(field.Values...)
	}
	return names
}

// PreFilterExtensions returns nil: adding or removing pods changes nothing here. Devices belong to claims,
// which stay allocated until their pods are gone for good.
func (pl *Plugin) PreFilterExtensions() fwk.PreFilterExtensions { return nil }
