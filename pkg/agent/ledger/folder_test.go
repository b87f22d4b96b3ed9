// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ledger_test

import (
	"crypto/sha256"
	"encoding/hex"
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

// sealed is a file whose checksum is right, whatever is in it.
func sealed(kind string, version int, payload string) string {
	sum := sha256.Sum256([]byte(payload))
	return fmt.Sprintf("{\"kind\":%q,\"schemaVersion\":%d,\"sha256\":%q}\n%s", kind, version, hex.EncodeToString(sum[:]), payload)
}

func of(uid types.UID, state ledger.State, gpus ...string) *ledger.Entry {
	e := entry(state, gpus...)
	e.Claim.UID = uid
	return e
}

// TestTheReasonIsSaid: who has to mend a record by hand must know what is wrong with it.
func TestTheReasonIsSaid(t *testing.T) {
	const kind, payload = "StowageClaimLedger", `{"claim":{"uid":"%s","namespace":"default","name":"train"},"state":"%s"}`
	for name, tc := range map[string]struct{ content, want string }{
		"no header":       {"hello", "corrupt ledger record: no header line in 5 bytes"},
		"no JSON":         {"hello\n", "corrupt ledger record: header: invalid character"},
		"another kind":    {sealed("Pod", 2, "{}"), `corrupt ledger record: kind is "Pod", not "StowageClaimLedger"`},
		"version 0":       {sealed(kind, 0, "{}"), "corrupt ledger record: schema version 0"},
		"version 99":      {sealed(kind, 99, "{}"), "ledger record has schema version 99, this agent knows versions up to"},
		"another payload": {sealed(kind, 2, "{}") + " ", "corrupt ledger record: checksum of the payload is "},
		"no payload":      {sealed(kind, 2, "["), "corrupt ledger record: payload: unexpected end"},
		"another state":   {sealed(kind, 2, fmt.Sprintf(payload, uid, "Bored")), `corrupt ledger record: unknown state "Bored"`},
		"another claim":   {sealed(kind, 2, fmt.Sprintf(payload, "other", "PrepareStarted")), "corrupt ledger record: the payload is of claim other"},
		"nothing":         {sealed(kind, 2, fmt.Sprintf(payload, uid, "PrepareStarted")), ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := open(t, durable.OS{}, t.TempDir())
			if err := os.WriteFile(filepath.Join(l.Dir(), string(uid)+"_gpu-a.claim"), []byte(tc.content), 0o600); err != nil {
				t.Fatal(err)
			}
			record := get(t, l)
			if tc.want == "" {
				if record.Err != nil || record.Entry == nil {
					t.Errorf("record %+v, want its entry", record)
				}
				return
			}
			if record.Entry != nil || record.Err == nil || !strings.HasPrefix(record.Err.Error(), tc.want) || strings.Contains(record.Err.Error(), "previous copy") {
				t.Errorf("record %+v, want the error %q and no word of a copy that was never made", record, tc.want)
			}
		})
	}
}

// TestEachClaimHasItsOwn record, among those of others and files that are none.
func TestEachClaimHasItsOwn(t *testing.T) {
	l := open(t, durable.OS{}, t.TempDir())
	for _, e := range []*ledger.Entry{
		of("b", ledger.PrepareStarted, "gpu-1"), of("b", ledger.PrepareCompleted, "gpu-1"), of("a", ledger.PrepareCompleted, "gpu-0", "gpu-1"), of("c", ledger.PrepareStarted, "gpu-2"),
	} {
		if err := l.Put(e); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"README", "d_gpu-1.claim.tmp", "b_gpu-1.claim.prev.tmp", "e_gpu-1.claim.bak"} {
		if err := os.WriteFile(filepath.Join(l.Dir(), name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	list := func(records []*ledger.Record, err error) (found []string) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			found = append(found, fmt.Sprintf("%s %v %s", r.UID, r.GPUs, r.Entry.State))
		}
		return found
	}
	a, b, c := "a [gpu-0 gpu-1] PrepareCompleted", "b [gpu-1] PrepareCompleted", "c [gpu-2] PrepareStarted"
	if diff := cmp.Diff([]string{a, b, c}, list(l.Records())); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{a, b}, list(l.Holders("gpu-1"))); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
	for uid, want := range map[types.UID]string{"a": a, "b": b, "c": c} {
		record, err := l.Get(uid)
		if diff := cmp.Diff([]string{want}, list([]*ledger.Record{record}, err)); diff != "" {
			t.Errorf("record of %s (-want +got):\n%s", uid, diff)
		}
	}
	if record, err := l.Get("d"); record != nil || err != nil {
		t.Errorf("a claim that was never written to the end: %v, %v", record, err)
	}

	unfinished, err := l.Unfinished()
	if diff := cmp.Diff([]types.UID{"b", "d"}, unfinished); err != nil || diff != "" {
		t.Errorf("unfinished: %v (-want +got):\n%s", err, diff)
	}
	for _, uid := range append(unfinished, "a", "nobody") {
		if err := l.RemoveUnfinished(uid); err != nil {
			t.Error(err)
		}
	}
	if unfinished, err := l.Unfinished(); err != nil || len(unfinished) > 0 {
		t.Errorf("still unfinished: %v, %v", unfinished, err)
	}
	foreign := filepath.Join(l.Dir(), "b_README")
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.Remove("b"); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(foreign); err != nil {
		t.Errorf("a file that is no record: %v", err)
	}
	if diff := cmp.Diff([]string{a, c}, list(l.Records())); diff != "" {
		t.Errorf("records without b (-want +got):\n%s", diff)
	}
	left, err := filepath.Glob(filepath.Join(l.Dir(), "b*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left of b: %v, %v", left, err)
	}
}

// TestThePreviousCopyAlone is a record all the same: the current one was lost.
func TestThePreviousCopyAlone(t *testing.T) {
	l := open(t, durable.OS{}, t.TempDir())
	for _, state := range []ledger.State{ledger.PrepareStarted, ledger.PrepareCompleted} {
		if err := l.Put(entry(state, "gpu-a")); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(get(t, l).Path); err != nil {
		t.Fatal(err)
	}
	record := get(t, l)
	if record == nil || record.Entry == nil || record.Entry.State != ledger.PrepareStarted || !errors.Is(record.Recovered, fs.ErrNotExist) || !record.Holds("gpu-a") {
		t.Errorf("record %+v, want the previous copy, and that the current one is missing", record)
	}
	// It cannot be read, either: the claim is there all the same.
	if err := os.WriteFile(record.Path+".prev", []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	var both *ledger.CopiesError
	if record := get(t, l); record == nil || !errors.As(record.Err, &both) || !record.Holds("gpu-a") {
		t.Errorf("record %+v, want one that cannot be read", record)
	}
}

// TestADamagedRecordIsNoPreviousCopy: the good one stays.
func TestADamagedRecordIsNoPreviousCopy(t *testing.T) {
	l := open(t, durable.OS{}, t.TempDir())
	put := func(state ledger.State) {
		t.Helper()
		if err := l.Put(entry(state, "gpu-a")); err != nil {
			t.Fatal(err)
		}
	}
	put(ledger.PrepareStarted)
	put(ledger.PrepareCompleted)
	path := get(t, l).Path
	if err := os.WriteFile(path, []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	put(ledger.PrepareCompleted)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if record := get(t, l); record == nil || record.Entry == nil || record.Entry.State != ledger.PrepareStarted {
		t.Errorf("record %+v, want the copy from before the damage", record)
	}
}

// TestWithoutItsFolderNothingIsConcluded: no record is not no claim.
func TestWithoutItsFolderNothingIsConcluded(t *testing.T) {
	l := open(t, durable.OS{}, t.TempDir())
	if err := os.RemoveAll(l.Dir()); err != nil {
		t.Fatal(err)
	}
	_, getErr := l.Get(uid)
	_, recordsErr := l.Records()
	_, holdersErr := l.Holders("gpu-a")
	_, unfinishedErr := l.Unfinished()
	for name, err := range map[string]error{
		"Get": getErr, "Records": recordsErr, "Holders": holdersErr, "Unfinished": unfinishedErr,
		"Put": l.Put(entry(ledger.PrepareStarted, "gpu-a")), "Remove": l.Remove(uid), "RemoveUnfinished": l.RemoveUnfinished(uid),
	} {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ledger.Open(durable.OS{}, filepath.Join(file, "claims")); err == nil {
		t.Error("a ledger is opened below a file")
	}
}

// TestTheLongestNameThatFits lists the GPUs; one byte more, and the claim holds the node.
func TestTheLongestNameThatFits(t *testing.T) {
	l := open(t, durable.OS{}, t.TempDir())
	const longest = 255 - len(".claim.prev.tmp")
	for extra, all := range map[int]bool{0: false, 1: true} {
		gpu := strings.Repeat("g", longest-len(uid)-1+extra)
		if err := l.Put(entry(ledger.PrepareStarted, gpu)); err != nil {
			t.Fatal(err)
		}
		if record := get(t, l); record.AllGPUs != all || !record.Holds(gpu) {
			t.Errorf("%d bytes more than fit: all GPUs %v, want %v", extra, record.AllGPUs, all)
		}
		if err := l.Remove(uid); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAnEntryNamesWhatItHolds(t *testing.T) {
	e := entry(ledger.PrepareStarted, "gpu-b", "gpu-a", "gpu-b", "gpu-c")
	e.Devices[3].AdminAccess = true
	if diff := cmp.Diff([]string{"gpu-b", "gpu-a"}, e.HeldGPUs()); diff != "" {
		t.Errorf("held GPUs (-want +got):\n%s", diff)
	}
	for want, got := range map[string]string{
		"default/train (" + string(uid) + ")": e.Claim.String(),
		"CDIFile /var/run/cdi/x.json":         e.Undo[0].String(),
		"Partition GPU-1 1g.10gb at slice 6":  ledger.Step{Kind: ledger.StepPartition, Target: "GPU-1", Partition: &place}.String(),
		"Partition GPU-1 2c.3g.40gb at slice 4, compute slice 1": ledger.Step{
			Kind: ledger.StepPartition, Target: "GPU-1", Partition: &ledger.Partition{Profile: "3g.40gb", Start: 4, ComputeStart: 1, ComputeSize: 2},
		}.String(),
		"GPU-gpu-b": e.Devices[0].PhysicalUUID(),
		"GPU-9":     (&ledger.Device{UUID: "MIG-1", GPUUUID: "GPU-9"}).PhysicalUUID(),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestARecordTellsOfBothItsCopies: its state is the one that counts, and what cannot be read is said of each copy.
func TestARecordTellsOfBothItsCopies(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "claims")
	l := open(t, durabletest.Unsynced{}, dir)
	if l.Dir() != dir || ledger.At(durabletest.Unsynced{}, dir).Dir() != dir {
		t.Errorf("folder %s, want %s", l.Dir(), dir)
	}
	put := func(state ledger.State) func() {
		return func() {
			if err := l.Put(entry(state, "gpu-0")); err != nil {
				t.Fatal(err)
			}
		}
	}
	put(ledger.PrepareStarted)()
	put(ledger.PrepareStarted)()
	path := get(t, l).Path
	tear := func(path string) func() {
		return func() {
			if err := os.WriteFile(path, []byte("torn"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, step := range []struct {
		name     string
		do       func()
		state    ledger.State
		contents []ledger.State
	}{
		{"both are whole, and it is only started", func() {}, ledger.PrepareStarted, []ledger.State{ledger.PrepareStarted, ledger.PrepareStarted}},
		{"both are whole", put(ledger.PrepareCompleted), ledger.PrepareCompleted, []ledger.State{ledger.PrepareCompleted, ledger.PrepareStarted}},
		{"the current one is torn", tear(path), ledger.PrepareCompleted, []ledger.State{"", ledger.PrepareStarted}},
		{"both are torn", tear(path + ".prev"), "", []ledger.State{"", ""}},
	} {
		step.do()
		record := get(t, l)
		if got := record.State(); got != step.state {
			t.Errorf("%s: state %q, want %q", step.name, got, step.state)
		}
		copies := l.Copies(record)
		if len(copies) != 2 || copies[0].Path != path || copies[1].Path != path+".prev" {
			t.Fatalf("%s: copies %+v", step.name, copies)
		}
		for i, want := range step.contents {
			if got := copies[i]; (got.Content == nil) != (want == "") || (got.Problem != "") != (want == "") || want != "" && got.Content.State != want {
				t.Errorf("%s: copy %d: %+v, want state %q", step.name, i, got, want)
			}
		}
	}
	var both *ledger.CopiesError
	var torn *ledger.CorruptError
	err := get(t, l).Err
	if !errors.As(err, &both) || both.Current == nil || both.Previous == nil || !errors.As(err, &torn) || !strings.Contains(err.Error(), "; nor can its previous copy, ") {
		t.Errorf("error %v, want one of both copies", err)
	}
}

// TestThePreviousCopyIsTheOneBefore, and not the first, also where a write was cut off.
func TestThePreviousCopyIsTheOneBefore(t *testing.T) {
	l := open(t, durabletest.Unsynced{}, filepath.Join(t.TempDir(), "claims"))
	for _, pod := range []types.UID{"first", "second", "third"} {
		e := entry(ledger.PrepareCompleted, "gpu-0")
		e.Pods = []types.UID{pod}
		if err := l.Put(e); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(get(t, l).Path+".prev.tmp", nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	copies := l.Copies(get(t, l))
	if got := copies[1].Content; got == nil || got.Pods[0] != "second" {
		t.Errorf("previous copy %+v, want that of the second", got)
	}
}
