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
