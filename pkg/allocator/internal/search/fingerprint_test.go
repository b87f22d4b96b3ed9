// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator/internal/answers"
	"stowage.dev/stowage/pkg/inventory"
)

// TestNodesThatDifferInAlphaFeaturesLookDifferent changes one thing that only features of alpha quality look at.
func TestNodesThatDifferInAlphaFeaturesLookDifferent(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(devices []resourceapi.Device)
		alike  bool
	}{
		"nothing": {func(devices []resourceapi.Device) {
			devices[1].Attributes["uuid"] = resourceapi.DeviceAttribute{StringValue: ptr.To("another")}
		}, true},
		"the groups of a device": {func(devices []resourceapi.Device) {
			devices[1].ConsumesCounters[0].CompatibilityGroups = []string{"red", "green"}
		}, false},
		"what devices in use have in common": {func(devices []resourceapi.Device) {
			devices[0].ConsumesCounters[0].CompatibilityGroups = []string{"red"}
		}, false},
		"a derived value": {func(devices []resourceapi.Device) {
			devices[2].Attributes["index"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(1))}
		}, false},
		"another value of a list": {func(devices []resourceapi.Device) {
			devices[2].Attributes["links"] = resourceapi.DeviceAttribute{IntValues: []int64{0, 1}}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			look := func(change func([]resourceapi.Device)) answers.Fingerprint {
				slots := func(n string) map[string]resourceapi.Counter {
					return map[string]resourceapi.Counter{"slots": {Value: resource.MustParse(n)}}
				}
				q := question{
					features: func(f *inventory.Features) {
						f.ListTypeAttributes, f.CompatibilityGroups, f.DerivedAttributes = true, true, true
					},
					devices:  devices(4, map[resourceapi.QualifiedName]func(int) int{"index": func(i int) int { return i }}),
					counters: []resourceapi.CounterSet{{Name: "set", Counters: slots("4")}},
					held:     []string{"device-0"},
				}
				for i := range q.devices {
					q.devices[i].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "set", Counters: slots("1"), CompatibilityGroups: []string{"red", "blue"}}}
					q.devices[i].Attributes["links"] = resourceapi.DeviceAttribute{IntValues: []int64{0, int64(i)}}
				}
				change(q.devices)
				request := exactly("gpu", 2)
				request.Exactly.DerivedAttributes = []resourceapi.DeviceDerivedAttribute{{Name: "example.com/derived", Expression: `device.attributes["a.example.com"].index`}}
				q.claim = resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request}, Constraints: match("example.com/derived", driver+"/links")}
				s := q.prepare(t)
				if n := s.lanes[0].candidates.Count(); n != 3 {
					t.Fatalf("%d candidates, want 3", n)
				}
				return s.prints.fingerprint()
			}
			if alike := look(func([]resourceapi.Device) {}) == look(tc.change); alike != tc.alike {
				t.Errorf("alike: %t, want %t", alike, tc.alike)
			}
		})
	}
}
