// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"
	"math/bits"
	"slices"
)

// MaxExact is the number of GPUs of a machine up to which [Table.Best] is exact: 2^16 sums are 256 KiB. Of more it finds
// a set that no exchange of one GPU makes better.
const MaxExact = 16

// Score compares sets of one size, of the same free GPUs. More is better, Inside before Left.
type Score struct {
	// Inside is the closeness of the set.
	Inside int
	// Left is the closeness of the free GPUs that are not in it: a single GPU is not taken from a pair that is linked.
	Left int
}

// Less tells whether the other one is better.
func (s Score) Less(than Score) bool {
	return s.Inside < than.Inside || s.Inside == than.Inside && s.Left < than.Left
}

// Table answers for one machine. It does not change, and may be used concurrently.
type Table struct {
	matrix *Matrix
	// sums is the closeness of every set of GPUs, by its bits; nil for more than MaxExact of them.
	sums []int32
}

// NewTable adds up all sets, which takes about 2 ms for MaxExact GPUs.
func NewTable(m *Matrix) *Table {
	t := &Table{matrix: m}
	if m.Len() > MaxExact {
		return t
	}
	t.sums = make([]int32, 1<<m.Len())
	for set := 1; set < len(t.sums); set++ {
		first := bits.TrailingZeros(uint(set))
		rest := set & (set - 1)
		sum := t.sums[rest]
		for others := rest; others != 0; others &= others - 1 {
			sum += m.closeness[first*m.n+bits.TrailingZeros(uint(others))]
		}
		t.sums[set] = sum
	}
	return t
}

// Best returns the best set of that size, in ascending order: with all that must be in it, and else of those that are
// available only. Of sets that are equally good it is the one with the lowest indices. The error says which argument
// is wrong: an index that is not below the matrix' length, one of must that is not available, or a size for which there
// are too few available or too many in must.
func (t *Table) Best(available, must []int, size int) ([]int, Score, error) {
	free, within, err := t.check(available, must, size)
	if err != nil {
		return nil, Score{}, err
	}
	if t.sums == nil {
		best := t.improve(free, within, size)
		return best, t.matrix.score(free, best), nil
	}
	var all, forced uint32
	for _, i := range free {
		all |= 1 << i
	}
	for _, i := range within {
		forced |= 1 << i
	}
	s := search{sums: t.sums, all: all, best: -1}
	for others := all &^ forced; others != 0; others &= others - 1 {
		s.others = append(s.others, others&-others)
	}
	s.choose(forced, 0, size-len(within))
	best := make([]int, 0, size)
	for set := uint32(s.best); set != 0; set &= set - 1 {
		best = append(best, bits.TrailingZeros32(set))
	}
	return best, s.score, nil
}

// check returns both lists in order and without repetition.
func (t *Table) check(available, must []int, size int) (free, within []int, err error) {
	free, within = slices.Compact(slices.Sorted(slices.Values(available))), slices.Compact(slices.Sorted(slices.Values(must)))
	for _, i := range free {
		if i < 0 || i >= t.matrix.Len() {
			return nil, nil, fmt.Errorf("available GPU %d: this machine has %d", i, t.matrix.Len())
		}
	}
	for _, i := range within {
		if _, found := slices.BinarySearch(free, i); !found {
			return nil, nil, fmt.Errorf("GPU %d must be in the set, and is not available", i)
		}
	}
	if size < len(within) || size > len(free) {
		return nil, nil, fmt.Errorf("size %d: want %d, which must be in the set, to %d, which are available", size, len(within), len(free))
	}
	return free, within, nil
}

// search goes through all sets.
type search struct {
	sums   []int32
	all    uint32
	others []uint32 // one bit each, lowest first
	best   int64    // the bits of the set; -1 for none yet
	score  Score
}

// choose adds more of the others, from that one on, to the set.
func (s *search) choose(set uint32, from, more int) {
	if more == 0 {
		score := Score{Inside: int(s.sums[set]), Left: int(s.sums[s.all&^set])}
		if s.best < 0 || s.score.Less(score) {
			s.best, s.score = int64(set), score
		}
		return
	}
	for i := from; i <= len(s.others)-more; i++ {
		s.choose(set|s.others[i], i+1, more-1)
	}
}

// improve begins with what is closest to what is in the set already, and then exchanges one for another for as long as
// that makes the set better, which ends because there are no two sets of one score in a row.
func (t *Table) improve(free, must []int, size int) []int {
	set := slices.Clone(must)
	for len(set) < size {
		next, closest := -1, -1
		for _, i := range free {
			if c := t.matrix.toAll(i, set); !slices.Contains(set, i) && c > closest {
				next, closest = i, c
			}
		}
		set = append(set, next)
	}
	for score := t.matrix.score(free, set); ; {
		better := false
		for at, was := range set {
			if slices.Contains(must, was) {
				continue
			}
			for _, i := range free {
				if slices.Contains(set, i) {
					continue
				}
				set[at] = i
				if now := t.matrix.score(free, set); score.Less(now) {
					score, better, was = now, true, i
				}
				set[at] = was
			}
		}
		if !better {
			slices.Sort(set)
			return set
		}
	}
}

func (m *Matrix) toAll(i int, set []int) (sum int) {
	for _, j := range set {
		sum += m.Closeness(i, j)
	}
	return sum
}

func (m *Matrix) score(free, set []int) Score {
	left := slices.DeleteFunc(slices.Clone(free), func(i int) bool { return slices.Contains(set, i) })
	return Score{Inside: m.inside(set), Left: m.inside(left)}
}

func (m *Matrix) inside(set []int) (sum int) {
	for at, i := range set {
		sum += m.toAll(i, set[:at])
	}
	return sum
}
