// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// TestOneThingAtATimeIsDoneToAGPU: what hangs is given up, what comes later waits for it, and other GPUs do not.
func TestOneThingAtATimeIsDoneToAGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		h := newRig(t, "dgx-h100").found(ctx)
		_, gpu, _, err := h.find(first)
		if err != nil {
			t.Fatal(err)
		}
		release := make(chan struct{})
		soon, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		hung := func(nvml.Device) error { <-release; return nil }
		if err := h.On(soon, first, gpu.UUID, hung); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a call that hangs: %v, want to be given up", err)
		}
		later, cancelLater := context.WithTimeout(ctx, time.Second)
		defer cancelLater()
		done := false
		if err := h.On(later, first, gpu.UUID, func(nvml.Device) error { done = true; return nil }); !errors.Is(err, context.DeadlineExceeded) || done {
			t.Errorf("a call after it: %v, done %v, want to wait in vain", err, done)
		}
		other := h.inventory.node.GPUs[1]
		if err := h.On(ctx, other.Name, other.UUID, func(d nvml.Device) error {
			if uuid, err := d.UUID(); err != nil || uuid != other.UUID {
				t.Errorf("it is %s, %v", uuid, err)
			}
			return nil
		}); err != nil {
			t.Errorf("another GPU: %v", err)
		}

		close(release)
		if err := h.On(ctx, first, gpu.UUID, func(nvml.Device) error { return nil }); err != nil {
			t.Errorf("after it has returned: %v", err)
		}
	})
}

// TestAReadingIsInNobodysWay: while one hangs things are done to its GPU, it is read again, and the session is replaced.
func TestAReadingIsInNobodysWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		h := r.found(ctx)
		reader := NewReader(h)
		gpus := reader.Node().GPUs
		release, done := make(chan struct{}), make(chan error)
		go func() { done <- reader.Read(ctx, &gpus[0], func(nvml.Device) error { <-release; return nil }) }()
		synctest.Wait()
		works := func(when string) {
			t.Helper()
			for _, gpu := range gpus[:2] {
				asked := func(d nvml.Device) error {
					if uuid, err := d.UUID(); err != nil || uuid != gpu.UUID {
						t.Errorf("%s: it is %s, %v", when, uuid, err)
					}
					return nil
				}
				if err := errors.Join(h.On(ctx, gpu.Name, gpu.UUID, asked), reader.Read(ctx, &gpu, asked)); err != nil {
					t.Errorf("%s: %v", when, err)
				}
			}
		}
		works("while a reading hangs")
		began := time.Now()
		if err := h.Apart(ctx, func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > closeTimeout+time.Second {
			t.Errorf("the session is replaced after %s", took)
		}
		works("in the next session")
		close(release)
		if err := <-done; err != nil {
			t.Error(err)
		}
		other := gpus[0]
		other.UUID = gpus[1].UUID
		if err := reader.Read(ctx, &other, func(nvml.Device) error { return nil }); err == nil {
			t.Error("another GPU in the place is read")
		}
	})
}
