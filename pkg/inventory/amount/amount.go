// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package amount is exact arithmetic on what devices have and requests take: capacities and counters.
package amount

import (
	"cmp"
	"encoding/binary"
	"math/big"
	"math/bits"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Amount is a resource.Quantity as a number of nanos in 128 bits. Of a quantity within the bounds of [Check], and of
// the sum of 16 million of them, it is exact. Amounts can be compared with ==.
type Amount struct {
	hi int64
	lo uint64
}

// Most and Least are what quantities beyond the bounds become. There is room for sums of 16 million of them.
var (
	Most  = Amount{hi: 1 << 39}
	Least = Amount{hi: -1 << 39}
)

const nano = 1_000_000_000

// Of converts a quantity. What is beyond the bounds of [Check] becomes Most or
// Least. The time that it takes is bounded.
func Of(q resource.Quantity) Amount {
	if q.IsZero() {
		return Amount{} // whatever its exponent: AsInt64 would count that down
	}
	if value, ok := q.AsInt64(); ok {
		if value < 0 {
			hi, lo := bits.Mul64(-uint64(value), nano)
			return Amount{}.Sub(Amount{hi: int64(hi), lo: lo})
		}
		hi, lo := bits.Mul64(uint64(value), nano)
		return Amount{hi: int64(hi), lo: lo}
	}
	if nanos, ok := nanosOf(parts(q)); ok {
		return ofBig(nanos)
	}
	if q.Sign() < 0 {
		return Least
	}
	return Most
}

// ofBig converts a number of nanos within the bounds.
func ofBig(n *big.Int) Amount {
	var word [16]byte
	new(big.Int).Abs(n).FillBytes(word[:])
	a := Amount{hi: int64(binary.BigEndian.Uint64(word[:8])), lo: binary.BigEndian.Uint64(word[8:])}
	if n.Sign() < 0 {
		return Amount{}.Sub(a)
	}
	return a
}

// Add returns a+b.
func (a Amount) Add(b Amount) Amount {
	lo, carry := bits.Add64(a.lo, b.lo, 0)
	hi, _ := bits.Add64(uint64(a.hi), uint64(b.hi), carry)
	return Amount{hi: int64(hi), lo: lo}
}

// Sub returns a-b.
func (a Amount) Sub(b Amount) Amount {
	lo, borrow := bits.Sub64(a.lo, b.lo, 0)
	hi, _ := bits.Sub64(uint64(a.hi), uint64(b.hi), borrow)
	return Amount{hi: int64(hi), lo: lo}
}

// Less tells whether a is less than b.
func (a Amount) Less(b Amount) bool {
	return a.hi < b.hi || (a.hi == b.hi && a.lo < b.lo)
}

// Compare returns a negative number if a is less than b, a positive one if it is more, and zero if they are equal.
func (a Amount) Compare(b Amount) int {
	return cmp.Or(cmp.Compare(a.hi, b.hi), cmp.Compare(a.lo, b.lo))
}

// IsNegative tells whether a is less than nothing.
func (a Amount) IsNegative() bool { return a.hi < 0 }

// Float returns the amount in units, not nanos, as nearly as a float64 can.
func (a Amount) Float() float64 {
	return (float64(a.hi)*(1<<32)*(1<<32) + float64(a.lo)) / nano
}

// Over returns a/b, not exactly; 0 if b is not positive.
func (a Amount) Over(b Amount) float64 {
	if !(Amount{}).Less(b) {
		return 0
	}
	return a.Float() / b.Float()
}

// Append appends a fixed-length encoding, different for different amounts.
func (a Amount) Append(to []byte) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(to, uint64(a.hi)), a.lo)
}
