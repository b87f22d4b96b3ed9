// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"os"
	"testing"
)

// TestMain is also the agent that TestKill9 kills.
func TestMain(m *testing.M) {
	if order := os.Getenv(victimEnv); order != "" {
		os.Exit(victim(order))
	}
	os.Exit(m.Run())
}
