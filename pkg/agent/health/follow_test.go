// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"testing"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestAnAgentThatFollowsWritesNoRecords: the next one does, to the same files.
func TestAnAgentThatFollowsWritesNoRecords(t *testing.T) {
	lead(t, func(ctx context.Context, b *bench, dir string, stop func()) {
		b.monitor.Follow()
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		b.want("a", "Unhealthy xid=119")
		if left, err := os.ReadDir(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("written: %v, %v", left, err)
		}
		stop()
	})
}
