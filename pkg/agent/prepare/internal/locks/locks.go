// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package locks excludes calls from each other: within an agent, and from another agent of the same node.
package locks

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics"

	"stowage.dev/stowage/pkg/agent/durable"
)

// WaitSeconds is the metric of how long locks are waited for. Who uses the package registers it.
var WaitSeconds = metrics.NewHistogramVec(&metrics.HistogramOpts{
	Namespace: "stowage",
	Subsystem: "agent",
	Name:      "lock_wait_seconds",
	Help: "How long a call waited for a lock, by its kind (claim, gpu; release: for a claim that was being released) and outcome " +
		"(ok, error: it was not free in time).",
	Buckets:        []float64{.001, .005, .02, .1, .5, 1, 5, 15, 40},
	StabilityLevel: metrics.ALPHA,
}, []string{"lock", "outcome"})

// Waited enters how long a lock of that kind was waited for, with or without success.
func Waited(kind string, waited time.Duration, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "error"
	}
	WaitSeconds.WithLabelValues(kind, outcome).Observe(waited.Seconds())
}

// Locker takes file locks in one folder, which exclude other agents as well as other calls to this one.
type Locker struct {
	Dir string
	// Timeout is for all locks of one call together: the kubelet's deadline is for the whole call, too.
	Timeout time.Duration
}

// Call has the locks of one call. The global order is the claim's lock first, then GPUs by name, all of them at once: no two calls
// can wait for each other. Not safe for concurrent use.
type Call struct {
	dir     string
	begun   time.Time
	timeout time.Duration
	unlocks []func()
}

// Begin starts the time that the call may wait for all of its locks.
func (l *Locker) Begin() *Call { return l.BeginWithin(l.Timeout) }

// BeginWithin is Begin for a call that must not wait longer than that, either.
func (l *Locker) BeginWithin(most time.Duration) *Call {
	return &Call{dir: l.Dir, begun: time.Now(), timeout: min(most, l.Timeout)}
}

// Claim excludes every other call for the same claim, and no call for another one: it is held while a GPU is waited for.
func (c *Call) Claim(ctx context.Context, uid types.UID) error {
	return c.take(ctx, "claim", func(ctx context.Context) (func(), error) {
		return durable.LockKey(ctx, filepath.Join(c.dir, "claims.lock"), string(uid))
	})
}

// GPUs excludes every other call that holds or may come to hold one of the GPUs. If it fails some may be locked.
func (c *Call) GPUs(ctx context.Context, gpus ...string) error {
	for _, gpu := range slices.Compact(slices.Sorted(slices.Values(gpus))) {
		err := c.take(ctx, "gpu", func(ctx context.Context) (func(), error) {
			return durable.Lock(ctx, filepath.Join(c.dir, "gpu-"+gpu+".lock"))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Yield lets those who wait for a lock take it, before one who has just given it back does again.
func Yield(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(2 * durable.LockPoll):
	}
}

// Unlock gives all of them back. To be called once.
func (c *Call) Unlock() {
	for _, unlock := range slices.Backward(c.unlocks) {
		unlock()
	}
}

// take takes a lock of that kind.
func (c *Call) take(ctx context.Context, kind string, lock func(context.Context) (func(), error)) (err error) {
	ctx, cancel := context.WithDeadline(ctx, c.begun.Add(c.timeout))
	defer cancel()
	start := time.Now()
	defer func() { Waited(kind, time.Since(start), err) }()
	unlock, err := lock(ctx)
	if err != nil && ctx.Err() == nil {
		return err // the file system's, which no waiting helps
	}
	if err != nil {
		return fmt.Errorf("%s after the call began to wait for its locks: %w", time.Since(c.begun).Round(time.Millisecond), err)
	}
	c.unlocks = append(c.unlocks, unlock)
	return nil
}
