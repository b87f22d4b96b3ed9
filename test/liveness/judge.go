// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"errors"
	"fmt"
	"slices"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/component-base/metrics/legacyregistry"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/kubernetes/pkg/scheduler/framework/preemption"

	"stowage.dev/stowage/pkg/plugins/deviceclaims"
	"stowage.dev/stowage/test/liveness/memoryapi"
)

// judgeRest returns what no cluster at rest may have: devices that a claim has for nobody.
func (h *history) judgeRest() []string {
	claims, err := h.user.ResourceV1().ResourceClaims("").List(h.ctx, metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	pods, err := h.user.CoreV1().Pods("").List(h.ctx, metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	groups, err := h.user.SchedulingV1beta1().PodGroups("").List(h.ctx, metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	alive := map[types.UID]v1.Pod{}
	for _, pod := range pods.Items {
		alive[pod.UID] = pod
	}
	var found []string
	for _, claim := range claims.Items {
		if claim.Status.Allocation == nil {
			continue
		}
		if len(claim.Status.ReservedFor) == 0 && !h.scenario.leaves(claim.Name) {
			found = append(found, fmt.Sprintf("claim %s holds devices for nobody", claim.Name))
		}
		for _, user := range claim.Status.ReservedFor {
			if slices.ContainsFunc(groups.Items, func(group schedulingapi.PodGroup) bool { return group.UID == user.UID }) {
				if h.groupWaits(user.Name, claim, pods.Items, groups.Items) {
					found = append(found, fmt.Sprintf("claim %s holds devices for group %s, whose pods wait", claim.Name, user.Name))
				}
				continue // a group keeps its claims to its end, unless it waits for nodes
			}
			if pod, ok := alive[user.UID]; !ok {
				found = append(found, fmt.Sprintf("claim %s is reserved for %s %s, which is gone", claim.Name, user.Resource, user.Name))
			} else if pod.Spec.NodeName == "" && pod.Spec.SchedulerName == schedulerName && !h.isLeftBehind(claim, pod, pods.Items, groups.Items) {
				found = append(found, fmt.Sprintf("claim %s holds devices for pod %s, which waits", claim.Name, user.Name))
			}
		}
	}
	return found
}

// leaves tells whether another scheduler lets go of a claim: it may stay allocated for nobody then, as nobody may say that nobody wants it.
func (s Scenario) leaves(claim string) bool {
	return slices.ContainsFunc(s.Steps, func(step Step) bool {
		unreserve, ok := step.(Unreserve)
		return ok && unreserve.Claim == claim
	})
}

// groupWaits tells whether pods of a group use a claim, none of them has a node, and a scheduler tries them. A claim that none of its
// pods uses is the group's to its end.
func (h *history) groupWaits(name string, claim resourceapi.ResourceClaim, pods []v1.Pod, groups []schedulingapi.PodGroup) bool {
	waits := false
	for _, pod := range pods {
		if pod.Namespace != claim.Namespace || groupOf(&pod) != name {
			continue
		}
		if isKeptOut(pod, pods, groups) {
			return false
		}
		if usesClaim(&pod, &claim) {
			if pod.Spec.NodeName != "" {
				return false
			}
			waits = true
		}
	}
	return waits
}

// groupOf returns the name of the pod's group, empty if it has none.
func groupOf(pod *v1.Pod) string {
	if group := pod.Spec.SchedulingGroup; group != nil {
		return *group.PodGroupName
	}
	return ""
}

func usesClaim(pod *v1.Pod, claim *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(pod.Spec.ResourceClaims, func(ref v1.PodResourceClaim) bool {
		name, _, err := resourceclaim.Name(pod, &ref)
		return err == nil && name != nil && *name == claim.Name
	})
}

// isKeptOut tells whether the queue keeps a pod's whole group out: because of this pod, or because it is a gang that is short of pods.
// Then nobody tries the group, nor knows whether it fits with what is reserved for it. That stays, whoever reserved it, as with upstream.
func isKeptOut(pod v1.Pod, pods []v1.Pod, groups []schedulingapi.PodGroup) bool {
	_, condition := podutil.GetPodCondition(&pod.Status, v1.PodScheduled)
	return condition != nil && condition.Reason == deviceclaims.ReasonWaitingForClaim || isShort(pod, pods, groups)
}

// isShort tells whether the pod's gang has too few pods.
func isShort(pod v1.Pod, pods []v1.Pod, groups []schedulingapi.PodGroup) bool {
	members := 0
	for _, other := range pods {
		if other.Namespace == pod.Namespace && groupOf(&other) == groupOf(&pod) {
			members++
		}
	}
	return slices.ContainsFunc(groups, func(group schedulingapi.PodGroup) bool {
		gang := group.Spec.SchedulingPolicy.Gang
		return group.Namespace == pod.Namespace && group.Name == groupOf(&pod) && gang != nil && members < int(gang.MinCount)
	})
}

// isLeftBehind tells whether a scheduler before the present one has reserved a claim for a pod of a gang, and the gang has too few pods
// now. A scheduler's queue keeps such a pod out until there are enough, and nobody tries it: neither upstream nor we take anything from it
// before. What the present one has reserved for a pod, and not for its group, it takes back when it fails to bind the pod.
func (h *history) isLeftBehind(claim resourceapi.ResourceClaim, pod v1.Pod, pods []v1.Pod, groups []schedulingapi.PodGroup) bool {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	return isShort(pod, pods, groups) && !slices.ContainsFunc(h.writes, func(w memoryapi.Write) bool {
		written, ok := w.Object.(*resourceapi.ResourceClaim)
		return ok && written.UID == claim.UID && isReserved(w.Object, pod) && !isReserved(w.Before, pod)
	})
}

// isReserved tells whether a claim, which may be none, is reserved for a pod.
func isReserved(claim runtime.Object, pod v1.Pod) bool {
	c, ok := claim.(*resourceapi.ResourceClaim)
	return ok &&
		slices.ContainsFunc(c.Status.ReservedFor, func(user resourceapi.ResourceClaimConsumerReference) bool { return user.UID == pod.UID })
}

// waitsForADeletion tells whether a pod waits for one that its user has deleted and that has not ended: preemption took that one for a
// victim, as upstream's does. A new scheduler may evict another pod instead, so it is not asked.
func (h *history) waitsForADeletion() bool {
	pods, err := h.user.CoreV1().Pods("").List(h.ctx, metav1.ListOptions{})
	if err != nil {
		h.err = err
		return true
	}
	return slices.ContainsFunc(pods.Items, func(waiting v1.Pod) bool {
		node := waiting.Status.NominatedNodeName
		return waiting.Spec.NodeName == "" && node != "" && slices.ContainsFunc(pods.Items, func(other v1.Pod) bool {
			return other.Spec.NodeName == node && other.DeletionTimestamp != nil && !preemption.PodTerminatingByPreemption(&other) &&
				corev1helpers.PodPriority(&other) < corev1helpers.PodPriority(&waiting)
		})
	})
}

// startsPerNode is how often a new scheduler begins with each node before it counts as certain that it always does something.
const startsPerNode = 4

// judgeSuccessor returns what a new scheduler does that the old one has not done.
//
// A group is tried pod by pod, and where its first pod goes is decided by the node with which kube-scheduler begins, which moves with each
// attempt. On one node the second pod finds what it needs, on another one it does not; nobody looks for both together. So the old scheduler
// may try a group again and again and always begin at the wrong node, where a new one begins at another one. What it did was possible if a
// new scheduler that begins at some node does nothing, either. That excuses nobody who sleeps: it counts only while the old one still tries
// groups, and what can be had for a pod that sleeps, a new scheduler gets wherever it begins.
func (h *history) judgeSuccessor(atRest *memoryapi.Server) []string {
	h.mutex.Lock()
	tries := !h.groups.at.IsZero() && time.Since(h.groups.at) < quiet
	h.mutex.Unlock()
	differences := h.secondLook()
	if !tries || len(differences) == 0 {
		return differences
	}
	// Who is tried before the group is a matter of chance, too, and moves the node with which it begins.
	for i := range startsPerNode * len(h.scenario.Nodes) {
		h.goBackTo(atRest)
		h.api.FirstNode.Store(int64(i % len(h.scenario.Nodes)))
		if len(h.secondLook()) == 0 {
			h.count("another node first")
			return nil
		}
	}
	return differences
}

// secondLook is what a new scheduler does.
func (h *history) secondLook() (differences []string) {
	h.start()
	time.Sleep(secondLook)
	synctest.Wait()
	h.stop()
	for _, write := range h.writes {
		if does := describe(write); does != "" {
			differences = append(differences, "a new scheduler "+does)
		}
	}
	return differences
}

// goBackTo goes on with the cluster as it was.
func (h *history) goBackTo(then *memoryapi.Server) {
	h.controllers.stop()
	h.api = then.Clone()
	h.user = h.api.Client("user")
	h.controllers = startControllers(h.ctx, h.api, h.scenario.Groups)
	h.api.OnWrite(h.noteSuccessor)
}

// nominated returns for which nodes pods are nominated, as the scheduling queue knows, by their names.
func (h *history) nominated() map[string]string {
	all := map[string]string{}
	for _, node := range h.scenario.Nodes {
		for _, info := range h.scheduler.queue.NominatedPodsForNode(node.Name) {
			all[info.GetPod().Name] = node.Name
		}
	}
	return all
}

// show writes nominations of which the API was not told because a write failed: nobody tries that again, neither upstream nor we, so a new
// scheduler would evict others for the same pod.
func (h *history) show(nominated map[string]string) {
	h.nominate(func(pod *v1.Pod) {
		if node := nominated[pod.Name]; node != "" {
			pod.Status.NominatedNodeName = node
		}
	})
}

// nominate changes the nominations of pods that wait.
func (h *history) nominate(change func(pod *v1.Pod)) {
	pods, err := h.user.CoreV1().Pods(namespace).List(h.ctx, metav1.ListOptions{})
	if err != nil {
		h.err = errors.Join(h.err, err)
		return
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		before := pod.Status.NominatedNodeName
		if change(pod); pod.Spec.NodeName == "" && pod.Status.NominatedNodeName != before {
			h.made(h.user.CoreV1().Pods(namespace).UpdateStatus(h.ctx, pod, metav1.UpdateOptions{}))
		}
	}
}

// judgeNominations returns what a new scheduler would do if pods were not nominated that wait for nobody. It believes in their nominations
// as the old one did. A nominated pod waits for pods of lower priority to end on that node, and for nobody else: others may take as long as
// they like. With groups chance may have its way, see judgeSuccessor.
func (h *history) judgeNominations(atRest *memoryapi.Server, waits map[string]string) (differences []string) {
	if len(waits) == 0 || h.scenario.Groups {
		return nil
	}
	h.goBackTo(atRest)
	h.nominate(func(pod *v1.Pod) {
		if waits[pod.Name] != "" {
			pod.Status.NominatedNodeName = ""
		}
	})
	h.count("waits in vain")
	for _, does := range h.secondLook() {
		differences = append(differences,
			fmt.Sprintf("%s that does not know for which nodes pods are nominated where nobody ends for them: %v", does, waits))
	}
	return differences
}

// waitsInVain are pods that wait and are nominated to a node on which nobody of lower priority is about to end, with these nodes.
func (h *history) waitsInVain() map[string]string {
	pods, err := h.user.CoreV1().Pods(namespace).List(h.ctx, metav1.ListOptions{})
	if err != nil {
		h.err = errors.Join(h.err, err)
		return nil
	}
	waits := map[string]string{}
	for _, pod := range pods.Items {
		node := pod.Status.NominatedNodeName
		if pod.Spec.NodeName == "" && node != "" && !slices.ContainsFunc(pods.Items, func(other v1.Pod) bool {
			return other.Spec.NodeName == node && other.DeletionTimestamp != nil &&
				corev1helpers.PodPriority(&other) < corev1helpers.PodPriority(&pod)
		}) {
			waits[pod.Name] = node
		}
	}
	return waits
}

// noteSuccessor is told of every write to a clone of the API, of which nothing counts but what the new scheduler does.
func (h *history) noteSuccessor(w memoryapi.Write) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	if w.Client == fmt.Sprintf("scheduler-%d", h.started) {
		h.writes = append(h.writes, w)
	}
}

// groupWork is what schedulers have done for groups by some time.
type groupWork struct {
	at              time.Time
	tries, refusals int
}

// groupWork returns it. Reserve refuses a pod of a group whose trial has given it devices only if something has changed in between. The
// counter is the process's, in which one history is played at a time, as [switchGroups] is for all, too.
func (h *history) groupWork() *groupWork {
	h.mutex.Lock()
	w := &groupWork{at: time.Now(), tries: h.groups.tries}
	h.mutex.Unlock()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		h.err = errors.Join(h.err, err)
	}
	for _, family := range families {
		if family.GetName() != "stowage_scheduler_allocations_total" {
			continue
		}
		for _, m := range family.GetMetric() {
			if m.GetLabel()[0].GetValue() != "chosen" {
				w.refusals += int(m.GetCounter().GetValue())
			}
		}
	}
	return w
}

// triesPerMinute is how often a group that waits may be tried at rest: by kube-scheduler's queue each ten
// seconds, and by time less and less often.
const triesPerMinute = 7

// judgeGroupWork says whether groups have been tried too often since.
func (h *history) judgeGroupWork(before *groupWork) (restless string) {
	now := h.groupWork()
	pods, err := h.user.CoreV1().Pods("").List(h.ctx, metav1.ListOptions{})
	if err != nil {
		h.err = errors.Join(h.err, err)
		return ""
	}
	waiting := sets.New[string]()
	for _, pod := range pods.Items {
		if group := pod.Spec.SchedulingGroup; group != nil && pod.Spec.NodeName == "" {
			waiting.Insert(*group.PodGroupName)
		}
	}
	switch {
	case now.refusals > before.refusals:
		return fmt.Sprintf("no rest: Reserve has refused %d pods in the last minute", now.refusals-before.refusals)
	case now.tries-before.tries > triesPerMinute*waiting.Len():
		return fmt.Sprintf("no rest: %d groups that wait have been tried %d times in the last minute", waiting.Len(), now.tries-before.tries)
	}
	return ""
}
