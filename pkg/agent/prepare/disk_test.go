// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

var errDisk = errors.New("the disk fails")

// failing fails an operation on paths that end so, from the nth on.
func failing(op, suffix string, nth int) func(string, string) error {
	var mu sync.Mutex
	return func(is, path string) error {
		mu.Lock()
		defer mu.Unlock()
		if is == op && strings.HasSuffix(path, suffix) {
			if nth--; nth <= 0 {
				return fmt.Errorf("%s %s: %w", op, filepath.Base(path), errDisk)
			}
		}
		return nil
	}
}

// forgotten prepares two claims and loses their records.
func forgotten(n *node, m *prepare.Manager) {
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(m, claim(name, result("gpu="+gpu)))
		records, _ := n.recordOf(types.UID(name + "-uid"))
		if err := records.Remove(types.UID(name + "-uid")); err != nil {
			n.t.Fatal(err)
		}
	}
}

// metadataAlone is what an older agent leaves of two claims.
func metadataAlone(n *node, m *prepare.Manager) {
	forgotten(n, m)
	for _, uid := range bothClaims {
		if err := m.RemoveStray(n.ctx, uid); err != nil {
			n.t.Fatal(err)
		}
	}
}

func bothPrepared(n *node, m *prepare.Manager) {
	n.prepared(m, reservedFor(claim("train", "gpu="+gpu0), "first"))
	n.prepared(m, reservedFor(claim("infer", "gpu="+gpu1), "first"))
}

func released(force bool) func(n *node, m *prepare.Manager) error {
	return eachClaim(func(n *node, m *prepare.Manager, uid types.UID) error {
		if _, err := m.Release(n.ctx, uid, force, unused); !errors.Is(err, prepare.ErrNoClaim) {
			return err
		}
		return nil
	})
}

// TestADiskThatFailsIsToldAndNothingIsForgotten: what an agent does for two claims, in which the disk fails for one of them or for both. It is done when
// the disk works again.
func TestADiskThatFailsIsToldAndNothingIsForgotten(t *testing.T) {
	t.Parallel()
	joined := eachClaim(func(n *node, m *prepare.Manager, uid types.UID) error {
		return m.NotePods(n.ctx, reservedFor(claim(strings.TrimSuffix(string(uid), "-uid")), "second"))
	})
	bothJoined := func(n *node) bool {
		for _, uid := range bothClaims {
			if _, record := n.recordOf(uid); record == nil || len(record.Entry.Pods) != 2 {
				return false
			}
		}
		return true
	}
	noQuarantine := func(n *node) bool { return n.empty(n.quarantineDir()) }
	tests := map[string]struct {
		before func(n *node, m *prepare.Manager)
		fails  func(op, path string) error
		do     func(n *node, m *prepare.Manager) error
		done   func(n *node) bool
		want   string // in the error
	}{
		"a GPU is taken out of quarantine": {
			before: inQuarantine, fails: failing("remove", gpu0+"_train-uid.quarantine", 1), do: reconciled, done: noQuarantine,
			want: "release GPU " + gpu0 + " from quarantine",
		},
		"a GPU is released": {
			before: inQuarantine, fails: failing("remove", gpu1+"_infer-uid.quarantine", 1), do: released(false), done: noQuarantine,
			want: "release GPU " + gpu1 + " from quarantine",
		},
		"a GPU is released, and what is owed is given up": {
			before: func(n *node, m *prepare.Manager) {
				inQuarantine(n, m)
				n.do(&nvmlsim.Refuse{GPU: "1", Settings: []nvmlsim.Setting{nvmlsim.SettingComputeMode}})
			},
			fails: failing("remove", gpu1+"_infer-uid.quarantine", 1), do: released(true), done: noQuarantine,
			want: "release GPU " + gpu1 + " from quarantine",
		},
		"a claim of a GPU in quarantine": {
			before: inQuarantine, fails: failing("remove", ".quarantine", 1),
			do: func(n *node, m *prepare.Manager) error {
				_, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu0, "more="+gpu1))
				return err
			},
			done: func(n *node) bool { return n.recorded("next-uid") }, want: "from quarantine",
		},
		"a release cannot list what is in quarantine": {
			before: inQuarantine, fails: failing("list", "/quarantine", 1), do: released(false), done: noQuarantine, want: "quarantine",
		},
		"a release cannot look at the ledger": {
			before: bothPrepared, fails: failing("list", "/claims", 1), do: released(false),
			done: func(n *node) bool { return n.empty(n.claimsDir()) }, want: "release claim train-uid",
		},
		"a release cannot remove the record": {
			before: bothPrepared, fails: failing("remove", "train-uid_"+gpu0+".claim", 1), do: released(false),
			done: func(n *node) bool { return n.empty(n.claimsDir()) }, want: "release claim train-uid",
		},
		"metadata cannot be listed": {
			before: metadataAlone, fails: failing("list", "/metadata", 1), do: reconciled,
			done: func(n *node) bool { return n.empty(n.metadataDir()) }, want: "list device metadata",
		},
		"metadata of nobody cannot be removed": {
			before: metadataAlone, fails: failing("remove", "infer-uid/gpu.json", 1), do: reconciled,
			done: func(n *node) bool { return n.empty(n.metadataDir()) }, want: "remove device metadata of claim infer-uid",
		},
		"whether metadata are anybody's cannot be read": {
			before: metadataAlone, fails: failing("list", "/claims", 2), do: reconciled,
			done: func(n *node) bool { return n.empty(n.metadataDir()) }, want: "list claims",
		},
		"whether metadata belong to a specification cannot be read": {
			before: metadataAlone, fails: failing("read", "train-uid.json", 1), do: reconciled,
			done: func(n *node) bool { return n.empty(n.metadataDir()) }, want: "read ",
		},
		"the folder of metadata cannot be made": {
			fails: failing("mkdir", "/metadata/train-uid", 1),
			do: func(n *node, m *prepare.Manager) error {
				_, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0))
				return err
			},
			done: func(n *node) bool { return n.recorded("train-uid") }, want: "make the folder for device metadata of claim train-uid",
		},
		"pods cannot be noted": {
			before: bothPrepared, fails: failing("create", "train-uid_"+gpu0+".claim.tmp", 1), do: joined, done: bothJoined,
			want: "write ledger record of claim default/train",
		},
		"whether a claim is prepared cannot be read": {
			before: bothPrepared, fails: failing("list", "/claims", 1), do: joined, done: bothJoined, want: "list claims",
		},
		"a stray is not known to be one": {
			before: forgotten, fails: failing("list", "/claims", 1),
			do:   eachClaim(func(n *node, m *prepare.Manager, uid types.UID) error { return m.RemoveStray(n.ctx, uid) }),
			done: func(n *node) bool { return n.empty(n.cdiDir()) }, want: "list claims",
		},
		"a stray cannot be removed": {
			before: forgotten, fails: failing("remove", "train-uid.json", 1),
			do:   eachClaim(func(n *node, m *prepare.Manager, uid types.UID) error { return m.RemoveStray(n.ctx, uid) }),
			done: func(n *node) bool { return n.empty(n.cdiDir()) }, want: "remove ",
		},
		"an unfinished record cannot be removed": {
			before: func(n *node, _ *prepare.Manager) {
				for _, uid := range bothClaims {
					n.write(filepath.Join(n.claimsDir(), string(uid)+"_"+gpu0+".claim.tmp"), "")
				}
			},
			fails: failing("remove", "infer-uid_"+gpu0+".claim.tmp", 1), do: recovered,
			done: func(n *node) bool { return n.empty(n.claimsDir()) }, want: "remove unfinished ledger record of claim infer-uid",
		},
		"what is half-made cannot be forgotten": {
			before: func(n *node, m *prepare.Manager) {
				bothPrepared(n, m)
				n.halfMade("train-uid")
			},
			fails: failing("remove", "train-uid_"+gpu0+".claim", 1),
			do: func(n *node, m *prepare.Manager) error {
				_, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0))
				return err
			},
			done: func(n *node) bool {
				_, record := n.recordOf("train-uid")
				return record != nil && record.Entry.State == "PrepareCompleted"
			},
			want: "undo the earlier preparation of claim default/train",
		},
		"whether a claim has what is left of a daemon": {
			before: func(n *node, _ *prepare.Manager) {
				n.tools.Daemons.(*leftDaemons).left = []string{"lost-uid", gpu0}
			},
			fails: failing("list", "/quarantine", 3), do: recovered, // what is owed and what is unfinished is looked for before
			done: func(n *node) bool { return len(n.tools.Daemons.(*leftDaemons).stopped) >= 2 }, want: "quarantine",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNodeOf(t, twoGPUs)
			n.tools.Daemons = &leftDaemons{Daemons: n.tools.Daemons}
			if tc.before != nil {
				tc.before(n, n.manager())
			}
			m := n.manager()
			n.fsys = durabletest.Watched{FS: n.disk, Before: tc.fails}
			err := tc.do(n, n.manager())
			if !errors.Is(err, errDisk) || !strings.Contains(err.Error(), tc.want) || tc.done(n) {
				t.Errorf("error %v, done: %v; want that the disk fails, with %q", err, tc.done(n), tc.want)
			}
			n.fsys = n.disk
			if err := tc.do(n, m); err != nil || !tc.done(n) {
				t.Errorf("with a disk that works: error %v, done: %v", err, tc.done(n))
			}
		})
	}
}

// TestStraysAreNotListedFromHalfOfIt: without the ledger every file would be one, and without the files none.
func TestStraysAreNotListedFromHalfOfIt(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	bothPrepared(n, n.manager())
	for _, dir := range []string{"/cdi", "/claims"} {
		n.fsys = n.disk
		if strays, err := n.manager().Strays(); err != nil || len(strays) > 0 {
			t.Errorf("strays %v, %v", strays, err)
		}
		n.fsys = durabletest.Watched{FS: n.disk, Before: failing("list", dir, 1)}
		if strays, err := n.manager().Strays(); !errors.Is(err, errDisk) || len(strays) > 0 {
			t.Errorf("%s cannot be listed: strays %v, %v", dir, strays, err)
		}
	}
}

// TestWhatIsPreparedWhileOthersAreSweptStays: the records were read before.
func TestWhatIsPreparedWhileOthersAreSweptStays(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	metadataAlone(n, n.manager())
	plain := n.manager()
	n.fsys = durabletest.Watched{FS: n.disk, Before: func(op, path string) error {
		if op == "list" && strings.HasSuffix(path, "/metadata") {
			n.prepared(plain, claim("train", "gpu="+gpu0))
			n.prepared(plain, claim("beside", "gpu="+gpu1))
		}
		return nil
	}}
	if err := reconciled(n, n.manager()); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []types.UID{"train-uid", "beside-uid"} {
		if n.empty(filepath.Join(n.metadataDir(), string(uid))) {
			t.Errorf("the metadata of claim %s are gone, and it has just been prepared", uid)
		}
	}
	if !n.empty(filepath.Join(n.metadataDir(), "infer-uid")) {
		t.Error("the metadata of nobody stay")
	}
}

// TestAFileThatIsLostOnTheWayIsNoSuccess: the kubelet is not told names that the container runtime does not find.
func TestAFileThatIsLostOnTheWayIsNoSuccess(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.fsys = lostFiles{n.disk, n.cdiDir()}
	m := n.manager()
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		if _, err := m.Prepare(n.ctx, claim(name, result("gpu="+gpu))); err == nil || !strings.Contains(err.Error(), "the container runtime would not find its devices") {
			t.Errorf("claim %s: error %v", name, err)
		}
	}
	if left := n.files(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// lostFiles forgets what is renamed in a folder.
type lostFiles struct {
	durable.FS
	dir string
}

func (f lostFiles) Rename(from, to string) error {
	if filepath.Dir(to) == f.dir {
		return os.Remove(from)
	}
	return f.FS.Rename(from, to)
}

// otherNames changes a name in what is renamed in a folder.
type otherNames struct {
	durable.FS
	dir, name string
}

func (f otherNames) Rename(from, to string) error {
	if filepath.Dir(to) == f.dir {
		data, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		return errors.Join(os.WriteFile(to, []byte(strings.ReplaceAll(string(data), f.name, "other")), 0o600), os.Remove(from))
	}
	return f.FS.Rename(from, to)
}

// TestAFileWithoutADeviceIsNoSuccess: each name that the kubelet is told has to be found.
func TestAFileWithoutADeviceIsNoSuccess(t *testing.T) {
	for _, gpu := range bothGPUs {
		n := newNodeOf(t, twoGPUs)
		n.fsys = otherNames{n.disk, n.cdiDir(), "_" + gpu}
		if _, err := n.manager().Prepare(n.ctx, claim("train", "a="+gpu0, "b="+gpu1)); err == nil || !strings.Contains(err.Error(), gpu) {
			t.Errorf("%s is not in the file: error %v", gpu, err)
		}
	}
}

// TestACallThatTheKubeletGivesUpMeanwhileIsNotDone: it may call to unprepare next.
func TestACallThatTheKubeletGivesUpMeanwhileIsNotDone(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	for _, name := range []string{"train", "infer"} { // they hold no GPU, so that nothing is asked of one
		c := claim(name, result("gpu="+gpu0+"+admin"))
		n.prepared(n.manager(), c)
		ctx, cancel := context.WithCancel(n.ctx)
		n.fsys = durabletest.Watched{FS: n.disk, Before: func(op, path string) error {
			if op == "list" && strings.HasSuffix(path, "/quarantine") {
				cancel()
			}
			return nil
		}}
		if _, err := n.manager().Prepare(ctx, c); !errors.Is(err, context.Canceled) {
			t.Errorf("claim %s: error %v", name, err)
		}
		cancel()
		n.fsys = n.disk
	}
}
