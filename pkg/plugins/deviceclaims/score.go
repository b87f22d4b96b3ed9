package deviceclaims

import (
	"context"

	v1 "k8s.io/api/core/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/helper"
)

// Score prefers nodes that offer earlier alternatives of the requests with a prioritized list (KEP-4816), and after that
// those on which more, or fewer, of the matching devices are held, as the arguments' scoring strategy says. Nodes on which
// devices failed to become ready for the pod come last (KEP-5007).
func (pl *Plugin) Score(_ context.Context, state fwk.CycleState, _ *v1.Pod, nodeInfo fwk.NodeInfo) (int64, *fwk.Status) {
	c, err := readCycle(state)
	if err != nil {
		return 0, fwk.AsStatus(err)
	}
	if c == nil {
		return 0, nil
	}
	result, _ := c.results.get(nodeInfo.Node().Name)
	return c.failed.score(nodeInfo.Node().Name, result.score), nil
}

// ScoreExtensions implements [fwk.ScorePlugin].
func (pl *Plugin) ScoreExtensions() fwk.ScoreExtensions { return pl }

// NormalizeScore scales the scores so that the best node has the maximum.
func (pl *Plugin) NormalizeScore(_ context.Context, _ fwk.CycleState, _ *v1.Pod, scores fwk.NodeScoreList) *fwk.Status {
	return helper.DefaultNormalizeScore(fwk.MaxScore, false, scores)
}
