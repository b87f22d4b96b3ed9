// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
)

// await lists and then watches until an object meets the condition, and returns that object. An object that is
// deleted no longer meets any condition, except for gone.
func await[T runtime.Object](w *world, what string, lw cache.ListerWatcher, met func(T) bool) T {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()

	var last T
	found, err := listAndWatch(ctx, lw, func(event watch.EventType, object runtime.Object) bool {
		candidate, ok := object.(T)
		if !ok || event == watch.Deleted {
			return false
		}
		last = candidate
		return met(candidate)
	})
	if err != nil {
		w.t.Fatalf("waiting for %s: %v; last seen: %s", what, err, describe(last))
	}
	return found.(T)
}

// listAndWatch calls met with each listed object, as if it were just added, and then with each change. It returns
// the object for which met is true.
func listAndWatch(ctx context.Context, lw cache.ListerWatcher, met func(watch.EventType, runtime.Object) bool) (runtime.Object, error) {
	list, err := cache.ToListerWatcherWithContext(lw).ListWithContext(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	objects, err := meta.ExtractList(list)
	if err != nil {
		return nil, err
	}
	for _, object := range objects {
		if met(watch.Added, object) {
			return object, nil
		}
	}
	listMeta, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	event, err := watchtools.Until(ctx, listMeta.GetResourceVersion(), lw, func(e watch.Event) (bool, error) {
		return met(e.Type, e.Object), nil
	})
	if err != nil {
		return nil, err
	}
	return event.Object, nil
}

func (w *world) podList(selector fields.Selector) cache.ListerWatcher {
	return cache.NewListWatchFromClient(w.client.CoreV1().RESTClient(), "pods", w.name, selector)
}

func (w *world) claimList(selector fields.Selector) cache.ListerWatcher {
	return cache.NewListWatchFromClient(w.client.ResourceV1().RESTClient(), "resourceclaims", w.name, selector)
}

func named(name string) fields.Selector {
	return fields.OneTermEqualSelector(metav1.ObjectNameField, name)
}

func (w *world) awaitPod(name, what string, met func(*v1.Pod) bool) *v1.Pod {
	w.t.Helper()
	return await(w, fmt.Sprintf("pod %s to be %s", name, what), w.podList(named(name)), met)
}

func (w *world) awaitClaim(name, what string, met func(*resourceapi.ResourceClaim) bool) *resourceapi.ResourceClaim {
	w.t.Helper()
	return await(w, fmt.Sprintf("claim %s to be %s", name, what), w.claimList(named(name)), met)
}

// awaitBound waits until the pod has a node.
func (w *world) awaitBound(name string) *v1.Pod {
	w.t.Helper()
	return w.awaitPod(name, "bound", func(p *v1.Pod) bool { return p.Spec.NodeName != "" })
}

// awaitBoundTo waits until the pod has a node and fails if that is another one.
func (w *world) awaitBoundTo(name, nodeSuffix string) *v1.Pod {
	w.t.Helper()
	pod := w.awaitBound(name)
	if want := w.nodeName(nodeSuffix); pod.Spec.NodeName != want {
		w.t.Fatalf("pod %s is on node %s, want %s", name, pod.Spec.NodeName, want)
	}
	return pod
}

// awaitUnschedulable waits until the pod's PodScheduled condition is false with a message that has all the parts.
func (w *world) awaitUnschedulable(name string, parts ...string) *v1.Pod {
	w.t.Helper()
	w.followAdviceAtTheEnd()
	return w.awaitPod(name, fmt.Sprintf("unschedulable with a message that has %q", parts), func(p *v1.Pod) bool {
		c := scheduledCondition(p)
		return c != nil && c.Status == v1.ConditionFalse && hasAll(c.Message, parts)
	})
}

// eventList has the events about an object of that name.
func (w *world) eventList(about string) cache.ListerWatcher {
	return cache.NewListWatchFromClient(w.client.CoreV1().RESTClient(), "events", w.name, fields.OneTermEqualSelector("involvedObject.name", about))
}

// awaitEvent waits for an event about the pod whose note has all the parts.
func (w *world) awaitEvent(pod *v1.Pod, parts ...string) *v1.Event {
	w.t.Helper()
	return await(w, fmt.Sprintf("an event of pod %s with %q", pod.Name, parts), w.eventList(pod.Name), func(e *v1.Event) bool {
		return hasAll(e.Message, parts)
	})
}

func scheduledCondition(pod *v1.Pod) *v1.PodCondition {
	for i, c := range pod.Status.Conditions {
		if c.Type == v1.PodScheduled {
			return &pod.Status.Conditions[i]
		}
	}
	return nil
}

func hasAll(s string, parts []string) bool {
	return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(s, part) })
}

func patchPhase(w *world, pod string, phase v1.PodPhase) error {
	patch := fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase)
	_, err := w.client.CoreV1().Pods(w.name).Patch(w.ctx, pod, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// describe is what a failure says about an object.
func describe(object runtime.Object) string {
	switch o := object.(type) {
	case *v1.Pod:
		if o == nil {
			return "nothing"
		}
		s := fmt.Sprintf("pod %s on node %q, phase %q", o.Name, o.Spec.NodeName, o.Status.Phase)
		if c := scheduledCondition(o); c != nil {
			s += fmt.Sprintf(", %s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message)
		}
		return s
	case *resourceapi.ResourceClaim:
		if o == nil {
			return "nothing"
		}
		return fmt.Sprintf("claim %s with devices %q, reserved for %v, finalizers %q", o.Name, devices(o), o.Status.ReservedFor, o.Finalizers)
	case *v1.Event:
		if o == nil {
			return "nothing"
		}
		return fmt.Sprintf("event %s: %s", o.Reason, o.Message)
	default:
		return fmt.Sprintf("%v", object)
	}
}

// dump logs the state of the world of a failed test.
func (w *world) dump() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if pods, err := w.client.CoreV1().Pods(w.name).List(ctx, metav1.ListOptions{}); err == nil {
		for i := range min(len(pods.Items), 20) {
			w.t.Log(describe(&pods.Items[i]))
		}
	}
	if claims, err := w.client.ResourceV1().ResourceClaims(w.name).List(ctx, metav1.ListOptions{}); err == nil {
		for i := range min(len(claims.Items), 20) {
			w.t.Log(describe(&claims.Items[i]))
		}
	}
	if events, err := w.client.CoreV1().Events(w.name).List(ctx, metav1.ListOptions{}); err == nil {
		for i := range min(len(events.Items), 20) {
			w.t.Log(events.Items[i].InvolvedObject.Name, describe(&events.Items[i]))
		}
	}
}

func (w *world) namespaceList() cache.ListerWatcher {
	return cache.NewListWatchFromClient(w.client.CoreV1().RESTClient(), "namespaces", "", named(w.name))
}

// awaitClaimGone waits until the claim of that name does not exist.
func (w *world) awaitClaimGone(name string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	options := metav1.ListOptions{FieldSelector: named(name).String()}
	list, err := w.client.ResourceV1().ResourceClaims(w.name).List(ctx, options)
	w.must(err, "listing claim %s", name)
	if len(list.Items) == 0 {
		return
	}
	_, err = watchtools.Until(ctx, list.ResourceVersion, w.claimList(named(name)), func(e watch.Event) (bool, error) {
		return e.Type == watch.Deleted, nil
	})
	w.must(err, "waiting for claim %s to be gone", name)
}
