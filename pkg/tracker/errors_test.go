// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"testing"
)

func TestStaleErrorIsNoOtherError(t *testing.T) {
	err := error(&StaleError{Pool: gpu0.PoolID()})
	if !errors.Is(err, ErrStale) || errors.Is(err, ErrClaimGone) {
		t.Errorf("%v: stale: %t, gone: %t", err, errors.Is(err, ErrStale), errors.Is(err, ErrClaimGone))
	}
}
