// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Three hundred pods at once that share one claim, of which 256 may use it at a time. They write to it one after the other; those that
// find no place wait, are told so, and come when there is one. None of that is a mistake of anybody's.
//
// It has the cluster for itself: schedulers see the pods of all tests, and a burst of this size would slow the others down.
func TestThreeHundredPodsOnOneClaimCauseNoWarning(t *testing.T) {
	const pods, places = 300, resourceapi.ResourceClaimReservedForMaxSize
	w := newWorld(t)
	w.addNode("a", gpus(h100, 1)...)
	w.addClaim("shared", spec(w.exactly("gpu", 1)))
	s := startScheduler(t, w.name, schedulerSetup{}) // which has seen the slice before it tries a pod, and warns of none

	var creators sync.WaitGroup
	for i := range pods {
		creators.Go(func() {
			pod := w.newPod(fmt.Sprintf("pod-%03d", i), withClaim("shared"))
			if _, err := w.client.CoreV1().Pods(w.name).Create(w.ctx, pod, metav1.CreateOptions{}); err != nil {
				t.Errorf("creating pod %d: %v", i, err)
			}
		})
	}
	creators.Wait()
	bound := func(p *v1.Pod) bool { return p.Spec.NodeName != "" }
	w.awaitPods("bound", places, 3*patience, bound)
	var running, waiting *v1.Pod
	w.awaitPods("kept waiting", pods-places, patience, func(p *v1.Pod) bool {
		if bound(p) {
			running = p
			return false
		}
		waiting = p
		c := scheduledCondition(p)
		return c != nil && hasAll(c.Message, []string{fmt.Sprintf(
			"claim %s/shared is already reserved for %d pods, the limit is", w.name, places)})
	})
	event := w.awaitEvent(waiting, "the pod waits until one of them ends")
	if event.Type != v1.EventTypeNormal || event.Reason != "ClaimFull" {
		t.Errorf("the event of a pod that waits for a place is %s %s", event.Type, event.Reason)
	}
	if got := len(w.claim("shared").Status.ReservedFor); got != places {
		t.Errorf("the claim is reserved for %d pods, want %d", got, places)
	}

	w.endPod(running)
	w.awaitPods("bound", places+1, 3*patience, bound)
	w.wantNoWarnings()
	s.wantNoErrors(t)
}

// wantNoWarnings fails if there is an event in the world that warns.
func (w *world) wantNoWarnings() {
	w.t.Helper()
	events, err := w.client.CoreV1().Events(w.name).List(w.ctx, metav1.ListOptions{FieldSelector: "type=" + v1.EventTypeWarning})
	w.must(err, "listing events")
	for i, event := range events.Items {
		if i == 10 {
			break
		}
		w.t.Errorf("one of %d warnings: pod %s: %s", len(events.Items), event.InvolvedObject.Name, describe(&events.Items[i]))
	}
}
