package deviceclaims

import (
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler/framework/preemption"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/usage"
)

// priorityOf returns the priority that counts when pods are evicted: that of the pod's group, if it has one.
func (pl *Plugin) priorityOf(pod *v1.Pod) int32 {
	if podclaims.GroupOf(pod) == "" || !enabled(features.GenericWorkload) {
		return corev1helpers.PodPriority(pod)
	}
	return preemption.GetPodPriority(pod, pl.handle.SnapshotSharedLister().PodGroups(), nil)
}

// groupClaims returns the pod's claims, by name, that are reserved not for the pod but for its group, because the group names the
// same claim (KEP-5729). They stay reserved until kube-controller-manager finds the group gone.
func (pl *Plugin) groupClaims(pod *v1.Pod) (map[string]resourceapi.ResourceClaimConsumerReference, error) {
	name := podclaims.GroupOf(pod)
	if name == "" || len(pod.Spec.ResourceClaims) == 0 || !enabled(features.DRAWorkloadResourceClaims) {
		return nil, nil
	}
	group, err := pl.handle.SnapshotSharedLister().PodGroups().Get(pod.Namespace, name)
	if err != nil {
		return nil, fmt.Errorf("pod group %s/%s: %w", pod.Namespace, name, err)
	}
	users := map[string]resourceapi.ResourceClaimConsumerReference{}
	for i := range pod.Spec.ResourceClaims {
		ref := &pod.Spec.ResourceClaims[i]
		user, err := resourceclaim.BindTo(pod, group, ref)
		if err != nil {
			return nil, fmt.Errorf("spec.resourceClaims[%d]: %w", i, err)
		}
		if claim, _, err := resourceclaim.Name(pod, ref); err == nil && claim != nil && user.UID == group.UID {
			users[*claim] = user
		}
	}
	return users, nil
}

// groupOf returns the group that a claim of the pod is reserved for, empty if that is the pod.
func (p *plan) groupOf(claim types.UID, pod *v1.Pod) types.UID {
	for i := range p.claims {
		if pc := &p.claims[i]; pc.claim.UID == claim && pc.user.UID != pod.UID {
			return pc.user.UID
		}
	}
	return ""
}

// scheduledUsers returns the pods of the pod's group that use the claim and have a node, or are being bound to one.
func (pl *Plugin) scheduledUsers(pod *v1.Pod, claim *resourceapi.ResourceClaim) ([]*v1.Pod, error) {
	state, err := pl.handle.PodGroupManager().PodGroupStates().Get(pod.Namespace, podclaims.GroupOf(pod))
	if err != nil {
		return nil, fmt.Errorf("pod group %s/%s: %w", pod.Namespace, podclaims.GroupOf(pod), err)
	}
	return slices.DeleteFunc(state.ScheduledPods(), func(member *v1.Pod) bool { return !podclaims.Uses(member, usage.RefOf(claim)) }), nil
}

// disruptedWith returns the pods that go with a pod that is evicted: itself, or all of a group that is only disrupted as a whole.
func (pl *Plugin) disruptedWith(pod *v1.Pod) []*v1.Pod {
	alone := []*v1.Pod{pod}
	name := podclaims.GroupOf(pod)
	if name == "" || !enabled(features.GenericWorkload) {
		return alone
	}
	snapshot := pl.handle.SnapshotSharedLister()
	group, err := snapshot.PodGroups().Get(pod.Namespace, name)
	if err != nil || group.Spec.DisruptionMode == nil || group.Spec.DisruptionMode.All == nil {
		return alone
	}
	state, err := snapshot.PodGroupStates().Get(pod.Namespace, name)
	if err != nil {
		return alone
	}
	return append(alone, state.ScheduledPods()...)
}

// groupCycle is what is known of the pods of a group in one cycle of the group. One goroutine uses it.
type groupCycle struct {
	pods map[types.UID]*cycle
}

// Clone implements [fwk.StateData].
func (g *groupCycle) Clone() fwk.StateData { return g }

// readGroupCycle returns what is known of the group's pods. It is empty if none of them needs devices.
func readGroupCycle(state fwk.PodGroupCycleState) (*groupCycle, error) {
	data, err := state.Read(stateKey)
	if errors.Is(err, fwk.ErrNotFound) {
		return &groupCycle{pods: map[types.UID]*cycle{}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the state of %s: %w", Name, err)
	}
	g, ok := data.(*groupCycle)
	if !ok {
		return nil, fmt.Errorf("the state of %s has type %T", Name, data)
	}
	return g, nil
}

// noteInGroup notes what PreFilter found out about a pod in a cycle of its group.
func noteInGroup(state fwk.CycleState, pod *v1.Pod, c *cycle) error {
	group := state.GetPodGroupSchedulingCycle()
	g, err := readGroupCycle(group)
	if err != nil {
		return err
	}
	g.pods[pod.UID] = c
	group.Write(stateKey, g)
	return nil
}
