// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func testLoad(seed uint64) *load {
	return &load{
		random: rand.New(rand.NewPCG(seed, 0)), namespace: "ns", hold: time.Second,
		schedulers: []string{"a", "b", "c"},
	}
}

func TestTheSameSeedMakesTheSameLoad(t *testing.T) {
	one, same, other := testLoad(1), testLoad(1), testLoad(2)
	differs := false
	for range 200 {
		a := one.arrive()
		if diff := cmp.Diff(a, same.arrive(), cmp.AllowUnexported(arrival{}, podPlan{})); diff != "" {
			t.Fatalf("the same seed makes something else:\n%s", diff)
		}
		differs = differs || !cmp.Equal(a, other.arrive(), cmp.AllowUnexported(arrival{}, podPlan{}))
	}
	if !differs {
		t.Error("another seed makes the same")
	}
}

// Every kind comes, and every scheduler gets its part of the shared claims.
func TestTheLoadHasAllKinds(t *testing.T) {
	l := testLoad(1)
	templates, shared, impatient := map[string]bool{}, map[string]int{}, 0
	for range 2000 {
		a := l.arrive()
		claims := 0
		for _, p := range a.pods {
			for _, c := range p.pod.Spec.ResourceClaims {
				if c.ResourceClaimTemplateName != nil {
					templates[*c.ResourceClaimTemplateName] = true
					claims++
				}
			}
			if a.shared != nil {
				shared[p.pod.Spec.SchedulerName]++
			}
			if p.patience > 0 {
				impatient++
			}
		}
		if a.shared != nil {
			claims++
		}
		if claims != a.claims {
			t.Errorf("an arrival of %d claims says that it has %d", claims, a.claims)
		}
	}
	if len(templates) != len(specs) {
		t.Errorf("only the templates %v are used", templates)
	}
	if len(shared) != 3 || impatient == 0 {
		t.Errorf("shared claims by scheduler: %v; impatient pods: %d", shared, impatient)
	}
}

func TestThePoolHas200Devices(t *testing.T) {
	if n := newPool().devices(); n != 200 {
		t.Errorf("the pool has %d devices", n)
	}
}
