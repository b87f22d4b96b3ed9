// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
)

var (
	ending  = prepare.Use{Ends: true, Text: "which is being released: its pod is gone from the API server, and the kubelet has not unprepared it yet"}
	running = prepare.Use{Text: "used by pod default/p, which runs"}
)

// TestAHolderThatIsBeingReleasedIsWaitedFor, without a lock, and the claim is told what it waits for.
func TestAHolderThatIsBeingReleasedIsWaitedFor(t *testing.T) {
	const half = "+share:%:30Gi:40"
	share := func(id string) result { return result("gpu=" + gpu0 + strings.ReplaceAll(half, "%:", id+":")) }
	tests := map[string]struct {
		profile    string   // twoGPUs if empty
		held       []result // by claims h0, h1
		wants      result
		ends, told string // the claim that ends, and part of what is told
	}{
		"a GPU": {
			held: []result{"gpu=" + gpu0}, wants: "gpu=" + gpu0, ends: "h0-uid",
			told: "claim default/next (next-uid), request gpu: device gpu-0000-1b-00-0 waits for claim default/h0 (h0-uid), which is being released: its pod is gone from the API server, and the kubelet has not unprepared it yet",
		},
		"a partition for the whole GPU": {
			held: []result{"gpu=" + gpu0 + "-mig-1g10gb-0"}, wants: "gpu=" + gpu0, ends: "h0-uid", told: "waits for claim default/h0 (h0-uid), which is being released",
		},
		// NVML does not see it before it is given back.
		"a GPU that is with a virtual machine": {
			profile: withSound, held: []result{"vm=" + vm0}, wants: "gpu=" + gpu0, ends: "h0-uid", told: "waits for claim default/h0 (h0-uid), which is being released",
		},
		"a GPU for a virtual machine": {
			profile: withSound, held: []result{"gpu=" + gpu0}, wants: "vm=" + vm0, ends: "h0-uid", told: "waits for claim default/h0 (h0-uid), which is being released",
		},
		"a share that the second of two others leaves": {
			held: []result{share("a"), share("b")}, wants: share("c"), ends: "h1-uid",
			told: "; it waits for claim default/h1 (h1-uid), which is being released",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, cmp.Or(tc.profile, twoGPUs))
			waits := make(chan error, 10)
			n.options.UseOf = func(_ context.Context, held *ledger.Entry) prepare.Use {
				if held.Claim.UID == types.UID(tc.ends) {
					return ending
				}
				return running
			}
			n.options.Waiting = func(c *resourceapi.ResourceClaim, err error) {
				if c.UID != "next-uid" {
					t.Errorf("claim %s waits", c.UID)
				}
				waits <- err
			}
			m := n.manager()
			for i, r := range tc.held {
				if _, err := m.Prepare(n.ctx, claim([]string{"h0", "h1"}[i], r)); err != nil {
					t.Fatal(err)
				}
			}
			done := make(chan error, 1)
			go func() {
				_, err := m.Prepare(n.ctx, claim("next", tc.wants))
				done <- err
			}()
			begins := func() error {
				select {
				case err := <-waits:
					return err
				case err := <-done:
					return fmt.Errorf("it does not wait: %w", err)
				}
			}
			if err := returned(t, "the beginning of the wait", begins); err == nil || !strings.Contains(err.Error(), tc.told) {
				t.Fatalf("it waits because of %q, want %q in it", err, tc.told)
			}
			if err := n.manager().Unprepare(n.ctx, types.UID(tc.ends)); err != nil { // another agent's
				t.Fatal(err)
			}
			if err := returned(t, "prepare", func() error { return <-done }); err != nil {
				t.Errorf("when the holder has gone: %v", err)
			}
			if len(waits) > 0 {
				t.Errorf("told again: %v", <-waits)
			}
		})
	}
}

// TestNobodyIsWaitedForWithoutEnd, nor who does not end.
func TestNobodyIsWaitedForWithoutEnd(t *testing.T) {
	tests := map[string]struct {
		use     *prepare.Use
		ctx     context.Context
		timeout time.Duration
		want    string
		told    int32
	}{
		"it is not known who uses it": {want: "is still held on this node by claim default/first (first-uid)"},
		"its pod runs":                {use: &running, want: "is still held on this node by claim default/first (first-uid), used by pod default/p, which runs"},
		"the time is over":            {use: &ending, timeout: 300 * time.Millisecond, want: "and the kubelet has not unprepared it yet; waited 0s, and the kubelet tries again", told: 1},
		"no time is left of the kubelet's": {
			use: &ending, want: "waits for claim default/first (first-uid), which is being released: its pod is gone from the API server, and the kubelet has not unprepared it yet",
			ctx: deadlineIn(t, 2*time.Second),
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			var told atomic.Int32
			n.options.Waiting = func(*resourceapi.ResourceClaim, error) { told.Add(1) }
			n.options.ReleaseTimeout = tc.timeout
			if tc.use != nil {
				n.options.UseOf = func(context.Context, *ledger.Entry) prepare.Use { return *tc.use }
			}
			m := n.manager()
			if _, err := m.Prepare(n.ctx, claim("first", "gpu="+gpu0)); err != nil {
				t.Fatal(err)
			}
			ctx := n.ctx
			if tc.ctx != nil {
				ctx = tc.ctx
			}
			err := returned(t, "prepare", func() error { _, err := m.Prepare(ctx, claim("second", "gpu="+gpu0)); return err })
			var held *prepare.HeldError
			if !errors.As(err, &held) || !strings.HasSuffix(err.Error(), tc.want) || told.Load() != tc.told {
				t.Errorf("told %d times, error %q; want %d and %q", told.Load(), err, tc.told, tc.want)
			}
		})
	}
}

func deadlineIn(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// TestAWaitEndsWithTheCall: the kubelet gives up, because the waiting pod is deleted.
func TestAWaitEndsWithTheCall(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	n.options.UseOf = func(context.Context, *ledger.Entry) prepare.Use { return ending }
	n.options.Waiting = func(*resourceapi.ResourceClaim, error) { cancel() }
	m := n.manager()
	if _, err := m.Prepare(n.ctx, claim("first", "gpu="+gpu0)); err != nil {
		t.Fatal(err)
	}
	if err := returned(t, "prepare", func() error { _, err := m.Prepare(ctx, claim("second", "gpu="+gpu0)); return err }); err == nil {
		t.Error("prepared")
	}
}

// TestAHolderThatTurnsOutToRunIsNotWaitedFor: what was not known becomes known.
func TestAHolderThatTurnsOutToRunIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNodeOf(t, twoGPUs)
		var asked []time.Time
		n.options.UseOf = func(context.Context, *ledger.Entry) prepare.Use {
			if asked = append(asked, time.Now()); len(asked) == 1 {
				return ending
			}
			return running
		}
		m := n.manager()
		if _, err := m.Prepare(n.ctx, claim("first", "gpu="+gpu0)); err != nil {
			t.Fatal(err)
		}
		err := returned(t, "prepare", func() error { _, err := m.Prepare(n.ctx, claim("second", "gpu="+gpu0)); return err })
		if err == nil || !strings.Contains(err.Error(), running.Text) {
			t.Errorf("%v, want that it runs", err)
		}
		if len(asked) != 2 || asked[1].Sub(asked[0]) < 5*time.Second {
			t.Errorf("asked at %v who uses it, want that the API is left alone for 5 s", asked)
		}
	})
}

// TestAClaimDoesNotWaitForItself: its own requests are for more than there is, and no release helps.
func TestAClaimDoesNotWaitForItself(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	var asked atomic.Int32
	n.options.UseOf = func(context.Context, *ledger.Entry) prepare.Use { asked.Add(1); return ending }
	m := n.manager()
	c := claim("two", "a="+gpu0+"+share:a:50Gi:10", "b="+gpu0+"+share:b:50Gi:5")
	err := returned(t, "prepare", func() error { _, err := m.Prepare(n.ctx, c); return err })
	var share *prepare.ShareError
	if !errors.As(err, &share) || !strings.HasSuffix(err.Error(), "by nobody else") || asked.Load() != 0 {
		t.Errorf("%d asked, error %v; want that the claim is refused because of itself", asked.Load(), err)
	}
}
