// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultpreemption"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
	"k8s.io/kubernetes/pkg/scheduler/framework/preemption"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/util"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

// inOrderPreemption is DefaultPreemption, but that it looks at all nodes, and chooses among equal ones by the seed.
// kube-scheduler begins at a random node, looks at a tenth of a large cluster, and chooses by the order of a map.
type inOrderPreemption struct {
	*defaultpreemption.DefaultPreemption
	random *rand.Rand
}

// preemptsInOrder makes the plugin.
func preemptsInOrder(random *rand.Rand) frameworkruntime.PluginFactory {
	return func(ctx context.Context, args runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
		pl, err := defaultpreemption.New(ctx, args, handle, feature.NewSchedulerFeaturesFromGates(utilfeature.DefaultFeatureGate))
		if err != nil {
			return nil, err
		}
		ordered := &inOrderPreemption{pl, random}
		pl.Evaluator = preemption.NewEvaluator(defaultpreemption.Name, handle, ordered, pl.Executor)
		return ordered, nil
	}
}

// GetOffsetAndNumCandidates implements [preemption.Interface].
func (p *inOrderPreemption) GetOffsetAndNumCandidates(nodes int32) (offset, candidates int32) {
	return 0, nodes
}

// OrderedScoreFuncs implements [preemption.Interface]: the order of kube-scheduler's own functions, which it does not export
// (pickOneNodeForPreemption), and then the seed.
func (p *inOrderPreemption) OrderedScoreFuncs(_ context.Context, victims map[string]*extenderv1.Victims) []func(string) int64 {
	names := make([]string, 0, len(victims))
	for name := range victims {
		names = append(names, name)
	}
	slices.Sort(names)
	p.random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	rank := map[string]int64{}
	for i, name := range names {
		rank[name] = int64(i)
	}
	return []func(string) int64{
		func(node string) int64 { return -victims[node].NumPDBViolations },
		func(node string) int64 {
			return -int64(corev1helpers.PodPriority(slices.MaxFunc(victims[node].Pods, func(a, b *v1.Pod) int {
				return cmp.Compare(corev1helpers.PodPriority(a), corev1helpers.PodPriority(b))
			})))
		},
		func(node string) (sum int64) {
			for _, pod := range victims[node].Pods {
				sum -= int64(corev1helpers.PodPriority(pod)) + math.MaxInt32 + 1
			}
			return sum
		},
		func(node string) int64 { return -int64(len(victims[node].Pods)) },
		func(node string) int64 {
			for _, pod := range victims[node].Pods {
				if pod.Status.StartTime == nil {
					return math.MinInt64 // kube-scheduler takes the present time, which is another one each time
				}
			}
			return util.GetEarliestPodStartTime(victims[node]).UnixNano()
		},
		func(node string) int64 { return rank[node] },
	}
}
