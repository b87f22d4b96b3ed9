// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package bitset

import (
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestAgainstAMap does random operations on a Set and on a map side by side.
func TestAgainstAMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		n := 1 + rng.IntN(200)
		a, am := random(rng, n)
		b, bm := random(rng, 1+rng.IntN(n))
		count := func(f func(i int) bool) (c int) {
			for i := range n {
				if f(i) {
					c++
				}
			}
			return c
		}
		equal(t, "Count", a.Count(), len(am))
		equal(t, "Empty", a.Empty(), len(am) == 0)
		equal(t, "AndCount", a.AndCount(b), count(func(i int) bool { return am[i] && bm[i] }))
		equal(t, "AndNotCount", a.AndNotCount(b), count(func(i int) bool { return am[i] && !bm[i] }))
		equal(t, "Intersects", a.Intersects(b), count(func(i int) bool { return am[i] && bm[i] }) > 0)
		and, andNot, or := a.Clone(), a.Clone(), a.Clone()
		and.And(b)
		andNot.AndNot(b)
		or.Or(b)
		for i := range n {
			equal(t, "Has", a.Has(i), am[i])
			equal(t, "And", and.Has(i), am[i] && bm[i])
			equal(t, "AndNot", andNot.Has(i), am[i] && !bm[i])
			equal(t, "Or", or.Has(i), am[i] || bm[i])
		}
		var want, got []int
		for i := range n {
			if am[i] {
				want = append(want, i)
			}
		}
		for i := a.Next(0); i >= 0; i = a.Next(i + 1) {
			got = append(got, i)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
		offset := rng.IntN(150)
		moved := New(n + offset)
		moved.OrAt(offset, a)
		for i := range n + offset {
			equal(t, "OrAt", moved.Has(i), i >= offset && am[i-offset])
		}
		full := Full(n)
		equal(t, "Full", full.Count(), n)
		full.Remove(n - 1)
		equal(t, "Remove", full.Has(n-1), false)
	}
}

func random(rng *rand.Rand, n int) (Set, map[int]bool) {
	s, m := New(n), map[int]bool{}
	for i := range n {
		if rng.IntN(3) == 0 {
			s.Add(i)
			m[i] = true
		}
	}
	return s, m
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}
