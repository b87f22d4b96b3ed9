// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

func (n *node) quarantineDir() string { return filepath.Join(n.root, "state", "quarantine") }

// TestEachGPUOwesItsOwn: two GPUs of a claim do not answer when it is unprepared; each comes back by itself.
func TestEachGPUOwesItsOwn(t *testing.T) {
	n := newNode(t)
	n.do(&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess}, &nvmlsim.SetComputeMode{GPU: "1", Mode: nvmlsim.ComputeExclusiveProcess})
	m := n.manager()
	if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0, "more="+gpu1)); err != nil {
		t.Fatal(err)
	}
	lost := errors.New("no answer")
	n.hardware.broken[gpu0], n.hardware.broken[gpu1] = lost, lost
	if err := m.Unprepare(n.ctx, "train-uid"); err != nil {
		t.Fatal(err)
	}
	owed := func() map[string]string {
		t.Helper()
		list, err := m.Quarantined()
		if err != nil {
			t.Fatal(err)
		}
		steps := map[string]string{}
		for _, q := range list {
			if q.Holder() != "train-uid" || !strings.Contains(q.Reason, "no answer") {
				t.Errorf("%s is in quarantine for %q because of %q", q.GPU, q.Holder(), q.Reason)
			}
			for _, step := range q.Owed.Undo {
				steps[q.GPU] += string(step.Kind) + " on " + step.GPU + "; "
			}
		}
		return steps
	}
	both := map[string]string{gpu0: "ComputeMode on " + gpu0 + "; Processes on " + gpu0 + "; ", gpu1: "ComputeMode on " + gpu1 + "; Processes on " + gpu1 + "; "}
	if diff := cmp.Diff(both, owed()); diff != "" {
		t.Errorf("owed (-want +got):\n%s", diff)
	}
	delete(n.hardware.broken, gpu1)
	recovery, err := m.Reconcile(n.ctx)
	if err != nil || recovery.Quarantined != 1 {
		t.Errorf("recovery %+v, %v; want one GPU in quarantine", recovery, err)
	}
	delete(both, gpu1)
	if diff := cmp.Diff(both, owed()); diff != "" {
		t.Errorf("owed when one is back (-want +got):\n%s", diff)
	}
	if got := n.gpu(1).ComputeMode; got != nvmlsim.ComputeExclusiveProcess {
		t.Errorf("compute mode of GPU 1 is %s, want what was found", got)
	}
	delete(n.hardware.broken, gpu0)
	var quarantined *prepare.QuarantinedError
	if _, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu0)); err != nil || errors.As(err, &quarantined) {
		t.Errorf("the other one is back, and is settled by who wants it: %v", err)
	}
	if diff := cmp.Diff(map[string]string{}, owed()); diff != "" {
		t.Errorf("owed in the end (-want +got):\n%s", diff)
	}
}

// stuckDaemons do not end.
type stuckDaemons struct {
	sharing.Daemons
	stuck bool
}

func (d *stuckDaemons) Stop(ctx context.Context, name string) error {
	if d.stuck {
		return errors.New("the daemon does not end")
	}
	return d.Daemons.Stop(ctx, name)
}

// TestADaemonThatDoesNotEndKeepsAllItsGPUs: it serves every one of the claim's, and nobody else gets one of them.
func TestADaemonThatDoesNotEndKeepsAllItsGPUs(t *testing.T) {
	n := newNode(t)
	daemons := &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
	n.tools.Daemons = daemons
	m := n.manager()
	c := withConfig(claim("train", "gpu="+gpu0, "more="+gpu1), driverName, sharingConfig("GpuConfig", "MPS", ""))
	if _, err := m.Prepare(n.ctx, c); err != nil {
		t.Fatal(err)
	}
	if err := m.Unprepare(n.ctx, c.UID); err != nil {
		t.Fatal(err)
	}
	for _, gpu := range []string{gpu0, gpu1} {
		var quarantined *prepare.QuarantinedError
		if _, err := m.Prepare(n.ctx, claim("next", result("gpu="+gpu))); !errors.As(err, &quarantined) || !strings.Contains(err.Error(), "does not end") {
			t.Errorf("%s: error %v, want a QuarantinedError about the daemon", gpu, err)
		}
	}
	// What was done to the GPUs before the daemon was started stays until it has gone.
	for i := range 2 {
		if got := n.gpu(i).ComputeMode; got != nvmlsim.ComputeExclusiveProcess {
			t.Errorf("compute mode of GPU %d is %s, and its daemon runs", i, got)
		}
	}
	if recovery, err := n.manager().Reconcile(n.ctx); err != nil || recovery.Quarantined != 2 {
		t.Errorf("recovery %+v, %v; want two GPUs in quarantine, for another agent too", recovery, err)
	}
	daemons.stuck = false
	// One is asked for, the other is not.
	if _, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu1)); err != nil {
		t.Error(err)
	}
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 0 {
		t.Errorf("recovery %+v, %v; want none in quarantine", recovery, err)
	}
	for i := range 2 {
		if diff := cmp.Diff(setting{Compute: nvmlsim.ComputeDefault}, n.setting(i), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("GPU %d (-want +got):\n%s", i, diff)
		}
	}
}

// TestWhatIsOwedToTwoClaimsIsOneGPU in quarantine, not two.
func TestWhatIsOwedToTwoClaimsIsOneGPU(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	for _, c := range []struct {
		name string
		part result
	}{{"a", "mig=" + gpu0 + "-mig-1g10gb-0"}, {"b", "mig=" + gpu0 + "-mig-1g10gb-1"}} {
		if _, err := m.Prepare(n.ctx, claim(c.name, c.part)); err != nil {
			t.Fatal(err)
		}
	}
	n.hardware.broken[gpu0] = nvml.ErrGPULost
	if err := errors.Join(m.Unprepare(n.ctx, "a-uid"), m.Unprepare(n.ctx, "b-uid")); err != nil {
		t.Fatal(err)
	}
	if list, err := m.Quarantined(); err != nil || len(list) != 2 {
		t.Fatalf("in quarantine: %+v, %v", list, err)
	}
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 1 {
		t.Errorf("recovery %+v, %v; want one GPU", recovery, err)
	}
	delete(n.hardware.broken, gpu0)
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 0 {
		t.Errorf("recovery %+v, %v", recovery, err)
	}
	if g := n.gpu(0); g.MIG || len(g.Instances) > 0 {
		t.Errorf("left on the GPU: MIG %v, instances %v", g.MIG, g.Instances)
	}
}

// TestAQuarantineThatCannotBeReadHasNoEnd, whatever is wrong with its file; a file that is none does not matter.
func TestAQuarantineThatCannotBeReadHasNoEnd(t *testing.T) {
	for name, content := range map[string]string{
		"torn":           "{",
		"of another GPU": `{"gpu":"` + gpu1 + `","owed":{"claim":{"uid":"x"}}}`,
		"without a debt": `{"gpu":"` + gpu0 + `"}`,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			m := n.manager()
			for file, text := range map[string]string{gpu0 + "_x.quarantine": content, gpu1 + "_README": "", gpu1 + "_x.quarantine.tmp": "{"} {
				if err := os.WriteFile(filepath.Join(n.quarantineDir(), file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			list, err := m.Quarantined()
			if err != nil || len(list) != 1 || list[0].GPU != gpu0 || list[0].Holder() != "" || !strings.Contains(list[0].Reason, "cannot be read") {
				t.Errorf("in quarantine: %+v, %v", list, err)
			}
			var quarantined *prepare.QuarantinedError
			if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); !errors.As(err, &quarantined) || !strings.Contains(quarantined.Reason, "cannot be read") {
				t.Errorf("prepare: %v", err)
			}
			if _, err := m.Prepare(n.ctx, claim("other", "gpu="+gpu1)); err != nil {
				t.Errorf("another GPU: %v", err)
			}
			if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 1 {
				t.Errorf("recovery %+v, %v", recovery, err)
			}
		})
	}
}

// TestWithoutAFolderNothingIsConcluded: neither that a GPU is in no quarantine, nor that a claim is not known.
func TestWithoutAFolderNothingIsConcluded(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	if err := os.RemoveAll(n.quarantineDir()); err != nil {
		t.Fatal(err)
	}
	_, listErr := m.Quarantined()
	_, prepareErr := m.Prepare(n.ctx, claim("train", "gpu="+gpu0))
	_, reconcileErr := m.Reconcile(n.ctx)
	for what, err := range map[string]error{"the list": listErr, "prepare": prepareErr, "reconcile": reconcileErr} {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := os.RemoveAll(n.claimsDir()); err != nil {
		t.Fatal(err)
	}
	if err := m.Unprepare(n.ctx, "train-uid"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("unprepare: %v", err)
	}
	if err := os.Mkdir(n.quarantineDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	if recovery, err := m.Reconcile(n.ctx); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "ledger") {
		t.Errorf("reconcile: %+v, %v; want that there is no ledger", recovery, err)
	}
}

// TestALockThatIsNotFreeIsNoSuccess: the claim is still prepared.
func TestALockThatIsNotFreeIsNoSuccess(t *testing.T) {
	n := newNode(t)
	n.timeout = 50 * time.Millisecond
	m := n.manager()
	if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); err != nil {
		t.Fatal(err)
	}
	files := n.files()
	for what, lock := range map[string]func() (func(), error){
		"of the claim": func() (func(), error) { return prepare.LockClaim(m, "train-uid") },
		"of the GPU":   func() (func(), error) { return prepare.LockGPU(m, gpu0) },
	} {
		unlock, err := lock()
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Unprepare(n.ctx, "train-uid"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", what, err)
		}
		unlock()
	}
	if diff := cmp.Diff(files, n.files()); diff != "" {
		t.Errorf("files (-before +after):\n%s", diff)
	}
}

// TestADebtThatCannotBeKeptKeepsTheClaim: otherwise nobody would know that the GPU is not as it was.
func TestADebtThatCannotBeKeptKeepsTheClaim(t *testing.T) {
	unprepare := func(at int) (n *node, steps []string, err error) {
		n = newNode(t)
		if _, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0)); err != nil {
			t.Fatal(err)
		}
		n.hardware.broken[gpu0] = nvml.ErrGPULost
		faulty := &durabletest.Faulty{FS: durable.OS{}, Mode: durabletest.Fail, At: at}
		n.fsys = faulty
		err = n.manager().Unprepare(n.ctx, "train-uid")
		return n, faulty.Steps(), err
	}
	_, steps, err := unprepare(0)
	if err != nil {
		t.Fatal(err)
	}
	kept := slices.IndexFunc(steps, func(step string) bool { return strings.Contains(step, ".quarantine") })
	if kept < 0 {
		t.Fatalf("no debt is kept in the steps %q", steps)
	}
	n, _, err := unprepare(kept + 1) // steps count from 1
	if err == nil || !strings.Contains(err.Error(), "into quarantine") {
		t.Fatalf("unprepare: %v, want that the debt could not be kept", err)
	}
	records, err := ledger.Open(durable.OS{}, n.claimsDir())
	if err != nil {
		t.Fatal(err)
	}
	if record, err := records.Get("train-uid"); err != nil || record == nil {
		t.Errorf("record %v, %v; want it to be kept", record, err)
	}
}

// stuckFolder does not let go of the files in one folder.
type stuckFolder struct {
	durable.FS
	dir string
}

func (f stuckFolder) Remove(path string) error {
	if filepath.Dir(path) == f.dir {
		return &os.PathError{Op: "remove", Path: path, Err: syscall.EROFS}
	}
	return f.FS.Remove(path)
}

// TestADiskThatDoesNotTakePartIsNoSuccess: the kubelet tries again, the claim stays known, and no GPU is in quarantine for it.
func TestADiskThatDoesNotTakePartIsNoSuccess(t *testing.T) {
	for name, tc := range map[string]struct {
		dir  func(*node) string
		want string
	}{
		"the CDI folder": {(*node).cdiDir, "undo CDIFile"},
		"the ledger":     {(*node).claimsDir, "remove ledger record"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			if _, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0)); err != nil {
				t.Fatal(err)
			}
			n.fsys = stuckFolder{durable.OS{}, tc.dir(n)}
			if err := n.manager().Unprepare(n.ctx, "train-uid"); !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("unprepare: %v, want %q", err, tc.want)
			}
			n.fsys = durable.OS{}
			records, err := ledger.Open(durable.OS{}, n.claimsDir())
			if err != nil {
				t.Fatal(err)
			}
			if record, err := records.Get("train-uid"); err != nil || record == nil {
				t.Errorf("record %v, %v; want it to be kept", record, err)
			}
			if left, err := os.ReadDir(n.quarantineDir()); err != nil || len(left) > 0 {
				t.Errorf("in quarantine: %v, %v", left, err)
			}
			if err := n.manager().Unprepare(n.ctx, "train-uid"); err != nil {
				t.Fatal(err)
			}
			if left := n.files(); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// TestAClaimThatWasNotUnpreparedToTheEndIsPreparedAnew: the disk failed after the GPU was taken back, or was to be, and then another pod comes
// to use the claim. It gets all that it asks for, and nothing of it is undone while it has it.
func TestAClaimThatWasNotUnpreparedToTheEndIsPreparedAnew(t *testing.T) {
	for name, tc := range map[string]struct {
		parameters string
		broken     error
		want       setting
	}{
		"all was undone": {
			parameters: sharingConfig("GpuConfig", "TimeSlicing", `,"timeSlicingConfig":{"interval":"Long"}`),
			want:       setting{Compute: nvmlsim.ComputeDefault, Slice: nvmlsim.TimeSliceLong},
		},
		"the GPU did not answer": {
			parameters: sharingConfig("GpuConfig", "Exclusive", ""), broken: nvml.ErrGPULost,
			want: setting{Compute: nvmlsim.ComputeExclusiveProcess},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			c := withConfig(claim("train", "gpu="+gpu0), driverName, tc.parameters)
			if _, err := n.manager().Prepare(n.ctx, c); err != nil {
				t.Fatal(err)
			}
			if tc.broken != nil {
				n.hardware.broken[gpu0] = tc.broken
			}
			n.fsys = stuckFolder{durable.OS{}, n.claimsDir()}
			if err := n.manager().Unprepare(n.ctx, c.UID); !errors.Is(err, syscall.EROFS) {
				t.Fatalf("unprepare: %v", err)
			}
			clear(n.hardware.broken)
			n.fsys = durable.OS{}
			m := n.manager()
			if _, err := m.Prepare(n.ctx, reservedFor(c, "pod-2")); err != nil {
				t.Fatal(err)
			}
			if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined > 0 {
				t.Errorf("recovery %+v, %v", recovery, err)
			}
			if diff := cmp.Diff(tc.want, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("while it is prepared (-want +got):\n%s", diff)
			}
			if err := m.Unprepare(n.ctx, c.UID); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(setting{Compute: nvmlsim.ComputeDefault}, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("in the end (-want +got):\n%s", diff)
			}
		})
	}
}
