// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"runtime/debug"
	"testing"
)

// There is a headroom in a command that ends soon, but not below a limit of memory, of which it would be a part.
func TestHeadroom(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(math.MaxInt64))
	collectLate()
	if headroom.Cap() < headroomBytes {
		t.Errorf("a headroom of %d bytes, want %d", headroom.Cap(), headroomBytes)
	}
	collectInTime()
	if headroom.Cap() > 0 {
		t.Error("there is a headroom in a command that goes on")
	}
	debug.SetMemoryLimit(4 << 30)
	collectLate()
	if headroom.Cap() > 0 {
		t.Error("there is a headroom below a limit of memory")
	}
	collectInTime()
}
