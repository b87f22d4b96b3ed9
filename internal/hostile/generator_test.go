// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"encoding/json"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
)

// TestTheAPIServerTakesTheExpressions compiles them as it does.
func TestTheAPIServerTakesTheExpressions(t *testing.T) {
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true})
	most := uint64(0)
	for _, text := range Expressions() {
		result := compiler.CompileCELExpression(text, cel.Options{EnvType: ptr.To(environment.NewExpressions)})
		if result.Error != nil || len(text) > resourceapi.CELSelectorExpressionMaxLength || result.MaxCost > resourceapi.CELSelectorExpressionMaxCost {
			t.Errorf("%.80s: %d bytes, cost %d, %v", text, len(text), result.MaxCost, result.Error)
			continue
		}
		most = max(most, result.MaxCost)
	}
	if most < resourceapi.CELSelectorExpressionMaxCost*3/4 {
		t.Errorf("the most costly is %d, which is far from the limit", most)
	}
}

func TestTheSameSeedMakesTheSameObjects(t *testing.T) {
	draw := func(seed uint64) string {
		g := New(seed, "ns", "a", "b")
		var all strings.Builder
		for range 5 {
			if err := json.NewEncoder(&all).Encode([]any{g.Pool(), g.Class(), g.Claim(), g.Template(), g.Pod([]string{"c"}, []string{"t"})}); err != nil {
				t.Fatal(err)
			}
		}
		return all.String()
	}
	first := draw(1)
	if draw(1) != first {
		t.Error("the same seed makes other objects")
	}
	if draw(2) == first {
		t.Error("another seed makes the same objects")
	}
}

// A large pool is whole, has no name twice, and is at what a scheduler looks at.
func TestALargePoolIsAsLargeAsOneMayBe(t *testing.T) {
	g := New(1, "ns", "a", "b")
	for in := range AllLarge {
		slices, names, sets, uses := g.LargePool(in), map[string]bool{}, map[string]int{}, 0
		counters, devices := 0, 0
		for _, s := range slices {
			if s.Spec.Pool.ResourceSliceCount != int64(len(slices)) || names[s.Name] {
				t.Errorf("slice %s of %d, which says %d", s.Name, len(slices), s.Spec.Pool.ResourceSliceCount)
			}
			names[s.Name] = true
			for _, set := range s.Spec.SharedCounters {
				sets[set.Name] += len(set.Counters)
				counters += len(set.Counters)
			}
			for _, d := range s.Spec.Devices {
				if names[d.Name] {
					t.Errorf("device %s comes twice", d.Name)
				}
				names[d.Name] = true
				devices++
				first := ""
				for _, c := range d.ConsumesCounters {
					if sets[c.CounterSet] != len(c.Counters) || c.CounterSet == first {
						t.Errorf("device %s takes %d of the %d counters of set %s", d.Name, len(c.Counters), sets[c.CounterSet], c.CounterSet)
					}
					first = c.CounterSet
					uses += len(c.Counters)
				}
			}
		}
		have := map[Large]int{LargeInDevices: devices, LargeInCounters: devices + counters + uses, LargeInSlices: 16 * len(slices)}[in]
		if most := 16 << 10; have > most || have < most*3/4 {
			t.Errorf("kind %d: %d slices, %d devices, %d counters, %d uses: %d, want almost %d", in, len(slices), devices, counters, uses, have, most)
		}
	}
}
