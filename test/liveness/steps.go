// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
)

// What each step does. A request that fails because of what is, or is not, there any more is part of the history.

func (p Pod) do(h *history) {
	h.makeTemplate(p.Name, p.Ask)
	h.made(h.user.CoreV1().Pods(namespace).Create(h.ctx, p.object(), metav1.CreateOptions{}))
}

func (g Group) do(h *history) {
	h.makeTemplate(g.Name, g.Ask)
	h.made(h.user.SchedulingV1beta1().PodGroups(namespace).Create(h.ctx, g.object(), metav1.CreateOptions{}))
}

func (d DeleteGroup) do(h *history) {
	h.done(h.user.SchedulingV1beta1().PodGroups(namespace).Delete(h.ctx, d.Name, metav1.DeleteOptions{}))
}

// makeTemplate makes the template of a claim that asks for something.
func (h *history) makeTemplate(name string, ask Ask) {
	if ask != (Ask{}) {
		h.made(h.user.ResourceV1().ResourceClaimTemplates(namespace).Create(h.ctx, &resourceapi.ResourceClaimTemplate{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: ask.spec()},
		}, metav1.CreateOptions{}))
	}
}

func (d Delete) do(h *history) {
	var options metav1.DeleteOptions
	if d.Now {
		options.GracePeriodSeconds = ptr.To[int64](0)
	}
	h.done(h.user.CoreV1().Pods(namespace).Delete(h.ctx, d.Pod, options))
}

func (c Claim) do(h *history) {
	h.made(h.user.ResourceV1().ResourceClaims(namespace).Create(h.ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: c.Name}, Spec: c.Ask.spec(),
	}, metav1.CreateOptions{}))
}

func (d DeleteClaim) do(h *history) {
	h.done(h.user.ResourceV1().ResourceClaims(namespace).Delete(h.ctx, d.Name, metav1.DeleteOptions{}))
}

func (d Deallocate) do(h *history) {
	claims := h.user.ResourceV1().ResourceClaims(namespace)
	claim, err := claims.Get(h.ctx, d.Claim, metav1.GetOptions{})
	if err != nil || claim.Status.Allocation == nil {
		return
	}
	for _, user := range claim.Status.ReservedFor {
		if user.Resource == "podgroups" {
			if group, err := h.user.SchedulingV1beta1().PodGroups(namespace).Get(h.ctx, user.Name, metav1.GetOptions{}); err == nil &&
				group.UID == user.UID {
				return // its pods run, or are about to
			}
		}
		if pod, err := h.user.CoreV1().Pods(namespace).Get(h.ctx, user.Name, metav1.GetOptions{}); err == nil && pod.UID == user.UID {
			return // it runs, or is about to
		}
	}
	claim.Status.Allocation, claim.Status.ReservedFor, claim.Status.Devices = nil, nil, nil
	h.made(claims.UpdateStatus(h.ctx, claim, metav1.UpdateOptions{}))
}

func (r Reserve) do(h *history) {
	pod := h.foreign(r.Pod)
	if pod == nil {
		return
	}
	h.changeUsers(r.Claim, func(users []resourceapi.ResourceClaimConsumerReference) []resourceapi.ResourceClaimConsumerReference {
		if slices.ContainsFunc(users, func(user resourceapi.ResourceClaimConsumerReference) bool { return user.UID == pod.UID }) {
			return users
		}
		return append(users, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID})
	})
}

func (u Unreserve) do(h *history) {
	pod := h.foreign(u.Pod)
	if pod == nil {
		return
	}
	h.changeUsers(u.Claim, func(users []resourceapi.ResourceClaimConsumerReference) []resourceapi.ResourceClaimConsumerReference {
		return slices.DeleteFunc(users, func(user resourceapi.ResourceClaimConsumerReference) bool { return user.UID == pod.UID })
	})
}

// foreign returns a pod of another scheduler, nil if there is none of that name.
func (h *history) foreign(name string) *v1.Pod {
	pod, err := h.user.CoreV1().Pods(namespace).Get(h.ctx, name, metav1.GetOptions{})
	if err != nil || pod.Spec.SchedulerName == schedulerName {
		return nil
	}
	return pod
}

// changeUsers changes for whom an allocated claim is reserved.
func (h *history) changeUsers(name string,
	change func([]resourceapi.ResourceClaimConsumerReference) []resourceapi.ResourceClaimConsumerReference,
) {
	claims := h.user.ResourceV1().ResourceClaims(namespace)
	claim, err := claims.Get(h.ctx, name, metav1.GetOptions{})
	if err != nil || claim.Status.Allocation == nil || claim.DeletionTimestamp != nil {
		return
	}
	claim.Status.ReservedFor = change(claim.Status.ReservedFor)
	h.made(claims.UpdateStatus(h.ctx, claim, metav1.UpdateOptions{}))
}

func (c Class) do(h *history) {
	classes := h.user.ResourceV1().DeviceClasses()
	old, err := classes.Get(h.ctx, c.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		h.made(classes.Create(h.ctx, c.object(), metav1.CreateOptions{}))
		return
	}
	old.Spec = c.object().Spec
	h.made(classes.Update(h.ctx, old, metav1.UpdateOptions{}))
}

func (t Taint) do(h *history) {
	slice, err := h.user.ResourceV1().ResourceSlices().Get(h.ctx, t.Node, metav1.GetOptions{})
	if err != nil {
		return
	}
	i := slices.IndexFunc(slice.Spec.Devices, func(d resourceapi.Device) bool { return d.Name == t.Device })
	if i < 0 {
		return
	}
	slice.Spec.Devices[i].Taints = []resourceapi.DeviceTaint{{
		Key: "sick", Effect: resourceapi.DeviceTaintEffectNoSchedule,
		TimeAdded: &metav1.Time{Time: time.Now()},
	}}
	if t.Lifted {
		slice.Spec.Devices[i].Taints = nil
	}
	h.made(h.user.ResourceV1().ResourceSlices().Update(h.ctx, slice, metav1.UpdateOptions{}))
}

func (c Cordon) do(h *history) {
	node, err := h.user.CoreV1().Nodes().Get(h.ctx, c.Node, metav1.GetOptions{})
	if err != nil {
		return
	}
	node.Spec.Unschedulable, node.Spec.Taints = !c.Lifted, nil
	if !c.Lifted {
		node.Spec.Taints = []v1.Taint{{Key: v1.TaintNodeUnschedulable, Effect: v1.TaintEffectNoSchedule}}
	}
	h.made(h.user.CoreV1().Nodes().Update(h.ctx, node, metav1.UpdateOptions{}))
}

func (b Budget) do(h *history) {
	budgets := h.user.PolicyV1().PodDisruptionBudgets(namespace)
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: guarded},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{guarded: "true"}}},
	}
	h.made(budgets.Create(h.ctx, budget, metav1.CreateOptions{}))
	known, err := budgets.Get(h.ctx, guarded, metav1.GetOptions{})
	if err != nil {
		h.done(err)
		return
	}
	known.Status.DisruptionsAllowed = b.Allows
	h.made(budgets.UpdateStatus(h.ctx, known, metav1.UpdateOptions{}))
}

func (j Join) do(h *history) {
	if i := h.late(j.Node); i >= 0 {
		h.join(h.scenario.Nodes[i])
	}
}

func (p Publish) do(h *history) {
	if i := h.late(p.Node); i >= 0 {
		h.publish(h.scenario.Nodes[i])
	}
}

// late is the place of a node that is late, -1 if there is none of that name.
func (h *history) late(name string) int {
	return slices.IndexFunc(h.scenario.Nodes, func(n Node) bool { return n.Name == name && n.Late })
}

func (h *history) join(n Node) {
	object := n.object()
	status := object.Status
	created, err := h.user.CoreV1().Nodes().Create(h.ctx, object, metav1.CreateOptions{})
	if h.done(err); err == nil {
		created.Status = status
		h.made(h.user.CoreV1().Nodes().UpdateStatus(h.ctx, created, metav1.UpdateOptions{}))
	}
}

func (h *history) publish(n Node) {
	for _, slice := range n.slices() {
		h.made(h.user.ResourceV1().ResourceSlices().Create(h.ctx, slice, metav1.CreateOptions{}))
	}
}

func (l Leave) do(h *history) {
	h.done(h.user.CoreV1().Nodes().Delete(h.ctx, l.Node, metav1.DeleteOptions{}))
	for _, slice := range (Node{Name: l.Node, Halved: 1}).slices() {
		h.done(h.user.ResourceV1().ResourceSlices().Delete(h.ctx, slice.Name, metav1.DeleteOptions{}))
	}
}

func (Restart) do(h *history) {
	h.stop()
	h.start()
}

// resources are what informers can be kept from hearing of.
var resources = map[string]schema.GroupVersionResource{
	"pods":           v1.SchemeGroupVersion.WithResource("pods"),
	"nodes":          v1.SchemeGroupVersion.WithResource("nodes"),
	"resourceclaims": resourceapi.SchemeGroupVersion.WithResource("resourceclaims"),
	"resourceslices": resourceapi.SchemeGroupVersion.WithResource("resourceslices"),
	"deviceclasses":  resourceapi.SchemeGroupVersion.WithResource("deviceclasses"),
	"podgroups":      schedulingapi.SchemeGroupVersion.WithResource("podgroups"),
}

func (s Hold) do(h *history) { h.api.Hold(resources[s.Resource]) }

func (s Release) do(h *history) { h.api.Release(resources[s.Resource]) }

func (r Reconnect) do(h *history) {
	if r.Expired {
		h.api.Compact()
	}
	h.api.EndWatches()
}

func (f Fail) do(h *history) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	h.faults = append(h.faults, f)
}

func (Undo) do(h *history) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	h.beginUndoing()
}

func (w Wait) do(h *history) { h.sleep(w.For) }

// made and done note an error that no history explains.
func (h *history) made(_ runtime.Object, err error) { h.done(err) }

func (h *history) done(err error) {
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return
	}
	if h.err == nil {
		h.err = err
	}
}
