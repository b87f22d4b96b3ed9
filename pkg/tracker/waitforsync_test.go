// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"testing"
)

// Once everything is listed, a context that has ended does not matter, every time.
func TestWaitForSyncFailsOnlyIfTheContextEndsFirst(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	tr := listed(t, 10)
	for range 64 {
		if err := tr.WaitForSync(ctx); err != nil {
			t.Fatal(err)
		}
	}
}
