// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// lockedCase is something that an agent does under the lock of a claim or of a GPU, of which there are two.
type lockedCase struct {
	claims []types.UID
	gpus   []string
	// before is what the machine is like when the lock is taken.
	before func(n *node, m *prepare.Manager)
	do     func(n *node, m *prepare.Manager) error
	// done tells whether it was done.
	done func(n *node) bool
}

// torn makes a claim of each GPU whose record cannot be read.
func torn(n *node, m *prepare.Manager) {
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(m, claim(name, result("gpu="+gpu)))
		n.tear(types.UID(name + "-uid"))
	}
}

// inQuarantine puts both GPUs there, from which they can be taken again.
func inQuarantine(n *node, m *prepare.Manager) {
	n.do(&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess}, &nvmlsim.SetComputeMode{GPU: "1", Mode: nvmlsim.ComputeExclusiveProcess})
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(m, claim(name, result("gpu="+gpu)))
		n.hardware.broken[gpu] = nvml.ErrGPULost
		n.unprepare(m, types.UID(name+"-uid"))
	}
	clear(n.hardware.broken)
}

func (n *node) empty(dir string) bool {
	entries, err := os.ReadDir(dir)
	return os.IsNotExist(err) || err == nil && len(entries) == 0
}

// daemonsDied are those of two claims.
func daemonsDied(n *node, m *prepare.Manager) {
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(m, withConfig(claim(name, result("gpu="+gpu)), driverName, underMPS))
		n.do(&nvmlsim.StopMPS{Daemon: name + "-uid"})
	}
}

var bothClaims, bothGPUs = []types.UID{"train-uid", "infer-uid"}, []string{gpu0, gpu1}

func reconciled(n *node, m *prepare.Manager) error { _, err := m.Reconcile(n.ctx); return err }
func recovered(n *node, m *prepare.Manager) error  { _, err := m.Recover(n.ctx); return err }

// eachClaim does it to both claims.
func eachClaim(do func(n *node, m *prepare.Manager, uid types.UID) error) func(n *node, m *prepare.Manager) error {
	return func(n *node, m *prepare.Manager) (err error) {
		for _, uid := range bothClaims {
			err = errors.Join(err, do(n, m, uid))
		}
		return err
	}
}

func unused(context.Context) string { return "" }

var lockedCases = map[string]lockedCase{
	"prepare": {
		claims: bothClaims, gpus: bothGPUs,
		do: func(n *node, m *prepare.Manager) error {
			_, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0))
			_, other := m.Prepare(n.ctx, claim("infer", "gpu="+gpu1))
			return errors.Join(err, other)
		},
		done: func(n *node) bool { return n.recorded("train-uid") && n.recorded("infer-uid") },
	},
	"the pods of a claim are noted": {
		claims: bothClaims,
		before: func(n *node, m *prepare.Manager) {
			n.prepared(m, claim("train", "gpu="+gpu0))
			n.prepared(m, claim("infer", "gpu="+gpu1))
		},
		do: func(n *node, m *prepare.Manager) error {
			return errors.Join(m.NotePods(n.ctx, reservedFor(claim("train"), "pod")), m.NotePods(n.ctx, reservedFor(claim("infer"), "pod")))
		},
		done: func(n *node) bool {
			for _, uid := range bothClaims {
				if _, record := n.recordOf(uid); len(record.Entry.Pods) != 1 {
					return false
				}
			}
			return true
		},
	},
	"a claim is released": {
		claims: bothClaims, gpus: bothGPUs, before: torn,
		do: eachClaim(func(n *node, m *prepare.Manager, uid types.UID) error {
			_, err := m.Release(n.ctx, uid, false, unused)
			if errors.Is(err, prepare.ErrNoClaim) {
				err = nil
			}
			return err
		}),
		done: func(n *node) bool { return n.empty(n.claimsDir()) },
	},
	"a GPU is released": {
		claims: bothClaims, gpus: bothGPUs, before: inQuarantine,
		do: eachClaim(func(n *node, m *prepare.Manager, uid types.UID) error {
			_, err := m.Release(n.ctx, uid, false, unused)
			if errors.Is(err, prepare.ErrNoClaim) {
				err = nil
			}
			return err
		}),
		done: func(n *node) bool { return n.empty(n.quarantineDir()) },
	},
	"a GPU is taken out of quarantine": {
		gpus: bothGPUs, before: inQuarantine, do: reconciled,
		done: func(n *node) bool { return n.empty(n.quarantineDir()) },
	},
	"a daemon is started again": {
		claims: bothClaims, gpus: bothGPUs, before: daemonsDied, do: reconciled,
		done: func(n *node) bool { return len(n.hardware.machine.State().Daemons) == 2 },
	},
	"metadata of nobody are removed": {
		claims: bothClaims,
		before: func(n *node, _ *prepare.Manager) {
			for _, uid := range bothClaims {
				if err := os.MkdirAll(filepath.Join(n.metadataDir(), string(uid)), 0o700); err != nil {
					n.t.Fatal(err)
				}
			}
		},
		do: reconciled, done: func(n *node) bool { return n.empty(n.metadataDir()) },
	},
	"a CDI specification of nobody is removed": {
		claims: bothClaims,
		before: func(n *node, m *prepare.Manager) {
			for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
				n.prepared(m, claim(name, result("gpu="+gpu)))
				records, _ := n.recordOf(types.UID(name + "-uid"))
				if err := records.Remove(types.UID(name + "-uid")); err != nil {
					n.t.Fatal(err)
				}
			}
		},
		do:   eachClaim(func(n *node, m *prepare.Manager, uid types.UID) error { return m.RemoveStray(n.ctx, uid) }),
		done: func(n *node) bool { return n.empty(n.cdiDir()) },
	},
	"unfinished files are removed": {
		claims: bothClaims,
		before: func(n *node, _ *prepare.Manager) {
			for _, uid := range bothClaims {
				n.write(filepath.Join(n.claimsDir(), string(uid)+"_"+gpu0+".claim.tmp"), "")
			}
		},
		do: recovered, done: func(n *node) bool { return n.empty(n.claimsDir()) },
	},
	"half-made claims are rolled back": {
		claims: bothClaims, gpus: bothGPUs,
		before: func(n *node, m *prepare.Manager) {
			for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
				n.prepared(m, claim(name, result("gpu="+gpu)))
				n.halfMade(types.UID(name + "-uid"))
			}
		},
		do: recovered, done: func(n *node) bool { return n.empty(n.claimsDir()) },
	},
	"what is left of daemons is taken away": {
		claims: []types.UID{"lost-uid", gpu0}, gpus: bothGPUs,
		before: func(n *node, _ *prepare.Manager) {
			n.tools.Daemons.(*leftDaemons).left = []string{"lost-uid", gpu0, gpu1}
		},
		do: recovered, done: func(n *node) bool { return len(n.tools.Daemons.(*leftDaemons).stopped) >= 3 },
	},
}

// TestWhatIsLockedIsLeftAlone: another agent is at work. That is an error after the time for locks, and nothing is done. Afterwards it is.
func TestWhatIsLockedIsLeftAlone(t *testing.T) {
	t.Parallel()
	for name, tc := range lockedCases {
		locks := map[string]func(m *prepare.Manager) (func(), error){}
		for _, uid := range tc.claims {
			locks["the claim "+string(uid)] = func(m *prepare.Manager) (func(), error) { return prepare.LockClaim(m, uid) }
		}
		for _, gpu := range tc.gpus {
			locks["the GPU "+gpu] = func(m *prepare.Manager) (func(), error) { return prepare.LockGPU(m, gpu) }
		}
		for what, lock := range locks {
			t.Run(name+"/"+what, func(t *testing.T) {
				t.Parallel()
				n := newNodeOf(t, twoGPUs)
				n.rules.Shares = config.TimeSlicing
				n.tools.Daemons = &leftDaemons{Daemons: n.tools.Daemons}
				if tc.before != nil {
					tc.before(n, n.manager())
				}
				n.timeout = 30 * time.Millisecond // what is locked is waited for in vain
				unlock, err := lock(n.manager())
				if err != nil {
					t.Fatal(err)
				}
				err = tc.do(n, n.manager())
				if !errors.Is(err, context.DeadlineExceeded) || tc.done(n) {
					t.Errorf("error %v, done: %v; want that the time for locks is over", err, tc.done(n))
				}
				unlock()
				n.timeout = 10 * time.Second
				if err := tc.do(n, n.manager()); err != nil || !tc.done(n) {
					t.Errorf("with the lock: error %v, done: %v", err, tc.done(n))
				}
			})
		}
	}
}
