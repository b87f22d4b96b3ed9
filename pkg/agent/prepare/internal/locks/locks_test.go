// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package locks_test

import (
	"path/filepath"
	"testing"
	"time"

	"stowage.dev/stowage/pkg/agent/prepare/internal/locks"
)

// A disk that takes no lock file says so, in the words of the system and with the path once: waiting has nothing to do with it.
func TestALockThatCannotBeMadeIsNoWaiting(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "none")
	l := (&locks.Locker{Dir: dir, Timeout: time.Minute}).Begin()
	want := "open " + filepath.Join(dir, "gpu-x.lock") + ": no such file or directory"
	if err := l.GPUs(t.Context(), "x"); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	want = "open " + filepath.Join(dir, "claims.lock") + ": no such file or directory"
	if err := l.Claim(t.Context(), "a"); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}
