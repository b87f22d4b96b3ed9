// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package amount

import (
	"bytes"
	"math"
	"math/big"
	"strings"
	"testing"
	"time"

	"gopkg.in/inf.v0"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
)

// hostile are quantities that the API reads and stores, and that arithmetic does not end on.
var hostile = []string{
	"1e2147483647", "-1e2147483647", "3E2147483647", "9e2147483640", "0e2147483647", "1e20000000", "1e22", "-1e22", "99e21", "10000E",
	"1" + strings.Repeat("0", 10_000), strings.Repeat("9", 10_000),
}

var harmless = []string{
	"0", "1", "-1", "1n", "-1n", "1e-9", "0e22", "0e-9", "9e21", "9999E", "-9999E", "8Ei", "-8Ei", "1000000Ei", "9999999999999999999999",
	"9999999999999999999999.999999999", "-9999999999999999999999.999999999", "9223372036854775807", "0.1", "1.5Gi", "100m", "1e3",
}

func TestCheckBoundsQuantities(t *testing.T) {
	for _, text := range hostile {
		q := resource.MustParse(text)
		err := Check(q)
		if err == nil || len(err.Error()) > 200 {
			t.Errorf("%.40s: %v", text, err)
		}
		want := Most
		switch {
		case q.IsZero():
			want = Amount{}
		case q.Sign() < 0:
			want = Least
		}
		if got := Of(q); got != want {
			t.Errorf("%.40s becomes %v, want %v", text, got, want)
		}
	}
	for _, text := range harmless {
		if err := Check(resource.MustParse(text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	if finer := *resource.NewDecimalQuantity(*inf.NewDec(1, 10), resource.DecimalSI); Check(finer) == nil {
		t.Error("a tenth of a nano is within the bounds")
	}
}

// Of what 64 bits do not have it is their end: also of a sum, of which the API's parser has seen only the parts.
func TestInt64EndsWhere64BitsDo(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "0e2147483647": 0, "1": 1, "-1": -1, "1500m": 2, "1n": 1, "1e3": 1000, "1Ki": 1024,
		"9223372036854775806": math.MaxInt64 - 1, "9223372036854775807": math.MaxInt64, "9223372036854775808": math.MaxInt64,
		"18446744073709551615500m": math.MaxInt64, "18446744073709551616": math.MaxInt64, "18446744073709551617": math.MaxInt64,
		"1e19": math.MaxInt64, "9e21": math.MaxInt64,
		"1e22": math.MaxInt64, "1e2147483647": math.MaxInt64,
		"-9223372036854775807": -math.MaxInt64, "-9223372036854775808": math.MinInt64, "-9223372036854775809": math.MinInt64,
		"-18446744073709551615000000001n": math.MinInt64, "-18446744073709551617": math.MinInt64, "-1e2147483647": math.MinInt64,
	} {
		if got := Int64(resource.MustParse(text)); got != want {
			t.Errorf("%s: %d, want %d", text, got, want)
		}
	}
	for _, n := range []int64{math.MaxInt64, math.MinInt64} {
		sum := resource.NewQuantity(n, resource.DecimalSI)
		sum.Add(*sum)
		if got := Int64(*sum); got != n {
			t.Errorf("twice %d: %d", n, got)
		}
	}
}

func TestCheckTextBoundsTextsBeforeTheyAreParsed(t *testing.T) {
	beforeParsing := []string{
		"1e-2147483647", "1234567890123456789e2147483647", "1.5e-2147483647", "1e4294967296", "0e999", "1e+100", "1e00000000000000000001",
		strings.Repeat("0", 65), strings.Repeat("9", 10_000_000),
	}
	for _, text := range append(beforeParsing, hostile...) {
		if err := CheckText(text); err == nil || len(err.Error()) > 200 {
			t.Errorf("%.40s: %v", text, err)
		}
	}
	for _, text := range append([]string{"", "no quantity", "1e", "1ee5", "1-5", "1E99x"}, harmless...) {
		if err := CheckText(text); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestEqualityOfQuantitiesThatNobodyChecked(t *testing.T) {
	all := append(append([]string{}, hostile...), texts...)
	for i, x := range all {
		for j, y := range all {
			a, b := resource.MustParse(x), resource.MustParse(y)
			want := i == j
			if Check(a) == nil && Check(b) == nil {
				want = a.Cmp(b) == 0
			}
			if got := Equal(a, b); got != want {
				t.Errorf("%.40s and %.40s are equal: %t, want %t", x, y, got, want)
			}
			c, d := map[string]resourceapi.Counter{"c": {Value: a}}, map[string]resourceapi.Counter{"c": {Value: b}}
			if got := Semantic.DeepEqual(c, d); got != want {
				t.Errorf("objects with %.40s and %.40s are equal: %t, want %t", x, y, got, want)
			}
		}
	}
}

func TestSumsOf16MillionHaveRoom(t *testing.T) {
	sum := new(big.Int).Lsh(big.NewInt(16_000_000), 64+39) // Most is 2^39 * 2^64
	if sum.BitLen() > 127 {
		t.Errorf("the sum takes %d bits", sum.BitLen())
	}
	if largest := Of(resource.MustParse("9999999999999999999999.999999999")); !largest.Less(Most) {
		t.Error("Most is not beyond the bounds")
	}
}

// TestLargeParametersAreComparedAtOnce compares with what looks at each byte by reflection, in the same run: it takes some thousand times as long.
func TestLargeParametersAreComparedAtOnce(t *testing.T) {
	parameters := func(last byte) []runtime.RawExtension {
		var all []runtime.RawExtension
		for range 32 {
			raw := bytes.Repeat([]byte{'x'}, 10<<10)
			raw[len(raw)-1] = last
			all = append(all, runtime.RawExtension{Raw: raw})
		}
		return all
	}
	a, same, other := parameters('a'), parameters('a'), parameters('b')
	if !Semantic.DeepEqual(a, same) || Semantic.DeepEqual(a, other) || Semantic.DeepEqual(a, a[1:]) {
		t.Error("parameters are not compared by what is in them")
	}
	least := func(equal func(a, b any) bool) time.Duration {
		shortest := time.Hour
		for range 5 {
			began := time.Now()
			equal(a, same)
			shortest = min(shortest, time.Since(began))
		}
		return shortest
	}
	if ours, byReflection := least(Semantic.DeepEqual), least(apiequality.Semantic.DeepEqual); ours > byReflection/10 {
		t.Errorf("takes %s, by reflection %s", ours, byReflection)
	}
}
