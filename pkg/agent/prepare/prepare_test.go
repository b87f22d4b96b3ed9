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
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

func TestPrepareAnswersWithWhatTheRuntimeFinds(t *testing.T) {
	tests := map[string]struct {
		results []result
		want    []ledger.Device
		sees    []string
	}{
		"one GPU": {
			results: []result{"gpu=" + gpu0},
			want:    []ledger.Device{{Request: "gpu", Pool: pool, Device: gpu0, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=train-uid_gpu_" + gpu0}}},
			sees:    []string{gpu0},
		},
		"an alternative of a prioritized list": {
			results: []result{"gpu/h100=" + gpu0},
			want:    []ledger.Device{{Request: "gpu/h100", Pool: pool, Device: gpu0, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=train-uid_gpu.h100_" + gpu0}}},
			sees:    []string{gpu0},
		},
		"two requests, and admin access to a GPU of the first": {
			results: []result{"a=" + gpu0, "b=" + gpu1, "watch=" + gpu0 + "+admin"},
			want: []ledger.Device{
				{Request: "a", Pool: pool, Device: gpu0, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=train-uid_a_" + gpu0}},
				{Request: "b", Pool: pool, Device: gpu1, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=train-uid_b_" + gpu1}},
				{Request: "watch", Pool: pool, Device: gpu0, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=train-uid_watch_" + gpu0}},
			},
			sees: []string{gpu0, gpu1},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			m := n.manager()
			for range 2 { // the second time it is prepared already
				got, err := m.Prepare(n.ctx, claim("train", tc.results...))
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(tc.want, got, told); diff != "" {
					t.Errorf("devices (-want +got):\n%s", diff)
				}
				var sees []string
				for _, device := range tc.sees {
					sees = append(sees, n.hardware.uuid(device))
				}
				slices.Sort(sees)
				if diff := cmp.Diff(sees, n.visible(got)); diff != "" {
					t.Errorf("GPUs in the container (-want +got):\n%s", diff)
				}
			}
			for range 2 { // the second time it is unknown
				if err := m.Unprepare(n.ctx, "train-uid"); err != nil {
					t.Fatal(err)
				}
				if left := n.files(); len(left) > 0 {
					t.Errorf("left after unprepare: %v", left)
				}
			}
		})
	}
}

func TestClaimsThatCannotBePrepared(t *testing.T) {
	foreign := claim("train", "gpu="+gpu0)
	foreign.Status.Allocation.Devices.Results[0].Pool = "node-2"
	tests := map[string]struct {
		claim  *resourceapi.ResourceClaim
		broken string
		want   []string
	}{
		"not allocated":         {claim: func() *resourceapi.ResourceClaim { c := claim("train"); c.Status.Allocation = nil; return c }(), want: []string{"default/train", "not allocated"}},
		"unknown device":        {claim: claim("train", "gpu=gpu-9"), want: []string{"default/train", "request gpu", "device gpu-9", "no GPU of that name"}},
		"device of another":     {claim: foreign, want: []string{"default/train", "request gpu", `pool "node-2"`, `pool "node-1"`}},
		"GPU does not answer":   {claim: claim("train", "a="+gpu0, "b="+gpu1), broken: gpu1, want: []string{"default/train", "request b", "device " + gpu1, "GPU is lost"}},
		"allocated twice":       {claim: claim("train", "a="+gpu0, "b="+gpu0), want: []string{"default/train", "device " + gpu0, "allocated twice", "a and b"}},
		"config of other kinds": {claim: withConfig(claim("train", "gpu="+gpu0), driverName, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"ComputeDomainChannelConfig"}`), want: []string{"config[0].opaque.parameters", "class", "ComputeDomainChannelConfig"}},
		"config with wishes":    {claim: withConfig(claim("train", "gpu="+gpu0), driverName, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","shared":true}`), want: []string{"GpuConfig", `unknown field "shared"`}},
		"config that is none":   {claim: withConfig(claim("train", "gpu="+gpu0), driverName, `[]`), want: []string{"config[0].opaque.parameters", "JSON object"}},
		"UID that is no name":   {claim: func() *resourceapi.ResourceClaim { c := claim("train", "gpu="+gpu0); c.UID = "../x"; return c }(), want: []string{`"../x"`}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if tc.broken != "" {
				n.hardware.broken[tc.broken] = errors.New("GPU is lost")
			}
			_, err := n.manager().Prepare(n.ctx, tc.claim)
			if err == nil {
				t.Fatal("prepared")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			if left := n.files(); len(left) > 0 {
				t.Errorf("left after the failure: %v", left)
			}
		})
	}
}

func TestConfigThatChangesNothingIsAccepted(t *testing.T) {
	c := claim("train", "gpu="+gpu0)
	withConfig(c, driverName, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`)
	withConfig(c, "other.example.com", `{"kind":"Anything","field":1}`)
	n := newNode(t)
	if _, err := n.manager().Prepare(n.ctx, c); err != nil {
		t.Error(err)
	}
}

func TestResultsOfOtherDriversAreNotOurs(t *testing.T) {
	c := claim("train", "gpu="+gpu0, "nic=eth0")
	c.Status.Allocation.Devices.Results[1].Driver = "nic.example.com"
	n := newNode(t)
	devices, err := n.manager().Prepare(n.ctx, c)
	if err != nil || len(devices) != 1 {
		t.Errorf("devices %v, %v: want the GPU alone", devices, err)
	}
	before := n.files()
	none := claim("other", "nic=eth0")
	none.Status.Allocation.Devices.Results[0].Driver = "nic.example.com"
	if devices, err := n.manager().Prepare(n.ctx, none); err != nil || len(devices) > 0 || !slices.Equal(before, n.files()) {
		t.Errorf("devices %v, %v, files %v: want nothing done for a claim without a GPU", devices, err, n.files())
	}
}

func TestAGPUIsHeldByOneClaim(t *testing.T) {
	tests := map[string]struct {
		first, second result
		refused       bool
	}{
		"the same GPU":                    {first: "gpu=" + gpu0, second: "gpu=" + gpu0, refused: true},
		"another GPU":                     {first: "gpu=" + gpu0, second: "gpu=" + gpu1},
		"admin access to a held GPU":      {first: "gpu=" + gpu0, second: "gpu=" + gpu0 + "+admin"},
		"a GPU that has an admin already": {first: "gpu=" + gpu0 + "+admin", second: "gpu=" + gpu0},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if _, err := n.manager().Prepare(n.ctx, claim("first", tc.first)); err != nil {
				t.Fatal(err)
			}
			m := n.manager() // another agent, as in a rolling update
			_, err := m.Prepare(n.ctx, claim("second", tc.second))
			if !tc.refused {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var held *prepare.HeldError
			if !errors.As(err, &held) || held.Holder.Name != "first" {
				t.Fatalf("error %v, want a HeldError that names the holder", err)
			}
			if err := m.Unprepare(n.ctx, "first-uid"); err != nil {
				t.Fatal(err)
			}
			if _, err := m.Prepare(n.ctx, claim("second", tc.second)); err != nil {
				t.Errorf("after the first claim was unprepared: %v", err)
			}
		})
	}
}

func TestOneClaimOfABatchDoesNotFailTheOthers(t *testing.T) {
	n := newNode(t)
	n.hardware.broken[gpu1] = errors.New("GPU is lost")
	results := n.manager().PrepareAll(n.ctx, []*resourceapi.ResourceClaim{
		claim("good", "gpu="+gpu0), claim("bad", "gpu="+gpu1), claim("fine", "gpu="+gpu2),
	})
	for uid, wantErr := range map[types.UID]bool{"good-uid": false, "bad-uid": true, "fine-uid": false} {
		if result, ok := results[uid]; !ok || (result.Err != nil) != wantErr {
			t.Errorf("%s: %+v", uid, result)
		}
	}
}

// TestALockThatIsNotGivenUpFailsItsClaimAlone holds a GPU's lock as an agent that hangs would.
func TestALockThatIsNotGivenUpFailsItsClaimAlone(t *testing.T) {
	n := newNode(t)
	n.timeout = 50 * time.Millisecond
	m := n.manager()
	unlock, err := prepare.LockGPU(m, gpu0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Prepare(n.ctx, claim("waits", "gpu="+gpu0)); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), gpu0) {
		t.Errorf("error %v, want one about the time and the lock", err)
	}
	if _, err := m.Prepare(n.ctx, claim("goes", "gpu="+gpu1)); err != nil {
		t.Errorf("claim for another GPU: %v", err)
	}
	unlock()
	if _, err := m.Prepare(n.ctx, claim("waits", "gpu="+gpu0)); err != nil {
		t.Errorf("after the lock was given up: %v", err)
	}
}

func TestACallThatTheKubeletGaveUpLeavesNothing(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	ctx, cancel := context.WithCancel(n.ctx)
	cancel()
	if _, err := m.Prepare(ctx, claim("train", "gpu="+gpu0)); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the context's", err)
	}
	if left := n.files(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestPrepareRepairsTheCDIFile(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"deleted":   os.Remove,
		"truncated": func(path string) error { return os.Truncate(path, 20) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			m := n.manager()
			train := claim("train", "gpu="+gpu0)
			devices, err := m.Prepare(n.ctx, train)
			if err != nil {
				t.Fatal(err)
			}
			files, err := filepath.Glob(filepath.Join(n.cdiDir(), "*"))
			if err != nil || len(files) != 1 {
				t.Fatal(files, err)
			}
			if err := damage(files[0]); err != nil {
				t.Fatal(err)
			}
			if _, err := m.Prepare(n.ctx, train); err != nil {
				t.Fatal(err)
			}
			n.visible(devices)
		})
	}
}

func TestPrepareMakesDeviceNodesAndRepairsThem(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making device nodes needs root: run this test as root")
	}
	n := newNode(t)
	n.mknod = true
	m := n.manager()
	train := claim("train", "gpu="+gpu0)
	for range 2 {
		if _, err := m.Prepare(n.ctx, train); err != nil {
			t.Fatal(err)
		}
		node := filepath.Join(n.root, "dev", "nvidia0")
		info, err := os.Stat(node)
		if err != nil || info.Mode()&os.ModeCharDevice == 0 {
			t.Fatalf("device node: %v, %v", info, err)
		}
		if err := os.Remove(node); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAnUnreadableRecordKeepsItsGPUsHeld(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	if _, err := m.Prepare(n.ctx, claim("lost", "gpu="+gpu0)); err != nil {
		t.Fatal(err)
	}
	records, err := filepath.Glob(filepath.Join(n.claimsDir(), "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range records { // the previous copy too
		if err := os.Truncate(path, 7); err != nil {
			t.Fatal(err)
		}
	}
	m = n.manager()
	recovery, err := m.Recover(n.ctx)
	var corrupt *ledger.CorruptError
	if !errors.As(err, &corrupt) || recovery.Unreadable != 1 {
		t.Errorf("recovery %+v, %v: want one unreadable claim, and why", recovery, err)
	}
	var held *prepare.HeldError
	if _, err := m.Prepare(n.ctx, claim("other", "gpu="+gpu0)); !errors.As(err, &held) || !errors.As(err, &corrupt) {
		t.Errorf("its GPU for another claim: %v, want a HeldError that says why", err)
	}
	if _, err := m.Prepare(n.ctx, claim("other", "gpu="+gpu1)); err != nil {
		t.Errorf("another GPU: %v", err)
	}
	if err := m.Unprepare(n.ctx, "lost-uid"); !errors.As(err, &corrupt) || !strings.Contains(err.Error(), n.claimsDir()) {
		t.Errorf("unprepare: %v, want an error that names the file", err)
	}
}

func TestALostRecordIsTakenFromItsPreviousCopy(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	train := claim("train", "gpu="+gpu0)
	devices, err := m.Prepare(n.ctx, train)
	if err != nil {
		t.Fatal(err)
	}
	records, err := filepath.Glob(filepath.Join(n.claimsDir(), "*.claim"))
	if err != nil || len(records) != 1 {
		t.Fatal(records, err)
	}
	if err := os.Truncate(records[0], 7); err != nil {
		t.Fatal(err)
	}
	// The previous copy says PrepareStarted, but the claim may have been completed, as it was: no roll-back.
	m = n.manager()
	recovery, err := m.Recover(n.ctx)
	if err != nil || recovery.RolledBack != 0 {
		t.Errorf("recovery %+v, %v", recovery, err)
	}
	n.visible(devices)
	if _, err := m.Prepare(n.ctx, train); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(records[0]); err != nil || info.Size() < 100 {
		t.Errorf("the record was not written again: %v, %v", info, err)
	}
	if err := m.Unprepare(n.ctx, train.UID); err != nil {
		t.Fatal(err)
	}
	if left := n.files(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestUnprepareWorksWithoutNVML(t *testing.T) {
	n := newNode(t)
	if _, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0)); err != nil {
		t.Fatal(err)
	}
	n.hardware.gone = true
	if err := n.manager().Unprepare(n.ctx, "train-uid"); err != nil {
		t.Error(err)
	}
	if left := n.files(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestAClaimWithOtherDevicesThanBefore(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); err != nil {
		t.Fatal(err)
	}
	_, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu1))
	if err == nil || !strings.Contains(err.Error(), gpu0) || !strings.Contains(err.Error(), gpu1) {
		t.Errorf("error %v, want one that names both devices", err)
	}
}

// TestAHalfMadeClaimOnOtherGPUsIsUndoneUnderTheirLocks: a claim was left half-made, released, and allocated anew. Another claim may be at
// work on the GPUs that it had.
func TestAHalfMadeClaimOnOtherGPUsIsUndoneUnderTheirLocks(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.timeout = 50 * time.Millisecond
	m := n.manager()
	n.do(&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess})
	records, err := ledger.Open(durable.OS{}, n.claimsDir())
	if err != nil {
		t.Fatal(err)
	}
	uuid := n.hardware.uuid(gpu0)
	if err := records.Put(&ledger.Entry{
		Claim: ledger.Claim{UID: "train-uid", Namespace: "default", Name: "train"}, State: ledger.PrepareStarted,
		Devices: []ledger.Device{{Request: "gpu", Pool: pool, Device: gpu0, GPU: gpu0, UUID: uuid}},
		Undo:    []ledger.Step{{Kind: ledger.StepComputeMode, Target: uuid, GPU: gpu0, Before: string(nvml.ComputeDefault), Want: string(nvml.ComputeExclusiveProcess)}},
	}); err != nil {
		t.Fatal(err)
	}
	unlock, err := prepare.LockGPU(m, gpu0)
	if err != nil {
		t.Fatal(err)
	}
	train := claim("train", "gpu="+gpu1)
	if _, err := m.Prepare(n.ctx, train); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), gpu0) {
		t.Errorf("error %v, want one about the time and the lock of the GPU that the claim had", err)
	}
	if mode := n.gpu(0).ComputeMode; mode != nvmlsim.ComputeExclusiveProcess {
		t.Errorf("compute mode %s: the GPU was changed while another call had its lock", mode)
	}
	unlock()
	if _, err := m.Prepare(n.ctx, train); err != nil {
		t.Fatal(err)
	}
	if mode := n.gpu(0).ComputeMode; mode != nvmlsim.ComputeDefault {
		t.Errorf("compute mode %s: what was half-made is not undone", mode)
	}
}
