// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// TestRequestsHaveTheSameNumberExactlyIfNodesLookAlikeToThem compares variants of one pod: each has a number of its own,
// which another pod of the template has, too.
func TestRequestsHaveTheSameNumberExactlyIfNodesLookAlikeToThem(t *testing.T) {
	const other = `device.attributes["a.example.com"].root == "1"`
	constrained := func(w *world, requests ...string) *world {
		w.matchAttribute(driverA + "/root")
		w.claims[len(w.claims)-1].Spec.Devices.Constraints[0].Requests = requests
		return w
	}
	distinct := func(w *world) *world {
		c := &w.claims[0].Spec.Devices.Constraints[0]
		c.MatchAttribute, c.DistinctAttribute = nil, c.MatchAttribute
		return w
	}
	all := exactly("a", 0)
	all.Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	tolerant := exactly("a", 1)
	tolerant.Exactly.Tolerations = []resourceapi.DeviceToleration{{Key: "broken", Operator: resourceapi.DeviceTolerationOpExists}}
	sub := func(count int64) resourceapi.DeviceSubRequest {
		return resourceapi.DeviceSubRequest{Name: "s", DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	}
	listed := func(counts ...int64) resourceapi.DeviceRequest {
		request := resourceapi.DeviceRequest{Name: "a"}
		for _, count := range counts {
			request.FirstAvailable = append(request.FirstAvailable, sub(count))
		}
		return request
	}
	base := rig().claim("c", exactly("a", 1), exactly("b", 1))
	store := base.store()
	seen := map[uint64]string{}
	for name, w := range map[string]*world{
		"two requests":                  base,
		"two requests in two claims":    rig().claim("c", exactly("a", 1)).claim("d", exactly("b", 1)),
		"one request":                   rig().claim("c", exactly("a", 1)),
		"one request for two":           rig().claim("c", exactly("a", 2)),
		"one for all":                   rig().claim("c", all),
		"one that tolerates":            rig().claim("c", tolerant),
		"one with admin access":         rig().claim("c", adminAccess(exactly("a", 1))),
		"one with a selector":           rig().claim("c", exactly("a", 1, other)),
		"a selector, then none":         rig().claim("c", exactly("a", 1, other), exactly("b", 1)),
		"none, then a selector":         rig().claim("c", exactly("a", 1), exactly("b", 1, other)),
		"a list of one":                 rig().claim("c", listed(1)),
		"a list of two":                 rig().claim("c", listed(2, 1)),
		"a list of two, the other way":  rig().claim("c", listed(1, 2)),
		"a constraint on both":          constrained(rig().claim("c", exactly("a", 2), exactly("b", 2))),
		"a constraint on the first":     constrained(rig().claim("c", exactly("a", 2), exactly("b", 2)), "a"),
		"a constraint on the second":    constrained(rig().claim("c", exactly("a", 2), exactly("b", 2)), "b"),
		"distinct values":               distinct(constrained(rig().claim("c", exactly("a", 2), exactly("b", 2)))),
		"a constraint on another value": rig().claim("c", exactly("a", 2), exactly("b", 2)).matchAttribute(driverA + "/other"),
		"capacity":                      rig().claim("c", takes(exactly("a", 1), "memory", "3")),
		"more capacity":                 rig().claim("c", takes(exactly("a", 1), "memory", "4")),
	} {
		first, err := Compile(w.claims, store.View(), DefaultFeatures())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if another, ok := seen[first.compiled.Number]; ok || first.compiled.Recurring {
			t.Errorf("%s and %s have the same number", name, another)
		}
		seen[first.compiled.Number] = name
		for _, claim := range w.claims { // names of claims and requests tell pods of one template apart
			claim.Name, claim.UID = claim.Name+"-2", claim.UID+"-2"
		}
		w.claims[0].Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driverA},
		}}}
		if second, err := Compile(w.claims, store.View(), DefaultFeatures()); err != nil || second.compiled.Number != first.compiled.Number || !second.compiled.Recurring {
			t.Errorf("%s: another pod of the template has number %d, not %d (%v)", name, second.compiled.Number, first.compiled.Number, err)
		}
	}
}
