// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

type podOption func(*v1.Pod)

// withClaim makes the pod use an existing claim.
func withClaim(name string) podOption {
	return func(p *v1.Pod) {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, v1.PodResourceClaim{Name: name, ResourceClaimName: &name})
	}
}

// withTemplate makes the pod use a claim of its own, from a template.
func withTemplate(name string) podOption {
	return func(p *v1.Pod) {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, v1.PodResourceClaim{Name: name, ResourceClaimTemplateName: &name})
	}
}

// withScheduler makes the pod choose another scheduler than the world's.
func withScheduler(name string) podOption {
	return func(p *v1.Pod) { p.Spec.SchedulerName = name }
}

// withCPUs makes the pod's container ask for CPUs.
func withCPUs(n string) podOption {
	return func(p *v1.Pod) {
		p.Spec.Containers[0].Resources.Requests = v1.ResourceList{v1.ResourceCPU: resource.MustParse(n)}
	}
}

// onNode makes the pod fit only one node.
func (w *world) onNode(suffix string) podOption {
	return func(p *v1.Pod) { p.Spec.NodeSelector[v1.LabelHostname] = w.nodeName(suffix) }
}

// newPod is a pod of the world with one container that uses all of the pod's claims. It is not created.
func (w *world) newPod(name string, options ...podOption) *v1.Pod {
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: w.name},
		Spec: v1.PodSpec{
			SchedulerName:                 w.schedulerName,
			NodeSelector:                  map[string]string{worldLabel: w.name},
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			AutomountServiceAccountToken:  ptr.To(false),
			Containers:                    []v1.Container{{Name: "main", Image: "stowage.dev/probe:latest"}},
		},
	}
	for _, o := range options {
		o(pod)
	}
	for _, c := range pod.Spec.ResourceClaims {
		resources := &pod.Spec.Containers[0].Resources
		resources.Claims = append(resources.Claims, v1.ResourceClaim{Name: c.Name})
	}
	return pod
}

func (w *world) addPod(name string, options ...podOption) *v1.Pod {
	w.t.Helper()
	pod, err := w.client.CoreV1().Pods(w.name).Create(w.ctx, w.newPod(name, options...), metav1.CreateOptions{})
	w.must(err, "creating pod %s", name)
	return pod
}

// endPod reports the pod as done, as its kubelet would.
func (w *world) endPod(pod *v1.Pod) {
	w.t.Helper()
	w.must(patchPhase(w, pod.Name, v1.PodSucceeded), "ending pod %s", pod.Name)
}

func (w *world) deletePod(name string) {
	w.t.Helper()
	w.must(w.client.CoreV1().Pods(w.name).Delete(w.ctx, name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}),
		"deleting pod %s", name)
}

// claimName is the name of the pod's claim of the given name in its spec, generated or not.
func claimName(pod *v1.Pod, name string) string {
	for _, s := range pod.Status.ResourceClaimStatuses {
		if s.Name == name && s.ResourceClaimName != nil {
			return *s.ResourceClaimName
		}
	}
	for _, c := range pod.Spec.ResourceClaims {
		if c.Name == name && c.ResourceClaimName != nil {
			return *c.ResourceClaimName
		}
	}
	return ""
}

// claim reads a claim.
func (w *world) claim(name string) *resourceapi.ResourceClaim {
	w.t.Helper()
	claim, err := w.client.ResourceV1().ResourceClaims(w.name).Get(w.ctx, name, metav1.GetOptions{})
	w.must(err, "getting claim %s", name)
	return claim
}

// devices are the names of the allocated devices, in order.
func devices(claim *resourceapi.ResourceClaim) []string {
	if claim.Status.Allocation == nil {
		return nil
	}
	var names []string
	for _, r := range claim.Status.Allocation.Devices.Results {
		names = append(names, r.Device)
	}
	return names
}
