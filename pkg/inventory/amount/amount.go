// Package amount is exact arithmetic on what devices have and requests take: capacities and counters.
package amount

import (
	"cmp"
	"encoding/binary"
	"math/big"
	"math/bits"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Amount is a resource.Quantity as a number of nanos in 128 bits. The API reads no finer quantity than one nano
// and none beyond 2^63, so that an Amount, and the sum of a billion of them, is exact. Amounts can be compared
// with ==.
type Amount struct {
	hi int64
	lo uint64
}

// Most and Least are what quantities beyond the range become. There is room above them for sums.
var (
	Most  = Amount{hi: 1 << 56}
	Least = Amount{hi: -1 << 56}
)

const nano = 1_000_000_000

// Of converts a quantity. What is finer than one nano is rounded up.
func Of(q resource.Quantity) Amount {
	if value, ok := q.AsInt64(); ok {
		if value < 0 {
			hi, lo := bits.Mul64(-uint64(value), nano)
			return Amount{}.Sub(Amount{hi: int64(hi), lo: lo})
		}
		hi, lo := bits.Mul64(uint64(value), nano)
		return Amount{hi: int64(hi), lo: lo}
	}
	q = q.DeepCopy() // AsDec changes it
	dec := q.AsDec()
	nanos := new(big.Int).Set(dec.UnscaledBig())
	ten := big.NewInt(10)
	if shift := 9 - int64(dec.Scale()); shift >= 0 {
		nanos.Mul(nanos, new(big.Int).Exp(ten, big.NewInt(shift), nil))
	} else {
		rest := new(big.Int)
		nanos.DivMod(nanos, new(big.Int).Exp(ten, big.NewInt(-shift), nil), rest)
		if rest.Sign() != 0 {
			nanos.Add(nanos, big.NewInt(1))
		}
	}
	return ofBig(nanos)
}

func ofBig(n *big.Int) Amount {
	if n.BitLen() > 120 {
		if n.Sign() < 0 {
			return Least
		}
		return Most
	}
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

// Times returns how often part can be taken from a before less than nothing is left, at most limit times.
func (a Amount) Times(part Amount, limit int) int {
	n := 0
	for ; n < limit && !a.Less(part); n++ {
		a = a.Sub(part)
	}
	return n
}

// Append appends a fixed-length encoding, different for different amounts.
func (a Amount) Append(to []byte) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(to, uint64(a.hi)), a.lo)
}
