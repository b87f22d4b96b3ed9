// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package amount

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

// texts are quantities of all kinds, some of which are the same amount.
var texts = []string{
	"0", "1", "-1", "1000m", "1500m", "1.5", "-1.5", "1n", "-1n", "999999999n", "1Gi", "1024Mi", "1Ki", "1e3", "40Gi", "0.1",
	"100m", "123456789.123456789", "9223372036854775807", "-9223372036854775807", "8Ei", "-8Ei", "9E", "1u",
}

func TestAmountsCompareAndAddAsQuantitiesDo(t *testing.T) {
	for _, x := range texts {
		for _, y := range texts {
			p, q := resource.MustParse(x), resource.MustParse(y)
			a, b := Of(p), Of(q)
			if got, want := a.Less(b), p.Cmp(q) < 0; got != want {
				t.Errorf("%s < %s: %t, want %t", x, y, got, want)
			}
			if got, want := a == b, p.Cmp(q) == 0; got != want {
				t.Errorf("%s == %s: %t, want %t", x, y, got, want)
			}
			sum, difference := p.DeepCopy(), p.DeepCopy()
			sum.Add(q)
			difference.Sub(q)
			if a.Add(b) != Of(sum) {
				t.Errorf("%s + %s is not %s", x, y, sum.String())
			}
			if a.Sub(b) != Of(difference) {
				t.Errorf("%s - %s is not %s", x, y, difference.String())
			}
			if string(a.Append(nil)) == string(b.Append(nil)) && a != b {
				t.Errorf("%s and %s are encoded alike", x, y)
			}
		}
		if got, want := Of(resource.MustParse(x)).IsNegative(), x[0] == '-'; got != want {
			t.Errorf("%s is negative: %t", x, got)
		}
	}
}

func TestRandomAmountsAddAsQuantitiesDo(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		p := resource.NewScaledQuantity(rng.Int64()-math.MaxInt64/2, resource.Scale(rng.IntN(10)-9))
		q := resource.NewScaledQuantity(rng.Int64()-math.MaxInt64/2, resource.Scale(rng.IntN(10)-9))
		sum := p.DeepCopy()
		sum.Add(*q)
		if Of(*p).Add(Of(*q)) != Of(sum) || Of(*p).Less(Of(*q)) != (p.Cmp(*q) < 0) {
			t.Fatalf("%s and %s", p, q)
		}
	}
}

func TestOfDoesNotChangeTheQuantity(t *testing.T) {
	q := resource.MustParse("1500m")
	before := fmt.Sprintf("%#v", q)
	Of(q)
	if after := fmt.Sprintf("%#v", q); after != before {
		t.Errorf("%s became %s", before, after)
	}
}

func TestBeyondTheRangeIsTheMost(t *testing.T) {
	huge := resource.NewScaledQuantity(math.MaxInt64, 40)
	if Of(*huge) != Most {
		t.Error("a huge quantity is not Most")
	}
	huge.Neg()
	if Of(*huge) != Least {
		t.Error("a huge negative quantity is not Least")
	}
}
