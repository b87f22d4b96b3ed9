// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ledger_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
)

const uid = types.UID("7b6b5d2e-0000-4000-8000-000000000001")

func open(t *testing.T, fsys durable.FS, dir string) *ledger.Ledger {
	t.Helper()
	l, err := ledger.Open(fsys, dir)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func entry(state ledger.State, gpus ...string) *ledger.Entry {
	e := &ledger.Entry{
		Claim: ledger.Claim{UID: uid, Namespace: "default", Name: "train"},
		State: state,
		Undo:  []ledger.Step{{Kind: ledger.StepCDIFile, Target: "/var/run/cdi/x.json"}},
	}
	for _, gpu := range gpus {
		e.Devices = append(e.Devices, ledger.Device{Request: "gpu", Pool: "node-1", Device: gpu, GPU: gpu, UUID: "GPU-" + gpu})
	}
	return e
}

func get(t *testing.T, l *ledger.Ledger) *ledger.Record {
	t.Helper()
	record, err := l.Get(uid)
	if err != nil {
		t.Fatal(err)
	}
	return record
}

func TestWhatIsPutIsReadBackByAnotherAgent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "claims")
	want := entry(ledger.PrepareCompleted, "gpu-0000-1b-00-0", "gpu-0000-43-00-0")
	want.Devices[1].AdminAccess = true
	if err := open(t, durable.OS{}, dir).Put(want); err != nil {
		t.Fatal(err)
	}
	l := open(t, durable.OS{}, dir)
	got := get(t, l)
	if diff := cmp.Diff(want, got.Entry); diff != "" {
		t.Errorf("entry (-want +got):\n%s", diff)
	}
	if !got.Holds("gpu-0000-1b-00-0") || got.Holds("gpu-0000-43-00-0") {
		t.Errorf("holds %v: want the GPU of the plain request, not that of the admin one", got.GPUs)
	}
	for _, gpu := range []string{"gpu-0000-1b-00-0", "gpu-0000-43-00-0"} {
		holders, err := l.Holders(gpu)
		if err != nil {
			t.Fatal(err)
		}
		if want := gpu == "gpu-0000-1b-00-0"; (len(holders) == 1) != want {
			t.Errorf("%s has %d holders", gpu, len(holders))
		}
	}
}

func TestFilesAreForTheAgentAlone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "claims")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	l := open(t, durable.OS{}, dir)
	for range 2 {
		if err := l.Put(entry(ledger.PrepareStarted, "gpu-a")); err != nil {
			t.Fatal(err)
		}
	}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		want := fs.FileMode(0o600)
		if d.IsDir() {
			want = 0o700
		}
		if info.Mode().Perm() != want {
			t.Errorf("%s has mode %v, want %v", path, info.Mode().Perm(), want)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestRemovedClaimsLeaveNothing(t *testing.T) {
	l := open(t, durable.OS{}, t.TempDir())
	for _, state := range []ledger.State{ledger.PrepareStarted, ledger.PrepareCompleted} {
		if err := l.Put(entry(state, "gpu-a")); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second time it is unknown
		if err := l.Remove(uid); err != nil {
			t.Fatal(err)
		}
	}
	left, err := os.ReadDir(l.Dir())
	if err != nil {
		t.Fatal(err)
	}
	if len(left) > 0 || get(t, l) != nil {
		t.Errorf("left after removal: %v", left)
	}
}

func TestTooManyGPUsForAFileNameHoldTheWholeNode(t *testing.T) {
	var gpus []string
	for i := range 16 {
		gpus = append(gpus, fmt.Sprintf("gpu-0000-%02x-00-0", i))
	}
	l := open(t, durable.OS{}, t.TempDir())
	for range 2 {
		if err := l.Put(entry(ledger.PrepareCompleted, gpus...)); err != nil {
			t.Fatal(err)
		}
	}
	if record := get(t, l); !record.AllGPUs || !record.Holds("gpu-0000-ff-00-0") {
		t.Errorf("record %+v: want one that holds every GPU", record)
	}
}

func TestUIDsThatAreNoFileNameAreRefused(t *testing.T) {
	l := open(t, durable.OS{}, t.TempDir())
	for _, bad := range []types.UID{"", "../../etc/passwd", "a_b", "a.b", ".", "a/b", types.UID(strings.Repeat("a", 64))} {
		e := entry(ledger.PrepareStarted)
		e.Claim.UID = bad
		if err := l.Put(e); err == nil {
			t.Errorf("Put(%q) succeeded", bad)
		}
		if err := l.Remove(bad); err == nil {
			t.Errorf("Remove(%q) succeeded", bad)
		}
	}
}

func TestDamagedRecords(t *testing.T) {
	damage := map[string]struct {
		change func([]byte) []byte
		newer  bool
	}{
		"empty":                    {change: func([]byte) []byte { return nil }},
		"truncated in the header":  {change: func(b []byte) []byte { return b[:10] }},
		"truncated in the payload": {change: func(b []byte) []byte { return b[:len(b)-5] }},
		"one bit flipped":          {change: func(b []byte) []byte { b[len(b)-20] ^= 1; return b }},
		"white space in payload":   {change: func(b []byte) []byte { return append(b, ' ') }},
		"zeros":                    {change: func(b []byte) []byte { return make([]byte, len(b)) }},
		"another kind of file":     {change: func([]byte) []byte { return []byte("{\"kind\":\"Pod\"}\n{}\n") }},
		"written by a newer agent": {change: newerVersion, newer: true},
		"schema version of no time": {change: func(b []byte) []byte {
			return []byte(strings.Replace(string(b), version(written), version(0), 1))
		}},
	}
	for name, tc := range damage {
		t.Run(name, func(t *testing.T) {
			for _, withPrevious := range []bool{false, true} {
				l := open(t, durable.OS{}, t.TempDir())
				if withPrevious {
					if err := l.Put(entry(ledger.PrepareStarted, "gpu-a")); err != nil {
						t.Fatal(err)
					}
				}
				if err := l.Put(entry(ledger.PrepareCompleted, "gpu-a")); err != nil {
					t.Fatal(err)
				}
				path := get(t, l).Path
				data, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, tc.change(data), 0o600); err != nil {
					t.Fatal(err)
				}
				// Another claim is not affected.
				other := entry(ledger.PrepareCompleted, "gpu-b")
				other.Claim.UID = "other"
				if err := l.Put(other); err != nil {
					t.Fatal(err)
				}

				record := get(t, l)
				if record == nil || !record.Holds("gpu-a") {
					t.Fatalf("record %+v does not hold its GPU any more", record)
				}
				var newer *ledger.NewerVersionError
				var corrupt *ledger.CorruptError
				switch {
				case tc.newer:
					if record.Entry != nil || !errors.As(record.Err, &newer) {
						t.Errorf("record %+v: want a NewerVersionError, previous copy or not", record)
					}
					if err := l.Put(entry(ledger.PrepareCompleted, "gpu-a")); !errors.As(err, &newer) {
						t.Errorf("Put over a newer agent's record: %v, want a NewerVersionError", err)
					}
				case withPrevious:
					if record.Entry == nil || record.Entry.State != ledger.PrepareStarted || !errors.As(record.Recovered, &corrupt) {
						t.Errorf("record %+v: want the previous copy, and the reason", record)
					}
				default:
					if record.Entry != nil || !errors.As(record.Err, &corrupt) {
						t.Errorf("record %+v: want a CorruptError", record)
					}
				}
				records, err := l.Records()
				if err != nil || len(records) != 2 {
					t.Errorf("%d records, %v: want the damaged and the other one", len(records), err)
				}
			}
		})
	}
}

func newerVersion(data []byte) []byte {
	return []byte(strings.Replace(string(data), version(written), version(ledger.SchemaVersion+1), 1))
}

// TestNoStepOfAWriteCanLoseTheRecord fails, or crashes at, every single file operation of writing a record over
// an older one. Whatever happens, a reader finds one of the two whole.
func TestNoStepOfAWriteCanLoseTheRecord(t *testing.T) {
	writes := func(fsys durable.FS, dir string) error {
		l, err := ledger.Open(fsys, dir)
		if err != nil {
			return err
		}
		return l.Put(entry(ledger.PrepareCompleted, "gpu-a"))
	}
	count := &durabletest.Faulty{FS: durable.OS{}}
	dir := t.TempDir()
	if err := open(t, durable.OS{}, dir).Put(entry(ledger.PrepareStarted, "gpu-a")); err != nil {
		t.Fatal(err)
	}
	if err := writes(count, dir); err != nil {
		t.Fatal(err)
	}
	steps := count.Steps()
	if len(steps) < 8 {
		t.Fatalf("only %d steps: %q", len(steps), steps)
	}
	for at := 1; at <= len(steps); at++ {
		for _, mode := range []durabletest.Mode{durabletest.Fail, durabletest.CrashBefore, durabletest.CrashAfter} {
			t.Run(fmt.Sprintf("%v/%s", mode, filepath.Base(steps[at-1])), func(t *testing.T) {
				dir := t.TempDir()
				if err := open(t, durable.OS{}, dir).Put(entry(ledger.PrepareStarted, "gpu-a")); err != nil {
					t.Fatal(err)
				}
				err := writes(&durabletest.Faulty{FS: durable.OS{}, Mode: mode, At: at}, dir)
				if err == nil {
					t.Error("Put reported success although a step failed")
				}
				l := open(t, durable.OS{}, dir)
				record := get(t, l)
				if record == nil || record.Entry == nil || record.Recovered != nil {
					t.Fatalf("record after %v: %+v, want one of the two whole", err, record)
				}
				if left, err := l.Unfinished(); mode == durabletest.Fail && (err != nil || len(left) > 0) {
					t.Errorf("unfinished although the writer lives: %v, %v", left, err)
				}
				// Trying again works, and so does forgetting the claim.
				if err := l.Put(entry(ledger.PrepareCompleted, "gpu-a")); err != nil {
					t.Errorf("Put again: %v", err)
				}
				if err := l.Remove(uid); err != nil {
					t.Errorf("Remove: %v", err)
				}
				if left, _ := os.ReadDir(dir); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
			})
		}
	}
}

// TestNoStepOfARemovalFreesTheClaimEarly: as long as Remove has not reported success the claim may still be
// held, and if it is, its record is readable.
func TestNoStepOfARemovalFreesTheClaimEarly(t *testing.T) {
	prepared := func(t *testing.T) *ledger.Ledger {
		l := open(t, durable.OS{}, t.TempDir())
		for _, state := range []ledger.State{ledger.PrepareStarted, ledger.PrepareCompleted} {
			if err := l.Put(entry(state, "gpu-a")); err != nil {
				t.Fatal(err)
			}
		}
		return l
	}
	count := &durabletest.Faulty{FS: durable.OS{}}
	if err := open(t, count, prepared(t).Dir()).Remove(uid); err != nil {
		t.Fatal(err)
	}
	steps := count.Steps()
	for at := 2; at <= len(steps); at++ { // the first is Open's
		for _, mode := range []durabletest.Mode{durabletest.Fail, durabletest.CrashBefore, durabletest.CrashAfter} {
			t.Run(fmt.Sprintf("%v/%s", mode, filepath.Base(steps[at-1])), func(t *testing.T) {
				l := prepared(t)
				err := open(t, &durabletest.Faulty{FS: durable.OS{}, Mode: mode, At: at}, l.Dir()).Remove(uid)
				if err == nil {
					t.Fatal("Remove reported success although a step failed")
				}
				if record := get(t, l); record != nil && (record.Entry == nil || record.Entry.State != ledger.PrepareCompleted) {
					t.Errorf("record after %v: %+v, want the completed one or none", err, record)
				}
				if err := l.Remove(uid); err != nil {
					t.Errorf("Remove again: %v", err)
				}
				if get(t, l) != nil {
					t.Error("still there after Remove succeeded")
				}
			})
		}
	}
}

// written is the version that a claim without anything newer gets.
const written = 2

// TestNoCopyIsLeftUnfinished: whatever a crash leaves of a write, the next one leaves nothing half-made.
func TestNoCopyIsLeftUnfinished(t *testing.T) {
	steps := 1
	for at := 0; at <= steps; at++ {
		for _, mode := range []durabletest.Mode{durabletest.Fail, durabletest.CrashBefore, durabletest.CrashAfter} {
			dir := filepath.Join(t.TempDir(), "claims")
			l := open(t, durabletest.Unsynced{}, dir)
			if err := l.Put(entry(ledger.PrepareStarted, "gpu-0")); err != nil {
				t.Fatal(err)
			}
			faulty := &durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: mode, At: at}
			_ = ledger.At(faulty, dir).Put(entry(ledger.PrepareCompleted, "gpu-0"))
			if at == 0 {
				steps = len(faulty.Steps())
			}
			if err := l.Put(entry(ledger.PrepareCompleted, "gpu-0")); err != nil {
				t.Fatal(err)
			}
			if left, err := l.Unfinished(); err != nil || len(left) > 0 {
				t.Errorf("%v step %d of %q: %v are left unfinished, %v", mode, at, faulty.Steps(), left, err)
			}
		}
	}
}

// TestAClaimThatIsRemovedTwiceIsGoneForGood: who removed it first ended before that was on the disk.
func TestAClaimThatIsRemovedTwiceIsGoneForGood(t *testing.T) {
	disk := durabletest.NewVolatile()
	steps := 1
	for at := 0; at <= steps; at++ {
		dir := filepath.Join(t.TempDir(), "claims")
		l := open(t, disk, dir)
		for _, state := range []ledger.State{ledger.PrepareStarted, ledger.PrepareCompleted} {
			if err := l.Put(entry(state, "gpu-0")); err != nil {
				t.Fatal(err)
			}
		}
		faulty := &durabletest.Faulty{FS: disk, Mode: durabletest.CrashBefore, At: at}
		_ = ledger.At(faulty, dir).Remove(uid)
		if at == 0 {
			steps = len(faulty.Steps())
		}
		if err := errors.Join(l.Remove(uid), disk.PowerCut(nil)); err != nil {
			t.Fatal(err)
		}
		if record := get(t, l); record != nil {
			t.Errorf("ended before step %d of %q, removed again, power cut: %+v is back", at, faulty.Steps(), record)
		}
	}
}

func version(n int) string { return fmt.Sprintf(`"schemaVersion":%d`, n) }
