// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// A run that takes too long fails, and says where it was. Other errors are told as they are.
func TestARunThatTakesTooLongSaysSo(t *testing.T) {
	broken := errors.New("phase burst: broken")
	for name, tc := range map[string]struct {
		takes, interrupted time.Duration
		err                error
		want               string
	}{
		"in time":                {takes: 20 * time.Minute, want: ""},
		"too long":               {takes: 22 * time.Minute, want: "it takes longer than -limit 21m0s; it was in phase churn: context deadline exceeded"},
		"broken":                 {takes: time.Minute, err: broken, want: "phase burst: broken"},
		"interrupted":            {takes: 20 * time.Minute, interrupted: time.Minute, want: "phase churn: context canceled"},
		"interrupted by another": {takes: 22 * time.Minute, interrupted: 2 * time.Minute, want: "phase churn: context canceled"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tc.interrupted > 0 {
					defer time.AfterFunc(tc.interrupted, cancel).Stop()
				}
				err := within(ctx, 21*time.Minute, func(ctx context.Context) error {
					select {
					case <-time.After(tc.takes):
						return tc.err
					case <-ctx.Done():
						return fmt.Errorf("phase churn: %w", ctx.Err())
					}
				})
				got := ""
				if err != nil {
					got = err.Error()
				}
				if got != tc.want {
					t.Errorf("got %q, want %q", got, tc.want)
				}
			})
		})
	}
}
