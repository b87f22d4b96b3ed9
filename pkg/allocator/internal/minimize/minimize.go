// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package minimize finds small sets of which no element can be left out, with few questions.
package minimize

import "slices"

// Answer is what is said of a set.
type Answer int

// The answers.
const (
	Unknown Answer = iota // there is no time to tell
	Yes
	No
)

// Set finds a small set of 0…n-1 that is admitted and of which no element can be left out, given that the
// lower numbers are to be preferred. It asks admits at most budget times; Unknown ends it. Nil means that not even
// the whole is admitted, or that it could not be told. The set of nothing is taken as not admitted.
//
// It tries single elements first, then grows sets from either end of the order and takes the smaller one. For what
// grows with the set (whatever admits a set admits a larger one) each takes one question for each element of the
// result times the logarithm of n. Anything else is answered right, too, if not as fast.
func Set(n, budget int, admits func(set []int) Answer) []int {
	m := &minimizer{admits: admits, left: budget}
	ascending := make([]int, n)
	for i := range ascending {
		ascending[i] = i
	}
	if !m.ask(ascending) {
		return nil
	}
	for i := range min(n, maxSingles) {
		if m.ask([]int{i}) {
			return []int{i}
		}
	}
	descending := slices.Clone(ascending)
	slices.Reverse(descending)
	best := m.grow(ascending)
	if other := m.grow(descending); other != nil && (best == nil || len(other) < len(best)) {
		best = other
	}
	return best
}

// maxSingles bounds how many elements are tried alone.
const maxSingles = 64

type minimizer struct {
	admits func([]int) Answer
	left   int
	over   bool // no answer can be relied upon any more
}

func (m *minimizer) ask(set []int) bool {
	if m.left--; m.left < 0 {
		m.over = true
	}
	if m.over {
		return false
	}
	a := m.admits(set)
	m.over = a == Unknown
	return a == Yes
}

// grow finds a set for a whole, in an order of preference, that is known to be admitted: the shortest beginning that
// is admitted shows that its last element is needed; with that one, a shorter beginning will do; and so on.
func (m *minimizer) grow(whole []int) []int {
	var needed []int
	for rest := whole; len(rest) > 0 && (len(needed) == 0 || !m.ask(needed)); {
		lo, hi := 0, len(rest) // with hi it is admitted, with lo it is not
		for hi-lo > 1 {
			if middle := (lo + hi) / 2; m.ask(slices.Concat(rest[:middle], needed)) {
				hi = middle
			} else {
				lo = middle
			}
		}
		needed = append(needed, rest[hi-1])
		rest = rest[:hi-1]
	}
	// Nothing is left to do here if admission grows with the set.
	for i := 0; i < len(needed); {
		if without := slices.Delete(slices.Clone(needed), i, i+1); len(without) > 0 && m.ask(without) {
			needed, i = without, 0
		} else {
			i++
		}
	}
	if m.over {
		return nil
	}
	slices.Sort(needed)
	return needed
}
