// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/failures"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
)

// told is what a pod's user is told of a failed attempt, and the condition's message.
func told(status *fwk.Status) (event, condition string) {
	handled, event := handle(status)
	return event, handled.Message()
}

// handle is what kube-scheduler does with a failure, as far as it can be seen from outside: the status that it gets, and its event.
func handle(status *fwk.Status) (handled *fwk.Status, event string) {
	return handleWith(nominationsWith(), status)
}

// nominationsWith knows the pods.
func nominationsWith(pods ...*v1.Pod) *contention.Nominations {
	known := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	for _, p := range pods {
		_ = known.Add(p) // the store of an indexer refuses only what has no name
	}
	return contention.NewNominations(corelisters.NewPodLister(known), nil, nil)
}

// handleWith returns no event if there is none.
func handleWith(n *contention.Nominations, status *fwk.Status) (handled *fwk.Status, event string) {
	recorder := events.NewFakeRecorder(10)
	next := func(
		_ context.Context, profile framework.Framework, pod *framework.QueuedPodInfo, status *fwk.Status, _ *fwk.NominatingInfo, _ time.Time,
	) {
		handled = status
		profile.EventRecorder().WithLogger(klog.Background()).Eventf(
			pod.Pod, nil, v1.EventTypeWarning, "FailedScheduling", "Scheduling", status.Message())
	}
	info := &framework.QueuedPodInfo{PodInfo: &framework.PodInfo{Pod: pod("p")}}
	(&Shared{common: &contention.Common{Nominations: n}}).HandleFailures(next)(context.Background(), profileWith{recorder: recorder}, info, status, nil, time.Time{})
	close(recorder.Events)
	return handled, <-recorder.Events
}

// A preemptor is tried at each change of the claims that it waits for. It is told of that once, and anew if it waits again later.
func TestAWaitForClaimsToLeaveIsToldOnce(t *testing.T) {
	waits := refusedWith("node node-b: claims team-a/a, team-a/b released, waiting for their deallocation")
	still := refusedWith("node node-b: claim team-a/b released, waiting for its deallocation")
	told := func(n *contention.Nominations, status *fwk.Status) bool {
		handled, event := handleWith(n, status)
		if handled == nil {
			t.Error("the scheduler's own handler was not called")
		}
		return event != ""
	}
	p := pod("p")
	for name, end := range map[string]func(n *contention.Nominations){
		"another failure": func(n *contention.Nominations) {
			if !told(n, refusedWith("something else")) {
				t.Error("another failure is not told")
			}
		},
		"a node":       func(n *contention.Nominations) { n.PodHandler().OnUpdate(p, boundPod(p.DeepCopy(), p.UID)) },
		"its deletion": func(n *contention.Nominations) { n.PodHandler().OnDelete(p) },
	} {
		t.Run(name, func(t *testing.T) {
			n := nominationsWith(p)
			if got, want := []bool{told(n, waits), told(n, still), told(n, still)}, []bool{true, false, false}; !slices.Equal(got, want) {
				t.Errorf("told %v, want %v", got, want)
			}
			if end(n); !told(n, still) {
				t.Error("another wait is not told")
			}
		})
	}
}

type profileWith struct {
	framework.Framework
	recorder events.EventRecorderLogger
}

func (p profileWith) EventRecorder() events.EventRecorderLogger { return p.recorder }

// isQuiet tells whether kube-scheduler logs no error for the status, and tries the pod again after a pause. Its queue adds to the sets of
// plugins, and ends the process if one is nil.
func isQuiet(status *fwk.Status) bool {
	fit, ok := status.AsError().(*framework.FitError) //nolint:errorlint // as kube-scheduler asks
	if !ok || !status.IsRejected() {
		return false
	}
	unschedulable, pending := fit.Diagnosis.UnschedulablePlugins, fit.Diagnosis.PendingPlugins
	return unschedulable != nil && pending != nil && unschedulable.Len()+pending.Len() == 0
}

func TestWhatPreBindTellsOfPodsThatAreTriedAgain(t *testing.T) {
	conflict := apierrors.NewConflict(resourceapi.Resource("resourceclaims"), "mine", errors.New("the object has been modified"))
	tests := map[string]struct {
		before func(h *harness) // between Reserve and PreBind
		event  string
		quiet  bool
	}{
		"another scheduler was faster": {
			func(h *harness) { h.othersTake("gpu-0") },
			"Normal LostRaceForDevices devices taken back, the pod will be tried again: claim team-a/mine gives way: " +
				"claim team-a/other (UID other-uid) was allocated earlier: device gpu.example.com/node-a/gpu-0", true,
		},
		"somebody else has allocated the claim": {
			func(h *harness) { h.api.change("mine", allocated("node-b", "gpu-1")) },
			"Normal ClaimChanged claim team-a/mine: was allocated by somebody else while the pod was scheduled", true,
		},
		"the claim is being deleted": {
			func(h *harness) { h.api.change("mine", deleting) }, "Normal ClaimChanged claim team-a/mine: is being deleted", true,
		},
		"the claim changes with each write": {
			func(h *harness) {
				h.api.onRequest(func(request string) error {
					if strings.HasPrefix(request, "update") {
						return conflict
					}
					return nil
				})
			},
			"Normal ClaimChanged claim team-a/mine: changed again and again while the pod was bound", true,
		},
		"other pods take the last places": {
			func(h *harness) {
				h.api.change("mine", func(c *resourceapi.ResourceClaim) {
					for i := range resourceapi.ResourceClaimReservedForMaxSize {
						reservedFor(fmt.Sprint("other-", i))(c)
					}
				})
			},
			"Normal ClaimFull claim team-a/mine: already reserved for 256 pods, the limit is 256: the pod waits until one of them ends", true,
		},
		"the API server fails": {
			func(h *harness) { h.api.onRequest(func(string) error { return errServer }) },
			"Warning FailedScheduling claim team-a/mine: add the finalizer: " + errServer.Error(), false,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := fenced()
			w.objects = twoNodes().objects
			w.nodes = twoNodes().nodes
			h := newHarness(t, w)
			a := h.filterAll(pod("p", "mine")).reserve("node-a")
			tc.before(h)
			h.plugin.binder.UndoPauses.Duration = 0
			status := a.preBind("node-a")
			event, condition := told(status)
			want := tc.event
			if tc.quiet {
				_, text, _ := strings.Cut(want, " ")
				_, text, _ = strings.Cut(text, " ")
				if diff := cmp.Diff("0/1 nodes are available: 1 "+text+".", condition); diff != "" {
					t.Errorf("condition (-want +got):\n%s", diff)
				}
			}
			if diff := cmp.Diff(want, event); diff != "" {
				t.Errorf("event (-want +got):\n%s", diff)
			}
			if got := isQuiet(status); got != tc.quiet {
				t.Errorf("no error is logged: %t, want %t", got, tc.quiet)
			}
		})
	}
}

func TestWhatIsToldOfPodsThatArePostponedBeforePreBind(t *testing.T) {
	full := claim("full", allocated("node-a", "gpu-0"), func(c *resourceapi.ResourceClaim) {
		for i := range resourceapi.ResourceClaimReservedForMaxSize {
			reservedFor(fmt.Sprint("other-", i))(c)
		}
	})
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{full, claim("flying")}
	h := newHarness(t, w)
	h.filterAll(pod("first", "flying")).reserve("node-b")
	tests := map[string]struct{ claim, want string }{
		"a claim without a place": {
			"full",
			"Normal ClaimFull claim team-a/full is already reserved for 256 pods, the limit is 256: the pod waits until one of them ends",
		},
		"a claim that is being allocated": {
			"flying", "Normal ClaimBeingAllocated claim team-a/flying, which the pod shares with pod first, is being allocated: the pod is tried again with it",
		},
		"a claim that does not exist is no such case": {
			"missing", "Warning FailedScheduling 0/2 nodes are available: claim team-a/missing does not exist.",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			status := h.filterAll(pod("p", tc.claim)).preFilter
			// As kube-scheduler hands it to its failure handler.
			fit := &framework.FitError{NumAllNodes: 2, Diagnosis: framework.Diagnosis{
				NodeToStatus: framework.NewDefaultNodeToStatus(), PreFilterMsg: status.Message(),
			}}
			fit.Diagnosis.NodeToStatus.SetAbsentNodesStatus(status)
			event, _ := told(fwk.NewStatus(fwk.Unschedulable).WithError(fit))
			if diff := cmp.Diff(tc.want, event); diff != "" {
				t.Errorf("event (-want +got):\n%s", diff)
			}
		})
	}
}

// The API server refuses an event whose note is longer than 1024 bytes, and then nobody is told anything.
func TestWhatIsToldFitsIntoAnEvent(t *testing.T) {
	status := failures.StatusOfBinding(pod("p"), "node-a", podevents.Postpone(podevents.ReasonLostRace, claim("mine"), errors.New(strings.Repeat("ä", 600))))
	event, condition := told(status)
	note := strings.TrimPrefix(event, "Normal LostRaceForDevices ")
	if len(note) > 1024 || !utf8.ValidString(note) || !strings.HasSuffix(note, "ä ...") {
		t.Errorf("a note of %d bytes that ends with %q", len(note), note[len(note)-10:])
	}
	if !strings.Contains(condition, strings.Repeat("ä", 600)) {
		t.Errorf("the condition does not say all: %q", condition)
	}
}
