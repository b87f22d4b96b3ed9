// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestThePopulationIsValid(t *testing.T) {
	all, err := population(fullSize)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != fullSize.Claims {
		t.Errorf("%d claims, want %d", len(all), fullSize.Claims)
	}
	holders, names, allocated, full, used := map[string]string{}, map[string]bool{}, 0, 0, map[int]int{}
	for _, h := range all {
		if names[h.namespace+"/"+h.name] {
			t.Errorf("two claims are named %s/%s", h.namespace, h.name)
		}
		names[h.namespace+"/"+h.name] = true
		if !h.allocated() {
			if len(h.pods) > 0 {
				t.Errorf("claim %s is not allocated and has pods", h.name)
			}
			continue
		}
		allocated++
		if len(h.gpus) != h.count || len(h.pods) == 0 {
			t.Errorf("claim %s has %d GPUs and %d pods, and asks for %d", h.name, len(h.gpus), len(h.pods), h.count)
		}
		for _, gpu := range h.gpus {
			device := fmt.Sprintf("%d/%d", h.node, gpu)
			if other, ok := holders[device]; ok || gpu >= gpusPerNode || h.node >= fullSize.Nodes {
				t.Errorf("claim %s has GPU %s, held by %q", h.name, device, other)
			}
			holders[device] = h.name
		}
		used[h.node] += h.count
	}
	for _, n := range used {
		if n == gpusPerNode {
			full++
		}
	}
	// Most claims are held, and there are empty, full and other nodes.
	empty := fullSize.Nodes - len(used)
	if allocated < fullSize.Claims*9/10 || empty < fullSize.Nodes/25 || full < fullSize.Nodes/4 || full > len(used)*3/4 {
		t.Errorf("%d claims are allocated on %d nodes, of which %d are full", allocated, len(used), full)
	}
	same, err := population(fullSize)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(all, same, cmp.AllowUnexported(holding{})); diff != "" {
		t.Errorf("the same seed makes something else:\n%s", diff)
	}
}

func TestWhatDoesNotFitIsRefused(t *testing.T) {
	tests := map[string]struct {
		change func(*size)
		want   string
	}{
		"more claims than devices":               {func(s *size) { s.Nodes = 100 }, "25000 claims are too many for 100 nodes"},
		"a burst for which no devices are left":  {func(s *size) { s.Burst = 5000 }, "too few for a burst of 5000 pods"},
		"no nodes":                               {func(s *size) { s.Nodes = 0 }, "-nodes, -claims and -burst must be 1 at least"},
		"GPUs that cannot be spread over slices": {func(s *size) { s.GPUsPerSlice = 3 }, "8 GPUs of a node cannot be spread evenly over slices of 3"},
		"an audit period that is refused":        {func(s *size) { s.AuditPeriod = 1 }, "-audit-period: 1ns is less than the second"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := fullSize
			test.change(&s)
			err := s.validate()
			if err == nil {
				_, err = population(s)
			}
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestANodeHasItsGPUsInOnePool(t *testing.T) {
	for _, perSlice := range []int{1, 2, 8} {
		devices, roots := map[string]bool{}, map[string]int{}
		slices := newSlices(7, perSlice)
		for _, slice := range slices {
			if slice.Spec.Pool.Name != nodeName(7) || slice.Spec.Pool.ResourceSliceCount != int64(len(slices)) || len(slice.Spec.Devices) != perSlice {
				t.Errorf("slice %s: %+v with %d devices, of %d slices", slice.Name, slice.Spec.Pool, len(slice.Spec.Devices), len(slices))
			}
			for _, device := range slice.Spec.Devices {
				devices[device.Name] = true
				roots[*device.Attributes["resource.kubernetes.io/pcieRoot"].StringValue]++
			}
		}
		if len(devices) != gpusPerNode || len(roots) != gpusPerNode/2 {
			t.Errorf("%d a slice: %d devices below %d roots", perSlice, len(devices), len(roots))
		}
	}
}
