// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// onePlaceLeft is an allocated claim with one place left.
func onePlaceLeft(c *resourceapi.ResourceClaim) {
	allocated("node-a", "gpu-0")(c)
	for i := range resourceapi.ResourceClaimReservedForMaxSize - 1 {
		reservedFor(fmt.Sprint("other-", i))(c)
	}
}

// The last place at a claim goes to one pod, before it is written. Whoever comes later waits, and is woken when that pod gives it back.
func TestTheLastPlaceAtAClaimIsGivenOnce(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("shared", onePlaceLeft)}
	w.pods = append(w.pods, pod("first", "shared"), pod("second", "shared"))
	h := newHarness(t, w)
	late := h.filterAll(pod("late", "shared"))
	first := h.filterAll(pod("first", "shared")).reserve("node-a")

	const want = "claim team-a/shared is already reserved for 256 pods, the limit is 256: the pod waits until one of them ends"
	if got := h.filterAll(pod("second", "shared")).preFilter.Message(); got != want {
		t.Errorf("PreFilter of the second pod: %q, want %q", got, want)
	}
	if status := h.plugin.Reserve(h.ctx, late.state, late.pod, "node-a"); status.Message() != want || !status.IsRejected() {
		t.Errorf("Reserve of a pod that was filtered before: %v, want %q", status, want)
	}
	h.activator.taken()
	first.unreserve("node-a")
	h.eventually("the second pod is woken", func() bool {
		for _, name := range h.activator.taken() {
			if name == "second" {
				return true
			}
		}
		return false
	})
	h.filterAll(pod("second", "shared")).bind("node-a")
	if got := len(h.api.get("shared").Status.ReservedFor); got != resourceapi.ResourceClaimReservedForMaxSize {
		t.Errorf("the claim is reserved for %d pods", got)
	}
}

// The watch is behind: the claim is full, and that is not known. The first pod finds it out in PreBind; those after it are not tried.
func TestWhatIsReadInPreBindIsKnownToTheNextPod(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("shared", onePlaceLeft)}
	w.pods = append(w.pods, pod("first", "shared"), pod("second", "shared"))
	h := newHarness(t, w)
	h.api.hold()
	h.api.change("shared", func(c *resourceapi.ResourceClaim) {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "other", UID: "other-uid"})
	})
	first := h.filterAll(pod("first", "shared")).reserve("node-a")
	if status := h.plugin.PreBind(h.ctx, first.state, first.pod, "node-a"); !status.IsRejected() {
		t.Fatalf("PreBind of the first pod: %v, want it rejected", status)
	}
	first.unreserve("node-a")
	const want = "claim team-a/shared is already reserved for 256 pods, the limit is 256: the pod waits until one of them ends"
	if got := h.filterAll(pod("second", "shared")).preFilter.Message(); got != want {
		t.Errorf("PreFilter of the second pod: %q, want %q", got, want)
	}
}

// Pods that are bound at the same time write to their claim one after the other, so the API server refuses none of them.
func TestPodsThatShareAClaimAndAreBoundAtOnceDoNotConflict(t *testing.T) {
	const pods = 40
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("shared", allocated("node-a", "gpu-0"))}
	h := newHarness(t, w)
	var attempts []*attempt
	for i := range pods {
		attempts = append(attempts, h.filterAll(pod(fmt.Sprint("p-", i), "shared")).reserve("node-a"))
	}
	var binders sync.WaitGroup
	for _, a := range attempts {
		binders.Go(func() {
			if status := a.preBind("node-a"); !status.IsSuccess() {
				t.Errorf("PreBind of %s: %v", a.pod.Name, status)
			}
		})
	}
	binders.Wait()
	if got := len(h.api.get("shared").Status.ReservedFor); got != pods {
		t.Errorf("the claim is reserved for %d pods, want %d", got, pods)
	}
	updates := 0
	for _, request := range h.api.written() {
		if strings.HasPrefix(request, "update") {
			updates++
		}
	}
	if updates != pods {
		t.Errorf("%d writes for %d pods: %q", updates, pods, h.api.written())
	}
	for _, a := range attempts {
		if h.plugin.shared.books.Places.Leave("shared-uid", a.pod.UID) {
			t.Errorf("pod %s has a place in the claim although it is in there", a.pod.Name)
		}
	}
}

// Of many that wait for a place, as many are woken as there are places, in the order of the queue.
func TestAsManyPodsAreWokenAsTheirClaimHasPlaces(t *testing.T) {
	w := twoNodes()
	full := claim("shared", onePlaceLeft, reservedFor("last"))
	w.claims = []*resourceapi.ResourceClaim{full}
	for i := range 9 {
		p := pod(fmt.Sprint("p-", i), "shared")
		p.Spec.Priority = ptr.To(int32(i))
		w.pods = append(w.pods, p)
	}
	w.pods = append(w.pods, pod("later", "late"))
	h := newHarness(t, w)
	for _, p := range w.pods {
		h.filterAll(p)
	}
	h.api.change("shared", func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = c.Status.ReservedFor[2:] })
	h.api.create(claim("late")) // claims' events come in order: when this one is known, the one before has been looked at
	var woken []string
	h.eventually("the pod with the later claim is woken", func() bool {
		woken = append(woken, h.activator.taken()...)
		return slices.Contains(woken, "later")
	})
	slices.Sort(woken)
	if diff := cmp.Diff([]string{"later", "p-7", "p-8"}, woken); diff != "" {
		t.Errorf("woken pods (-want +got):\n%s", diff)
	}
	h.filterAll(w.pods[8]).bind("node-a")
	h.filterAll(w.pods[7]).reserve("node-a").unreserve("node-a")
	h.eventually("the next one is woken", func() bool { return slices.Contains(h.activator.taken(), "p-6") })
}

// Until a claim is allocated, one of the pods that share it is tried, and not all for each that fails.
func TestOnePodIsWokenForAClaimThatIsToBeAllocated(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("shared")}
	for i := range 5 {
		w.pods = append(w.pods, pod(fmt.Sprint("p-", i), "shared"))
	}
	h := newHarness(t, w)
	first := h.filterAll(w.pods[0]).reserve("node-a")
	for _, p := range w.pods[1:] {
		if status := h.filterAll(p).preFilter; status.IsSuccess() {
			t.Fatalf("pod %s is tried while the claim is being allocated", p.Name)
		}
	}
	first.unreserve("node-a")
	h.wakes("p-1")
	second := h.filterAll(w.pods[1]).reserve("node-a")
	if status := second.preBind("node-a"); !status.IsSuccess() {
		t.Fatalf("PreBind: %v", status)
	}
	var woken []string
	h.eventually("all others are woken, as the claim has places for them", func() bool {
		woken = append(woken, h.activator.taken()...)
		return len(woken) == 3
	})
}
