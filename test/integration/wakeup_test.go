// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/component-base/metrics/legacyregistry"
)

var badGPU = resourceapi.DeviceTaint{Key: "stowage.dev/bad", Effect: resourceapi.DeviceTaintEffectNoSchedule}

// What changes wakes the pod that it helps and nobody else. A bystander waits for devices of the same node that the change does not
// bring, another one for devices of a node that it does not touch.
func TestOnlyThePodIsWokenThatFitsAfter(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		before func(w *world)
		event  func(w *world)
	}{
		"a freed device": {
			before: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				w.addClaim("held", spec(w.exactly("gpu", 1)))
				w.addPod("holder", withClaim("held"))
				w.awaitBound("holder")
			},
			event: func(w *world) { w.deletePod("holder") },
		},
		"a new slice": {
			before: func(w *world) { w.addNode("a") },
			event:  func(w *world) { w.addSlice(w.slice("a", gpus(h100, 1)...)) },
		},
		"a taint lifted by the driver": {
			before: func(w *world) { w.addNode("a", gpus(h100, 1, tainted(1, badGPU))...) },
			event: func(w *world) {
				slice, err := w.client.ResourceV1().ResourceSlices().Get(w.ctx, w.nodeName("a"), metav1.GetOptions{})
				w.must(err, "getting the slice")
				slice.Spec.Devices = gpus(h100, 1)
				slice.Spec.Pool.Generation++
				_, err = w.client.ResourceV1().ResourceSlices().Update(w.ctx, slice, metav1.UpdateOptions{})
				w.must(err, "lifting the taint")
			},
		},
		"a DeviceTaintRule that goes": {
			before: func(w *world) {
				w.addTaintRule("a", "gpu-0", badGPU)
				w.addNode("a", gpus(h100, 1)...)
			},
			event: func(w *world) {
				w.must(w.client.ResourceV1().DeviceTaintRules().Delete(w.ctx, w.name+"-a-gpu-0", metav1.DeleteOptions{}), "deleting the rule")
			},
		},
		"a changed class": {
			before: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				w.setClass(`false`)
			},
			event: func(w *world) { w.setClass(`device.driver == "$DRIVER"`) },
		},
		"a node that comes after its slices": {
			before: func(w *world) {
				w.addNode("b")
				w.addSlice(w.slice("a", gpus(h100, 1)...))
			},
			event: func(w *world) { w.addNode("a") },
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			s := startScheduler(t, w.name, schedulerSetup{})
			test.before(w)
			w.addNode("full", gpus(h100, 1, tainted(1, badGPU))...)
			w.addClaim("two", spec(w.exactly("gpu", 2)))
			w.addPod("wants-two", withClaim("two"))
			w.addClaim("other", spec(w.exactly("gpu", 1, byProduct(a100))))
			w.addPod("wants-another", withClaim("other"))
			w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			w.addPod("waiting", withClaim("wanted"))
			for _, pod := range []string{"wants-two", "wants-another", "waiting"} {
				w.awaitUnschedulable(pod)
			}
			before := map[string]int{}
			for _, pod := range []string{"wants-two", "wants-another"} {
				before[pod] = s.probe.of(pod).attempts
			}
			test.event(w)
			w.awaitBoundTo("waiting", "a")
			for pod, n := range before {
				if again := s.probe.of(pod).attempts - n; again > allowed(name) {
					t.Errorf("pod %s was tried %d more times", pod, again)
				}
			}
		})
	}
}

// allowed is how often a bystander may be tried. A new node matches the selectors of all pods of the world, and admission taints
// it until that is taken away: kube-scheduler's own plugins wake the pods that they have refused, for each of the two.
func allowed(event string) int {
	if event == "a node that comes after its slices" {
		return 3
	}
	return 0
}

// setClass changes the selector of the world's class.
func (w *world) setClass(selector string) {
	w.t.Helper()
	class, err := w.client.ResourceV1().DeviceClasses().Get(w.ctx, w.class, metav1.GetOptions{})
	w.must(err, "getting class %s", w.class)
	class.Spec.Selectors = w.selectors(selector)
	_, err = w.client.ResourceV1().DeviceClasses().Update(w.ctx, class, metav1.UpdateOptions{})
	w.must(err, "changing class %s", w.class)
}

// Ten pods wait for one device. Each time it is freed one of them is tried and gets it, and all run in the end.
func TestTenPodsWaitForOneDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 1)...)
	w.addClaim("held", spec(w.exactly("gpu", 1)))
	holder := w.addPod("holder", withClaim("held"))
	w.awaitBound("holder")

	const n = 10
	attempts := func() (sum int) {
		for i := range n {
			sum += s.probe.of(fmt.Sprintf("waiting-%d", i)).attempts
		}
		return sum
	}
	for i := range n {
		name := fmt.Sprintf("waiting-%d", i)
		w.addClaim(name, spec(w.exactly("gpu", 1)))
		w.addPod(name, withClaim(name))
		w.awaitUnschedulable(name)
	}
	for i := range n {
		before := attempts()
		w.endPod(holder)
		holder = await(w, "a pod that waited to run", w.podList(fields.Everything()), func(p *v1.Pod) bool {
			return p.Spec.NodeName != "" && p.Status.Phase == v1.PodPending
		})
		if tried := attempts() - before; tried > 2 {
			t.Errorf("device %d freed: %d attempts for one device", i, tried)
		}
	}
}

// The first one that is woken turns out to have no room on the node, where a pod without devices has taken the CPUs. The next one is woken.
func TestTheNextPodIsWokenWhenTheFirstDoesNotTakeTheDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 1)...)
	w.addClaim("held", spec(w.exactly("gpu", 1)))
	w.addPod("holder", withClaim("held"))
	w.awaitBound("holder")
	w.addClaim("first", spec(w.exactly("gpu", 1)))
	w.addPod("first", withClaim("first"), withCPUs("100"))
	w.awaitUnschedulable("first", "held")
	w.addClaim("second", spec(w.exactly("gpu", 1)))
	w.addPod("second", withClaim("second"))
	w.awaitUnschedulable("second", "held")
	w.addPod("neighbour", withCPUs("50"))
	w.awaitBound("neighbour")
	before := s.probe.of("first").attempts

	w.deletePod("holder")
	w.awaitBoundTo("second", "a")
	if s.probe.of("first").attempts == before {
		t.Error("the pod that has waited longer was not tried")
	}
	// The outcome is counted when the scheduler hears that the pod is bound.
	w.must(wait.PollUntilContextTimeout(w.ctx, 10*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		n, err := wakeUps("next", "placed")
		return n > 0, err
	}), "waiting for the wake-up of the next pod to be counted")
}

// wakeUps reads the metric, which is of all schedulers in this process.
func wakeUps(cause, result string) (float64, error) {
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		return 0, err
	}
	for _, family := range families {
		if family.GetName() != "stowage_scheduler_wakeups_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, label := range metric.GetLabel() {
				labels[label.GetName()] = label.GetValue()
			}
			if labels["cause"] == cause && labels["result"] == result {
				return metric.GetCounter().GetValue(), nil
			}
		}
	}
	return 0, nil
}
