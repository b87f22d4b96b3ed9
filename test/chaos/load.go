// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// template names a kind of claim, and the claim template that makes it.
type template string

const (
	oneGPU     template = "one-gpu"
	twoGPUs    template = "two-gpus"
	wholeNode  template = "whole-node" // all whole GPUs of a node: waits until they have left
	quarter    template = "quarter"
	half       template = "half"
	full       template = "full"
	smallShare template = "small-share"
	largeShare template = "large-share"
	twoKinds   template = "two-kinds" // a GPU and a share in one claim
)

// specs is what the claims of each template ask for.
var specs = map[template]resourceapi.ResourceClaimSpec{
	oneGPU:     claimFor(request("gpu", "gpu", 1, 0)),
	twoGPUs:    claimFor(request("gpu", "gpu", 2, 0)),
	wholeNode:  claimFor(request("gpu", "gpu", wholePerNode, 0)),
	quarter:    claimFor(request("part", "quarter", 1, 0)),
	half:       claimFor(request("part", "half", 1, 0)),
	full:       claimFor(request("part", "full", 1, 0)),
	smallShare: claimFor(request("share", "shared", 1, 5)),
	largeShare: claimFor(request("share", "shared", 1, 25)),
	twoKinds:   claimFor(request("gpu", "gpu", 1, 0), request("share", "shared", 1, 10)),
}

func claimFor(requests ...resourceapi.DeviceRequest) resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: requests}}
}

// request is for n devices of a kind, and so much of their memory in GiB.
func request(name, kind string, n int64, memory int) resourceapi.DeviceRequest {
	exactly := &resourceapi.ExactDeviceRequest{
		DeviceClassName: deviceClass,
		AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
		Count:           n,
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes[%q].type == %q", driver, kind),
		}}},
	}
	if memory > 0 {
		exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": gibi(memory)}}
	}
	return resourceapi.DeviceRequest{Name: name, Exactly: exactly}
}

// arrival is what comes at once: pods and, if they share one, their claim.
type arrival struct {
	shared *resourceapi.ResourceClaim // of all pods; nil if each has its own
	pods   []podPlan
	claims int
}

// podPlan is a pod and what becomes of it.
type podPlan struct {
	pod *corev1.Pod
	// hold is how long it runs.
	hold time.Duration
	// patience is when its owner deletes it, from its creation, in whatever state it is then. 0: never.
	patience time.Duration
	// large tells that it may wait until nobody else does.
	large bool
	// deleted tells that it is deleted while it runs; otherwise it ends first.
	deleted bool
}

// kinds of arrivals, and how often they come.
var kinds = []struct {
	weight int
	make   func(*load) arrival
}{
	{30, single(oneGPU)},
	{8, single(twoGPUs)},
	{8, single(twoKinds)},
	{7, single(oneGPU, smallShare)}, // two claims
	{5, single(quarter, half)},
	{10, single(quarter)},
	{7, single(half)},
	{3, single(full)},
	{7, single(smallShare)},
	{7, single(largeShare)},
	{1, single(wholeNode)},
	{5, (*load).shared},
	{4, (*load).impatient},
}

// load makes arrivals from a seed: the same seed makes the same ones, in the same
// order.
type load struct {
	random     *rand.Rand
	namespace  string
	schedulers []string
	hold       time.Duration // mean
	next       int
}

// arrive makes the next arrival.
func (l *load) arrive() arrival {
	total := 0
	for _, k := range kinds {
		total += k.weight
	}
	at := l.random.IntN(total)
	for _, k := range kinds {
		if at < k.weight {
			l.next++
			return k.make(l)
		}
		at -= k.weight
	}
	panic("unreachable: the weights' sum")
}

// single is one pod with claims of its own.
func single(templates ...template) func(*load) arrival {
	return func(l *load) arrival {
		return arrival{claims: len(templates), pods: []podPlan{l.plan(fmt.Sprintf("pod-%04d", l.next), l.scheduler(), templates...)}}
	}
}

// impatient is a pod that is deleted soon, in whatever state it is then.
func (l *load) impatient() arrival {
	a := single(oneGPU)(l)
	a.pods[0].patience = time.Duration(l.random.Int64N(int64(3 * time.Second)))
	return a
}

// shared is several pods of different schedulers with one claim.
func (l *load) shared() arrival {
	name := fmt.Sprintf("shared-%04d", l.next)
	kinds := []template{oneGPU, quarter, smallShare}
	a := arrival{claims: 1, shared: &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: l.namespace},
		Spec:       specs[kinds[l.random.IntN(len(kinds))]],
	}}
	first := l.random.IntN(len(l.schedulers))
	for i := range 2 + l.random.IntN(2) {
		p := l.plan(fmt.Sprintf("pod-%04d-%d", l.next, i), l.schedulers[(first+i)%len(l.schedulers)])
		p.pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "shared", ResourceClaimName: ptr.To(name)}}
		a.pods = append(a.pods, p)
	}
	return a
}

func (l *load) scheduler() string { return l.schedulers[l.random.IntN(len(l.schedulers))] }

func (l *load) plan(name, scheduler string, templates ...template) podPlan {
	return podPlan{
		pod:     l.newPod(name, scheduler, templates...),
		large:   slices.Contains(templates, wholeNode),
		hold:    l.hold/2 + time.Duration(l.random.Int64N(int64(l.hold))),
		deleted: l.random.IntN(3) == 0,
	}
}

// newPod has a claim of its own from each of the templates.
func (l *load) newPod(name, scheduler string, templates ...template) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: l.namespace},
		Spec: corev1.PodSpec{
			SchedulerName:                 scheduler,
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			AutomountServiceAccountToken:  ptr.To(false),
			Containers:                    []corev1.Container{{Name: "main", Image: "stowage.dev/none"}},
		},
	}
	for i, t := range templates {
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{
			Name: fmt.Sprintf("claim-%d", i), ResourceClaimTemplateName: ptr.To(string(t)),
		})
	}
	return pod
}

// newTemplate is the claim template of a kind.
func newTemplate(name template, spec resourceapi.ResourceClaimSpec) *resourceapi.ResourceClaimTemplate {
	return &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: string(name)},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: spec},
	}
}
