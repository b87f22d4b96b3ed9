// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
)

// confirm leaves those releases in an explanation that would help, and returns what else refuses the pod on the other nodes: the plugin of
// the devices is asked before plugins that count CPUs and volumes. Who uses a claim that is released is taken off the node first.
func (c *Cluster) confirm(ctx context.Context, state fwk.CycleState, pod *v1.Pod,
	e *explain.Explanation,
) (*explain.Explanation, []Refusal, error) {
	if e == nil || len(e.Holders) == 0 {
		return e, nil, nil
	}
	confirmed := *e
	confirmed.Holders = nil
	besides := map[string][]string{}
	for _, holders := range e.Holders {
		status, err := c.without(ctx, state, pod, holders.Node, holders.Release)
		switch {
		case err != nil:
			return nil, nil, err
		case status.IsSuccess():
			confirmed.Holders = append(confirmed.Holders, holders)
		default:
			reason := strings.Join(status.Reasons(), "; ")
			besides[reason] = append(besides[reason], holders.Node)
		}
	}
	return &confirmed, refusalsOf(besides), nil
}

func refusalsOf(nodes map[string][]string) (refusals []Refusal) {
	for _, reason := range slices.Sorted(maps.Keys(nodes)) {
		refusals = append(refusals, Refusal{reason, nodes[reason]})
	}
	return refusals
}

// compare finds what else than devices refuses a pod that no release helps: on nodes that lack devices, if nobody were there, and on others
// that have some. Without it advice about devices would be taken for all that is to be done.
func (c *Cluster) compare(ctx context.Context, state fwk.CycleState, pod *v1.Pod, all []fwk.NodeInfo, diagnosis *framework.Diagnosis,
	out *Outcome,
) error {
	published, err := c.factory.Resource().V1().ResourceSlices().Lister().List(labels.Everything())
	if err != nil {
		return err
	}
	equipped := sets.New[string]()
	for _, slice := range published {
		if slice.Spec.NodeName != nil && len(slice.Spec.Devices) > 0 {
			equipped.Insert(*slice.Spec.NodeName)
		}
	}
	others := map[string][]string{}
	var lacking []fwk.NodeInfo
	for _, info := range all {
		name := info.Node().Name
		switch status := diagnosis.NodeToStatus.Get(name); {
		case status.Plugin() == deviceclaims.Name:
			lacking = append(lacking, info)
		case equipped.Has(name):
			reason := strings.Join(status.Reasons(), "; ")
			others[reason] = append(others[reason], name)
		}
	}
	evenEmpty, err := c.evenEmpty(ctx, state, pod, lacking)
	if err != nil {
		return err
	}
	out.EvenEmpty, out.Others = refusalsOf(evenEmpty), refusalsOf(others)
	return nil
}

// countPods are the plugins that count pods before they look at any node: those of a node that is thought empty, too.
var countPods = sets.New(names.InterPodAffinity, names.PodTopologySpread, names.VolumeRestrictions)

// evenEmpty is what refuses a pod on nodes, by reason, if nobody is there and devices do not matter. Plugins that count pods do not matter
// either: it would take longer to count again for each node than to try it.
func (c *Cluster) evenEmpty(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodes []fwk.NodeInfo) (map[string][]string, error) {
	without := withoutDevices(state)
	without.SetSkipFilterPlugins(without.GetSkipFilterPlugins().Union(countPods))
	empty, statuses := make([]fwk.NodeInfo, len(nodes)), make([]*fwk.Status, len(nodes))
	for i, info := range nodes {
		empty[i] = c.emptied(info.Node())
	}
	c.profile.Parallelizer().Until(ctx, len(nodes), func(i int) {
		statuses[i] = c.profile.RunFilterPlugins(ctx, without, pod, empty[i])
	}, "Filter")
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	refused := map[string][]string{}
	for i, status := range statuses {
		switch {
		case status.Code() == fwk.Error:
			return nil, status.AsError()
		case !status.IsSuccess():
			reason := strings.Join(status.Reasons(), "; ")
			refused[reason] = append(refused[reason], nodes[i].Node().Name)
		}
	}
	return refused, nil
}

// emptied is the node without anybody.
func (c *Cluster) emptied(node *v1.Node) fwk.NodeInfo {
	info := c.empty[node.Name]
	if info == nil {
		made := framework.NewNodeInfo()
		made.SetNode(node)
		info, c.empty[node.Name] = made, made
	}
	return info
}

// withoutDevices is a copy of a state with which the plugin of the devices is not asked.
func withoutDevices(state fwk.CycleState) fwk.CycleState {
	state = state.Clone()
	state.SetSkipFilterPlugins(state.GetSkipFilterPlugins().Union(sets.New(deviceclaims.Name)))
	return state
}

// without is what all plugins but that of the devices say of a node on which nobody uses the claims any more.
func (c *Cluster) without(ctx context.Context, state fwk.CycleState, pod *v1.Pod, name string,
	claims []explain.ClaimHolder,
) (*fwk.Status, error) {
	of, err := c.snapshot.Get(name)
	if err != nil {
		return nil, err
	}
	state, node := withoutDevices(state), of.Snapshot()
	for _, user := range of.GetPods() {
		if !usesAny(user.GetPod(), claims) {
			continue
		}
		if err := node.RemovePod(c.logger, user.GetPod()); err != nil {
			return nil, err
		}
		if status := c.profile.RunPreFilterExtensionRemovePod(ctx, state, pod, user, node); !status.IsSuccess() {
			return nil, status.AsError()
		}
	}
	status := c.profile.RunFilterPluginsWithNominatedPods(ctx, state, pod, node)
	if status.Code() == fwk.Error {
		return nil, status.AsError()
	}
	return status, nil
}

// usesAny tells whether a pod uses one of the claims.
func usesAny(pod *v1.Pod, claims []explain.ClaimHolder) bool {
	used := usedBy(pod)
	return slices.ContainsFunc(claims, func(claim explain.ClaimHolder) bool {
		return used.Has(types.NamespacedName{Namespace: claim.Namespace, Name: claim.Claim})
	})
}

// usedBy are the names of the pod's claims that are known.
func usedBy(pod *v1.Pod) sets.Set[types.NamespacedName] {
	used := sets.New[types.NamespacedName]()
	for i := range pod.Spec.ResourceClaims {
		if name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i]); err == nil && name != nil {
			used.Insert(types.NamespacedName{Namespace: pod.Namespace, Name: *name})
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		used.Insert(types.NamespacedName{Namespace: pod.Namespace, Name: extended.ResourceClaimName})
	}
	return used
}
