// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// over is a limit that has passed when it begins.
const over = -1

func TestLimitsHaveDefaults(t *testing.T) {
	const ms = time.Millisecond
	tests := map[string]struct{ limits, want Limits }{
		"none is set": {Limits{}, Limits{Holders: 50 * ms, Obstacle: 50 * ms, WakeUp: 50 * ms, Evaluation: 2 * time.Second}},
		"one is set":  {Limits{Obstacle: time.Second}, Limits{Holders: 50 * ms, Obstacle: time.Second, WakeUp: 50 * ms, Evaluation: 2 * time.Second}},
		"all are set": {unhurried, unhurried},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, NewShared(tc.limits).limits); diff != "" {
				t.Errorf("limits (-want +got):\n%s", diff)
			}
		})
	}
}

// Without time to look for holders, the pod is told all but who they are.
func TestHoldersAreLookedForWithinTheirLimit(t *testing.T) {
	for name, tc := range map[string]struct {
		limits Limits
		named  bool
	}{
		"in time":  {unhurried, true},
		"too late": {Limits{Holders: over}, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.limits = tc.limits
			w.claims = []*resourceapi.ResourceClaim{
				claim("wanted"), claim("holder-a", allocated("node-a", "gpu-0")), claim("holder-b", allocated("node-b", "gpu-0", "gpu-1")),
			}
			message := newHarness(t, w).filterAll(pod("p", "wanted")).postFilter().Message()
			if !strings.Contains(message, "3 of 3 gpu devices held") {
				t.Errorf("message %q does not say what is missing", message)
			}
			if named := strings.Contains(message, "would fit on node"); named != tc.named {
				t.Errorf("message %q: names a holder: %t", message, named)
			}
		})
	}
}

// Without time to look which allocation is in the way, the first one is given up.
func TestObstacleIsLookedForWithinItsLimit(t *testing.T) {
	for name, tc := range map[string]struct {
		limits Limits
		gone   string
	}{
		"in time":  {unhurried, "b-any"},
		"too late": {Limits{Obstacle: over}, "a-special"},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.limits = tc.limits
			w.claims = []*resourceapi.ResourceClaim{
				claim("a-special", withSelector(`device.attributes["gpu.example.com"].model == "H100"`), allocated("node-b", "gpu-0"), reservedFor("p")),
				claim("b-any", allocated("node-a", "gpu-0"), reservedFor("p")),
			}
			h := newHarness(t, w)
			h.filterAll(pod("p", "a-special", "b-any")).postFilter()
			for _, c := range w.claims {
				if lost := h.api.get(c.Name).Status.Allocation == nil; lost != (c.Name == tc.gone) {
					t.Errorf("claim %s: allocation given up: %t", c.Name, lost)
				}
			}
		})
	}
}

// Without time to find out whether a change helps, the pod is woken, although one device is not enough for it.
func TestPodIsWokenWhenItsLimitHasPassed(t *testing.T) {
	waiting := pod("waiting", "wanted")
	w := twoNodes()
	w.limits = Limits{WakeUp: over}
	w.pods = []*v1.Pod{waiting}
	w.claims = []*resourceapi.ResourceClaim{
		claim("wanted", func(c *resourceapi.ResourceClaim) { c.Spec.Devices.Requests[0].Exactly.Count = 2 }),
		claim("one", allocated("node-b", "gpu-0")), claim("other", allocated("node-b", "gpu-1")),
	}
	h := newHarness(t, w)
	if a := h.filterAll(waiting); len(a.fits()) > 0 {
		t.Fatalf("the pod fits %v", a.fits())
	}
	h.api.change("one", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
	h.wakes("waiting")
}
