// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package bitset is a plain set of small integers: the devices of a pool or a node by dense index.
package bitset

import "math/bits"

// Set holds the integers whose bits are set; bit i of word w stands for 64*w+i. The nil Set is empty. Methods
// that take another Set expect it to be of the same length, or shorter where they say so.
type Set []uint64

// Words is the number of words for n integers.
func Words(n int) int { return (n + 63) / 64 }

// New returns an empty set with room for the integers 0 to n-1.
func New(n int) Set { return make(Set, Words(n)) }

// Full returns the set of the integers 0 to n-1.
func Full(n int) Set {
	s := New(n)
	for i := range s {
		s[i] = ^uint64(0)
	}
	if r := n % 64; r != 0 {
		s[len(s)-1] = 1<<r - 1
	}
	return s
}

// Has tells whether i is in the set; integers beyond its length are not.
func (s Set) Has(i int) bool {
	w := i >> 6
	return w < len(s) && s[w]&(1<<(uint(i)&63)) != 0
}

// Add puts i into the set, which must have room for it.
func (s Set) Add(i int) { s[i>>6] |= 1 << (uint(i) & 63) }

// Remove takes i out of the set.
func (s Set) Remove(i int) { s[i>>6] &^= 1 << (uint(i) & 63) }

// Empty tells whether nothing is in the set.
func (s Set) Empty() bool {
	for _, w := range s {
		if w != 0 {
			return false
		}
	}
	return true
}

// Count is the number of integers in the set.
func (s Set) Count() int {
	n := 0
	for _, w := range s {
		n += bits.OnesCount64(w)
	}
	return n
}

// Next is the smallest member that is at least from, or -1.
func (s Set) Next(from int) int {
	w := from >> 6
	if from < 0 || w >= len(s) {
		return -1
	}
	word := s[w] & (^uint64(0) << (uint(from) & 63))
	for {
		if word != 0 {
			return w<<6 + bits.TrailingZeros64(word)
		}
		if w++; w >= len(s) {
			return -1
		}
		word = s[w]
	}
}

// Clone returns a copy.
func (s Set) Clone() Set {
	if s == nil {
		return nil
	}
	return append(make(Set, 0, len(s)), s...)
}

// And keeps what is also in o; o may be shorter.
func (s Set) And(o Set) {
	for i := range s {
		if i < len(o) {
			s[i] &= o[i]
		} else {
			s[i] = 0
		}
	}
}

// AndNot takes out what is in o; o may be shorter.
func (s Set) AndNot(o Set) {
	for i := range min(len(s), len(o)) {
		s[i] &^= o[i]
	}
}

// Or adds what is in o; o may be shorter.
func (s Set) Or(o Set) {
	for i := range o {
		s[i] |= o[i]
	}
}

// OrAt adds each member of o moved up by offset.
func (s Set) OrAt(offset int, o Set) {
	w, shift := offset>>6, uint(offset)&63
	for i, word := range o {
		if word == 0 {
			continue
		}
		s[w+i] |= word << shift
		if shift != 0 {
			if high := word >> (64 - shift); high != 0 {
				s[w+i+1] |= high
			}
		}
	}
}

// Intersects tells whether s and o have a member in common; either may be shorter.
func (s Set) Intersects(o Set) bool {
	for i := range min(len(s), len(o)) {
		if s[i]&o[i] != 0 {
			return true
		}
	}
	return false
}

// AndCount is the number of members that s and o have in common; either may be shorter.
func (s Set) AndCount(o Set) int {
	n := 0
	for i := range min(len(s), len(o)) {
		n += bits.OnesCount64(s[i] & o[i])
	}
	return n
}

// AndNotCount is the number of members of s that are not in o; o may be shorter.
func (s Set) AndNotCount(o Set) int {
	n := 0
	for i, w := range s {
		if i < len(o) {
			w &^= o[i]
		}
		n += bits.OnesCount64(w)
	}
	return n
}
