// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"
)

// barrier holds pods after their Reserve, before anything is written to the API.
type barrier struct {
	holds func(*v1.Pod) bool
	probe *probe

	mutex sync.Mutex
	held  map[string]chan struct{} // closed when the pod of that name is held
	uids  map[string]types.UID
}

func newBarrier(holds func(*v1.Pod) bool) *barrier {
	b := &barrier{holds: holds, held: map[string]chan struct{}{}, uids: map[string]types.UID{}}
	b.probe = &probe{permit: b.permit}
	return b
}

func (b *barrier) permit(_ context.Context, pod *v1.Pod, _ string) (*fwk.Status, time.Duration) {
	if !b.holds(pod) {
		return nil, 0
	}
	held := b.channel(pod.Name)
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if _, again := b.uids[pod.Name]; !again {
		b.uids[pod.Name] = pod.UID
		close(held)
	}
	return fwk.NewStatus(fwk.Wait), 2 * patience
}

func (b *barrier) channel(pod string) chan struct{} {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if b.held[pod] == nil {
		b.held[pod] = make(chan struct{})
	}
	return b.held[pod]
}

// await waits until the pod is held and can be allowed or rejected.
func (b *barrier) await(w *world, pod string) fwk.WaitingPod {
	w.t.Helper()
	select {
	case <-b.channel(pod):
	case <-time.After(patience):
		w.t.Fatalf("pod %s does not reach its Permit step", pod)
	}
	b.mutex.Lock()
	uid := b.uids[pod]
	b.mutex.Unlock()
	// The scheduler enters the pod into its list of waiting ones just after the plugin has said so, and tries no
	// further pod before that: a pod that was tried later shows that it is there.
	w.addPod(pod + "-follower")
	w.awaitBound(pod + "-follower")
	waiting := b.probe.handle.GetWaitingPod(uid)
	if waiting == nil {
		w.t.Fatalf("pod %s is not waiting at its Permit step", pod)
	}
	return waiting
}

func only(names ...string) func(*v1.Pod) bool {
	return func(p *v1.Pod) bool {
		for _, n := range names {
			if p.Name == n {
				return true
			}
		}
		return false
	}
}

// Reserve: a device counts as taken from the decision on, not only from the API write on.
func TestDeviceInFlightIsNotGivenToAnotherPod(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := newBarrier(only("first"))
	startScheduler(t, w.name, schedulerSetup{probe: b.probe})
	w.addNode("a", gpus(h100, 1)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))

	w.addPod("first", withTemplate("one"))
	waiting := b.await(w, "first")
	w.addPod("second", withTemplate("one"))
	second := w.awaitUnschedulable("second", "one")

	waiting.Allow(probeName)
	first := w.awaitBound("first")
	if got := devices(w.claim(claimName(first, "one"))); len(got) != 1 {
		t.Errorf("the first pod has the devices %q, want one", got)
	}
	if got := devices(w.claim(claimName(second, "one"))); len(got) != 0 {
		t.Errorf("the second pod has the devices %q, want none", got)
	}
}

// Unreserve, before any API write: the device is free again, and the pods that wait for it hear of that, although
// no object in the API has changed.
func TestDeviceOfARejectedPodGoesToTheNext(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := newBarrier(only("first"))
	startScheduler(t, w.name, schedulerSetup{probe: b.probe})
	w.addNode("a", gpus(h100, 1)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))

	w.addPod("first", withTemplate("one"))
	waiting := b.await(w, "first")
	w.addPod("second", withTemplate("one"))
	w.awaitUnschedulable("second")

	waiting.Reject(probeName, "the test says no")
	w.awaitBound("second")
	first := w.awaitUnschedulable("first", "the test says no")
	claim := w.claim(claimName(first, "one"))
	if claim.Status.Allocation != nil || len(claim.Status.ReservedFor) != 0 {
		t.Errorf("after Unreserve: %s", describe(claim))
	}
}

// Unreserve, after our PreBind has written: the API object is restored as well.
func TestClaimOfAPodThatFailsToBindIsRestored(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var written atomic.Pointer[resourceapi.ResourceClaim] // as it was when the later PreBind failed
	p := &probe{preBind: func(ctx context.Context, pod *v1.Pod, _ string) *fwk.Status {
		if pod.Name != "first" {
			return nil
		}
		claim, err := w.client.ResourceV1().ResourceClaims(w.name).Get(ctx, claimName(pod, "one"), metav1.GetOptions{})
		if err != nil {
			return fwk.AsStatus(err)
		}
		written.Store(claim)
		return fwk.AsStatus(errors.New("the test makes binding fail"))
	}}
	startScheduler(t, w.name, schedulerSetup{probe: p})
	w.addNode("a", gpus(h100, 1)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))

	w.addPod("first", withTemplate("one"))
	first := w.awaitUnschedulable("first", "the test makes binding fail")
	w.addPod("second", withTemplate("one"))
	w.awaitBound("second")

	if before := written.Load(); before == nil || before.Status.Allocation == nil {
		t.Errorf("when the later step failed, our PreBind had not written the allocation")
	}
	w.awaitClaim(claimName(first, "one"), "as it was before", func(c *resourceapi.ResourceClaim) bool {
		return c.Status.Allocation == nil && len(c.Status.ReservedFor) == 0
	})
}

// A claim in flight for one pod is not decided a second time for another. When the first gives up, the second hears
// of it and takes the claim.
func TestSharedClaimInFlightOfAPodThatIsRejected(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := newBarrier(only("first"))
	startScheduler(t, w.name, schedulerSetup{probe: b.probe})
	w.addNode("a", gpus(h100, 2)...)
	w.addClaim("shared", spec(w.exactly("gpu", 1)))

	w.addPod("first", withClaim("shared"))
	waiting := b.await(w, "first")
	w.addPod("second", withClaim("shared"))
	w.awaitUnschedulable("second", "shared, which the pod shares with pod first, is being allocated")

	waiting.Reject(probeName, "the test says no")
	w.awaitUnschedulable("first", "the test says no")
	second := w.awaitBound("second")
	claim := w.claim("shared")
	if len(devices(claim)) != 1 || len(claim.Status.ReservedFor) != 1 || claim.Status.ReservedFor[0].UID != second.UID {
		t.Errorf("want one device, reserved for the second pod: %s", describe(claim))
	}
}
