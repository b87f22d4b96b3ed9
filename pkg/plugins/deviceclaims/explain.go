package deviceclaims

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	v1helper "k8s.io/kubernetes/pkg/apis/core/v1/helper"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
)

// explain says why no node satisfies the pod's claims: where they are allocated already, and what of those that are not is missing. Both
// may be empty.
func (pl *Plugin) explain(ctx context.Context, c *cycle.State, pod *v1.Pod) (where, missing string) {
	return pl.whereAllocated(c), pl.tellMissing(ctx, c, pod)
}

// join makes one text of those that are not empty.
func join(texts ...string) string {
	return strings.Join(slices.DeleteFunc(texts, func(text string) bool { return text == "" }), "; ")
}

// tellMissing is explainMissing for the pod's user. What that one is not to know is in the log alone.
func (pl *Plugin) tellMissing(ctx context.Context, c *cycle.State, pod *v1.Pod) string {
	found := pl.explainMissing(ctx, c, pod)
	if found == nil {
		return ""
	}
	whole, told := found.String(), found
	if !pl.rivals.NameAll {
		told = found.InNamespace(pod.Namespace)
	}
	text := told.String()
	if text != whole {
		klog.FromContext(ctx).V(2).Info("Pod waits for claims of other namespaces", "pod", klog.KObj(pod), "why", whole)
	}
	return text
}

// explainMissing says what devices are missing, and whose release would help or that none would. It is nil if that was not the reason.
func (pl *Plugin) explainMissing(ctx context.Context, c *cycle.State, pod *v1.Pod) *allocator.Explanation {
	wanted := c.Results.MostRefused()
	if wanted == nil {
		return nil
	}
	failures := c.Results.FailuresFor(wanted.Requests)
	explanation := allocator.Explain(wanted.Requests, failures, allocator.Naming{
		Rule: pl.taintRule,
		Subject: func(claim types.NamespacedName, request string) string {
			if !extended.IsUnborn(claim.Name) {
				return ""
			}
			return wanted.Subject(request)
		},
	})
	if explanation.Nodes == 0 {
		return nil
	}
	for reason, n := range explanation.Reasons {
		refusedNodesTotal.WithLabelValues(string(reason)).Add(float64(n))
	}
	keep := sets.New[types.UID]()
	for _, pc := range c.Claims {
		keep.Insert(pc.Claim.UID)
	}
	ctx, cancel := context.WithTimeout(ctx, pl.shared.limits.Holders)
	defer cancel()
	input := c.Input(ctx, wanted.Requests, nil)
	input.Attempt = c.Budget
	explanation.Holders = allocator.FindHolders(ctx, input, failures, pl.nodeThatCanHold(pod), allocator.HolderOptions{Keep: keep, Namespace: pod.Namespace})
	if len(explanation.Holders) == 0 {
		allocator.FindLimits(ctx, input, explanation, pl.suitableNodes(ctx, pod))
	}
	return explanation
}

// suitableNodes iterates over the nodes that the pod may be on by their labels and taints.
func (pl *Plugin) suitableNodes(ctx context.Context, pod *v1.Pod) iter.Seq[*v1.Node] {
	suitable := pl.setup.Suitable(klog.FromContext(ctx), pod)
	return func(yield func(*v1.Node) bool) {
		nodes, err := pl.handle.SnapshotSharedLister().NodeInfos().List()
		if err != nil {
			return
		}
		for _, info := range nodes {
			if suitable(info.Node()) && !yield(info.Node()) {
				return
			}
		}
	}
}

// whereAllocated says for which nodes the pod's claims are allocated already, if that rules out others. The scheduler does not say more of
// nodes that PreFilter leaves out than that this plugin did it. If it left out all, it has said this itself.
func (pl *Plugin) whereAllocated(c *cycle.State) string {
	if limit := c.PreFilterResult(); limit != nil && len(limit.NodeNames) == 0 {
		return ""
	}
	var texts []string
	for i := range c.Claims {
		if pc := &c.Claims[i]; pc.Nodes != nil {
			texts = append(texts, pl.describePin(pc)+": the pod can run nowhere else")
		}
	}
	return join(texts...)
}

// describePin says for which nodes a claim is allocated. One that is planned is so for another node each time: if the text named it, pod and
// group would be written with each attempt.
func (pl *Plugin) describePin(pc *podclaims.Claim) string {
	of := ""
	if pc.User.Resource == "podgroups" {
		of = fmt.Sprintf(" of pod group %s", pc.User.Name)
	}
	if pc.Shared != nil {
		return fmt.Sprintf("claim %s%s is planned for another pod of the group on one node", klog.KObj(pc.Claim), of)
	}
	names := podclaims.NodesByName(pc.Allocation().NodeSelector)
	if names == nil {
		return fmt.Sprintf("claim %s%s is allocated on nodes that its status.allocation.nodeSelector selects", klog.KObj(pc.Claim), of)
	}
	var nodes []string
	for _, name := range sets.List(names) {
		if pl.nodeOf(name) == nil {
			name += " (which does not exist)"
		}
		nodes = append(nodes, name)
	}
	return fmt.Sprintf("claim %s%s is allocated on node %s", klog.KObj(pc.Claim), of, strings.Join(nodes, " or "))
}

// taintRule returns the name of the DeviceTaintRule that a device has a taint from, empty if its driver has set the taint.
func (pl *Plugin) taintRule(pool inventory.PoolID, device string, taint *resourceapi.DeviceTaint) string {
	if !enabled(features.DRADeviceTaintRules) {
		return ""
	}
	rules, err := pl.handle.SharedInformerFactory().Resource().V1().DeviceTaintRules().Lister().List(labels.Everything())
	if err != nil {
		return ""
	}
	first := ""
	for _, rule := range rules {
		selector := rule.Spec.DeviceSelector
		if selector == nil || ptr.Deref(selector.Driver, pool.Driver) != pool.Driver || ptr.Deref(selector.Pool, pool.Pool) != pool.Pool ||
			ptr.Deref(selector.Device, device) != device {
			continue
		}
		set := &rule.Spec.Taint
		if set.Key == taint.Key && set.Value == taint.Value && set.Effect == taint.Effect && set.TimeAdded.Equal(taint.TimeAdded) &&
			(first == "" || rule.Name < first) {
			first = rule.Name
		}
	}
	return first
}

// nodeOf returns the node with the name as it is in this cycle, nil if there is none.
func (pl *Plugin) nodeOf(name string) *v1.Node {
	info, err := pl.handle.SnapshotSharedLister().NodeInfos().Get(name)
	if err != nil {
		return nil
	}
	return info.Node()
}

// nodeThatCanHold is nodeOf for those nodes whose CPU, memory and alike suffice for the pod's containers when nobody else is there. This plugin
// is asked before NodeResourcesFit, and the release of devices on another node would help nobody.
func (pl *Plugin) nodeThatCanHold(pod *v1.Pod) func(name string) *v1.Node {
	if !pl.setup.Filters(names.NodeResourcesFit) {
		return pl.nodeOf
	}
	least := map[v1.ResourceName]amount.Amount{}
	for i := range pod.Spec.Containers {
		for resource, quantity := range pod.Spec.Containers[i].Resources.Requests {
			if !v1helper.IsExtendedResourceName(resource) { // a class may stand for them
				least[resource] = least[resource].Add(amount.Of(quantity))
			}
		}
	}
	return func(name string) *v1.Node {
		node := pl.nodeOf(name)
		if node == nil {
			return nil
		}
		for resource, wanted := range least {
			if offered, ok := node.Status.Allocatable[resource]; ok && amount.Of(offered).Less(wanted) {
				return nil
			}
		}
		return node
	}
}

// Explain is why a pod that has been through PreFilter and Filter with the state has no node for its claims, node by node for the first
// perNode nodes by name. It is nil if devices were not the reason, or PreFilter has refused the pod. It decides nothing: a simulation asks.
func Explain(ctx context.Context, pl *Plugin, state fwk.CycleState, pod *v1.Pod, perNode int) (*allocator.Explanation, error) {
	c, err := cycle.Read(state)
	if err != nil || c == nil {
		return nil, err
	}
	found := pl.explainMissing(ctx, c, pod)
	if wanted := c.Results.MostRefused(); found != nil && perNode > 0 {
		found.PerNode = allocator.ExplainNodes(wanted.Requests, c.Results.FailuresFor(wanted.Requests), perNode)
	}
	return found, nil
}

// WaitForSync waits until the plugin has seen all claims, slices and classes once. Before that PreEnqueue lets pods pass, and leaves them to
// PreFilter. The error is that ctx has ended, or that it took longer than 10 s.
func WaitForSync(ctx context.Context, pl *Plugin) error { return pl.shared.waitForSync(ctx) }

// Reserved is what Reserve has decided for the pod of the state, claim by claim.
func Reserved(state fwk.CycleState) ([]tracker.Reservation, error) {
	c, err := cycle.Read(state)
	if err != nil || c == nil {
		return nil, err
	}
	return slices.Clone(c.Binding.Reserved), nil
}
