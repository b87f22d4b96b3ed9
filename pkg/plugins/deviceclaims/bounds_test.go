// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/auditing"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/tracker"
)

// What is bounded, each with what is one more than the bound. Others have tests where they belong: TestFailuresAreBounded,
// TestDevicesOfAFabricAreTriedElsewhere, TestTheLastPlaceAtAClaimIsGivenOnce, TestWhatIsToldFitsIntoAnEvent.

// meddling is a context that changes something whenever a search looks whether it has ended.
type meddling struct {
	context.Context
	change func()
}

func (m meddling) Err() error {
	m.change()
	return m.Context.Err()
}

// Others change the usage of the node while devices are chosen on it, each time.
func TestReserveGivesUpAfterSomeAttempts(t *testing.T) {
	for _, tc := range []struct {
		changes int
		want    string
	}{
		{maxReserveAttempts - 1, ""},
		{maxReserveAttempts, "node node-b: gave up after 8 attempts: "},
	} {
		t.Run(fmt.Sprintf("%d changes", tc.changes), func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{claim("c")}
			h := newHarness(t, w)
			a := h.filterAll(pod("p", "c"))
			other := claim("other")
			changes := 0
			status := h.plugin.Reserve(meddling{h.ctx, func() {
				if changes == tc.changes {
					return
				}
				changes++
				next := other.DeepCopy()
				next.ResourceVersion = strconv.Itoa(1000 + changes)
				if changes%2 == 1 {
					allocated("node-b", "gpu-1")(next)
				}
				if err := h.plugin.shared.account.Tracker.Assume(next); err != nil {
					t.Error(err)
				}
			}}, a.state, a.pod, "node-b")
			if changes != tc.changes {
				t.Errorf("%d changes, want %d: the test does not know when devices are chosen", changes, tc.changes)
			}
			if got := status.Message(); !strings.HasPrefix(got, tc.want) || status.IsSuccess() != (tc.want == "") {
				t.Errorf("Reserve: %v, want %q", status, tc.want)
			}
			if tc.want != "" && !errors.Is(status.AsError(), tracker.ErrStale) {
				t.Errorf("Reserve: %v, want that it wraps %v", status, tracker.ErrStale)
			}
		})
	}
}

// The pods of a namespace come in pages of 500.
func TestABoundPodOfTheGroupIsFoundOnAnyPage(t *testing.T) {
	const pages = 3
	for bound := range pages + 1 { // the last one: nowhere
		t.Run(fmt.Sprintf("page %d", bound), func(t *testing.T) {
			h := newHarness(t, twoNodes())
			var mutex sync.Mutex
			asked := []string{}
			h.client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
				options := action.(clienttesting.ListActionImpl).ListOptions
				mutex.Lock()
				asked = append(asked, fmt.Sprintf("%d from %q, fields %s", options.Limit, options.Continue, options.FieldSelector))
				mutex.Unlock()
				page := 0
				if options.Continue != "" {
					page, _ = strconv.Atoi(options.Continue)
				}
				list := &v1.PodList{Items: []v1.Pod{*running("r", "node-a", 0)}}
				if page == bound {
					list.Items = append(list.Items, *member(running("m", "node-b", 0, "common")))
				}
				if page+1 < pages {
					list.Continue = strconv.Itoa(page + 1)
				}
				return true, list, nil
			})
			err := h.plugin.binder.CheckGroupUnbound(h.ctx, member(pod("p", "common")), claim("common"))
			var found *binding.BoundError
			if errors.As(err, &found) != (bound < pages) || err != nil && found == nil {
				t.Errorf("%v, want that a bound pod is found: %t", err, bound < pages)
			}
			mutex.Lock()
			defer mutex.Unlock()
			if want := fmt.Sprintf("500 from %q, fields %s", "", binding.PodsThatRun); asked[0] != want {
				t.Errorf("first request %s, want %s", asked[0], want)
			}
			if bound == pages && len(asked) != pages {
				t.Errorf("requests %q, want %d", asked, pages)
			}
		})
	}
}

// Some are told one by one, and of all others how many they are.
func TestTheAuditorCountsWhatItDoesNotTell(t *testing.T) {
	const more = 3
	devices := make([]resourceapi.Device, auditing.MaxReports+more)
	for i := range devices {
		devices[i] = device(fmt.Sprintf("gpu-%d", i))
	}
	w := world{nodes: []*v1.Node{node("node-a")}, objects: []runtime.Object{class(testClass), slice("node-a", devices...)}}
	for i := range devices {
		w.claims = append(w.claims, claim(fmt.Sprintf("c-%d", i)))
	}
	h := newHarness(t, w)
	a := newTestAuditor(h, time.Minute)
	tests := []struct {
		name    string
		prepare func()
		each    string // line of the log
		rest    string
	}{
		{
			"in flight for nobody",
			func() {
				for i := range devices {
					h.filterAll(pod(fmt.Sprintf("p-%d", i), fmt.Sprintf("c-%d", i))).reserve("node-a")
				}
				a.Compare(h.ctx)
				a.clock.Step(time.Minute + 1)
			},
			"ERROR An allocation is in flight and no pod is being bound with it ",
			"ERROR Further allocations are in flight and no pods are being bound with them allocations=3",
		},
		{
			"different",
			func() {
				for i := range devices {
					h.plugin.shared.account.Tracker.Release(types.UID(fmt.Sprintf("c-%d-uid", i)), types.UID(fmt.Sprintf("p-%d-uid", i)))
				}
				h.api.hold()
				for i := range devices {
					h.api.change(fmt.Sprintf("c-%d", i), func(c *resourceapi.ResourceClaim) { c.Labels = map[string]string{"a": "b"} })
				}
			},
			"ERROR What is known of a claim differs from the API ",
			"ERROR What is known of further claims differs from the API claims=3 resourceVersion=113",
		},
	}
	for _, tc := range tests {
		tc.prepare()
		a.told()
		var each, rest int
		for _, line := range h.logged(t, func() { a.Compare(h.ctx) }) {
			switch {
			case strings.HasPrefix(line, tc.each):
				each++
			case line == tc.rest:
				rest++
			default:
				t.Errorf("%s: unexpected line %q", tc.name, line)
			}
		}
		if events := len(a.told()); each != auditing.MaxReports || events != auditing.MaxReports || rest != 1 {
			t.Errorf("%s: %d lines, %d events, %d lines about the others", tc.name, each, events, rest)
		}
	}
}

// However many sizes there are, the smallest devices count for less than the next alternative.
func TestSizesCountForLessThanAnAlternative(t *testing.T) {
	const sizes = maxSizeSteps + 4
	c := &cycle.State{Plan: &cycle.Plan{}, Results: cycle.NewResults(nil)}
	var scores fwk.NodeScoreList
	for i := range sizes {
		scores = append(scores, fwk.NodeScore{Name: fmt.Sprintf("node-%d", i), Score: allocator.PreferenceStep})
		c.Results.Set(scores[i].Name, cycle.NodeResult{Size: int64(i + 1)})
	}
	preferSmall(c, scores)
	for i := range scores[1:] {
		if scores[i].Score < scores[i+1].Score {
			t.Errorf("smaller devices score %d, larger ones %d", scores[i].Score, scores[i+1].Score)
		}
	}
	got := []int64{scores[0].Score - allocator.PreferenceStep, scores[sizes-1].Score - allocator.PreferenceStep}
	if diff := cmp.Diff([]int64{maxSizeSteps * sizeStep, 0}, got); diff != "" || got[0] >= allocator.PreferenceStep {
		t.Errorf("what the smallest and the largest devices count for (-want +got):\n%s", diff)
	}
}
