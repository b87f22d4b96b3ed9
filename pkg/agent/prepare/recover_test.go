// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// TestAStartPutsBackCDIFilesOfPreparedClaims: the kubelet does not call Prepare when a container restarts.
func TestAStartPutsBackCDIFilesOfPreparedClaims(t *testing.T) {
	n := newNode(t)
	devices, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(n.cdiDir()); err != nil { // /var/run does not outlive a reboot
		t.Fatal(err)
	}
	n.hardware.gone = true // no driver yet
	recovery, err := n.manager().Recover(n.ctx)
	if err != nil || recovery.Claims != 1 || recovery.Restored != 1 {
		t.Errorf("recovery %+v, %v: want one claim, restored", recovery, err)
	}
	n.visible(devices)
}

// TestReconcileLeavesClaimsAloneThatACallIsWorkingOn: only a start may roll back.
func TestReconcileLeavesClaimsAloneThatACallIsWorkingOn(t *testing.T) {
	n := newNode(t)
	s := scenarios["whole GPU"]
	steps, _, _ := s.undisturbed(t, preparing)
	n.fsys = &durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: durabletest.CrashBefore, At: len(steps) - 2}
	if _, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0)); err == nil {
		t.Fatal("no crash")
	}
	n.fsys = durabletest.Unsynced{}
	before := n.files()
	if _, err := n.manager().Reconcile(n.ctx); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, n.files()); diff != "" {
		t.Errorf("files (-before +after):\n%s", diff)
	}
}

// TestARecordOfANewerAgentBlocksItsClaimAlone, and says what to do.
func TestARecordOfANewerAgentBlocksItsClaimAlone(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	data, err := os.ReadFile("../ledger/testdata/v99-newer.claim")
	if err != nil {
		t.Fatal(err)
	}
	const uid = "7b6b5d2e-0000-4000-8000-000000000001"
	if err := os.WriteFile(filepath.Join(n.claimsDir(), uid+"_"+gpu0+".claim"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	before := n.files()
	var newer *ledger.NewerVersionError
	if recovery, err := m.Recover(n.ctx); !errors.As(err, &newer) || recovery.Unreadable != 1 {
		t.Errorf("recovery %+v, %v", recovery, err)
	}
	if err := m.Unprepare(n.ctx, uid); !errors.As(err, &newer) || !strings.Contains(err.Error(), "version 99") {
		t.Errorf("unprepare: %v, want the version", err)
	}
	if _, err := m.Prepare(n.ctx, claim("other", "gpu="+gpu0)); !errors.As(err, &newer) {
		t.Errorf("another claim for its GPU: %v", err)
	}
	if diff := cmp.Diff(before, n.files()); diff != "" {
		t.Errorf("files (-before +after):\n%s", diff)
	}
	if _, err := m.Prepare(n.ctx, claim("other", "gpu="+gpu1)); err != nil {
		t.Errorf("another GPU: %v", err)
	}
}

// TestFilesThatACrashLeftUnfinishedAreRemovedByTheNextStart, those of claims that exist and of such that do not, and nobody else's.
func TestFilesThatACrashLeftUnfinishedAreRemovedByTheNextStart(t *testing.T) {
	n := newNode(t)
	devices, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0))
	if err != nil {
		t.Fatal(err)
	}
	quarantine := filepath.Join(n.root, "state", "quarantine")
	before := n.files()
	const foreign = "nvidia.com-gpu.json.tmp"
	for _, path := range []string{
		filepath.Join(n.claimsDir(), "train-uid_"+gpu0+".claim.tmp"), filepath.Join(n.claimsDir(), "train-uid_"+gpu0+".claim.prev.tmp"),
		filepath.Join(n.claimsDir(), "gone-uid_"+gpu1+".claim.tmp"),
		filepath.Join(n.cdiDir(), "k8s.gpu.nvidia.com-claim_train-uid.json.tmp"), filepath.Join(n.cdiDir(), "k8s.gpu.nvidia.com-claim_gone-uid.json.tmp"),
		filepath.Join(quarantine, gpu1+"_gone-uid.quarantine.tmp"), filepath.Join(quarantine, gpu1+"_owing-uid.quarantine.tmp"),
		filepath.Join(n.cdiDir(), foreign),
	} {
		if err := os.WriteFile(path, []byte("torn"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := n.manager()
	unfinished := n.files()
	if _, err := m.Reconcile(n.ctx); err != nil { // another agent may be writing
		t.Fatal(err)
	}
	if diff := cmp.Diff(unfinished, n.files()); diff != "" {
		t.Errorf("after reconcile (-before +after):\n%s", diff)
	}
	if _, err := m.Recover(n.ctx); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(append(before, foreign), n.files()); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if left, err := os.ReadDir(quarantine); err != nil || len(left) > 0 {
		t.Errorf("left in quarantine: %v, %v", left, err)
	}
	n.visible(devices)
}

// TestAWriterIsNotSwept: of two agents one starts while the other one writes.
func TestAWriterIsNotSwept(t *testing.T) {
	n := newNode(t)
	n.timeout = 100 * time.Millisecond
	m := n.manager()
	path := filepath.Join(n.cdiDir(), "k8s.gpu.nvidia.com-claim_train-uid.json.tmp")
	if err := os.WriteFile(path, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	unlock, err := prepare.LockClaim(m, "train-uid")
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if _, err := n.manager().Recover(n.ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("recover: %v, want that the claim is locked", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}

// TestStraysAreFilesWithoutARecord: unreadable records own theirs, too, and a claim that is prepared again keeps its file.
func TestStraysAreFilesWithoutARecord(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	for _, c := range []*resourceapi.ResourceClaim{claim("owned", "gpu="+gpu0), claim("torn", "gpu="+gpu1), claim("lost", "gpu="+gpu2)} {
		if _, err := m.Prepare(n.ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	drop := func(pattern string, with func(path string) error) {
		t.Helper()
		paths, err := filepath.Glob(filepath.Join(n.claimsDir(), pattern))
		if err != nil || len(paths) == 0 {
			t.Fatalf("%s: %v, %v", pattern, paths, err)
		}
		for _, path := range paths {
			if err := with(path); err != nil {
				t.Fatal(err)
			}
		}
	}
	drop("torn-uid*", func(path string) error { return os.Truncate(path, 7) })
	drop("lost-uid*", os.Remove)
	want := []cdi.File{{Claim: "lost-uid", Devices: []string{gpu2}}}
	strays, err := m.Strays()
	if diff := cmp.Diff(want, strays); err != nil || diff != "" {
		t.Errorf("strays: %v (-want +got):\n%s", err, diff)
	}
	files := n.files()
	if err := errors.Join(m.RemoveStray(n.ctx, "owned-uid"), m.RemoveStray(n.ctx, "torn-uid")); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(files, n.files()); diff != "" {
		t.Errorf("files that have an owner (-before +after):\n%s", diff)
	}

	// The claim is being prepared: its file is left alone.
	unlock, err := prepare.LockClaim(m, "lost-uid")
	if err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(n.ctx, 100*time.Millisecond)
	defer cancel()
	if err := m.RemoveStray(soon, "lost-uid"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while the claim is locked: %v", err)
	}
	unlock()
	if diff := cmp.Diff(files, n.files()); diff != "" {
		t.Errorf("files of a claim that is locked (-before +after):\n%s", diff)
	}
	if err := m.RemoveStray(n.ctx, "lost-uid"); err != nil {
		t.Error(err)
	}
	if strays, err := m.Strays(); err != nil || len(strays) > 0 {
		t.Errorf("strays after the removal: %v, %v", strays, err)
	}
	if len(n.files()) != len(files)-1 {
		t.Errorf("files %v, before %v", n.files(), files)
	}
}

// TestAKillBetweenTheCDIFileAndTheRecord: unprepare has removed the claim's CDI file, but not its record. The pod may still be there
// for another try, so the file comes back, and goes with the next unprepare.
func TestAKillBetweenTheCDIFileAndTheRecord(t *testing.T) {
	s := scenarios["whole GPU"]
	steps, _, _ := s.undisturbed(t, unpreparing)
	removal := slices.IndexFunc(steps, func(step string) bool { return strings.Contains(step, ".json") }) + 1 // steps count from 1
	n := newNode(t)
	s.start(t, n, unpreparing)
	before := n.files()
	n.fsys = &durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: durabletest.CrashAfter, At: removal}
	if err := s.run(n, unpreparing); err == nil {
		t.Fatal("no crash")
	}
	n.restart()
	if files, err := os.ReadDir(n.cdiDir()); err != nil || len(files) > 0 {
		t.Fatalf("CDI files %v, %v: the crash came too early", files, err)
	}
	m := n.manager()
	if recovery, err := m.Recover(n.ctx); err != nil || recovery.Restored != 1 {
		t.Errorf("recovery %+v, %v", recovery, err)
	}
	if diff := cmp.Diff(before, n.files()); diff != "" {
		t.Errorf("files (-before the crash +after the start):\n%s", diff)
	}
	if err := m.Unprepare(n.ctx, s.claim().UID); err != nil {
		t.Fatal(err)
	}
	if files := n.files(); len(files) > 0 {
		t.Errorf("left: %v", files)
	}
}

// TestWhatAStartFindsIsCounted, and what it cannot bring in order is said.
func TestWhatAStartFindsIsCounted(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	for _, c := range []*resourceapi.ResourceClaim{claim("well", "gpu="+gpu0), claim("cleared", "gpu="+gpu1)} {
		if _, err := m.Prepare(n.ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(n.cdiDir(), "k8s.gpu.nvidia.com-claim_cleared-uid.json")
	clearFile := func() {
		t.Helper()
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	records, err := ledger.Open(durable.OS{}, n.claimsDir())
	if err != nil {
		t.Fatal(err)
	}
	half := &ledger.Entry{
		Claim: ledger.Claim{UID: "half-uid", Namespace: "default", Name: "half"}, State: ledger.PrepareStarted,
		Devices: []ledger.Device{{Request: "gpu", Device: gpu2, GPU: gpu2, UUID: n.hardware.uuid(gpu2)}},
	}
	if err := records.Put(half); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"torn-uid_gpu-x.claim": "{", "large-uid_all.claim": "{"} {
		if err := os.WriteFile(filepath.Join(n.claimsDir(), name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	// Locks that are not free in time: the others are brought in order.
	n.timeout = 50 * time.Millisecond
	impatient := n.manager()
	clearFile()
	for _, step := range []struct {
		lock    func() (func(), error)
		err     string
		restore int
	}{
		{func() (func(), error) { return prepare.LockClaim(m, "cleared-uid") }, "recover claim cleared-uid", 0},
		{func() (func(), error) { return prepare.LockGPU(m, gpu2) }, "roll back claim default/half (half-uid)", 1},
	} {
		if err := records.Put(half); err != nil {
			t.Fatal(err)
		}
		unlock, err := step.lock()
		if err != nil {
			t.Fatal(err)
		}
		recovery, err := impatient.Recover(n.ctx)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), step.err) || recovery.Restored != step.restore {
			t.Errorf("recovery %+v, %v; want %q", recovery, err, step.err)
		}
		unlock()
	}

	clearFile()
	recovery, err := m.Recover(n.ctx)
	if want := (prepare.Recovery{Claims: 2, Restored: 1, RolledBack: 1, Unreadable: 2}); recovery != want {
		t.Errorf("recovery %+v, want %+v", recovery, want)
	}
	for _, want := range []string{"It holds gpu-x until somebody decides", "It holds all GPUs of this node until somebody decides"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	if record, err := records.Get("half-uid"); record != nil || err != nil {
		t.Errorf("what was half-made: %v, %v", record, err)
	}
	clearFile()
	if recovery, err := m.RestoreClaim(n.ctx, "cleared-uid"); err != nil || recovery.Restored != 1 {
		t.Errorf("restored: %+v, %v", recovery, err)
	}
	if recovery, err := m.RestoreClaim(n.ctx, "nobody"); err != nil || recovery != (prepare.Recovery{}) {
		t.Errorf("a claim that is not known: %+v, %v", recovery, err)
	}

	// The disk does not take it.
	clearFile()
	n.fsys = fullFolder{durable.OS{}, n.cdiDir()}
	if recovery, err := n.manager().Recover(n.ctx); !errors.Is(err, syscall.ENOSPC) || recovery.Restored != 0 {
		t.Errorf("on a full disk: %+v, %v", recovery, err)
	}
	if err := records.Put(half); err != nil {
		t.Fatal(err)
	}
	n.fsys = stuckFolder{durable.OS{}, n.claimsDir()}
	if recovery, err := n.manager().Recover(n.ctx); !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "roll back claim default/half") || recovery.RolledBack != 0 {
		t.Errorf("on a disk that cannot be written: %+v, %v", recovery, err)
	}
	if err := os.RemoveAll(n.claimsDir()); err != nil {
		t.Fatal(err)
	}
	for what, f := range map[string]func() (prepare.Recovery, error){
		"Recover":      func() (prepare.Recovery, error) { return m.Recover(n.ctx) },
		"Reconcile":    func() (prepare.Recovery, error) { return m.Reconcile(n.ctx) },
		"RestoreClaim": func() (prepare.Recovery, error) { return m.RestoreClaim(n.ctx, "cleared-uid") },
	} {
		if _, err := f(); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s without a ledger: %v", what, err)
		}
	}
}

// fullFolder has no room for files in one folder.
type fullFolder struct {
	durable.FS
	dir string
}

func (f fullFolder) Create(path string, perm os.FileMode) (durable.File, error) {
	if filepath.Dir(path) == f.dir {
		return nil, &os.PathError{Op: "create", Path: path, Err: syscall.ENOSPC}
	}
	return f.FS.Create(path, perm)
}
