package simulate

import (
	"cmp"
	"context"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"

	"stowage.dev/stowage/pkg/snapshot"
)

// Waiting are the pods that have no node and want one, in the order in which the scheduling queue takes them: by priority, then by age.
func Waiting(objects *snapshot.Objects) []*v1.Pod {
	var pods []*v1.Pod
	for _, pod := range objects.Pods {
		if pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && !isOver(pod) {
			pods = append(pods, pod)
		}
	}
	inOrder(pods)
	return pods
}

func inOrder(pods []*v1.Pod) {
	slices.SortStableFunc(pods, func(a, b *v1.Pod) int {
		return cmp.Or(cmp.Compare(corev1helpers.PodPriority(b), corev1helpers.PodPriority(a)),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
}

// Place tries pods of a changed cluster one after the other, by priority and age. Where preemption evicts others for one, they are taken
// away, and it is placed. An outcome names those, and its reason is why the pod had to evict.
func Place(ctx context.Context, change *Change, pods []*v1.Pod, opts Options) ([]*Outcome, error) {
	pods = slices.Clone(pods)
	inOrder(pods)
	var outcomes []*Outcome
	cluster, err := New(ctx, &change.Objects, opts)
	if err != nil {
		return nil, err
	}
	defer func() { cluster.Close() }()
	placed := map[*v1.Pod]*Outcome{}
	for _, pod := range pods {
		out, err := cluster.Schedule(ctx, pod)
		if err != nil {
			return nil, err
		}
		if len(out.Victims) > 0 && out.Nominated != "" {
			if cluster, err = evict(ctx, cluster, change, out, pod, placed, opts); err != nil {
				return nil, err
			}
			again, err := cluster.Schedule(ctx, pod)
			if err != nil {
				return nil, err
			}
			again.Victims, again.Nominated = out.Victims, out.Nominated
			out = again
		}
		placed[pod] = out
		outcomes = append(outcomes, out)
	}
	return outcomes, nil
}

// evict begins again on a cluster without the victims, with what was placed before.
func evict(ctx context.Context, old *Cluster, change *Change, out *Outcome, pod *v1.Pod, placed map[*v1.Pod]*Outcome,
	opts Options,
) (*Cluster, error) {
	old.Close()
	for _, victim := range out.Victims {
		namespace, name, _ := strings.Cut(victim, "/")
		if err := change.Delete(namespace, name); err != nil {
			return old, err
		}
		change.Evicted = append(change.Evicted, victim)
	}
	nominated := pod.DeepCopy()
	nominated.Status.NominatedNodeName = out.Nominated
	for i := range change.Pods {
		if change.Pods[i].UID == pod.UID {
			change.Pods[i] = nominated
		}
	}
	next, err := New(ctx, &change.Objects, opts)
	if err != nil {
		return old, err
	}
	earlier := make([]*v1.Pod, 0, len(placed))
	for p, o := range placed {
		if o.Node != "" && !slices.Contains(out.Victims, snapshot.Reference(p)) {
			earlier = append(earlier, p)
		}
	}
	inOrder(earlier)
	for _, p := range earlier {
		if err := next.put(ctx, p, placed[p].Node); err != nil {
			return next, err
		}
	}
	return next, nil
}

// put places a pod on the node that was chosen for it before.
func (c *Cluster) put(ctx context.Context, pod *v1.Pod, node string) error {
	pinned := pod.DeepCopy()
	if pinned.Spec.Affinity == nil {
		pinned.Spec.Affinity = &v1.Affinity{}
	}
	pinned.Spec.Affinity.NodeAffinity = &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
		NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchFields: []v1.NodeSelectorRequirement{{
			Key: "metadata.name", Operator: v1.NodeSelectorOpIn, Values: []string{node},
		}}}},
	}}
	_, err := c.Schedule(ctx, pinned)
	return err
}
