// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// counted is a library that knows how many of its sessions are open.
type counted struct {
	nvml.Library
	mu   sync.Mutex
	open int
}

func (c *counted) Init() error {
	err := c.Library.Init()
	if err == nil {
		c.add(1)
	}
	return err
}

func (c *counted) Shutdown() error { c.add(-1); return c.Library.Shutdown() }

func (c *counted) add(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open += n
}

func (c *counted) sessions() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open
}

// countedHardware is hardware after its first look, and the libraries that it opens, in order.
func countedHardware(ctx context.Context, r *rig) (*Hardware, func(i int) *counted) {
	r.t.Helper()
	var mu sync.Mutex
	var opened []*counted
	h := r.hardware()
	open := h.sessions.open
	h.sessions.open = func() (*nvml.Handle, error) {
		handle, err := open()
		if err == nil {
			library := &counted{Library: handle.Library}
			handle.Library = library
			mu.Lock()
			defer mu.Unlock()
			opened = append(opened, library)
		}
		return handle, err
	}
	if _, err := h.Discover(ctx); err != nil {
		r.t.Fatal(err)
	}
	return h, func(i int) *counted {
		mu.Lock()
		defer mu.Unlock()
		if i >= len(opened) {
			r.t.Fatalf("%d libraries have been opened, want one more", len(opened))
		}
		return opened[i]
	}
}

// reload loads the driver anew, and looks.
func reload(ctx context.Context, r *rig, h *Hardware) error {
	r.do(&nvmlsim.UnloadDriver{})
	r.do(&nvmlsim.LoadDriver{})
	_, err := h.Discover(ctx)
	return err
}

// TestNVMLIsNotClosedUnderAnAct: who is at work keeps the old session, who comes meanwhile waits for the new one.
func TestNVMLIsNotClosedUnderAnAct(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		h, library := countedHardware(ctx, r)
		gpus := h.inventory.node.GPUs
		const work, later = 3 * time.Second, time.Second
		var group sync.WaitGroup
		on := func(i int, f func(nvml.Device) error) {
			group.Go(func() {
				if err := h.On(ctx, gpus[i].Name, gpus[i].UUID, f); err != nil {
					t.Errorf("GPU %d: %v", i, err)
				}
			})
		}
		began := time.Now()
		on(0, func(nvml.Device) error {
			time.Sleep(work)
			if n := library(0).sessions(); n != 1 {
				t.Errorf("the act's session has been closed: %d are open", n)
			}
			return nil
		})
		synctest.Wait()
		group.Go(func() {
			if err := reload(ctx, r, h); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took != work {
				t.Errorf("the driver was reopened after %s, want when the act has ended", took)
			}
		})
		time.Sleep(later)
		on(1, func(d nvml.Device) error {
			if _, err := d.UUID(); err != nil {
				t.Errorf("in the new session: %v", err)
			}
			if took := time.Since(began); took < work || library(1).sessions() != 1 {
				t.Errorf("after %s, with %d sessions open; want the new one", took, library(1).sessions())
			}
			return nil
		})
		group.Go(func() {
			if n, err := h.Processes(ctx, gpus[2].Name); n != 0 || err != nil || time.Since(began) < work {
				t.Errorf("processes: %d, %v after %s", n, err, time.Since(began))
			}
		})
		// Who cannot wait for that long says so.
		soon, cancel := context.WithTimeout(ctx, later)
		defer cancel()
		if err := h.On(soon, gpus[3].Name, gpus[3].UUID, func(nvml.Device) error { return nil }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("an act in a hurry: %v", err)
		}
		group.Wait()
		if a, b := library(0).sessions(), library(1).sessions(); a != 0 || b != 1 {
			t.Errorf("sessions: %d of the old library, %d of the new one", a, b)
		}
	})
}

// TestAnActThatHangsDoesNotKeepTheOldSession from being replaced; it is closed when the call returns.
func TestAnActThatHangsDoesNotKeepTheOldSession(t *testing.T) {
	tests := map[string]func(ctx context.Context, h *Hardware, release <-chan struct{}){
		"in an act": func(ctx context.Context, h *Hardware, release <-chan struct{}) {
			gpu := h.inventory.node.GPUs[0]
			_ = h.On(ctx, gpu.Name, gpu.UUID, func(nvml.Device) error { <-release; return nil })
		},
		"in a count of processes": func(ctx context.Context, h *Hardware, _ <-chan struct{}) {
			_, _ = h.Processes(ctx, h.inventory.node.GPUs[0].Name)
		},
		"in a question about health": func(ctx context.Context, h *Hardware, _ <-chan struct{}) {
			_ = h.monitor.Check(ctx, h.inventory.node.GPUs[0].Name)
		},
		"in a look": func(ctx context.Context, h *Hardware, _ <-chan struct{}) { _, _ = h.Discover(ctx) },
	}
	for name, call := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				r := newRig(t, "dgx-h100")
				h, library := countedHardware(ctx, r)
				release := make(chan struct{})
				if name != "in an act" {
					r.do(&nvmlsim.HangGPU{GPU: "0"})
				}
				soon, cancel := context.WithTimeout(ctx, 20*time.Second)
				defer cancel()
				go call(soon, h, release)
				time.Sleep(15 * time.Second)

				// A GPU is plugged in: the driver has not gone.
				r.do(&nvmlsim.RemoveGPU{GPU: "7"})
				began := time.Now()
				if _, err := h.Discover(ctx); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(began); took < closeTimeout || took > closeTimeout+10*time.Second {
					t.Errorf("another session was opened after %s, want after %s", took, closeTimeout)
				}
				if a, b := library(0).sessions(), library(1).sessions(); a != 1 || b != 1 {
					t.Errorf("while the call hangs: %d sessions of the old library, %d of the new one, want 1 of each", a, b)
				}
				other := h.inventory.node.GPUs[1]
				if err := h.On(ctx, other.Name, other.UUID, func(d nvml.Device) error { _, err := d.UUID(); return err }); err != nil {
					t.Errorf("an act on another GPU: %v", err)
				}
				close(release)
				if name != "in an act" {
					r.do(&nvmlsim.UnhangGPU{GPU: "0"})
				}
				synctest.Wait()
				if a, b := library(0).sessions(), library(1).sessions(); a != 0 || b != 1 {
					t.Errorf("after the call has returned: %d sessions of the old library, %d of the new one", a, b)
				}
			})
		})
	}
}

// TestActsNeverMeetAClosedSession, however often it is opened anew: for the race detector.
func TestActsNeverMeetAClosedSession(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRig(t, "t4")
	h, library := countedHardware(ctx, r)
	stop := make(chan struct{})
	var group sync.WaitGroup
	for _, gpu := range h.inventory.node.GPUs {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				err := h.On(ctx, gpu.Name, gpu.UUID, func(d nvml.Device) error {
					_, err := d.MemoryUsedBytes()
					return err
				})
				if err != nil {
					t.Errorf("an act: %v", err)
					return
				}
				if _, err := h.Processes(ctx, gpu.Name); err != nil {
					t.Errorf("processes: %v", err)
					return
				}
			}
		})
	}
	const times = 50
	for range times {
		h.sessions.mu.Lock()
		h.sessions.stale = true // as if the driver had been loaded anew just now
		h.sessions.mu.Unlock()
		if _, err := h.Discover(ctx); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	group.Wait()
	for i := range times {
		if n := library(i).sessions(); n != 0 {
			t.Errorf("%d sessions of library %d are still open", n, i)
		}
	}
	if n := library(times).sessions(); n != 1 {
		t.Errorf("%d sessions of the last library are open", n)
	}
}

// TestTheLibraryIsTheSameAsLongAsItIsOpen: by it others know whether what they have found with it still counts.
func TestTheLibraryIsTheSameAsLongAsItIsOpen(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	h := newRig(t, "t4").found(ctx)
	if a, b := h.NVML(), h.NVML(); a == nil || a != b {
		t.Errorf("two calls give two libraries: %p, %p", a, b)
	}
}
