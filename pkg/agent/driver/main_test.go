// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"flag"
	"os"
	"testing"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

// TestMain lets more tests run at a time than there are processors: those that may run beside others wait for an agent's clock most of the time.
// A test that reads metrics may not: they are the process's.
//
// Errors are not held back: who reports one sleeps until a millisecond after the last one, which in a bubble may have been decades later.
func TestMain(m *testing.M) {
	flag.Parse()
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1]
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", "12"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}
