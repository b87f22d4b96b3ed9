// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"stowage.dev/stowage/test/chaos/audit"
)

// checkLeaks waits until everything has been released, as all pods are gone, and
// says what has not.
func (r *run) checkLeaks(ctx context.Context) error {
	r.trouble.wg.Wait()
	r.calm()
	if err := r.wait(ctx, "claims are still held though no pod is left", r.heldClaims); err != nil {
		return err
	}
	r.owner.wg.Wait()
	r.owner.deleteClaims(ctx)
	if err := r.wait(ctx, "objects are left", r.leftovers); err != nil {
		return err
	}
	return r.checkTrackers(ctx)
}

// calm ends all delays.
func (r *run) calm() {
	for _, m := range r.members {
		if m.proxy != nil {
			m.proxy.SetDelay(0)
		}
	}
}

// heldClaims are the claims that are allocated or reserved.
func (r *run) heldClaims() []string {
	var held []string
	for _, c := range r.history.Claims() {
		if c.Status.Allocation != nil || len(c.Status.ReservedFor) > 0 {
			held = append(held, describe(audit.Change{Claim: c}))
		}
	}
	return held
}

// leftovers are all pods and claims.
func (r *run) leftovers() []string {
	var left []string
	for _, c := range r.history.Claims() {
		left = append(left, describe(audit.Change{Claim: c}))
	}
	for _, p := range r.history.Pods() {
		left = append(left, describe(audit.Change{Pod: p}))
	}
	return left
}

// wait goes on watching until nothing of a kind is left.
func (r *run) wait(ctx context.Context, what string, left func() []string) error {
	timeout := time.NewTimer(settleTimeout)
	defer timeout.Stop()
	for len(left()) > 0 {
		select {
		case answer, ok := <-r.watch.changes:
			if err := r.take(ctx, answer, ok); err != nil {
				return err
			}
		case <-timeout.C:
			return fmt.Errorf("leak: after %s %s:\n  %s", settleTimeout, what, strings.Join(left(), "\n  "))
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// Metrics that must be 0 when nothing is held.
var trackerMetrics = []string{"stowage_tracker_held_devices", "stowage_tracker_in_flight_allocations"}

// checkTrackers asks the schedulers themselves. Their watch may be a little
// behind.
func (r *run) checkTrackers(ctx context.Context) error {
	deadline := time.Now().Add(settleTimeout)
	for _, m := range r.members {
		if m.stock {
			continue
		}
		for _, name := range trackerMetrics {
			for {
				value, err := m.metric(ctx, name)
				if err == nil && value == 0 {
					break
				}
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				if time.Now().After(deadline) {
					if err != nil {
						return err
					}
					return fmt.Errorf("leak: %s says that %s is %g though nothing is held", m.name, name, value)
				}
				pause(ctx, 200*time.Millisecond)
			}
		}
	}
	return nil
}
