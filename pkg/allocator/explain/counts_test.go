// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAllCountsAreAdded(t *testing.T) {
	var one, two DeviceCounts
	for i := range reflect.TypeFor[DeviceCounts]().NumField() {
		if field := reflect.ValueOf(&one).Elem().Field(i); field.CanInt() {
			field.SetInt(int64(i + 1))
			reflect.ValueOf(&two).Elem().Field(i).SetInt(2 * int64(i+1))
		}
	}
	sum := one
	sum.Add(&one)
	if diff := cmp.Diff(two, sum); diff != "" {
		t.Errorf("the sum of twice the same (-want +got):\n%s", diff)
	}
}
