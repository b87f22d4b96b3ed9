package prepare_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
)

var modes = []durabletest.Mode{durabletest.Fail, durabletest.CrashBefore, durabletest.CrashAfter}

// TestACrashAtAnyStepOfPrepareIsRecovered fails, or kills the agent at, every single file operation of a
// prepare. After a restart the claim can be prepared by a retry, and its GPU by another claim instead; in the
// end nothing is left.
func TestACrashAtAnyStepOfPrepareIsRecovered(t *testing.T) {
	train := claim("train", "gpu="+gpu0)
	run := func(n *node) error {
		m, err := n.tryManager()
		if err != nil {
			return err
		}
		_, err = m.Prepare(n.ctx, train)
		return err
	}
	steps := count(t, nil, run)
	tried := 0
	for at := 1; at <= len(steps); at++ {
		for _, mode := range modes {
			t.Run(fmt.Sprintf("%v/%02d %s", mode, at, filepath.Base(steps[at-1])), func(t *testing.T) {
				tried++
				n := newNode(t)
				n.fsys = &durabletest.Faulty{FS: durable.OS{}, Mode: mode, At: at}
				prepareErr := run(n)

				n.fsys = durable.OS{} // the agent is started again
				m := n.manager()
				recovery, err := m.Recover(n.ctx)
				if err != nil {
					t.Fatal(err)
				}
				if prepareErr == nil && recovery.Claims != 1 {
					t.Errorf("prepare reported success, after the restart: %+v", recovery)
				}
				if recovery.Claims == 0 {
					if left := n.files(); len(left) > 0 && !onlyUnfinished(left) {
						t.Errorf("left after the roll-back: %v", left)
					}
					// The kubelet may also never come back with this claim.
					if _, err := m.Prepare(n.ctx, claim("other", "gpu="+gpu0)); err != nil {
						t.Errorf("another claim for the GPU: %v", err)
					}
					if err := m.Unprepare(n.ctx, "other-uid"); err != nil {
						t.Error(err)
					}
				}
				devices, err := m.Prepare(n.ctx, train)
				if err != nil {
					t.Fatalf("retry: %v", err)
				}
				if diff := cmp.Diff([]string{n.hardware.uuid(gpu0)}, n.visible(devices)); diff != "" {
					t.Errorf("GPUs in the container (-want +got):\n%s", diff)
				}
				if err := m.Unprepare(n.ctx, train.UID); err != nil {
					t.Fatal(err)
				}
				if left := n.files(); len(left) > 0 {
					t.Errorf("left after unprepare: %v", left)
				}
			})
		}
	}
	t.Logf("%d faults at %d steps of prepare", tried, len(steps))
}

// TestACrashAtAnyStepOfUnprepareIsRecovered is the same for unprepare: until it has reported success the GPU
// may be held, never half-released.
func TestACrashAtAnyStepOfUnprepareIsRecovered(t *testing.T) {
	train := claim("train", "gpu="+gpu0)
	before := func(n *node) error {
		_, err := n.manager().Prepare(n.ctx, train)
		return err
	}
	run := func(n *node) error {
		m, err := n.tryManager()
		if err != nil {
			return err
		}
		return m.Unprepare(n.ctx, train.UID)
	}
	steps := count(t, before, run)
	tried := 0
	for at := 1; at <= len(steps); at++ {
		for _, mode := range modes {
			t.Run(fmt.Sprintf("%v/%02d %s", mode, at, filepath.Base(steps[at-1])), func(t *testing.T) {
				tried++
				n := newNode(t)
				if err := before(n); err != nil {
					t.Fatal(err)
				}
				n.fsys = &durabletest.Faulty{FS: durable.OS{}, Mode: mode, At: at}
				if err := run(n); err == nil {
					t.Fatal("unprepare reported success although a step failed")
				}
				n.fsys = durable.OS{}
				m := n.manager()
				if _, err := m.Recover(n.ctx); err != nil {
					t.Fatal(err)
				}
				if err := m.Unprepare(n.ctx, train.UID); err != nil {
					t.Fatalf("retry: %v", err)
				}
				if left := n.files(); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
				if _, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu0)); err != nil {
					t.Errorf("the next claim for the GPU: %v", err)
				}
			})
		}
	}
	t.Logf("%d faults at %d steps of unprepare", tried, len(steps))
}

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
	n.hardware = &hardware{} // no driver yet
	recovery, err := n.manager().Recover(n.ctx)
	if err != nil || recovery.Claims != 1 || recovery.Restored != 1 {
		t.Errorf("recovery %+v, %v: want one claim, restored", recovery, err)
	}
	n.visible(devices)
}

// TestReconcileLeavesClaimsAloneThatACallIsWorkingOn: only a start may roll back.
func TestReconcileLeavesClaimsAloneThatACallIsWorkingOn(t *testing.T) {
	n := newNode(t)
	n.fsys = &durabletest.Faulty{FS: durable.OS{}, Mode: durabletest.CrashBefore, At: 0}
	steps := count(t, nil, func(n *node) error {
		_, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0))
		return err
	})
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

// count returns the file operations of run on a new node, undisturbed.
func count(t *testing.T, before, run func(*node) error) []string {
	t.Helper()
	n := newNode(t)
	if before != nil {
		if err := before(n); err != nil {
			t.Fatal(err)
		}
	}
	faulty := &durabletest.Faulty{FS: durable.OS{}}
	n.fsys = faulty
	if err := run(n); err != nil {
		t.Fatal(err)
	}
	return faulty.Steps()
}

// onlyUnfinished reports whether all files are ones that were never complete; the next write or removal of
// the same claim takes them away.
func onlyUnfinished(names []string) bool {
	for _, name := range names {
		if filepath.Ext(name) != durable.TempSuffix {
			return false
		}
	}
	return true
}
