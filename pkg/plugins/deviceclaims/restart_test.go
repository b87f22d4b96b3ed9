// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// died is what a scheduler panics with that is killed.
type died struct{}

// The scheduler is killed at each request of PreBind and Unreserve, before or after it takes effect. At no time is a claim
// allocated for nobody, and the next scheduler, which knows nothing but the API, gives the pod its devices.
func TestSchedulerIsKilledAtEveryRequest(t *testing.T) {
	first := newFaultHarness(t)
	tried := 0
	for claims := 1; claims <= 3; claims++ {
		for _, giveUp := range []bool{false, true} {
			for at := range requestsOf(first, claims, giveUp) {
				for name, d := range map[string]disturbance{
					"before": {before: func(*faultRun) error { panic(died{}) }},
					"after":  {after: func(*faultRun) error { panic(died{}) }},
				} {
					what := fmt.Sprintf("%d claims, given up %t, killed %s request %d", claims, giveUp, name, at)
					tried++
					h := newFaultHarness(t)
					f := newFaultRun(h, claims, map[int]disturbance{at: d})
					f.killed(giveUp)
					h.api.onRequest(nil)
					h.api.afterWrite(nil)
					for _, name := range f.claims {
						c := h.api.get(name)
						if users := usersOf(c); (c.Status.Allocation != nil) != (len(users) > 0) {
							t.Fatalf("%s: %s has devices %v, users %v", what, name, devicesOf(c), users)
						}
					}
					h.cancel()

					f.h = startHarness(t, manyDevices(), h.client, h.api)
					f.at = nil
					if !f.attempt(false) {
						t.Fatalf("%s: the next scheduler does not bind the pod", what)
					}
					f.settle()
					if problems := f.problems(true); len(problems) > 0 {
						t.Fatalf("%s:\n%s", what, strings.Join(problems, "\n"))
					}
				}
			}
		}
	}
	t.Logf("%d steps tried", tried)
}

// killed runs an attempt until the scheduler dies in it, if it does.
func (f *faultRun) killed(giveUp bool) {
	defer func() {
		if r := recover(); r != nil && r != any(died{}) {
			panic(r)
		}
	}()
	f.attempt(giveUp)
}

// The same for the write of PostFilter: the claim is allocated as before, or free.
func TestSchedulerIsKilledWhileItGivesUpAnAllocation(t *testing.T) {
	for name, hook := range map[string]func(*claimAPI){
		"before": func(api *claimAPI) {
			api.onRequest(func(request string) error {
				if request == "update/status" {
					panic(died{})
				}
				return nil
			})
		},
		"after": func(api *claimAPI) { api.afterWrite(func(string) error { panic(died{}) }) },
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.nodes = w.nodes[1:] // the claim's own node is not there any more
			w.claims = []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), reservedFor("p"))}
			h := newHarness(t, w)
			a := h.filterAll(pod("p", "c"))
			hook(h.api)
			func() {
				defer func() {
					if recover() == nil {
						t.Fatal("PostFilter wrote nothing: the test proves nothing")
					}
				}()
				_, _ = h.plugin.PostFilter(context.Background(), a.state, a.pod, nil)
			}()
			h.api.onRequest(nil)
			h.api.afterWrite(nil)
			h.cancel()

			next := startHarness(t, w, h.client, h.api)
			if a := next.filterAll(pod("p", "c")); len(a.fits()) == 0 {
				a.postFilter() // gives it up, if that has not been done
				next.caughtUp("c")
			}
			next.filterAll(pod("p", "c")).bind("node-b")
			got := next.api.get("c")
			if got.Status.Allocation == nil || got.Status.Allocation.Devices.Results[0].Pool != "node-b" || len(got.Status.ReservedFor) != 1 {
				t.Errorf("claim: devices %v, users %v", devicesOf(got), usersOf(got))
			}
		})
	}
}

// An attempt gives up one thing. Whoever holds more is tried again, also if it fits nowhere by then.
func TestAPodIsTriedAgainUntilItHoldsNothing(t *testing.T) {
	first, second := allocated("node-b", "gpu-0"), allocated("node-b", "gpu-1")
	for name, tc := range map[string]struct {
		claims []*resourceapi.ResourceClaim
		made   bool // and a claim for extended resources
		want   []state
		tries  int
	}{
		"nothing": {claims: []*resourceapi.ResourceClaim{claim("first"), claim("second")}, want: []state{{}, {}}, tries: 1},
		"two claims": {
			claims: []*resourceapi.ResourceClaim{claim("first", first, reservedFor("p")), claim("second", second, reservedFor("p"))},
			want:   []state{{}, {}}, tries: 3,
		},
		"a claim of others, too, and one of its own": {
			claims: []*resourceapi.ResourceClaim{claim("first", first, reservedFor("p", "q")), claim("second", second, reservedFor("p"))},
			want:   []state{{Devices: []string{"gpu-0"}, Users: []string{"q"}}, {}}, tries: 3,
		},
		"two claims, and one made for extended resources": {
			claims: []*resourceapi.ResourceClaim{claim("first", first, reservedFor("p")), claim("second", second, reservedFor("p"))}, made: true,
			want: []state{{}, {}}, tries: 4,
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := pod("p", "first", "second", "large")
			if tc.made {
				p.Spec.Containers = containersPod("a=2").Spec.Containers
			}
			w := extendedWorld(p)
			w.claims = append(tc.claims, claim("large", counted(3))) // for which no node has the devices
			if tc.made {
				w.claims = append(w.claims, leftover(p, allocated("node-x", "gpu-0", "gpu-1")))
			}
			h := newHarness(t, w)
			tries := 1
			for h.filterAll(p).postFilter(); tries < 10 && slices.Contains(h.activator.taken(), "p"); tries++ {
				h.filterAll(p).postFilter()
			}
			if tries < tc.tries || tries >= 10 { // the room may wake it once more for what it gave up: that news takes its own time
				t.Errorf("tried %d times, want %d and not for ever", tries, tc.tries)
			}
			h.wantState("first", tc.want[0])
			h.wantState("second", tc.want[1])
			if made := h.extendedClaims(); len(made) > 0 {
				t.Errorf("claims for extended resources are left: %v", made)
			}
		})
	}
}
