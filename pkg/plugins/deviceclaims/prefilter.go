package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/usage"
	"stowage.dev/stowage/pkg/wakeup"
)

// reasonPausing does not say how long: the pod would be written with each attempt.
const reasonPausing = "the pod pauses for some seconds: it was refused again and again after its group had been tried"

// PreFilter looks up the pod's claims, refuses the pod where no node could help, compiles the claims that need
// an allocation, and takes the views of inventory and usage on which all nodes are judged.
//
// Claims that are allocated already limit the nodes to those that the allocation can be used on.
//
// A pod that has a node has its devices, too. It is tried because of a resize that its kubelet has deferred (feature gate
// InPlacePodVerticalScalingSchedulerPreemption), for which others may be evicted from its node, and devices do not matter for that.
func (pl *Plugin) PreFilter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, _ []fwk.NodeInfo) (*fwk.PreFilterResult, *fwk.Status) {
	if pod.Spec.NodeName != "" {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	resources := extended.NamesOf(pod)
	if len(pod.Spec.ResourceClaims) == 0 && len(resources) == 0 {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	state.Delete(stateKey)
	inGroup := state.IsPodGroupSchedulingCycle()
	c, status := pl.newCycle(ctx, pod, resources, inGroup)
	if !status.IsSuccess() {
		klog.FromContext(ctx).V(5).Info("Pod cannot be scheduled", "pod", klog.KObj(pod), "reason", status.Message())
		return nil, status
	}
	state.Write(stateKey, c)
	if inGroup {
		if err := noteInGroup(state, pod, c); err != nil {
			return nil, fwk.AsStatus(err)
		}
	}
	result := c.preFilterResult()
	if !result.AllNodes() && len(result.NodeNames) == 0 {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, pl.nowhere(c))
	}
	return result, nil
}

// nowhere says that claims are allocated for nodes that have none in common.
func (pl *Plugin) nowhere(c *cycle) string {
	var pins []string
	for i := range c.claims {
		if pc := &c.claims[i]; pc.Nodes != nil && podclaims.NodesByName(pc.Allocation().NodeSelector) != nil {
			pins = append(pins, pl.describePin(pc))
		}
	}
	return strings.Join(pins, ", ") + ": no node can use all of them"
}

// newCycle begins an attempt. With inGroup it is one of several in a cycle of the pod's group.
func (pl *Plugin) newCycle(ctx context.Context, pod *v1.Pod, resources []v1.ResourceName, inGroup bool) (*cycle, *fwk.Status) {
	c := &cycle{plan: &plan{
		budget: pl.time.budget(pod), failed: pl.shared.elsewhere.Of(pod.UID),
	}, Situation: contention.Situation{Facts: &contention.Facts{Search: pl.rivals.Search, Holders: pl.rivals.NewHolders()}}, results: newResults(nil), binding: &progress{}}
	if len(pod.Status.NodeAllocatableResourceClaimStatuses) > 0 {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
			"status.nodeAllocatableResourceClaimStatuses is set: claims for CPU or memory of a node are not supported")
	}
	names, err := podclaims.NamesOf(pod)
	if err != nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}
	if err := pl.shared.waitForSync(ctx); err != nil {
		return nil, fwk.AsStatus(err)
	}
	ofGroup, err := pl.groups.ClaimsOf(pod)
	if err != nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}
	if inGroup {
		c.Trial = pl.shared.common.Trial
		if c.Trial.IsForgetful() {
			c.failed = nil
		}
		if c.WhatIf, err = c.Trial.WhatIf(pl.handle); err != nil {
			return nil, fwk.AsStatus(err)
		}
	}

	// Noted as waiting before anything is looked at: whatever changes later than that is looked at for the pod. What is tried while the
	// group's attempt ends is none: the pod waits for what the attempt has found.
	var made []*resourceapi.ResourceClaim
	if len(resources) > 0 {
		made = pl.extended.MadeFor(pod)
	}
	attempted := !c.WhatIf.IsDryRun()
	waits := attempted && (len(names) > 0 || len(made) > 0 || len(resources) > 0)
	if waits {
		pl.shared.waiting.Note(pod, append(podclaims.NamespacedNames(names), namesOf(made)...), pl)
	}
	snapshot := pl.shared.tracker.Snapshot()
	c.Usage = snapshot.Usage
	c.Inventory = pl.shared.store.View()
	within, done := c.budget.Evaluate(ctx)
	asked, err := pl.ask(within, pod, names, c.Inventory, c.Trial)
	var question *wakeup.Question
	if waits {
		question = pl.question(within, pod, asked, c.Inventory, err)
	}
	done()
	if waits {
		pl.shared.waiting.Judged(pod.UID, question, wakeup.Seen{Usage: snapshot.Revision, Inventory: c.Inventory.Generation()})
	}
	if errors.Is(err, errEvaluation) {
		until := pl.hasTimeAt(pod)
		if attempted {
			pl.shared.waiting.Refused(pod.UID, wakeup.Refusal{Undecided: true, NotBefore: until}, pl.binder.Clock.Now())
		}
		err = errors.New(join(err.Error(), pl.putOff(pod, until)))
	}
	if err != nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable).WithError(err)
	}
	if until := pl.shared.common.Attempts.PausesUntil(pod.UID); inGroup && pl.binder.Clock.Now().Before(until) {
		if attempted {
			pl.shared.waiting.Refused(pod.UID, wakeup.Refusal{NotBefore: until}, pl.binder.Clock.Now())
		}
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, reasonPausing)
	}
	c.claims, c.base, c.extended = asked.claims, &extended.Variant{Requests: asked.requests}, asked.extended
	for i := range c.claims {
		pc := &c.claims[i]
		c.Holders.Own.Insert(pc.Claim.UID)
		if user, ok := ofGroup[pc.Claim.Name]; ok {
			pc.User = user
		}
	}
	return c, nil
}

// ask looks at a pod's claims and compiles those without allocation. The error says why the pod cannot be tried on any node; what is
// known by then is returned with it. Claims are compiled until ctx ends. trial has what other pods of the group have been given in this cycle, if it is one of the group.
func (pl *Plugin) ask(ctx context.Context, pod *v1.Pod, names []podclaims.Name, inv *inventory.View, trial *contention.Trial) (*asked, error) {
	a := &asked{}
	for _, name := range names {
		claim, err := podclaims.Get(pl.shared.tracker, pod, name)
		if err != nil {
			return a, err
		}
		pc := podclaims.Claim{Claim: claim, User: podclaims.UserOf(pod)}
		if claim.Status.Allocation == nil {
			if pending, _ := pl.shared.tracker.Pending(claim.UID); pending != nil {
				return a, podevents.Postpone(podevents.ReasonClaimBusy, claim, pl.beingAllocated(pod, claim))
			}
			if trial != nil {
				pc.Shared = trial.Allocation(claim.UID)
			}
			if pc.Shared == nil {
				a.unallocated = append(a.unallocated, claim)
			} else if pc.Nodes, err = podclaims.NodesOf(claim, pc.Shared); err != nil {
				return a, err
			}
		} else if pc.Nodes, err = pl.usableAllocation(pod, claim); err != nil {
			return a, err
		}
		a.claims = append(a.claims, pc)
	}
	var err error
	if a.requests, err = pl.compile(ctx, a.unallocated, inv); err != nil {
		return a, err
	}
	if names := extended.NamesOf(pod); len(names) > 0 {
		return a, pl.askExtended(pod, names, a, inv)
	}
	return a, nil
}

// askExtended adds to what the pod asks for what it asks for as extended resources.
func (pl *Plugin) askExtended(pod *v1.Pod, names []v1.ResourceName, a *asked, inv *inventory.View) error {
	a.extended = pl.extended.Plan(pod, names, a.requests, func(ctx context.Context, claim *resourceapi.ResourceClaim) (*allocator.Requests, error) {
		return pl.compile(ctx, append(slices.Clip(a.unallocated), claim), inv)
	})
	adopted := a.extended.Adopted
	if adopted == nil {
		return nil
	}
	nodes, err := pl.usableAllocation(pod, adopted)
	if err != nil {
		return err
	}
	a.claims = append(a.claims, podclaims.Claim{Claim: adopted, Nodes: nodes, User: podclaims.UserOf(pod)})
	return nil
}

// beingAllocated says for whom a claim of the pod is being allocated just now. With it the pod is tried again.
func (pl *Plugin) beingAllocated(pod *v1.Pod, claim *resourceapi.ResourceClaim) error {
	var others []string
	for _, owner := range pl.shared.tracker.Holding(usage.RefOf(claim)).Owners {
		if owner == pod.UID {
			continue
		}
		if other := pl.rivals.PodOf(types.NamespacedName{}, owner); other != nil {
			others = append(others, "pod "+other.Name)
		}
	}
	slices.Sort(others)
	of := "which the pod uses"
	if n := len(others); n > 0 {
		of = "which the pod shares with " + strings.Join(others, ", ")
	}
	return fmt.Errorf("claim %s, %s, is being allocated: the pod is tried again with it", klog.KObj(claim), of)
}

// compile compiles claims, to nil if there are none.
func (pl *Plugin) compile(ctx context.Context, claims []*resourceapi.ResourceClaim, inv *inventory.View) (*allocator.Requests, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	return allocator.CompileWithin(ctx, claims, inv, pl.rivals.Features)
}

// usableAllocation returns the nodes on which a pod can use a claim that is allocated, nil for all, or why it
// cannot.
func (pl *Plugin) usableAllocation(pod *v1.Pod, claim *resourceapi.ResourceClaim) (*nodeaffinity.NodeSelector, error) {
	if !resourceclaim.IsReservedForPod(pod, claim, enabled(features.DRAWorkloadResourceClaims)) {
		if !resourceclaim.CanBeReserved(claim) {
			return nil, fmt.Errorf("claim %s is in use", klog.KObj(claim))
		}
		if err := pl.shared.books.Places.Check(claim, pod.UID); err != nil {
			return nil, err
		}
	}
	return podclaims.NodesOf(claim, claim.Status.Allocation)
}

// preFilterResult limits the nodes to those that the allocated claims name. Nil means no limit.
func (p *plan) preFilterResult() *fwk.PreFilterResult {
	var nodes sets.Set[string]
	for _, pc := range p.claims {
		if pc.Nodes == nil {
			continue
		}
		names := podclaims.NodesByName(pc.Allocation().NodeSelector)
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

// namesOf returns the names of claims.
func namesOf(claims []*resourceapi.ResourceClaim) []types.NamespacedName {
	names := make([]types.NamespacedName, len(claims))
	for i, claim := range claims {
		names[i] = types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	}
	return names
}
