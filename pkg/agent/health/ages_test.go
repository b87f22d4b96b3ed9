// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// lead plays in virtual time with a monitor that leads, keeps its records in dir, and has found GPU a well.
func lead(t *testing.T, play func(ctx context.Context, b *bench, dir string, stop func())) {
	dir := filepath.Join(t.TempDir(), "health")
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		b := newBench(t, dir)
		b.monitor.Lead(ctx)
		stop := b.run(ctx)
		b.want("a", "Healthy")
		play(ctx, b, dir, stop)
	})
}

// TestTheSuccessorGoesOnCounting: an agent that is updated often must not keep a fault for ever, nor make it younger.
func TestTheSuccessorGoesOnCounting(t *testing.T) {
	lead(t, func(ctx context.Context, b *bench, dir string, stop func()) {
		begin := time.Now()
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		for range 3 {
			time.Sleep(3 * time.Minute)
			b.want("a", "Unhealthy xid=119")
			if got := b.monitor.Of("a", nil).Faults[0].Since; !got.Equal(begin) {
				t.Errorf("the fault is there since %s, want %s", got, begin)
			}
			stop()
			b.open(dir)
			b.monitor.Lead(ctx)
			stop = b.run(ctx)
		}
		time.Sleep(time.Until(begin.Add(rules[XID].clear + 2*PollInterval)))
		b.want("a", "Healthy")
		stop()
		b.open(dir)
		b.want("a", "Unknown")
	})
}

// TestTheQuietMinutesBeginAnewWithTheNextXID, also when a former agent has counted some.
func TestTheQuietMinutesBeginAnewWithTheNextXID(t *testing.T) {
	lead(t, func(ctx context.Context, b *bench, dir string, stop func()) {
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		time.Sleep(9 * time.Minute)
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		synctest.Wait()
		stop()
		b.open(dir)
		b.monitor.Lead(ctx)
		stop = b.run(ctx)
		time.Sleep(9 * time.Minute)
		b.want("a", "Unhealthy xid=119")
		time.Sleep(2 * time.Minute)
		b.want("a", "Healthy")
		stop()
	})
}

// TestAClockThatIsSetBackDoesNotKeepAFault for as long as it was set back.
func TestAClockThatIsSetBackDoesNotKeepAFault(t *testing.T) {
	var s State
	s.Answered(start, well())
	xid(119, nil)(start, &s)
	s.Answered(start.Add(time.Hour), well())
	for at := time.Duration(0); at <= rules[XID].clear; at += PollInterval {
		s.Answered(start.Add(at), well())
	}
	if got := told(s.Of(nil)); got != "Healthy" {
		t.Errorf("after %s by the new clock: %q", rules[XID].clear, got)
	}
}

// TestWhatEndedWithTheDriverIsNotKnownToTheSuccessor: the record is of now, not of before the driver was loaded anew.
func TestWhatEndedWithTheDriverIsNotKnownToTheSuccessor(t *testing.T) {
	lead(t, func(ctx context.Context, b *bench, dir string, stop func()) {
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		b.want("a", "Unhealthy xid=119")
		if err := b.monitor.Watch(b.machine.BootID(), b.targets(), true); err != nil {
			t.Error(err)
		}
		b.want("a", "Healthy")
		stop()
		b.open(dir)
		b.want("a", "Unknown")
	})
}
