// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestAPreparedClaimWithOtherDevicesIsRefused: containers may run with what the record says. It differs from the allocation in one thing alone.
func TestAPreparedClaimWithOtherDevicesIsRefused(t *testing.T) {
	whole := func() *resourceapi.ResourceClaim { return claim("train", "gpu="+gpu0, "more="+gpu1) }
	share := func() *resourceapi.ResourceClaim { return sharedBy("train", "20Gi:25", "") }
	part := func() *resourceapi.ResourceClaim { return claim("train", "part="+gpu0+"-mig-1g10gb-0") }
	tests := map[string]struct {
		claim func() *resourceapi.ResourceClaim
		edit  func(e *ledger.Entry)
		same  bool
	}{
		"nothing differs":            {claim: whole, edit: func(*ledger.Entry) {}, same: true},
		"nothing differs, a share":   {claim: share, edit: func(*ledger.Entry) {}, same: true},
		"nothing differs, a part":    {claim: part, edit: func(*ledger.Entry) {}, same: true},
		"there are fewer":            {claim: whole, edit: func(e *ledger.Entry) { e.Devices = e.Devices[:1] }},
		"there are more":             {claim: whole, edit: func(e *ledger.Entry) { e.Devices = append(e.Devices, e.Devices[0]) }},
		"the request":                {claim: whole, edit: func(e *ledger.Entry) { e.Devices[0].Request = "other" }},
		"the pool":                   {claim: whole, edit: func(e *ledger.Entry) { e.Devices[1].Pool = "node-2" }},
		"the device":                 {claim: whole, edit: func(e *ledger.Entry) { e.Devices[1].Device = gpu2 }},
		"the GPU":                    {claim: whole, edit: func(e *ledger.Entry) { e.Devices[1].GPU = gpu2 }},
		"the GPU was replaced":       {claim: whole, edit: func(e *ledger.Entry) { e.Devices[0].UUID = "GPU-before" }},
		"it has admin access":        {claim: whole, edit: func(e *ledger.Entry) { e.Devices[1].AdminAccess = true }},
		"it is no share":             {claim: share, edit: func(e *ledger.Entry) { e.Devices[0].Share = nil }},
		"the share is larger":        {claim: share, edit: func(e *ledger.Entry) { e.Devices[0].Share.MemoryBytes++ }},
		"the share is another":       {claim: share, edit: func(e *ledger.Entry) { e.Devices[0].ShareID = ptr.To[types.UID]("other") }},
		"it is no part":              {claim: part, edit: func(e *ledger.Entry) { e.Devices[0].Partition = nil }},
		"the part is somewhere else": {claim: part, edit: func(e *ledger.Entry) { e.Devices[0].Partition.Start++ }},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			m := n.manager()
			n.prepared(m, tc.claim())
			records, record := n.recordOf("train-uid")
			tc.edit(record.Entry)
			if err := records.Remove("train-uid"); err != nil {
				t.Fatal(err)
			}
			if err := records.Put(record.Entry); err != nil {
				t.Fatal(err)
			}
			before := n.state()
			_, err := m.Prepare(n.ctx, tc.claim())
			if tc.same {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), "has to be unprepared first") {
				t.Errorf("error %v, want that it has to be unprepared first", err)
			}
			if diff := before.diff(n.state()); diff != "" {
				t.Errorf("it was refused (-before +after):\n%s", diff)
			}
		})
	}
}

// TestAClaimWhoseRecordCannotBeReadIsNotPrepared: what it has, nobody knows.
func TestAClaimWhoseRecordCannotBeReadIsNotPrepared(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(m, claim(name, result("gpu="+gpu)))
		n.tear(types.UID(name + "-uid"))
		files := n.files()
		var unreadable *prepare.UnreadableError
		if _, err := m.Prepare(n.ctx, claim(name, result("gpu="+gpu))); !errors.As(err, &unreadable) ||
			!slices.Equal(unreadable.GPUs, []string{gpu}) || unreadable.Claim != types.UID(name+"-uid") {
			t.Errorf("claim %s: error %v, want an UnreadableError about %s", name, err, gpu)
		}
		if diff := cmp.Diff(files, n.files()); diff != "" {
			t.Errorf("claim %s: files (-before +after):\n%s", name, diff)
		}
	}
}

// TestWhatIsPreparedAnewHasToBeAllowed: of a claim that was being unprepared nothing is left, and the node's rules are by now others.
func TestWhatIsPreparedAnewHasToBeAllowed(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	daemons := &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
	n.tools.Daemons = daemons
	c := fromClaim(withConfig(claim("train", "gpu="+gpu0), driverName, underMPS))
	n.prepared(n.manager(), c)
	n.fsys = keptRecords{n.disk}
	if err := n.manager().Unprepare(n.ctx, c.UID); err == nil {
		t.Fatal("the record could not be removed, and there is no error")
	}
	n.fsys = n.disk
	daemons.stuck = false
	n.rules.Allowed = nil
	m := n.manager()
	if _, err := m.Prepare(n.ctx, c); err == nil || !strings.Contains(err.Error(), "MPS") {
		t.Errorf("error %v, want that MPS is not allowed", err)
	}
	if list, err := m.Quarantined(); err != nil || len(list) != 1 || n.recorded(c.UID) {
		t.Errorf("in quarantine %+v, %v; recorded %v", list, err, n.recorded(c.UID))
	}
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined > 0 || n.gpu(0).ComputeMode != nvmlsim.ComputeDefault {
		t.Errorf("recovery %+v, %v, compute mode %s", recovery, err, n.gpu(0).ComputeMode)
	}
}

// TestABatchIsDoneEachByItself: one that fails does not keep the others.
func TestABatchIsDoneEachByItself(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	prepared := m.PrepareAll(n.ctx, []*resourceapi.ResourceClaim{
		claim("train", "gpu="+gpu0), claim("infer", "gpu="+gpu1), claim("torn", "gpu="+gpu2), claim("none", "gpu=gpu-none"),
	})
	for uid, want := range map[types.UID]int{"train-uid": 1, "infer-uid": 1, "torn-uid": 1, "none-uid": 0} {
		if got := prepared[uid]; len(got.Devices) != want || (got.Err == nil) != (want == 1) {
			t.Errorf("claim %s: %+v, want %d devices", uid, got, want)
		}
	}
	n.tear("torn-uid")
	results := m.UnprepareAll(n.ctx, []types.UID{"train-uid", "torn-uid", "infer-uid", "never-uid", "../x"})
	if len(results) != 5 {
		t.Errorf("results %v, want five", results)
	}
	for uid, err := range results {
		if (err != nil) != (uid == "torn-uid") {
			t.Errorf("claim %s: %v", uid, err)
		}
	}
	if n.recorded("train-uid") || n.recorded("infer-uid") || !n.recorded("torn-uid") {
		t.Errorf("left: %v", n.files())
	}
}
