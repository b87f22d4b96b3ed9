// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestAReleaseWithoutARecordBringsItsGPUsBack to how a GPU is by itself, as far as that can be told from an administrator's: two GPUs of a claim whose
// record cannot be read.
func TestAReleaseWithoutARecordBringsItsGPUsBack(t *testing.T) {
	whole := func(parameters string) *resourceapi.ResourceClaim {
		return withConfig(claim("train", "gpu="+gpu0, "more="+gpu1), driverName, parameters)
	}
	tests := map[string]struct {
		claim  *resourceapi.ResourceClaim
		before func(n *node) // the release
		undone string        // kinds of steps: for each GPU, and for the claim
		did    []string
		left   []string
		// quarantined GPUs come back once that is mended.
		quarantined []string
		mend        func(n *node)
		want        setting // of GPU 1, in the end
	}{
		"exclusive use": {
			claim: whole(sharingConfig("GpuConfig", "Exclusive", "")), undone: daemonsAlone + " ComputeMode ComputeMode", want: setting{Compute: nvmlsim.ComputeDefault},
		},
		"time slices": {claim: whole(longSlices), undone: daemonsAlone, want: setting{Compute: nvmlsim.ComputeDefault}},
		"time slices that cannot be set any more": {
			claim:  whole(longSlices),
			undone: daemonsAlone,
			before: func(n *node) { n.do(&nvmlsim.Refuse{GPU: "1", Settings: []nvmlsim.Setting{nvmlsim.SettingTimeSlice}}) },
			left:   []string{"GPU " + gpu1 + ": its time slice could not be set to the default: "},
			want:   setting{Compute: nvmlsim.ComputeDefault, Slice: nvmlsim.TimeSliceLong},
		},
		"a daemon": {
			claim: whole(underMPS), undone: daemonsAlone + " ComputeMode ComputeMode", did: []string{"undone: MPSDaemon train-uid"},
			want: setting{Compute: nvmlsim.ComputeDefault},
		},
		"one GPU does not answer": {
			claim:  whole(sharingConfig("GpuConfig", "Exclusive", "")),
			before: func(n *node) { n.hardware.wrap = func(d nvml.Device) nvml.Device { return lostSecond{d} } },
			undone: daemonsAlone + " ComputeMode ComputeMode", left: []string{"GPU " + gpu1 + " is in quarantine: undo ComputeMode"}, quarantined: []string{gpu1},
			mend: func(n *node) { n.hardware.wrap = nil },
			want: setting{Compute: nvmlsim.ComputeDefault},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			m := n.manager()
			n.prepared(m, tc.claim)
			n.tear("train-uid")
			if tc.before != nil {
				tc.before(n)
			}
			done := n.releaseOf(m, "train-uid", false)
			for _, want := range append(tc.did, "undone: CDIFile ", "removed: the claim's ledger record") {
				n.wantLine("did", done.Did, want)
			}
			for _, want := range tc.left {
				n.wantLine("left", done.Left, want)
			}
			if got := undone(done); got != tc.undone {
				t.Errorf("undone: %s, want %s", got, tc.undone)
			}
			if len(done.Left) != len(tc.left) || !slices.Equal(done.Quarantined, tc.quarantined) || len(n.files()) > 0 {
				t.Errorf("%+v, files %v", done, n.files())
			}
			if tc.mend != nil {
				tc.mend(n)
				if err := reconciled(n, n.manager()); err != nil {
					t.Error(err)
				}
			}
			if diff := cmp.Diff(tc.want, n.setting(1), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("setting of GPU 1 (-want +got):\n%s", diff)
			}
			if got := n.setting(0); got.Compute != nvmlsim.ComputeDefault || got.Slice != "" && got.Slice != nvmlsim.TimeSliceDefault {
				t.Errorf("setting of GPU 0: %+v", got)
			}
		})
	}
}

// daemonsAlone are the steps for two GPUs that are as they are by themselves: it is not known whether there was a daemon.
const daemonsAlone = "CDIFile MPSDaemon MPSDaemon MPSDaemon"

func undone(done prepare.Released) string {
	var kinds []string
	for _, line := range done.Did {
		if step, ok := strings.CutPrefix(line, "undone: "); ok {
			kind, _, _ := strings.Cut(step, " ")
			kinds = append(kinds, kind)
		}
	}
	return strings.Join(kinds, " ")
}

// lostSecond is a GPU that answers unless it is the second one.
type lostSecond struct{ nvml.Device }

func (d lostSecond) MIGMode() (nvml.MIGMode, error) {
	if minor, err := d.MinorNumber(); err != nil || minor == 1 {
		return nvml.MIGMode{}, errors.Join(err, nvml.ErrGPULost)
	}
	return d.Device.MIGMode()
}

func (d lostSecond) PCIBusID() (string, error) {
	if _, err := d.MIGMode(); err != nil {
		return "", err
	}
	return d.Device.PCIBusID()
}

func (d lostSecond) ComputeMode() (nvml.ComputeMode, error) {
	if _, err := d.MIGMode(); err != nil {
		return "", err
	}
	return d.Device.ComputeMode()
}

// TestAReleaseOfAShareWithoutARecordLeavesTheOthers: the GPU is as they have it until the last one goes.
func TestAReleaseOfAShareWithoutARecordLeavesTheOthers(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares = config.MPS
	m := n.manager()
	for _, name := range []string{"torn", "other"} {
		n.prepared(m, sharedBy(name, "20Gi:25", ""))
	}
	n.do(&nvmlsim.SetTimeSlice{GPU: "0", Time: nvmlsim.TimeSliceLong}) // somebody's, which is not looked at while others have the GPU
	shared := n.setting(0)
	n.tear("torn-uid")
	done := n.releaseOf(m, "torn-uid", false)
	if len(done.Left) > 0 || len(done.Quarantined) > 0 {
		t.Errorf("%+v", done)
	}
	if diff := cmp.Diff(shared, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("with the other share (-want +got):\n%s", diff)
	}
	n.unprepare(m, "other-uid")
	if got := n.setting(0); got.Compute != nvmlsim.ComputeDefault || len(got.Daemons) > 0 {
		t.Errorf("in the end: %+v", got)
	}
}

// TestAReleaseThatCannotTellWhatIsLeft says so, beside what it did.
func TestAReleaseThatCannotTellWhatIsLeft(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	bothPrepared(n, n.manager())
	for _, uid := range bothClaims {
		n.fsys = durabletest.Watched{FS: n.disk, Before: failing("list", "/quarantine", 1)}
		done, err := n.manager().Release(n.ctx, uid, false, unused)
		if !errors.Is(err, errDisk) {
			t.Errorf("claim %s: error %v", uid, err)
		}
		n.wantLine("did", done.Did, "removed: the claim's ledger record")
		n.fsys = n.disk
	}
}

// TestARecordThatSaysLittleIsReleased: of a claim without a GPU, of one of all GPUs, and of a newer agent.
func TestARecordThatSaysLittleIsReleased(t *testing.T) {
	tests := map[string]struct {
		file, text string
		did, left  string
		needsForce bool
	}{
		"it holds no GPU":            {file: "train-uid.claim", text: "{", did: "removed: the claim's ledger record"},
		"it held too many to name":   {file: "train-uid_all.claim", text: "{", did: "removed: the claim's ledger record", left: "the record held all GPUs of this node"},
		"it is of a newer agent":     {file: "train-uid_" + gpu0 + ".claim", text: `{"kind":"StowageClaimLedger","schemaVersion":99}` + "\n{}\n", did: "removed: the claim's ledger record", needsForce: true},
		"it has no whole first line": {file: "train-uid_" + gpu0 + ".claim", text: "", did: "undone: MPSDaemon train-uid"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			m := n.manager()
			path := filepath.Join(n.claimsDir(), tc.file)
			n.write(path, tc.text)
			if tc.needsForce {
				done, err := m.Release(n.ctx, "train-uid", false, unused)
				if _, gone := os.Stat(path); !errors.Is(err, prepare.ErrInUse) || !strings.Contains(err.Error(), "schema version 99") || len(done.Did) > 0 || gone != nil {
					t.Errorf("without force: %+v, %v, the file: %v", done, err, gone)
				}
			}
			done := n.releaseOf(m, "train-uid", tc.needsForce)
			n.wantLine("did", done.Did, tc.did)
			if tc.left != "" {
				n.wantLine("left", done.Left, tc.left)
			} else if len(done.Left) > 0 {
				t.Errorf("left: %q", done.Left)
			}
			if left := n.files(); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// TestAReleaseThatCannotBeIsNotHalfDone: without the boot nothing of the GPUs is known, and who is asked whether it is in use is believed.
func TestAReleaseThatCannotBeIsNotHalfDone(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		uid := types.UID(name + "-uid")
		n.prepared(n.manager(), claim(name, result("gpu="+gpu)))
		n.tear(uid)
		files := n.files()
		n.hardware.readings = &readings{fails: 1}
		_, err := n.manager().Release(n.ctx, uid, true, unused)
		n.hardware.readings = nil
		if !errors.Is(err, errReading) {
			t.Errorf("claim %s: %v, want that the boot ID cannot be read", name, err)
		}
		if _, err := n.manager().Release(n.ctx, uid, false, func(context.Context) string { return fmt.Sprint(name, " runs") }); !errors.Is(err, prepare.ErrInUse) {
			t.Errorf("claim %s: %v, want that it is in use", name, err)
		}
		if diff := cmp.Diff(files, n.files()); diff != "" {
			t.Errorf("claim %s: files (-before +after):\n%s", name, diff)
		}
	}
	if made := n.manager().Made(); len(made) > 0 {
		t.Errorf("made: %v", made)
	}
}
