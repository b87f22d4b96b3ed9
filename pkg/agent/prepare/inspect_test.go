// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
)

func (n *node) stateDir() string { return filepath.Join(n.root, "state") }

// halfMade takes the claim's record back to before it was completed. The completed one is its previous copy.
func (n *node) halfMade(claim types.UID) {
	n.t.Helper()
	records, record := n.recordOf(claim)
	record.Entry.State = ledger.PrepareStarted
	if err := records.Put(record.Entry); err != nil {
		n.t.Fatal(err)
	}
}

// tearCurrent leaves nothing to read of the claim's current record.
func (n *node) tearCurrent(claim types.UID) {
	n.t.Helper()
	_, record := n.recordOf(claim)
	if err := os.Truncate(record.Path, 7); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) write(path, text string) {
	n.t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// summary of what was found, without the texts of errors.
func summary(f *prepare.Found) string {
	s := fmt.Sprintf("%s %s/%s %s %v readable: %s, problem: %v, copies: %d", f.UID, f.Namespace, f.Name, f.State, f.Devices, f.Readable(), f.Problem != "", len(f.Copies))
	for _, q := range f.Quarantine {
		since := "?"
		if !q.Since.IsZero() {
			since = q.Since.Format(time.DateOnly)
		}
		s += fmt.Sprintf("; %s since %s because of %q: %v, %s", q.GPU, since, strings.Join(strings.Fields(q.Reason)[:2], " "), q.Owed, filepath.Base(q.Path))
	}
	return s
}

// TestWhatIsFoundOfEachClaim: an administrator sees every claim of which the node remembers anything, whatever can be read of it.
func TestWhatIsFoundOfEachClaim(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	uuid := n.hardware.uuid(gpu2)
	part := func(gpu string, at int) string { return fmt.Sprintf("%s-mig-1g10gb-%d", gpu, at) }
	for i, name := range []string{"whole", "half", "previous", "torn", "nameless", "foreign"} {
		n.prepared(m, claim(name, result("a="+part(gpu0, i))))
	}
	n.prepared(m, claim("two", result("a="+part(gpu1, 0)), result("b="+part(gpu1, 1))))
	n.prepared(m, claim("admin", result("a="+part(gpu0, 0)+"+admin")))
	n.halfMade("half-uid")
	n.halfMade("previous-uid")
	n.tearCurrent("previous-uid")
	for _, uid := range []types.UID{"torn-uid", "nameless-uid", "foreign-uid"} {
		n.tear(uid)
	}
	metadata := func(uid string) string { return filepath.Join(n.metadataDir(), uid) }
	if err := os.RemoveAll(metadata("nameless-uid")); err != nil {
		t.Fatal(err)
	}
	n.write(filepath.Join(metadata("foreign-uid"), "a.json"), `{"metadata":{"namespace":"other","name":"other","uid":"other-uid"}}`)
	n.write(filepath.Join(metadata("torn-uid"), "zz.json"), "{") // beside one that can be read

	// What is owed: of claims without a record, of one with a record that could not be removed, and what cannot be read.
	for i, name := range []string{"both", "gone"} {
		n.prepared(m, claim(name, result("a="+part(gpu2, i))))
	}
	n.hardware.broken[gpu2] = nvml.ErrGPULost
	n.unprepare(m, "gone-uid")
	n.fsys = keptRecords{durable.OS{}}
	if err := n.manager().Unprepare(n.ctx, "both-uid"); !errors.Is(err, syscall.EROFS) {
		t.Fatal(err)
	}
	n.fsys = n.disk
	n.write(filepath.Join(n.quarantineDir(), gpu1+"_lost-uid.quarantine"), "{")

	owed := strings.ReplaceAll("[MIGMode UUID Partition UUID 1g.10gb at slice %d Processes UUID 1g.10gb at slice %[1]d]", "UUID", uuid)
	want := []string{
		"admin-uid default/admin PrepareCompleted [" + part(gpu0, 0) + "] readable: yes, problem: false, copies: 2",
		"both-uid default/both PrepareCompleted [" + part(gpu2, 0) + `] readable: yes, problem: false, copies: 2; ` + gpu2 +
			` since 2026-11-22 because of "undo Processes": ` + fmt.Sprintf(owed, 0) + ", " + gpu2 + "_both-uid.quarantine",
		"foreign-uid / [" + gpu0 + "] readable: no, problem: true, copies: 2",
		"gone-uid default/gone  [" + gpu2 + `] readable: -, problem: false, copies: 0; ` + gpu2 +
			` since 2026-11-22 because of "undo Processes": ` + fmt.Sprintf(owed, 1) + ", " + gpu2 + "_gone-uid.quarantine",
		"half-uid default/half PrepareStarted [" + part(gpu0, 1) + "] readable: yes, problem: false, copies: 2",
		"lost-uid / [" + gpu1 + `] readable: -, problem: false, copies: 0; ` + gpu1 + ` since ? because of "the file": [], ` + gpu1 + "_lost-uid.quarantine",
		"nameless-uid / [" + gpu0 + "] readable: no, problem: true, copies: 2",
		"previous-uid default/previous PrepareCompleted [" + part(gpu0, 2) + "] readable: previous copy, problem: true, copies: 2",
		"torn-uid default/torn [" + gpu0 + "] readable: no, problem: true, copies: 2",
		"two-uid default/two PrepareCompleted [" + part(gpu1, 0) + " " + part(gpu1, 1) + "] readable: yes, problem: false, copies: 2",
		"whole-uid default/whole PrepareCompleted [" + part(gpu0, 0) + "] readable: yes, problem: false, copies: 2",
	}
	all, err := prepare.Inspect(n.stateDir())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for i := range all {
		got = append(got, strings.Join(strings.Split(summary(&all[i]), "  "), " "))
	}
	for i := range want {
		want[i] = strings.Join(strings.Split(want[i], "  "), " ")
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("found (-want +got):\n%s", diff)
	}
	wantNamed := []ledger.Claim{{UID: "torn-uid", Namespace: "default", Name: "torn"}, {UID: "whole-uid", Namespace: "default", Name: "whole"}}
	if diff := cmp.Diff(wantNamed, m.NamesOf([]types.UID{"torn-uid", "nameless-uid", "foreign-uid", "never-uid", "whole-uid"})); diff != "" {
		t.Errorf("named (-want +got):\n%s", diff)
	}
	for gpu, want := range map[string]bool{gpu0: false, gpu1: true, gpu2: true} {
		if got := prepare.InQuarantine(n.stateDir(), gpu); got != want {
			t.Errorf("%s is in quarantine: %v", gpu, got)
		}
	}
}

// TestWhatCannotBeLookedIntoIsNotFoundEmpty: an error says which folder it is. A node on which no GPU was ever in quarantine has no such folder.
func TestWhatCannotBeLookedIntoIsNotFoundEmpty(t *testing.T) {
	tests := map[string]struct {
		spoil func(n *node, dir string) error
		dir   func(*node) string
		is    error
		want  string
	}{
		"there is no agent's state":      {spoil: func(_ *node, dir string) error { return os.RemoveAll(dir) }, dir: (*node).stateDir, is: fs.ErrNotExist, want: "there is no ledger"},
		"the ledger is no folder":        {spoil: fileInstead, dir: (*node).claimsDir, is: syscall.ENOTDIR, want: "ledger"},
		"the quarantine is no folder":    {spoil: fileInstead, dir: (*node).quarantineDir, is: syscall.ENOTDIR, want: "quarantine"},
		"there was never any quarantine": {spoil: func(_ *node, dir string) error { return os.Remove(dir) }, dir: (*node).quarantineDir},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			m := n.manager()
			n.prepared(m, claim("train", "gpu="+gpu0))
			n.prepared(m, claim("infer", "gpu="+gpu1))
			if err := tc.spoil(n, tc.dir(n)); err != nil {
				t.Fatal(err)
			}
			all, err := prepare.Inspect(n.stateDir())
			if tc.is == nil {
				if err != nil || len(all) != 2 {
					t.Errorf("found %v, %v", all, err)
				}
				return
			}
			if !errors.Is(err, tc.is) || !strings.Contains(err.Error(), tc.want) || len(all) > 0 {
				t.Errorf("found %v, error %v, want one about %q", all, err, tc.want)
			}
		})
	}
}

// fileInstead puts a file in a folder's place.
func fileInstead(n *node, dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.WriteFile(dir, nil, 0o600)
}
