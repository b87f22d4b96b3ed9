// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// soon is far more than what must not wait takes on a slow machine, and less than what it must not wait for.
const soon = 30 * time.Second

// returned is what f returns, which must be soon.
func returned(t *testing.T, what string, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(soon):
		t.Fatalf("%s has not come to an end", what)
		return nil
	}
}

// becomes waits for a condition.
func becomes(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(soon); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not %s", what)
		}
	}
}

// hungSlicer does not return once it hangs, whoever gives up: its process is one that the kernel does not end.
type hungSlicer struct {
	sharing.TimeSlicer
	hangs   atomic.Bool
	release chan struct{}
	calls   atomic.Int32
}

func (s *hungSlicer) SetTimeSlice(ctx context.Context, gpu string, interval config.Interval) error {
	if s.hangs.Load() {
		s.calls.Add(1)
		<-s.release
	}
	return s.TimeSlicer.SetTimeSlice(ctx, gpu, interval)
}

// TestAProgramThatDoesNotEndHoldsUpItsGPUAlone: unprepare ends, and no second program is started as long as there is the first.
func TestAProgramThatDoesNotEndHoldsUpItsGPUAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNodeOf(t, twoGPUs)
		n.options.GPUTimeout = time.Second
		slicer := &hungSlicer{TimeSlicer: n.tools.TimeSlicer, release: make(chan struct{})}
		n.tools.TimeSlicer = slicer
		m := n.manager()
		c := withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "TimeSlicing", `,"timeSlicingConfig":{"interval":"Long"}`))
		if _, err := m.Prepare(n.ctx, c); err != nil {
			t.Fatal(err)
		}
		slicer.hangs.Store(true)
		if err := returned(t, "unprepare", func() error { return m.Unprepare(n.ctx, c.UID) }); err != nil {
			t.Fatal(err)
		}
		if err := returned(t, "reconcile", func() error {
			recovery, err := m.Reconcile(n.ctx)
			if recovery.Quarantined != 1 {
				t.Errorf("recovery %+v, want the GPU in quarantine", recovery)
			}
			return err
		}); err != nil {
			t.Error(err)
		}
		if calls := slicer.calls.Load(); calls != 1 {
			t.Errorf("%d programs were started, of which none has ended", calls)
		}
		if _, err := m.Prepare(n.ctx, claim("other", "gpu="+gpu1)); err != nil {
			t.Errorf("the other GPU: %v", err)
		}
		close(slicer.release)
		becomes(t, "out of quarantine", func() bool {
			recovery, err := m.Reconcile(n.ctx)
			return err == nil && recovery.Quarantined == 0
		})
		if got := n.gpu(0).TimeSlice; got != "" {
			t.Errorf("time slice %q is left", got)
		}
	})
}

// namedSlicer notes of which GPUs time slices are set.
type namedSlicer struct {
	sharing.TimeSlicer
	mu   sync.Mutex
	gpus map[string]bool
}

func (s *namedSlicer) SetTimeSlice(ctx context.Context, gpu string, interval config.Interval) error {
	s.mu.Lock()
	s.gpus[gpu] = true
	s.mu.Unlock()
	return s.TimeSlicer.SetTimeSlice(ctx, gpu, interval)
}

// TestATimeSliceIsSetByAddress: nvidia-smi finds no GPU by its UUID any more when one has fallen off the bus.
func TestATimeSliceIsSetByAddress(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	slicer := &namedSlicer{TimeSlicer: n.tools.TimeSlicer, gpus: map[string]bool{}}
	n.tools.TimeSlicer = slicer
	m := n.manager()
	want := map[string]bool{}
	for i, gpu := range []string{gpu0, gpu1} {
		c := withConfig(claim("train-"+gpu, result("gpu="+gpu)), driverName, sharingConfig("GpuConfig", "TimeSlicing", `,"timeSlicingConfig":{"interval":"Long"}`))
		if _, err := m.Prepare(n.ctx, c); err != nil {
			t.Fatal(err)
		}
		if got := n.gpu(i).TimeSlice; got != nvmlsim.TimeSliceLong {
			t.Errorf("time slice %q of GPU %d", got, i)
		}
		if err := m.Unprepare(n.ctx, c.UID); err != nil {
			t.Fatal(err)
		}
		want[path.Base(n.hardware.machine.Profile().GPUs[i].PCI)] = true
	}
	if diff := cmp.Diff(want, slicer.gpus); diff != "" {
		t.Errorf("set of (-want +got):\n%s", diff)
	}
}

// slowBackend is one that waits for something until its time is over, and knows for what.
type slowBackend struct{ cdi.Backend }

func (slowBackend) CommonEdits(ctx context.Context) (*specs.ContainerEdits, error) {
	<-ctx.Done()
	return nil, errors.New("modprobe has not ended yet")
}

// TestWhatTheDriverWaitsForIsSaid, rather than that it does not answer.
func TestWhatTheDriverWaitsForIsSaid(t *testing.T) {
	n := newNode(t)
	n.options.GPUTimeout = time.Second
	n.backend = func(b cdi.Backend) cdi.Backend { return slowBackend{b} }
	_, err := n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0))
	if err == nil || !strings.Contains(err.Error(), "modprobe has not ended yet") {
		t.Errorf("%v, want an error that says what is waited for", err)
	}
}

// hungBackend does not return while it hangs.
type hungBackend struct {
	cdi.Backend
	common, gpu chan struct{}
}

func (b *hungBackend) CommonEdits(ctx context.Context) (*specs.ContainerEdits, error) {
	<-b.common
	return b.Backend.CommonEdits(ctx)
}

func (b *hungBackend) GPUEdits(ctx context.Context, gpu cdi.GPU) (*specs.ContainerEdits, error) {
	<-b.gpu
	return b.Backend.GPUEdits(ctx, gpu)
}

// TestWhatContainersNeedIsNotWaitedForForEver: who looks it up asks NVML, which may not answer. The claim can be unprepared all the same.
func TestWhatContainersNeedIsNotWaitedForForEver(t *testing.T) {
	for _, what := range []string{"what all containers need", "what the GPU is to them"} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				free, hangs := make(chan struct{}), make(chan struct{})
				close(free)
				defer close(hangs)
				hung := &hungBackend{common: hangs, gpu: free}
				if what == "what the GPU is to them" {
					hung.common, hung.gpu = free, hangs
				}
				n := newNodeOf(t, twoGPUs)
				n.backend = func(b cdi.Backend) cdi.Backend { hung.Backend = b; return hung }
				m := n.manager()
				if err := returned(t, "prepare", func() error { _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); return err }); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "train") {
					t.Errorf("prepare: %v; want that the claim has run out of time", err)
				}
				if err := returned(t, "unprepare", func() error { return m.Unprepare(n.ctx, "train-uid") }); err != nil {
					t.Error(err)
				}
				if left := n.files(); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
			})
		})
	}
}

// TestNobodyWaitsForAnothersLock: what is put back, and taken out of quarantine, is so while another claim or GPU is held.
func TestNobodyWaitsForAnothersLock(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.timeout = time.Hour
	m := n.manager()
	for name, gpu := range map[string]string{"a": gpu0, "b": gpu1} {
		if _, err := m.Prepare(n.ctx, claim(name, result("gpu="+gpu))); err != nil {
			t.Fatal(err)
		}
	}
	reconcile := func(done chan<- error) { _, err := m.Reconcile(n.ctx); done <- err }
	var unlock func()
	ends := func(done <-chan error) {
		t.Helper()
		unlock()
		if err := returned(t, "reconcile", func() error { return <-done }); err != nil {
			t.Error(err)
		}
	}

	// The first of the claims is held, and the file of the other one is gone.
	unlock, err := prepare.LockClaim(m, "a-uid")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(n.cdiDir(), "*b-uid*"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	if err := os.Remove(files[0]); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go reconcile(done)
	becomes(t, "written again", func() bool { _, err := os.Stat(files[0]); return err == nil })
	ends(done)

	// The first of the GPUs is held, and both are in quarantine.
	n.hardware.broken[gpu0], n.hardware.broken[gpu1] = nvml.ErrGPULost, nvml.ErrGPULost
	if err := errors.Join(m.Unprepare(n.ctx, "a-uid"), m.Unprepare(n.ctx, "b-uid")); err != nil {
		t.Fatal(err)
	}
	clear(n.hardware.broken)
	if unlock, err = prepare.LockGPU(m, gpu0); err != nil {
		t.Fatal(err)
	}
	go reconcile(done)
	becomes(t, "out of quarantine", func() bool {
		list, err := m.Quarantined()
		return err == nil && len(list) == 1 && list[0].GPU == gpu0
	})
	ends(done)
	if list, err := m.Quarantined(); err != nil || len(list) > 0 {
		t.Errorf("in quarantine: %+v, %v", list, err)
	}
}

// TestAnEarlierDaemonOfTheClaimIsNotTakenForItsNewOne: it serves other GPUs, and whoever takes those out of quarantine ends it.
func TestAnEarlierDaemonOfTheClaimIsNotTakenForItsNewOne(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	daemons := &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
	n.tools.Daemons = daemons
	m := n.manager()
	on := func(gpu string) error {
		_, err := m.Prepare(n.ctx, withConfig(claim("train", result("gpu="+gpu)), driverName, sharingConfig("GpuConfig", "MPS", "")))
		return err
	}
	if err := on(gpu0); err != nil {
		t.Fatal(err)
	}
	if err := m.Unprepare(n.ctx, "train-uid"); err != nil {
		t.Fatal(err)
	}
	// The claim was allocated anew.
	var quarantined *prepare.QuarantinedError
	if err := on(gpu1); !errors.As(err, &quarantined) || quarantined.GPU != gpu0 || !strings.Contains(err.Error(), "does not end") {
		t.Errorf("prepare: %v, want that the daemon of before has not ended", err)
	}
	// One that needs no daemon is not concerned.
	if _, err := m.Prepare(n.ctx, claim("train", result("gpu="+gpu1))); err != nil {
		t.Error(err)
	}
	if err := m.Unprepare(n.ctx, "train-uid"); err != nil {
		t.Fatal(err)
	}
	daemons.stuck = false
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 0 {
		t.Fatalf("recovery %+v, %v", recovery, err)
	}
	if err := on(gpu1); err != nil {
		t.Fatal(err)
	}
	if running := n.hardware.machine.State().Daemons; len(running) != 1 || len(running[0].GPUs) != 1 || running[0].GPUs[0] != n.hardware.uuid(gpu1) {
		t.Errorf("daemons %+v, want one for %s", running, gpu1)
	}
}
