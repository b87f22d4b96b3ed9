// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// What another scheduler writes into a claim's status may be a quantity on which comparisons do not end.
func TestHoldersOfQuantitiesThatNeverEndAreCompared(t *testing.T) {
	holder := func(text string) Holder {
		return Holder{ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(text)}}
	}
	for _, tc := range []struct {
		a, b string
		want bool
	}{
		{"1e2147483647", "1m", false},
		{"1e2147483647", "1e20000000", false},
		{"1e2147483647", "1e2147483647", true},
		{"1Gi", "1024Mi", true},
	} {
		if got := holder(tc.a).Equal(holder(tc.b)); got != tc.want {
			t.Errorf("%s and %s are equal: %t", tc.a, tc.b, got)
		}
	}
}
