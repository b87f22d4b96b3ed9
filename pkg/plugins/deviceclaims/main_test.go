// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"testing"

	"go.uber.org/goleak"
)

// TestMain checks that all goroutines have ended when the tests have.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
