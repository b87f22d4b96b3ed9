// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	fwk "k8s.io/kube-scheduler/framework"
)

// The tests of this file replay what has gone wrong between the extension points of kube-scheduler's own plugin and its
// claim tracker, see the regression tests of pkg/tracker. The numbers are kubernetes/kubernetes issues and pull requests.

// #139418: PreBind failed and let go of the allocation in flight, and Unreserve did so once more. By then it belonged to
// another pod that uses the claim, too.
func TestUpstreamFailedPreBindIsNotUnreservedTwice(t *testing.T) {
	w := fenced()
	h := newHarness(t, w)
	h.api.hold()
	h.othersTake("gpu-0")
	failed := h.filterAll(w.pods[0]).reserve("node-a")
	done := failed.preBindAsync()
	h.eventually("the claim is written", func() bool { return h.api.get("mine").Status.Allocation != nil })
	h.api.release()
	if status := <-done; status.IsSuccess() {
		t.Fatal("PreBind succeeded although another scheduler was first")
	}
	h.caughtUp("mine")

	other := h.filterAll(w.pods[1]).reserve("node-b")
	failed.unreserve("node-a") // as the framework does after a failed PreBind
	if _, owners := h.plugin.shared.account.Tracker.Pending("mine-uid"); owners != 1 {
		t.Errorf("%d pods have the allocation in flight, want that of the other pod", owners)
	}
	if diff := cmp.Diff([]string{"gpu-0"}, h.heldOn("node-b")); diff != "" {
		t.Errorf("held devices differ (-want +got):\n%s", diff)
	}
	if status := other.preBind("node-b"); !status.IsSuccess() {
		t.Errorf("PreBind of the other pod: %v", status)
	}
	h.wantState("mine", state{[]string{"gpu-0"}, []string{"q"}})
}

// #140053: two pods that share a claim were decided while nobody had allocated it. To the second one the write of the
// first was a conflict. It must let the first one be, and then use what that one has.
func TestUpstreamPodsShareAClaimThatIsNotAllocatedYet(t *testing.T) {
	for name, written := range map[string]bool{"the first is in flight": false, "the first has written": true} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{claim("shared")}
			h := newHarness(t, w)
			first, second := h.filterAll(pod("p", "shared")), h.filterAll(pod("q", "shared"))
			first.reserve("node-b")
			bind := func() {
				if status := first.preBind("node-b"); !status.IsSuccess() {
					t.Fatalf("PreBind of the first pod: %v", status)
				}
			}
			if written {
				bind()
			}
			status := h.plugin.Reserve(h.ctx, second.state, second.pod, "node-a")
			if status.Code() != fwk.Unschedulable || !strings.Contains(status.Message(), "team-a/shared") {
				t.Errorf("Reserve of the second pod: %v", status)
			}
			second.unreserve("node-a")
			if !written {
				bind()
			}

			again := h.filterAll(second.pod)
			if diff := cmp.Diff([]string{"node-b"}, again.fits()); diff != "" {
				t.Errorf("nodes for the second pod differ (-want +got):\n%s", diff)
			}
			again.bind("node-b")
			h.wantState("shared", state{[]string{"gpu-0"}, []string{"p", "q"}})
			again.unreserve("node-b")
			h.wantState("shared", state{[]string{"gpu-0"}, []string{"p"}})
		})
	}
}

// A pod names one claim twice, directly and as the one that was made for it from a template. It is one claim: asked for once, given once.
func TestAClaimThatAPodNamesTwiceIsAllocatedOnce(t *testing.T) {
	mine := templatePod("mine", "made")
	mine.Spec.ResourceClaims = append(mine.Spec.ResourceClaims, pod("", "made").Spec.ResourceClaims...)
	twice := pod("twice", "direct", "direct")
	twice.Spec.ResourceClaims[1].Name = "again"
	thief := templatePod("thief", "made")
	thief.Spec.ResourceClaims = append(thief.Spec.ResourceClaims, pod("", "made").Spec.ResourceClaims...)
	w := twoNodes()
	w.pods = []*v1.Pod{mine, twice, thief}
	w.claims = []*resourceapi.ResourceClaim{claim("made", ownedBy(mine)), claim("direct")}
	h := newHarness(t, w)
	if got := h.filterAll(thief).preFilter.Message(); !strings.Contains(got, "was not created for") {
		t.Errorf("PreFilter of a pod that the claim was not made for: %q", got)
	}
	a := h.filterAll(mine)
	if diff := cmp.Diff([]string{"node-a", "node-b"}, a.fits()); diff != "" {
		t.Errorf("nodes that do, of which one has a single device (-want +got):\n%s", diff)
	}
	a.bind("node-b")
	h.filterAll(twice).bind("node-b")
	h.wantState("made", state{[]string{"gpu-0"}, []string{"mine"}})
	h.wantState("direct", state{[]string{"gpu-1"}, []string{"twice"}})
}
