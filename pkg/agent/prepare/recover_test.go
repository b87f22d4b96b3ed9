package prepare_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
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
	n.fsys = &durabletest.Faulty{FS: durable.OS{}, Mode: durabletest.CrashBefore, At: len(steps) - 2}
	if _, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0)); err == nil {
		t.Fatal("no crash")
	}
	n.fsys = durable.OS{}
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
