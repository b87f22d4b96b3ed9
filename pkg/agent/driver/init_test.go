// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// stuck is a library that does not start before it is released.
type stuck struct {
	nvml.Library
	started atomic.Bool
	release <-chan struct{}
}

func (s *stuck) Init() error {
	if !s.started.Swap(true) {
		<-s.release
	}
	return s.Library.Init()
}

// TestADriverThatDoesNotStartIsSaid: nvmlInit hangs after the driver was loaded anew. No GPU can be had meanwhile, and nothing may look as
// if it could.
func TestADriverThatDoesNotStartIsSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		agent := r.agent(ctx, namingServer())
		h := agent.opts.Hardware
		defer background(ctx, agent.watch)()
		defer background(ctx, agent.publisher.discover)()
		time.Sleep(95 * time.Second) // between two looks, and between two questions
		const gpu = "gpu-0000-00-1b-0"
		if got := published(t, h)[0]; got != gpu {
			t.Fatalf("published %q, want no taint", got)
		}
		release := make(chan struct{})
		r.wrap = func(library nvml.Library) nvml.Library { return &stuck{Library: library, release: release} }
		r.do(&nvmlsim.UnloadDriver{})
		r.do(&nvmlsim.LoadDriver{})
		time.Sleep(5 * time.Minute)
		if got := published(t, h)[0]; got != gpu+" no-answer=:NoSchedule" {
			t.Errorf("while NVML does not start: published %q, want a taint", got)
		}
		close(release)
		time.Sleep(2 * time.Minute)
		if got := published(t, h)[0]; got != gpu {
			t.Errorf("when it has started: published %q, want no taint", got)
		}
	})
}

// TestADriverThatNeverStartsHasNoGPUs: the slices of an earlier agent are withdrawn, as where there is no driver.
func TestADriverThatNeverStartsHasNoGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		release := make(chan struct{})
		r.wrap = func(library nvml.Library) nvml.Library { return &stuck{Library: library, release: release} }
		agent := r.blindAgent(ctx, namingServer())
		defer background(ctx, agent.watch)()
		defer background(ctx, agent.publisher.discover)()
		time.Sleep(5 * time.Minute)
		if resources := agent.publisher.wanted(); resources == nil {
			t.Error("nothing is said of the GPUs")
		} else if slices := resources.Pools["node-1"].Slices; len(slices) != 1 || len(slices[0].Devices) > 0 {
			t.Errorf("wanted: %v, want a pool without devices", slices)
		}
		close(release)
		time.Sleep(2 * time.Minute)
		if got := strings.Join(published(t, agent.opts.Hardware), ", "); !strings.HasPrefix(got, "gpu-0000-00-1b-0, ") {
			t.Errorf("when it has started: published %s", got)
		}
	})
}

// early is a library that was opened before the driver had its GPUs.
type early struct{ nvml.Library }

func (early) DeviceCount() (int, error) { return 0, nil }

// TestASessionThatSeesNoGPUIsOpenedAgain, if the driver has some: such a session never sees them.
func TestASessionThatSeesNoGPUIsOpenedAgain(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRig(t, "dgx-h100")
	r.wrap = func(library nvml.Library) nvml.Library { return early{library} }
	h := r.hardware()
	if node, err := h.Discover(ctx); err == nil || !strings.Contains(err.Error(), "the driver has 8, the first at 0000:1b:00.0") {
		t.Fatalf("%+v, %v, want an error", node, err)
	}
	r.wrap = nil
	node, err := h.Discover(ctx)
	if err != nil || len(node.GPUs) != 8 {
		t.Errorf("%+v, %v, want 8 GPUs", node, err)
	}
	// Where the driver has none that answers there is nothing to wait for.
	bare := newRig(t, "dgx-h100")
	for i := range 8 {
		bare.do(&nvmlsim.RemoveGPU{GPU: fmt.Sprint(i)})
	}
	if node, err := bare.hardware().Discover(ctx); err != nil || len(node.GPUs) != 0 {
		t.Errorf("without GPUs: %+v, %v", node, err)
	}
}
