// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
	"stowage.dev/stowage/pkg/snapshot"
)

// perNode bounds the nodes of which an explanation speaks one by one. Nodes that say the same are grouped by who reads it.
const perNode = 10_000

// NoNodes is the reason of all pods in a cluster without nodes, in the words of kube-scheduler, which tries no plugin then.
const NoNodes = "no nodes available to schedule pods"

// Outcome is what became of a pod.
type Outcome struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// Node is where it has a place, empty if it has none.
	Node string `json:"node,omitempty"`
	// Devices are those that its claims get there; what was allocated before is not among them.
	Devices []Device `json:"devices,omitempty"`
	// Reason is why it has no place, as the scheduler would say it.
	Reason string `json:"reason,omitempty"`
	// RefusedBy is the plugin that refuses it before any node is looked at, if one does: the pod, or what it names, has to be put right.
	RefusedBy string `json:"refusedBy,omitempty"`
	// Nodes groups the nodes that refuse it.
	Nodes []Refusal `json:"nodes,omitempty"`
	// Explanation says which devices are missing; nil if that is not the reason.
	Explanation *explain.Explanation `json:"explanation,omitempty"`
	// Besides is what refuses it on nodes where a release of claims would free the devices that it lacks.
	Besides []Refusal `json:"besides,omitempty"`
	// EvenEmpty is what refuses it on nodes that lack devices and would not take it either if nobody were there. It is found if no
	// release helps.
	EvenEmpty []Refusal `json:"evenEmpty,omitempty"`
	// Others is what refuses it on nodes with devices for another reason than these. It is found if no release helps.
	Others []Refusal `json:"others,omitempty"`
	// Nominated is the node on which it gets a place when the victims have gone.
	Nominated string `json:"nominated,omitempty"`
	// Victims are the pods that preemption evicts, as namespace/name.
	Victims []string `json:"victims,omitempty"`
	// GivenBack are claims of the pod, as namespace/name, whose allocation is in its own way and is given up.
	GivenBack []string `json:"givenBack,omitempty"`

	// reserved is what its claims got.
	reserved []reservation
}

// Device is what a claim gets.
type Device struct {
	Claim   string `json:"claim"`
	Request string `json:"request"`
	Driver  string `json:"driver"`
	Pool    string `json:"pool"`
	Device  string `json:"device"`
}

// reservation is a claim, and the devices that it got.
type reservation struct {
	claim      *resourceapi.ResourceClaim
	allocation *resourceapi.AllocationResult
}

// Refusal is a reason, and the nodes that have it.
type Refusal struct {
	Reason string   `json:"reason"`
	Nodes  []string `json:"nodes"`
}

// Schedule places a pod of the cluster, and keeps it there: later pods see its devices as held. If it has no place, it says why, and whom
// preemption would evict; the victims stay. The error is about the simulation, not the pod.
func (c *Cluster) Schedule(ctx context.Context, pod *v1.Pod) (*Outcome, error) {
	out := &Outcome{Namespace: pod.Namespace, Pod: pod.Name}
	for _, plugin := range c.profile.PreEnqueuePlugins() {
		if status := plugin.PreEnqueue(ctx, pod); !status.IsSuccess() {
			out.Reason, out.RefusedBy = status.Message(), plugin.Name()
			return out, nil
		}
	}
	if all, err := c.snapshot.List(); err != nil || len(all) == 0 {
		out.Reason = NoNodes
		return out, err
	}
	state := framework.NewCycleState()
	nodes, diagnosis, err := c.filter(ctx, state, pod)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", klog.KObj(pod), err)
	}
	if len(nodes) == 0 {
		return out, c.refuse(ctx, state, pod, diagnosis, out)
	}
	node, err := c.choose(ctx, state, pod, nodes)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", klog.KObj(pod), err)
	}
	assumed := pod.DeepCopy()
	assumed.Spec.NodeName = node
	if status := c.profile.RunReservePluginsReserve(ctx, state, assumed, node); !status.IsSuccess() {
		c.profile.RunReservePluginsUnreserve(ctx, state, assumed, node)
		out.Reason = status.Message()
		return out, nil
	}
	info, _ := framework.NewPodInfo(assumed) // see [podInfos.of]
	if err := c.snapshot.AssumePod(info); err != nil {
		return nil, fmt.Errorf("pod %s: %w", klog.KObj(pod), err)
	}
	c.nominees.DeleteNominatedPodIfExists(pod)
	out.Node = node
	reserved, err := deviceclaims.Reserved(state)
	if err != nil {
		return nil, err
	}
	for _, r := range reserved {
		out.reserved = append(out.reserved, reservation{r.Claim, r.Allocation})
		for _, result := range r.Allocation.Devices.Results {
			out.Devices = append(out.Devices, Device{r.Claim.Name, result.Request, result.Driver, result.Pool, result.Device})
		}
	}
	return out, nil
}

// filter returns the nodes that take the pod, in the order of the snapshot.
func (c *Cluster) filter(ctx context.Context, state fwk.CycleState, pod *v1.Pod) ([]fwk.NodeInfo, *framework.Diagnosis, error) {
	diagnosis := &framework.Diagnosis{NodeToStatus: framework.NewDefaultNodeToStatus()}
	all, err := c.snapshot.List()
	if err != nil {
		return nil, nil, err
	}
	limit, status, plugins := c.profile.RunPreFilterPlugins(ctx, state, pod)
	diagnosis.UnschedulablePlugins = plugins
	if !status.IsSuccess() {
		if !status.IsRejected() {
			return nil, nil, status.AsError()
		}
		diagnosis.NodeToStatus.SetAbsentNodesStatus(status)
		diagnosis.PreFilterMsg = status.Message()
		diagnosis.AddPluginStatus(status)
		return nil, diagnosis, nil
	}
	nodes := all
	if !limit.AllNodes() {
		nodes = slices.DeleteFunc(slices.Clone(all), func(n fwk.NodeInfo) bool { return !limit.NodeNames.Has(n.Node().Name) })
		diagnosis.NodeToStatus.SetAbsentNodesStatus(fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
			fmt.Sprintf("node(s) didn't satisfy plugin(s) %v", sets.List(plugins))))
	}
	statuses := make([]*fwk.Status, len(nodes))
	c.profile.Parallelizer().Until(ctx, len(nodes), func(i int) {
		statuses[i] = c.profile.RunFilterPluginsWithNominatedPods(ctx, state, pod, nodes[i])
	}, "Filter")
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	var feasible []fwk.NodeInfo
	for i, status := range statuses {
		switch {
		case status.Code() == fwk.Error:
			return nil, nil, status.AsError()
		case status.IsSuccess():
			feasible = append(feasible, nodes[i])
		default:
			diagnosis.NodeToStatus.Set(nodes[i].Node().Name, status)
			diagnosis.AddPluginStatus(status)
		}
	}
	return feasible, diagnosis, nil
}

// choose returns one of the nodes with the best score.
func (c *Cluster) choose(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodes []fwk.NodeInfo) (string, error) {
	if len(nodes) == 1 {
		return nodes[0].Node().Name, nil
	}
	if status := c.profile.RunPreScorePlugins(ctx, state, pod, nodes); !status.IsSuccess() {
		return "", status.AsError()
	}
	scores, status := c.profile.RunScorePlugins(ctx, state, pod, nodes)
	if !status.IsSuccess() {
		return "", status.AsError()
	}
	best := slices.MaxFunc(scores, func(a, b fwk.NodePluginScores) int { return int(a.TotalScore - b.TotalScore) }).TotalScore
	var names []string
	for _, score := range scores {
		if score.TotalScore == best {
			names = append(names, score.Name)
		}
	}
	slices.Sort(names)
	return names[c.random.IntN(len(names))], nil
}

// refuse finds out why, and whom preemption would evict.
func (c *Cluster) refuse(ctx context.Context, state fwk.CycleState, pod *v1.Pod, diagnosis *framework.Diagnosis, out *Outcome) error {
	all, err := c.snapshot.List()
	if err != nil {
		return err
	}
	out.Nodes = group(all, diagnosis)
	if diagnosis.PreFilterMsg != "" {
		out.RefusedBy = strings.Join(sets.List(diagnosis.UnschedulablePlugins), ", ")
	} else {
		e, err := deviceclaims.Explain(ctx, c.plugin, state, pod, perNode)
		if err != nil {
			return err
		}
		if out.Explanation, out.Besides, err = c.confirm(ctx, state, pod, e); err != nil {
			return err
		}
		if e != nil && len(out.Explanation.Holders) == 0 {
			if err := c.compare(ctx, state, pod, all, diagnosis, out); err != nil {
				return err
			}
		}
	}
	c.writes.take()
	result, status := c.profile.RunPostFilterPlugins(ctx, state, pod, diagnosis.NodeToStatus)
	if status.Code() == fwk.Error {
		return fmt.Errorf("pod %s: %w", klog.KObj(pod), status.AsError())
	}
	diagnosis.PostFilterMsg = status.Message()
	if out.Explanation != nil || diagnosis.PreFilterMsg == "" {
		diagnosis.PostFilterMsg = ""
	}
	out.Reason = strings.TrimSpace((&framework.FitError{Pod: pod, NumAllNodes: len(all), Diagnosis: *diagnosis}).Error())
	deleted, claims := c.writes.take()
	for _, victim := range deleted {
		out.Victims = append(out.Victims, victim.String())
	}
	slices.Sort(out.Victims)
	for _, claim := range claims {
		out.GivenBack = append(out.GivenBack, snapshot.Reference(claim))
	}
	if result != nil && result.NominatingInfo != nil {
		out.Nominated = result.NominatedNodeName
	}
	return nil
}

// group joins the nodes that are refused for the same reasons.
func group(all []fwk.NodeInfo, diagnosis *framework.Diagnosis) (groups []Refusal) {
	by := map[string][]string{}
	for _, node := range all {
		status := diagnosis.NodeToStatus.Get(node.Node().Name)
		reason := strings.Join(status.Reasons(), "; ")
		by[reason] = append(by[reason], node.Node().Name)
	}
	for _, reason := range slices.Sorted(maps.Keys(by)) {
		slices.Sort(by[reason])
		groups = append(groups, Refusal{reason, by[reason]})
	}
	slices.SortStableFunc(groups, func(a, b Refusal) int { return len(b.Nodes) - len(a.Nodes) })
	return groups
}
