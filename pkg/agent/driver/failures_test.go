// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"testing"
)

func TestAFailureIsToldOnceUntilItChanges(t *testing.T) {
	var f failures
	full, torn := errors.New("disk full"), errors.New("torn")
	for i, step := range []struct {
		name string
		err  error
		want bool
	}{
		{"a", full, true},
		{"a", full, false},
		{"b", full, true},
		{"a", torn, true},
		{"a", torn, false},
		{"a", nil, false},
		{"a", torn, true},
	} {
		if got := f.changed(step.name, step.err); got != step.want {
			t.Errorf("step %d: changed(%s, %v) is %t", i, step.name, step.err, got)
		}
	}
}
