// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/locks"
)

// To the API a pod that is deleted by force is gone at once, and its GPUs are the next pod's. On the node it has the rest of its grace
// period. A kubelet that is refused the GPUs asks again after 60 to 90 s, so the call waits for them, as long as the kubelet waits for it.

const (
	// DefaultReleaseTimeout leaves time to prepare the claim, before the kubelet gives up.
	DefaultReleaseTimeout = KubeletPatience - prepareTime
	prepareTime           = 8 * time.Second

	// releasePoll is how often the ledger is looked at for the holder's record, and useInterval how often it is asked who uses it.
	releasePoll = 100 * time.Millisecond
	useInterval = 5 * time.Second
)

// Handover says what is waited for that other claims hold.
type Handover struct {
	// UseOf tells who uses what a claim holds. What is being released is waited for, up to ReleaseTimeout. Without it nobody is waited for.
	UseOf func(ctx context.Context, held *ledger.Entry) Use
	// Waiting is told that a claim begins to wait, and what for. It must not block.
	Waiting        func(claim *resourceapi.ResourceClaim, err error)
	ReleaseTimeout time.Duration
}

func (h *Handover) setDefaults() {
	h.ReleaseTimeout = cmp.Or(h.ReleaseTimeout, DefaultReleaseTimeout)
	if h.Waiting == nil {
		h.Waiting = func(*resourceapi.ResourceClaim, error) {}
	}
}

// Use is what is known of those who use what a claim holds.
type Use struct {
	// Ends: nobody uses it any more or will soon, as far as is known. Then the kubelet unprepares the claim.
	Ends bool
	// Text goes on after the claim's name: "used by pod default/train, which runs". Public says the same to other namespaces: without names.
	Text, Public string
}

// blockedError is one that other claims cause by what they hold.
type blockedError interface {
	error
	holders() []types.UID
	// note tells what is known of the use of one of them.
	note(holder ledger.Claim, use Use)
}

// handover is the wait of one call for what other claims hold.
type handover struct {
	Handover
	ledger *ledger.Ledger
	claim  *resourceapi.ResourceClaim
	begun  time.Time
	until  time.Time
	told   bool
}

func beginHandover(ctx context.Context, opts Handover, ledger *ledger.Ledger, claim *resourceapi.ResourceClaim) *handover {
	h := &handover{Handover: opts, ledger: ledger, claim: claim, begun: time.Now()}
	h.until = h.begun.Add(opts.ReleaseTimeout)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-prepareTime).Before(h.until) {
		h.until = deadline.Add(-prepareTime)
	}
	return h
}

// again tells whether to try again after an error: what other claims hold is released, or it has to be looked at anew who uses it.
// It returns false for what is not released by itself, and when the time is over. No lock is held meanwhile: who releases it needs them.
func (h *handover) again(ctx context.Context, err error) bool {
	var blocked blockedError
	if h.UseOf == nil || !errors.As(err, &blocked) {
		return false
	}
	holder, gone := h.ending(ctx, blocked)
	if gone {
		return true
	}
	if holder == "" || !time.Now().Before(h.until) {
		return false
	}
	if !h.told {
		h.told = true
		logger := klog.FromContext(ctx)
		logger.Info("Claim waits for what another one holds, which is being released", "reason", err.Error(),
			"others", Others(err), "until", h.until.UTC())
		h.Waiting(h.claim, err)
	}
	return h.wait(ctx, holder)
}

// ending returns a holder that is being released. gone: one has been, since.
func (h *handover) ending(ctx context.Context, blocked blockedError) (holder types.UID, gone bool) {
	var runs *ledger.Claim
	var use Use
	for _, uid := range blocked.holders() {
		record, err := h.ledger.Get(uid)
		switch {
		case err != nil || record != nil && record.Entry == nil:
			continue // it cannot be read: who uses it is not known, and it says so
		case record == nil:
			return "", true
		}
		now := h.UseOf(ctx, record.Entry)
		if now.Ends {
			blocked.note(record.Entry.Claim, now)
			return uid, false
		}
		if runs == nil {
			runs, use = &record.Entry.Claim, now
		}
	}
	if runs != nil {
		blocked.note(*runs, use)
	}
	return "", false
}

// wait returns when the holder's record is gone, or after useInterval; it is false if the time is over.
func (h *handover) wait(ctx context.Context, holder types.UID) bool {
	ctx, cancel := context.WithDeadline(ctx, h.until)
	defer cancel()
	ticks := time.Tick(releasePoll)
	for end := time.Now().Add(useInterval); time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return false
		case <-ticks:
		}
		if record, err := h.ledger.Get(holder); err == nil && record == nil {
			return true
		}
	}
	return true
}

// end is the error of a call after its wait.
func (h *handover) end(err error) error {
	if !h.told {
		return err
	}
	waited := time.Since(h.begun)
	locks.Waited("release", waited, err)
	var blocked blockedError
	if errors.As(err, &blocked) {
		return fmt.Errorf("%w; waited %s, and the kubelet tries again", err, waited.Round(time.Second))
	}
	return err
}
