// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"slices"

	v1 "k8s.io/api/core/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/helper"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
)

// sizeStep is what a step in size counts for in a score: more than occupancy, in thousandths, and maxSizeSteps of them less than
// [allocator.PreferenceStep].
const (
	sizeStep     = 1000
	maxSizeSteps = 8
)

// Score prefers nodes that offer earlier alternatives of the requests with a prioritized list (KEP-4816), and after that
// those on which more, or fewer, of the matching devices are held, as the arguments' scoring strategy says. Nodes on which
// devices failed to become ready for the pod come last (KEP-5007).
func (pl *Plugin) Score(_ context.Context, state fwk.CycleState, _ *v1.Pod, nodeInfo fwk.NodeInfo) (int64, *fwk.Status) {
	c, err := cycle.Read(state)
	if err != nil {
		return 0, fwk.AsStatus(err)
	}
	if c == nil {
		return 0, nil
	}
	result, _ := c.Results.Get(nodeInfo.Node().Name)
	return c.Failed.Score(nodeInfo.Node().Name, result.Score), nil
}

// ScoreExtensions implements [fwk.ScorePlugin].
func (pl *Plugin) ScoreExtensions() fwk.ScoreExtensions { return pl }

// NormalizeScore prefers, among nodes with equal alternatives and before occupancy, those that give the pod smaller devices, and
// scales the scores so that the best node has the maximum.
func (pl *Plugin) NormalizeScore(_ context.Context, state fwk.CycleState, _ *v1.Pod, scores fwk.NodeScoreList) *fwk.Status {
	c, err := cycle.Read(state)
	if err != nil {
		return fwk.AsStatus(err)
	}
	if c != nil {
		preferSmall(c, scores)
	}
	return helper.DefaultNormalizeScore(fwk.MaxScore, false, scores)
}

// preferSmall adds to the scores of the nodes with the best alternatives how small the devices are, by rank among these nodes: as long
// as they are the same everywhere that changes nothing, and where they are not it leaves something to occupancy. Nodes with worse
// alternatives get nothing, or they would come closer to the best ones. It takes sizes that are known on all nodes to compare them.
func preferSmall(c *cycle.State, scores fwk.NodeScoreList) {
	var best int64
	for i := range scores {
		best = max(best, scores[i].Score/allocator.PreferenceStep)
	}
	var among []int // indexes
	var ranks []int64
	sizes := make([]int64, len(scores))
	for i := range scores {
		if scores[i].Score/allocator.PreferenceStep < best || c.Failed.On(scores[i].Name) > 0 {
			continue
		}
		result, _ := c.Results.Get(scores[i].Name)
		if sizes[i] = result.Size; sizes[i] == 0 {
			return
		}
		among, ranks = append(among, i), append(ranks, sizes[i])
	}
	slices.Sort(ranks)
	ranks = slices.Compact(ranks)
	steps := min(len(ranks)-1, maxSizeSteps)
	if steps <= 0 {
		return
	}
	for _, i := range among {
		rank, _ := slices.BinarySearch(ranks, sizes[i])
		scores[i].Score += sizeStep * int64((len(ranks)-1-rank)*steps/(len(ranks)-1))
	}
}
