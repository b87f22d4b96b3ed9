// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"testing"

	"go.uber.org/goleak"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

// TestMain checks that all goroutines have ended when the tests have.
func TestMain(m *testing.M) {
	// Without apimachinery's limit on errors per time. It remembers the time of the
	// last error and sleeps until a little after that: in the next bubble of
	// synctest, where time begins anew, for as long as the last bubble lasted. The
	// Reflector reports its errors there.
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1]
	goleak.VerifyTestMain(m)
}
