// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Options configure a Fence.
type Options struct {
	// Timeout is how long Pass waits at most for the watch.
	Timeout time.Duration
	// Jitter is how long Pause takes at most.
	Jitter time.Duration
}

// Fence lets claims pass that came first. All methods may be called from any
// goroutine; they block, so none belongs into a scheduling loop.
type Fence struct {
	tracker *tracker.Tracker
	options Options
}

// New returns a fence on what the tracker observes. The tracker needs a Judge.
func New(t *tracker.Tracker, options Options) *Fence {
	registerMetrics()
	return &Fence{tracker: t, options: options}
}

// ErrTimeout says that the watch did not bring a write in time. Whether the claim
// came first is not known.
var ErrTimeout = errors.New("timed out")

// YieldError says that a claim must give way, for now: another one has been, or
// may have been, allocated earlier.
type YieldError struct {
	Claim usage.ClaimRef
	// Allocation is the one that must not be used.
	Allocation *resourceapi.AllocationResult
	Verdict    tracker.Verdict
}

func (e *YieldError) Error() string {
	return fmt.Sprintf("claim %s gives way: %s", e.Claim, e.Verdict)
}

// Yields returns the claims that must give way, out of an error of Pass.
func Yields(err error) []*YieldError {
	var yields []*YieldError
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			var yield *YieldError
			if errors.As(err, &yield) {
				yields = append(yields, yield)
			}
		}
	}
	return yields
}

// Pass waits until the watch has brought the given claims, as the API server has
// answered to the last write of each or as they were found, and returns nil if all
// of them may be used. decidedOn returns the usage on which a claim's allocation
// was decided, empty if that was elsewhere or in an earlier life.
//
// The error has a *YieldError for each claim that must give way, ErrTimeout if
// the watch is silent, or a *tracker.ClaimError for one that is gone or has
// another allocation.
func (f *Fence) Pass(ctx context.Context, claims []*resourceapi.ResourceClaim,
	decidedOn func(*resourceapi.ResourceClaim) usage.View,
) (err error) {
	start := time.Now()
	defer func() { count(err, time.Since(start)) }()
	if err := f.wait(ctx, claims); err != nil {
		return err
	}
	var errs refusals
	for _, claim := range claims {
		ref := usage.RefOf(claim)
		verdict, err := f.tracker.Verdict(ref, claim.Status.Allocation, decidedOn(claim))
		switch {
		case err != nil:
			errs = append(errs, err)
		case verdict.Outcome != tracker.Fits:
			errs = append(errs, &YieldError{Claim: ref, Allocation: claim.Status.Allocation, Verdict: verdict})
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return errs
}

// refusals are one for each claim that must not be used, in one line.
type refusals []error

func (r refusals) Error() string {
	texts := make([]string, len(r))
	for i, err := range r {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (r refusals) Unwrap() []error { return r }

// wait waits until the watch has brought all claims.
func (f *Fence) wait(ctx context.Context, claims []*resourceapi.ResourceClaim) error {
	ctx, cancel := context.WithTimeoutCause(ctx, f.options.Timeout, fmt.Errorf("%w after %s", ErrTimeout, f.options.Timeout))
	defer cancel()
	for _, claim := range claims {
		if err := f.tracker.WaitObserved(ctx, claim.ResourceVersion); err != nil {
			return fmt.Errorf("wait for the watch to bring claim %s: %w", usage.RefOf(claim), err)
		}
	}
	return nil
}

// Pause waits for a random time of at most the jitter, so that two schedulers that
// both gave way do not meet again.
func (f *Fence) Pause(ctx context.Context) {
	if f.options.Jitter <= 0 {
		return
	}
	select {
	case <-time.After(rand.N(f.options.Jitter)):
	case <-ctx.Done():
	}
}
