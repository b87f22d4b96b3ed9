// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// countedReads counts the files that are read.
type countedReads struct {
	durable.OS
	n atomic.Int64
}

func (c *countedReads) ReadFile(path string) ([]byte, error) {
	c.n.Add(1)
	return c.OS.ReadFile(path)
}

// Scrapes read what has changed, and all of it once a minute, and no more however many there are.
func TestScrapesDoNotReadTheLedgerAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk, dir := &countedReads{}, filepath.Join(t.TempDir(), "claims")
		records, err := ledger.Open(disk, dir)
		if err != nil {
			t.Fatal(err)
		}
		writer := ledger.At(durable.OS{}, dir) // another agent on the node
		put := func(uid types.UID, state ledger.State) {
			t.Helper()
			entry := &ledger.Entry{State: state, Claim: ledger.Claim{UID: uid, Namespace: "a", Name: string(uid)}}
			entry.Devices = []ledger.Device{{Device: "gpu-0", GPU: "GPU-0"}}
			if err := writer.Put(entry); err != nil {
				t.Fatal(err)
			}
		}
		put("one", ledger.PrepareCompleted)
		put("two", ledger.PrepareCompleted)
		collector := &claimCollector{}
		for _, step := range []struct {
			name              string
			change            func()
			reads             int64 // of all scrapes after the change
			completed, series int
		}{
			{name: "the first", change: func() {}, reads: 2, completed: 2, series: 2},
			{name: "nothing new", change: func() { time.Sleep(ledgerAge / 2) }, completed: 2, series: 2},
			{name: "a claim more", change: func() { put("three", ledger.PrepareStarted) }, reads: 3, completed: 2, series: 2},
			{name: "it is completed", change: func() { put("three", ledger.PrepareCompleted) }, reads: 3, completed: 3, series: 3},
			{name: "a claim less", change: func() {
				if err := writer.Remove("one"); err != nil {
					t.Fatal(err)
				}
			}, reads: 2, completed: 2, series: 2},
			{name: "a record is cut", change: func() {
				files, _ := filepath.Glob(filepath.Join(dir, "two_*.claim"))
				if len(files) != 1 {
					t.Fatalf("records: %q", files)
				}
				if err := os.Truncate(files[0], 1); err != nil {
					t.Fatal(err)
				}
			}, reads: 3, completed: 1, series: 1}, // and its previous copy is looked for
			{name: "a minute later", change: func() { time.Sleep(ledgerAge) }, reads: 3, completed: 1, series: 1},
			{name: "another ledger", change: func() {
				if records, err = ledger.Open(disk, filepath.Join(t.TempDir(), "other")); err != nil {
					t.Fatal(err)
				}
			}},
		} {
			step.change()
			before := disk.n.Load()
			var all sync.WaitGroup
			for range 100 {
				all.Go(func() {
					states, series, err := collector.read(records)
					if err != nil || states["completed"] != step.completed || len(series) != step.series {
						t.Errorf("%s: %v, %d series, %v; want %d completed, %d series", step.name, states, len(series), err, step.completed, step.series)
					}
				})
			}
			all.Wait()
			if got := disk.n.Load() - before; got != step.reads {
				t.Errorf("%s: %d files read by 100 scrapes, want %d", step.name, got, step.reads)
			}
		}
		if err := os.RemoveAll(records.Dir()); err != nil {
			t.Fatal(err)
		}
		if _, _, err := collector.read(records); err == nil {
			t.Error("a folder that is gone is no error")
		}
	})
}
