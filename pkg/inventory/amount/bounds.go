// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package amount

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"reflect"
	"strings"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
)

// The API documents that no quantity is beyond 2^63-1 or finer than one nano. Its parser sees to that for binary suffixes
// alone: 1e2147483647 is read, stored, and then nothing that compares, adds or rounds it ever ends. So a quantity has to be
// judged before anything is done with it.
const (
	// digits is how many digits a quantity may have before the point, and decimals after it: 10^22 is a thousand times 2^63.
	digits   = 22
	decimals = 9
	// maxBits hold digits and decimals.
	maxBits = 103
	// maxText is how long a text may be that is parsed: sign, leading zeros, digits, point, decimals, exponent.
	maxText = 64
	// maxShown is how much of a text an error quotes.
	maxShown = 32
)

var limit = new(big.Int).Exp(big.NewInt(10), big.NewInt(digits+decimals), nil)

var errBounds = fmt.Errorf("not less than 1e%d, or finer than 1e-%d", digits, decimals)

// Check says what is wrong with a quantity that is not less than 10^22, or whose exponent is beyond that, even if it is zero.
// For all others arithmetic, comparisons and text take little time. It looks at the exponent and at how many digits there are
// before it does any arithmetic.
func Check(q resource.Quantity) error {
	if !q.IsZero() {
		if _, ok := q.AsInt64(); ok {
			return nil
		}
	}
	unscaled, exponent := parts(q)
	if _, ok := nanosOf(unscaled, exponent); ok {
		return nil
	}
	if unscaled.BitLen() > maxBits {
		return fmt.Errorf("a number of %d bits with the exponent %d is out of bounds: %w", unscaled.BitLen(), exponent, errBounds)
	}
	return fmt.Errorf("%de%d is out of bounds: %w", unscaled, exponent, errBounds)
}

// Int64 is a quantity in whole numbers, rounded away from zero, as far as 64 bits have it: of what is beyond them it is
// their end. Its Value would be the lower 64 bits then, which may be any number. The time that it takes is bounded.
func Int64(q resource.Quantity) int64 {
	a, negative := Of(q), false
	if a.IsNegative() {
		a, negative = Amount{}.Sub(a), true
	}
	var n uint64 = math.MaxUint64
	if a.hi < nano {
		whole, rest := bits.Div64(uint64(a.hi), a.lo, nano)
		if n = whole; rest > 0 && n < math.MaxUint64 {
			n++
		}
	}
	switch {
	case n <= math.MaxInt64 && negative:
		return -int64(n)
	case n <= math.MaxInt64:
		return int64(n)
	case negative:
		return math.MinInt64
	}
	return math.MaxInt64
}

// CheckText says what is wrong with a text that, if it is a quantity at all, is one that Check refuses, or that is too long to be
// worth parsing. It does not parse texts that would take long.
func CheckText(text string) error {
	shown := text
	if len(shown) > maxShown {
		shown = strings.ToValidUTF8(shown[:maxShown], "") + "…"
	}
	if len(text) > maxText {
		return fmt.Errorf("%q is too long for a quantity: %d bytes, not at most %d", shown, len(text), maxText)
	}
	// An exponent of more than two digits is out of bounds, or zero with leading zeros, which nobody writes.
	mantissa := strings.TrimRight(text, "0123456789")
	exponent := text[len(mantissa):]
	if signed := strings.TrimRight(mantissa, "+-"); len(exponent) > 2 && (strings.HasSuffix(signed, "e") || strings.HasSuffix(signed, "E")) {
		return fmt.Errorf("%q is out of bounds: %w", shown, errBounds)
	}
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return nil //nolint:nilerr // It is for the caller to say that it is no quantity.
	}
	if Check(q) != nil {
		return fmt.Errorf("%q is out of bounds: %w", shown, errBounds)
	}
	return nil
}

// Equal tells whether two quantities are the same amount. Quantities out of bounds are equal if they are written alike.
func Equal(a, b resource.Quantity) bool {
	if Check(a) == nil && Check(b) == nil {
		return Of(a) == Of(b)
	}
	unscaled, exponent := parts(a)
	other, otherExponent := parts(b)
	return exponent == otherExponent && unscaled.Cmp(other) == 0
}

// Semantic is [apiequality.Semantic] for objects whose quantities nobody has checked, and whose parameters may be large: 32 of 10 KiB each
// in a claim, of which that looks at each byte by reflection, for some 20 ms.
var Semantic = func() conversion.Equalities {
	e := apiequality.Semantic.Copy()
	if err := e.AddFuncs(Equal, sameParameters); err != nil {
		panic(err)
	}
	return e
}()

func sameParameters(a, b runtime.RawExtension) bool {
	return (a.Raw == nil) == (b.Raw == nil) && bytes.Equal(a.Raw, b.Raw) && reflect.DeepEqual(a.Object, b.Object)
}

// parts returns what the quantity is made of: unscaled * 10^exponent. The quantity is a copy, which AsDec may change.
func parts(q resource.Quantity) (unscaled *big.Int, exponent int64) {
	dec := q.AsDec()
	return dec.UnscaledBig(), -int64(dec.Scale())
}

// nanosOf is the number of nanos, rounded up, if it is within the bounds.
func nanosOf(unscaled *big.Int, exponent int64) (nanos *big.Int, ok bool) {
	if exponent < -decimals || exponent > digits || unscaled.BitLen() > maxBits {
		return nil, false
	}
	nanos = new(big.Int).Exp(big.NewInt(10), big.NewInt(exponent+decimals), nil)
	nanos.Mul(nanos, unscaled)
	return nanos, nanos.CmpAbs(limit) < 0
}
