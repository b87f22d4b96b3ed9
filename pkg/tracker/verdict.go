// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

// Outcome says whether an allocation fits on top of all that were written before
// it.
type Outcome string

const (
	// Fits: whatever was allocated earlier leaves enough.
	Fits Outcome = "fits"
	// Lost: a claim that was certainly allocated earlier has what this one takes.
	Lost Outcome = "lost"
	// Undecided: a claim that takes the same may have been allocated earlier, or
	// it is not known what the devices have to give.
	Undecided Outcome = "undecided"
)

// Verdict is a Judge's answer.
type Verdict struct {
	Outcome Outcome
	// Device is the claim's device that somebody else has, or of which too
	// little is left. Other has it. Both are empty if the claim fits.
	Device usage.DeviceID
	Other  usage.ClaimRef
	// Detail says what there is too little of, or what is not known. It may be
	// empty.
	Detail string
}

// Case is what a Judge judges.
type Case struct {
	Claim      usage.ClaimRef
	Allocation *resourceapi.AllocationResult
	// Usage is who holds what, the claim itself included.
	Usage usage.View
	// Precedence says how a hold in Usage stands to the claim. What is Later
	// does not count; the claim's own holds are.
	Precedence func(usage.DeviceID, usage.Holder) Precedence
	// DecidedOn is the usage on which the allocation was decided, empty if that
	// is not known: whatever was held there has been taken into account with
	// the knowledge of that time. The claim's own hold is in it if a pod that
	// has a node uses the claim.
	DecidedOn usage.View
}

// Judge decides about allocations. It is called with the tracker's lock held: it
// must be quick and must not call the tracker.
type Judge interface {
	Judge(Case) Verdict
	// Taken tells of an allocation whose devices are held from now on, or still
	// are. It may be nil. Nothing comes into Usage without that.
	Taken(*resourceapi.AllocationResult)
}

// Option configures a Tracker.
type Option func(*Tracker)

// WithJudge makes the tracker judge every allocation when the watch brings it.
func WithJudge(judge Judge) Option {
	return func(t *Tracker) { t.judge = judge }
}

// ErrDeallocated says that a claim does not have the allocation any more about
// which was asked.
var ErrDeallocated = errors.New("claim lost its allocation, or has another one")

var errNoJudge = errors.New("the tracker has no judge")

// Verdict says whether an allocation of a claim fits on top of what was written
// before it. Call it when the list and the watch have reached the version at
// which the claim had the allocation, see WaitObserved: what was observed by then
// includes everything that was written before.
//
// A claim that fits once fits for good. One that does not may do so later, when
// others have gone.
//
// It fails with a ClaimError if the claim is gone (ErrClaimGone) or has not that
// allocation any more (ErrDeallocated).
func (t *Tracker) Verdict(claim usage.ClaimRef, allocation *resourceapi.AllocationResult, decidedOn usage.View) (Verdict, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	s := t.standings[claim.UID]
	switch {
	case t.judge == nil:
		return Verdict{}, errNoJudge
	case t.claims.byUID[claim.UID] == nil: // for list and watch it may still be there
		return Verdict{}, claimError(claim, ErrClaimGone)
	case s == nil || !sameDevices(s.allocation, allocation):
		return Verdict{}, claimError(claim, ErrDeallocated)
	}
	if s.verdict.Outcome != Fits {
		s.verdict = t.verdictOf(s, decidedOn)
	}
	return s.verdict, nil
}

// AllocatedAt says when the claim got the allocation that the list or the watch
// has brought, false if it has none.
func (t *Tracker) AllocatedAt(claim types.UID) (Order, bool) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	s := t.standings[claim]
	if s == nil {
		return Order{}, false
	}
	return s.order, true
}

// verdictOf judges a claim on what is observed now.
func (t *Tracker) verdictOf(s *standing, decidedOn usage.View) Verdict {
	return t.judge.Judge(Case{
		Claim:      s.claim,
		Allocation: s.allocation,
		Usage:      t.index.View(),
		Precedence: func(device usage.DeviceID, holder usage.Holder) Precedence {
			other := t.standings[holder.Claim.UID]
			if other == nil || other == s || !other.holds(device, holder.ShareID) {
				// In flight, or known from an answer alone: the watch brings
				// it later than the claim.
				return Later
			}
			return other.order.to(s.order)
		},
		DecidedOn: decidedOn,
	})
}

// sameDevices compares what two allocations name.
func sameDevices(a, b *resourceapi.AllocationResult) bool {
	if len(a.Devices.Results) != len(b.Devices.Results) {
		return false
	}
	s := standing{allocation: a}
	for i := range b.Devices.Results {
		if result := &b.Devices.Results[i]; !s.holds(usage.DeviceOf(result), result.ShareID) {
			return false
		}
	}
	return true
}

func (v Verdict) String() string {
	switch v.Outcome {
	case Fits:
		return string(Fits)
	case Lost:
		return fmt.Sprintf("claim %s (UID %s) was allocated earlier: device %s%s", v.Other, v.Other.UID, v.Device, v.detail())
	case Undecided:
	}
	return fmt.Sprintf("claim %s (UID %s) may have been allocated earlier: device %s%s", v.Other, v.Other.UID, v.Device, v.detail())
}

func (v Verdict) detail() string {
	if v.Detail == "" {
		return ""
	}
	return ": " + v.Detail
}
