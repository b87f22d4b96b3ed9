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
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/reconcile"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// releaseOf releases a claim that nobody uses.
func (n *node) releaseOf(m *prepare.Manager, claim types.UID, force bool) prepare.Released {
	n.t.Helper()
	done, err := m.Release(n.ctx, claim, force, func(context.Context) string { return "" })
	if err != nil {
		n.t.Fatal(err)
	}
	return done
}

// tear leaves nothing to read of the claim's record.
func (n *node) tear(claim types.UID) {
	n.t.Helper()
	files, err := filepath.Glob(filepath.Join(n.claimsDir(), string(claim)+"_*"))
	if err != nil || len(files) == 0 {
		n.t.Fatalf("records %v, %v", files, err)
	}
	for _, file := range files {
		if err := os.Truncate(file, 7); err != nil {
			n.t.Fatal(err)
		}
	}
}

// wantLine wants a line that has the text.
func (n *node) wantLine(what string, lines []string, text string) {
	n.t.Helper()
	if !slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, text) }) {
		n.t.Errorf("%s: %q, want a line with %q", what, lines, text)
	}
}

// TestAReleaseTriesAgainWhatIsOwed, and gives it up with force alone.
func TestAReleaseTriesAgainWhatIsOwed(t *testing.T) {
	tests := map[string]struct {
		mended, force bool
		did           string // empty: the GPU stays in quarantine
	}{
		"it still does not end": {},
		"it ends":               {mended: true, did: "released: GPU " + gpu0 + ", on which what was owed is done"},
		"it is given up":        {force: true, did: "released, because of --force: GPU " + gpu0 + ", with what is owed given up: "},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			daemons := &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
			n.tools.Daemons = daemons
			m := n.manager()
			c := withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "MPS", ""))
			n.prepared(m, c)
			n.unprepare(m, c.UID)
			daemons.stuck = !tc.mended
			done := n.releaseOf(m, c.UID, tc.force)
			list, err := m.Quarantined()
			if err != nil {
				t.Fatal(err)
			}
			if tc.did == "" {
				n.wantLine("left", done.Left, "the daemon does not end")
				if !slices.Equal(done.Quarantined, []string{gpu0}) || len(list) != 1 || len(done.Did) > 0 {
					t.Errorf("%+v with %+v in quarantine, want that %s stays there", done, list, gpu0)
				}
				return
			}
			n.wantLine("did", done.Did, tc.did)
			if len(done.Quarantined) > 0 || len(list) > 0 {
				t.Errorf("%+v with %+v in quarantine", done, list)
			}
			if _, err := m.Release(n.ctx, c.UID, tc.force, nil); !errors.Is(err, prepare.ErrNoClaim) {
				t.Errorf("once more: %v", err)
			}
		})
	}
}

// TestAReleaseOfNoUIDIsRefused: it is no claim that could be known.
func TestAReleaseOfNoUIDIsRefused(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	for _, uid := range []types.UID{"../x", ""} {
		if _, err := n.manager().Release(n.ctx, uid, true, unused); err == nil || !strings.Contains(err.Error(), "claim UID ") {
			t.Errorf("%q: %v", uid, err)
		}
	}
}

// TestAReleaseThatFailsHalfwayTellsWhatItDid: two GPUs are owed, and only one of them can be released.
func TestAReleaseThatFailsHalfwayTellsWhatItDid(t *testing.T) {
	tests := map[string]struct {
		stuck, force, locked bool
	}{
		"the second GPU is locked":            {locked: true},
		"the disk keeps what was owed":        {},
		"the disk keeps what was given up":    {stuck: true, force: true},
		"the second GPU is locked and forced": {stuck: true, force: true, locked: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			daemons := &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
			n.tools.Daemons = daemons
			c := withConfig(claim("train", "gpu="+gpu0, "more="+gpu1), driverName, underMPS)
			n.prepared(n.manager(), c)
			n.unprepare(n.manager(), c.UID)
			daemons.stuck = tc.stuck
			n.timeout = 30 * time.Millisecond // what is locked is waited for in vain
			m := n.manager()
			if tc.locked {
				unlock, err := prepare.LockGPU(m, gpu1)
				if err != nil {
					t.Fatal(err)
				}
				defer unlock()
			} else {
				n.fsys = durabletest.Watched{FS: n.disk, Before: failing("remove", gpu1+"_train-uid"+prepare.QuarantineSuffix, 1)}
				m = n.manager()
			}
			done, err := m.Release(n.ctx, c.UID, tc.force, unused)
			if err == nil || !strings.Contains(err.Error(), gpu1) {
				t.Errorf("error %v, want one about %s", err, gpu1)
			}
			if len(done.Did) != 1 || !strings.Contains(done.Did[0], gpu0) {
				t.Errorf("it did %q, want what it did to %s", done.Did, gpu0)
			}
		})
	}
}

// TestAReleaseLeavesMIGInstancesItDoesNotKnow: without the record an instance may be an administrator's.
func TestAReleaseLeavesMIGInstancesItDoesNotKnow(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	n.prepared(m, claim("torn", result("x="+gpu0+"-mig-3g40gb-0")))
	n.prepared(m, claim("beside", "gpu="+gpu1))
	n.do(&nvmlsim.SetTimeSlice{GPU: "0", Time: nvmlsim.TimeSliceLong}) // somebody's, as the instance may be
	n.tear("torn-uid")
	done := n.releaseOf(m, "torn-uid", false)
	n.wantLine("left", done.Left, "GPU "+gpu0+" has MIG instance ")
	if g := n.gpu(0); len(g.Instances) != 1 || g.TimeSlice != nvmlsim.TimeSliceLong || len(done.Left) != 1 || len(done.Quarantined) > 0 {
		t.Errorf("%+v, instances %v, time slice %q", done, g.Instances, g.TimeSlice)
	}
	if files := n.files(); slices.ContainsFunc(files, func(name string) bool { return strings.Contains(name, "torn") }) {
		t.Errorf("left: %v", files)
	}
	n.prepared(m, claim("beside", "gpu="+gpu1))
}

// TestAReleaseOfAShareLeavesTheOthers as they are; with the last one the GPU is as it was.
func TestAReleaseOfAShareLeavesTheOthers(t *testing.T) {
	n := newNode(t)
	n.rules.Shares = config.MPS
	m := n.manager()
	before := n.setting(0)
	for _, name := range []string{"one", "two"} {
		n.prepared(m, sharedBy(name, "20Gi:25", ""))
	}
	shared := n.setting(0)
	n.releaseOf(m, "one-uid", false)
	if diff := cmp.Diff(shared, n.setting(0)); diff != "" {
		t.Errorf("with the other share (-want +got):\n%s", diff)
	}
	n.releaseOf(m, "two-uid", false)
	if diff := cmp.Diff(before, n.setting(0), cmpopts.EquateEmpty()); diff != "" || len(n.files()) > 0 {
		t.Errorf("after both, with the files %v (-want +got):\n%s", n.files(), diff)
	}
}

// TestAReleaseOfAPassthrough gives the GPU back by its record. Without one it stays with vfio-pci, and that is told.
func TestAReleaseOfAPassthrough(t *testing.T) {
	for name, torn := range map[string]bool{"by its record": false, "of which nothing can be read": true} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			m := n.manager()
			n.prepared(m, claim("machine", "vm="+vm0))
			if torn {
				n.tear("machine-uid")
			}
			done := n.releaseOf(m, "machine-uid", false)
			if files := n.files(); len(files) > 0 || len(done.Quarantined) > 0 {
				t.Errorf("%+v, left %v", done, files)
			}
			_, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu0))
			if !torn {
				if err != nil || n.driverOf(bus0) != "nvidia/" {
					t.Errorf("the next claim: %v, with the driver %s", err, n.driverOf(bus0))
				}
				return
			}
			n.wantLine("left", done.Left, "GPU "+gpu0+": how it is set up could not be looked at: the GPU has the driver vfio-pci")
			if !errors.Is(err, discovery.ErrBound) {
				t.Errorf("the next claim: %v", err)
			}
		})
	}
}

// leftovers releases claims that are forgotten by everybody, by name. last is called when the last question about a claim is asked.
func (n *node) leftovers(m *prepare.Manager, clock *testingclock.FakeClock, forgotten func(claim string) bool, last func()) (*reconcile.Reconciler, *reconcile.Summary) {
	n.t.Helper()
	records := ledger.At(durabletest.Unsynced{}, n.claimsDir())
	found := &reconcile.Summary{}
	return reconcile.New(reconcile.Options{
		Clock: clock, Ledger: records,
		Sources: reconcile.Sources{
			Claim: func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
				c := claim(name)
				if record, err := records.Get(c.UID); err == nil && record != nil && !forgotten(name) {
					for _, d := range record.Entry.Devices {
						c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{Pool: d.Pool, Device: d.Device})
					}
					reservedFor(c, record.Entry.Pods...)
					return c, err
				}
				c.Status.Allocation = nil
				return c, nil
			},
			Pods:       func(context.Context) ([]corev1.Pod, error) { return nil, nil },
			Kubelet:    func(context.Context) ([]reconcile.KubeletPod, error) { return nil, nil },
			Registered: func() time.Time { return clock.Now().Add(-time.Hour) },
			Processes: func(_ context.Context, gpu string, _ ...*ledger.Partition) (int, error) {
				last()
				return n.processesBut(gpu, nil), nil
			},
			ProcessesBut: func(_ context.Context, gpu string, pods []types.UID) (int, error) {
				last()
				return n.processesBut(gpu, pods), nil
			},
			BootID:  n.hardware.BootID,
			PlaceOf: func(device string) (string, *ledger.Partition) { return device[:len(gpu0)], nil },
		},
		Repair:      func(context.Context) error { return nil },
		NotePods:    m.NotePods,
		Release:     m.UnprepareUnused,
		Strays:      m.Strays,
		RemoveStray: m.RemoveStray,
		Seen:        func(s reconcile.Summary) { *found = s },
	}), found
}

// processesBut counts the processes on a GPU that are of other pods. The server of a daemon of ours is none.
func (n *node) processesBut(gpu string, pods []types.UID) (count int) {
	for _, p := range n.gpu(slices.Index([]string{gpu0, gpu1, gpu2}, gpu)).Processes {
		if p.Daemon == "" && !slices.Contains(pods, types.UID(p.Pod)) {
			count++
		}
	}
	return count
}

// TestAClaimThatIsPreparedAgainIsNotReleased: nobody used it, as every source told, and then another pod of the claim has it prepared before the
// release has the claim's lock.
func TestAClaimThatIsPreparedAgainIsNotReleased(t *testing.T) {
	tests := map[string]struct {
		between  func(n *node, m *prepare.Manager)
		released bool
		pods     []types.UID
	}{
		"nothing happens": {between: func(*node, *prepare.Manager) {}, released: true},
		"a pod joins": {
			between: func(n *node, m *prepare.Manager) { n.prepared(m, reservedFor(claim("train", "gpu="+gpu0), "second")) },
			pods:    []types.UID{"first", "second"},
		},
		"it is unprepared and prepared": {
			between: func(n *node, m *prepare.Manager) {
				n.unprepare(m, "train-uid")
				n.prepared(m, reservedFor(claim("train", "gpu="+gpu0), "second"))
			},
			pods: []types.UID{"second"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			m := n.manager()
			n.prepared(m, reservedFor(claim("train", "gpu="+gpu0), "first"))
			clock := testingclock.NewFakeClock(time.Date(2026, 11, 22, 1, 0, 0, 0, time.UTC))
			looks := 0
			leftovers, found := n.leftovers(m, clock, func(string) bool { return true }, func() {
				if looks++; looks == 2 {
					tc.between(n, m)
				}
			})
			for range 2 {
				if err := leftovers.Once(n.ctx); err != nil {
					t.Fatal(err)
				}
				clock.Step(reconcile.Interval)
			}
			_, record := n.recordOf("train-uid")
			if looks != 2 || (found.Released == 1) != tc.released || (record == nil) != tc.released {
				t.Fatalf("%d looks, %+v, record %+v, want it released: %v", looks, found, record, tc.released)
			}
			if record != nil && !slices.Equal(record.Entry.Pods, tc.pods) {
				t.Errorf("pods %v, want %v", record.Entry.Pods, tc.pods)
			}
		})
	}
}

// TestAReleaseNeedsProofOrForce: what somebody uses, and what an older agent cannot undo, is released with force alone.
func TestAReleaseNeedsProofOrForce(t *testing.T) {
	for name, force := range map[string]bool{"without force": false, "with force": true} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			m := n.manager()
			c := claim("train", "gpu="+gpu0)
			n.prepared(m, c)
			before := n.state()
			done, err := m.Release(n.ctx, c.UID, force, func(context.Context) string { return "a pod runs" })
			if force {
				n.wantLine("did", done.Did, "passed over, because of --force: a pod runs")
				if err != nil || len(n.files()) > 0 {
					t.Errorf("%v, files %v", err, n.files())
				}
				return
			}
			if !errors.Is(err, prepare.ErrInUse) || !strings.Contains(err.Error(), "a pod runs") || len(done.Did) > 0 {
				t.Errorf("%+v, %v", done, err)
			}
			if diff := before.diff(n.state()); diff != "" {
				t.Errorf("it was refused (-before +after):\n%s", diff)
			}
		})
	}
}
