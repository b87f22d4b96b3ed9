// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/locks"
)

// found answers for devices that are what they are called, and must not be asked for more.
type found struct{ Hardware }

func (found) Begin(string) (done func(), err error) { return func() {}, nil }

func (found) Find(_ context.Context, device string) (Target, error) {
	var t Target
	t.GPU.Name, t.GPU.UUID = device, "GPU-of-"+device
	return t, nil
}

// TestACallWaitsForAllItsLocksTogether: a minute is what calls may wait, whether for one lock or for four. Unprepare does not, as the kubelet
// would give up before what was done is undone.
func TestACallWaitsForAllItsLocksTogether(t *testing.T) {
	const uid = types.UID("train-uid")
	gpus := []string{"gpu-0", "gpu-1", "gpu-2"}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "train", UID: uid}}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	half := &ledger.Entry{Claim: claimRef(claim), State: ledger.PrepareStarted}
	for i, gpu := range gpus {
		request := fmt.Sprint("request-", i)
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{Request: request, Driver: "driver", Pool: "node", Device: gpu})
		half.Devices = append(half.Devices, ledger.Device{Request: request, Pool: "node", Device: gpu, GPU: gpu, UUID: "GPU-of-" + gpu, CDIDeviceIDs: []string{"vendor/class=" + gpu}})
	}
	for name, tc := range map[string]struct {
		call func(context.Context, *Manager) error
		// want is how long it waits, of which half is for the first three locks.
		want time.Duration
	}{
		"prepare":   {func(ctx context.Context, m *Manager) error { _, err := m.Prepare(ctx, claim); return err }, time.Minute},
		"unprepare": {func(ctx context.Context, m *Manager) error { return m.Unprepare(ctx, uid) }, DefaultLockTimeout},
		"recover": {func(ctx context.Context, m *Manager) error {
			var sum Recovery
			return m.reconcileClaim(ctx, uid, true, &sum)
		}, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				root := t.TempDir()
				m := New(Options{Driver: "driver", Pool: "node", StateDir: root, CDIDir: filepath.Join(root, "cdi"), Hardware: found{}, LockTimeout: time.Minute})
				err := m.MakeFolders()
				if err != nil {
					t.Fatal(err)
				}
				if err := m.ledger.Put(half); err != nil {
					t.Fatal(err)
				}
				// Each is free some time after the one before, and the last one never.
				held := func(lock func(*locks.Call) error) *locks.Call {
					l := m.locks.Begin()
					if err := lock(l); err != nil {
						t.Fatal(err)
					}
					return l
				}
				others := []*locks.Call{held(func(l *locks.Call) error { return l.Claim(t.Context(), uid) })}
				for _, gpu := range gpus {
					others = append(others, held(func(l *locks.Call) error { return l.GPUs(t.Context(), gpu) }))
				}
				go func() {
					for _, other := range others[:3] {
						time.Sleep(tc.want / 6)
						other.Unlock()
					}
				}()
				began := time.Now()
				err = tc.call(t.Context(), m)
				if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took != tc.want {
					t.Errorf("after %s: %v; want that the deadline is exceeded, after %s", took, err, tc.want)
				}
				if err == nil || !strings.Contains(err.Error(), tc.want.String()+" after") || !strings.Contains(err.Error(), "gpu-gpu-2.lock") {
					t.Errorf("error %v, want one that says how long all locks were waited for, and which was the last", err)
				}
				// Nothing of it stays locked.
				for _, gpu := range gpus[:2] {
					held(func(l *locks.Call) error { return l.GPUs(t.Context(), gpu) }).Unlock()
				}
				others[3].Unlock()
			})
		})
	}
}

// TestUnprepareEndsWithinTheKubeletsTime: what is waited for and undone leaves time for the rest.
func TestUnprepareEndsWithinTheKubeletsTime(t *testing.T) {
	if rest := KubeletPatience - DefaultLockTimeout - DefaultUndoTimeout; rest < 5*time.Second {
		t.Errorf("unprepare may wait %s and undo for %s: that leaves %s of the kubelet's %s", DefaultLockTimeout, DefaultUndoTimeout, rest, KubeletPatience)
	}
}
