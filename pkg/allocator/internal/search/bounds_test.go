// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator/internal/packing"
)

// zigzag has two devices with each of so many values of a and of b, and none that are alike in both, but for two of the last value of a
// if it fits. A claim wants two that are.
func zigzag(values int, fits bool) *question {
	return &question{
		devices: devices(2*values, map[resourceapi.QualifiedName]func(int) int{
			"a": func(i int) int { return i / 2 },
			"b": func(i int) int {
				if fits && i == 2*values-1 {
					i--
				}
				return (i + 1) / 2 % values
			},
		}),
		claim: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{exactly("one", 1), exactly("two", 1)}, Constraints: match(driver+"/a", driver+"/b"),
		},
	}
}

// thorough is a search that is about to begin with all shortcuts.
func (q *question) thorough(t *testing.T) *Search {
	t.Helper()
	s := q.prepare(t)
	s.begin(s.order)
	s.classify()
	return s
}

// Of more values than a shortcut looks at it does not say that none would do. The search finds out, either way.
func TestMoreValuesThanAreLookedAt(t *testing.T) {
	for _, tc := range []struct {
		values              int
		fits                bool
		flowKnows, promises bool
	}{
		{values: maxValues, flowKnows: true},
		{values: maxValues, fits: true, flowKnows: true, promises: true},
		{values: maxValues + 1, flowKnows: true, promises: true},
		{values: maxValues + 1, fits: true, flowKnows: true, promises: true},
		{values: maxFlows, flowKnows: true, promises: true},
		{values: maxFlows + 1, promises: true},
		{values: maxFlows + 1, fits: true, promises: true},
	} {
		t.Run(fmt.Sprintf("%d values, fits %t", tc.values, tc.fits), func(t *testing.T) {
			q := zigzag(tc.values, tc.fits)
			s := q.thorough(t)
			if possible, known := s.pruning.decideByFlow(0); known != tc.flowKnows || known && possible != tc.fits {
				t.Errorf("by flow possible: %t, known: %t, want %t, %t", possible, known, tc.fits, tc.flowKnows)
			}
			if got := s.pruning.promising(-1, 0, 0); got != tc.promises {
				t.Errorf("promising: %t, want %t", got, tc.promises)
			}
			if got := q.fits(t); got != tc.fits {
				t.Errorf("fits: %t, want %t", got, tc.fits)
			}
		})
	}
}

// partsOf is one GPU with so much of a counter, and so many parts of each kind that take one of it, and a request for some of each kind.
func partsOf(total, kinds, each int, wanted int64) *question {
	x := func(n int) map[string]resourceapi.Counter {
		return map[string]resourceapi.Counter{"x": {Value: *resource.NewQuantity(int64(n), resource.DecimalSI)}}
	}
	q := &question{
		devices:  devices(kinds*each, map[resourceapi.QualifiedName]func(int) int{"kind": func(i int) int { return i / each }}),
		counters: []resourceapi.CounterSet{{Name: "gpu", Counters: x(total)}},
	}
	for i := range q.devices {
		q.devices[i].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "gpu", Counters: x(1)}}
	}
	for k := range kinds {
		q.claim.Requests = append(q.claim.Requests, exactly(fmt.Sprintf("kind-%d", k), wanted, fmt.Sprintf(`device.attributes["a.example.com"].kind == %d`, k)))
	}
	return q
}

// Each of three requests for two devices gets a share of the one that is shared, so it needs one more.
func TestSharesAndWholeDevices(t *testing.T) {
	for whole, want := range map[int]bool{3: true, 2: false} {
		t.Run(fmt.Sprintf("%d more", whole), func(t *testing.T) {
			q := &question{devices: devices(1+whole, nil)}
			q.devices[0].AllowMultipleAllocations = ptr.To(true)
			q.claim.Requests = []resourceapi.DeviceRequest{exactly("one", 2), exactly("two", 2), exactly("three", 2)}
			s := q.thorough(t)
			requests, ok := s.pruning.openRequests(-1, 0, 0)
			if !ok {
				t.Fatal("too few devices for a request")
			}
			if got := s.pruning.matchable(requests); got != want {
				t.Errorf("matchable: %t, want %t", got, want)
			}
			if got := q.fits(t); got != want {
				t.Errorf("fits: %t, want %t", got, want)
			}
		})
	}
}

// Counters suffice if they do for the cheapest alternatives that have devices at all.
func TestCountersOfAlternatives(t *testing.T) {
	const part, whole, either, nothing = "part", "whole", "either", "nothing"
	selectors := map[string]string{
		part: `device.attributes["a.example.com"].x > 0`, whole: `device.attributes["a.example.com"].x == 0`, either: "true", nothing: "false",
	}
	for name, tc := range map[string]struct {
		total        int64
		alternatives []string
		want         bool
	}{
		"as much as two requests need": {total: 4, alternatives: []string{part}, want: true},
		"less":                         {total: 3, alternatives: []string{part}},
		"an alternative without devices costs nobody less":  {total: 3, alternatives: []string{nothing, part}},
		"nor does one after it":                             {total: 3, alternatives: []string{part, nothing}},
		"an alternative of devices that use none":           {total: 3, alternatives: []string{whole, part}, want: true},
		"the same, when the other one is looked at before":  {total: 3, alternatives: []string{part, whole}, want: true},
		"devices of which some use none":                    {total: 3, alternatives: []string{either}, want: true},
		"with one without devices, still as much as needed": {total: 4, alternatives: []string{nothing, part}, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			q := &question{devices: devices(8, map[resourceapi.QualifiedName]func(int) int{"x": func(i int) int { return i / 4 }})}
			x := func(n int64) map[string]resourceapi.Counter {
				return map[string]resourceapi.Counter{"x": {Value: *resource.NewQuantity(n, resource.DecimalSI)}}
			}
			q.counters = []resourceapi.CounterSet{{Name: "gpu", Counters: x(tc.total)}}
			for i := range q.devices[4:] {
				q.devices[4+i].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "gpu", Counters: x(1)}}
			}
			for _, request := range []string{"one", "two"} {
				r := resourceapi.DeviceRequest{Name: request}
				for _, alternative := range tc.alternatives {
					exact := exactly(alternative, 2, selectors[alternative]).Exactly
					r.FirstAvailable = append(r.FirstAvailable, resourceapi.DeviceSubRequest{
						Name: alternative, DeviceClassName: exact.DeviceClassName, Selectors: exact.Selectors, AllocationMode: exact.AllocationMode, Count: exact.Count,
					})
				}
				q.claim.Requests = append(q.claim.Requests, r)
			}
			s := q.thorough(t)
			requests, ok := s.pruning.openRequests(-1, 0, 0)
			if !ok {
				t.Fatal("too few devices for a request")
			}
			for range 2 { // the memory of the first question is used again
				if got := s.pruning.bounds.countersSuffice(requests); got != tc.want {
					t.Errorf("counters suffice: %t, want %t", got, tc.want)
				}
			}
			if got := q.fits(t); got != tc.want {
				t.Errorf("fits: %t, want %t", got, tc.want)
			}
		})
	}
}

// Whether parts can be cut from what there is, is not said where there are more kinds of them than are told apart, or more ways to
// cut them than are looked at. The search finds out, either way.
func TestMorePartsThanArePacked(t *testing.T) {
	for name, tc := range map[string]struct {
		total, kinds, each int
		wanted             int64
		packable, fits     bool
	}{
		"as many kinds as are told apart":                 {total: packing.MaxKinds, kinds: packing.MaxKinds, each: 1, wanted: 1, packable: true, fits: true},
		"as many kinds as are told apart, and too little": {total: packing.MaxKinds - 1, kinds: packing.MaxKinds, each: 1, wanted: 1},
		"more kinds":                        {total: packing.MaxKinds + 1, kinds: packing.MaxKinds + 1, each: 1, wanted: 1, packable: true, fits: true},
		"more kinds, and too little":        {total: packing.MaxKinds, kinds: packing.MaxKinds + 1, each: 1, wanted: 1, packable: true},
		"few ways":                          {total: 4, kinds: 2, each: 4, wanted: 2, packable: true, fits: true},
		"few ways, and too little":          {total: 3, kinds: 2, each: 4, wanted: 2},
		"more ways than are looked at":      {total: 6, kinds: 2, each: 6, wanted: 3, packable: true, fits: true},
		"more ways, and too little of each": {total: 5, kinds: 2, each: 8, wanted: 3, packable: true},
	} {
		t.Run(name, func(t *testing.T) {
			q := partsOf(tc.total, tc.kinds, tc.each, tc.wanted)
			s := q.thorough(t)
			requests, ok := s.pruning.openRequests(-1, 0, 0)
			if !ok {
				t.Fatal("too few devices for a request")
			}
			if got := s.pruning.packable(requests); got != tc.packable {
				t.Errorf("packable: %t, want %t", got, tc.packable)
			}
			if got := q.fits(t); got != tc.fits {
				t.Errorf("fits: %t, want %t", got, tc.fits)
			}
		})
	}
}

// States beyond are searched anew; what is known stays known.
func TestKnownStatesAreBounded(t *testing.T) {
	c := &classes{known: map[string]bool{}}
	for i := range maxKnown + 2 {
		c.remember(fmt.Sprint(i), true)
	}
	if _, known := c.known[fmt.Sprint(maxKnown)]; known || len(c.known) != maxKnown || !c.known["0"] {
		t.Errorf("%d states are known, at most %d", len(c.known), maxKnown)
	}
}
