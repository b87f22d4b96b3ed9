// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/watch"
)

// Two hundred pods at once, for 24 GPUs on 3 nodes. As many as fit run; the others follow as those end.
func TestBurst(t *testing.T) {
	t.Parallel()
	const pods, nodes, perNode = 200, 3, 8
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	for i := range nodes {
		w.addNode(fmt.Sprint(i), gpus(h100, perNode)...)
	}
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	audit := w.auditDevices()

	var creators sync.WaitGroup
	for i := range pods {
		creators.Go(func() {
			if _, err := w.client.CoreV1().Pods(w.name).Create(w.ctx, w.newPod(fmt.Sprintf("pod-%03d", i), withTemplate("one")), metav1.CreateOptions{}); err != nil {
				t.Errorf("creating pod %d: %v", i, err)
			}
		})
	}
	creators.Wait()

	w.awaitPods("bound", nodes*perNode, 3*patience, func(p *v1.Pod) bool { return p.Spec.NodeName != "" })
	ended := sets.New[string]()
	w.awaitPods("ended", pods, 3*patience, func(p *v1.Pod) bool {
		if p.Spec.NodeName != "" && !ended.Has(p.Name) {
			ended.Insert(p.Name)
			w.endPod(p)
		}
		return p.Status.Phase == v1.PodSucceeded
	})
	if most := audit.stop(); most != nodes*perNode {
		t.Errorf("at most %d devices were held at once, want all %d", most, nodes*perNode)
	}
}

// awaitPods waits until as many pods of the world meet the condition.
func (w *world) awaitPods(what string, n int, limit time.Duration, met func(*v1.Pod) bool) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, limit)
	defer cancel()
	found := sets.New[string]()
	_, err := listAndWatch(ctx, w.podList(fields.Everything()), func(_ watch.EventType, object runtime.Object) bool {
		if pod, ok := object.(*v1.Pod); ok && met(pod) {
			found.Insert(pod.Name)
		}
		return found.Len() >= n
	})
	if err != nil {
		w.t.Fatalf("waiting for %d pods to be %s, have %d: %v", n, what, found.Len(), err)
	}
}

// audit watches all claims of a namespace, in the order of their revisions, and reports every device that
// two of them hold at once.
type audit struct {
	w      *world
	cancel context.CancelFunc
	done   chan struct{}

	holders map[string]sets.Set[types.UID] // by device
	held    map[types.UID][]string         // devices by claim
	most    int                            // devices held at once
}

// auditDevices begins an audit of the world's claims. It must be stopped.
func (w *world) auditDevices() *audit {
	ctx, cancel := context.WithCancel(w.ctx)
	a := &audit{
		w: w, cancel: cancel, done: make(chan struct{}),
		holders: map[string]sets.Set[types.UID]{}, held: map[types.UID][]string{},
	}
	go func() {
		defer close(a.done)
		_, err := listAndWatch(ctx, w.claimList(fields.Everything()), a.observe)
		if ctx.Err() == nil {
			w.t.Errorf("the audit of devices ended early: %v", err)
		}
	}()
	return a
}

// stop ends the audit and returns how many devices were held at once, at most.
func (a *audit) stop() int {
	a.cancel()
	<-a.done
	return a.most
}

func (a *audit) observe(event watch.EventType, object runtime.Object) bool {
	claim, ok := object.(*resourceapi.ResourceClaim)
	if !ok {
		return false
	}
	for _, device := range a.held[claim.UID] {
		if a.holders[device].Delete(claim.UID); a.holders[device].Len() == 0 {
			delete(a.holders, device)
		}
	}
	delete(a.held, claim.UID)
	if event == watch.Deleted || claim.Status.Allocation == nil {
		return false
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		device := r.Driver + "/" + r.Pool + "/" + r.Device
		a.held[claim.UID] = append(a.held[claim.UID], device)
		if a.holders[device] == nil {
			a.holders[device] = sets.New[types.UID]()
		}
		if a.holders[device].Insert(claim.UID); a.holders[device].Len() > 1 {
			a.w.t.Errorf("revision %s: device %s is held by %d claims, the last being %s", claim.ResourceVersion, device, a.holders[device].Len(), claim.Name)
		}
	}
	a.most = max(a.most, len(a.holders))
	return false
}
