// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// An evaluation of CEL looks at Done alone. In a pass it has to end, or one hard expression keeps all pods from being woken.
func TestAnEvaluationInAPassEnds(t *testing.T) {
	for name, left := range map[string]time.Duration{"some time is left": 50 * time.Millisecond, "none is left": 0, "less than none is left": -time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				pass, end := context.WithCancel(t.Context()) // as that of the scheduler
				defer end()
				before := func() time.Time { return time.Now().Add(-time.Nanosecond) } // the clock goes on after it was read
				b := &budget{Context: pass, now: before, until: began.Add(left)}
				ctx, done := (&evaluation{b}).Evaluate(b)
				defer done()
				<-ctx.Done()
				if err := ctx.Err(); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("it ends with %v", err)
				}
				if took, want := time.Since(began), max(left+time.Nanosecond, 0); took != want {
					t.Errorf("it ends after %s, want %s", took, want)
				}
			})
		})
	}
}
