// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// bench is a simulated machine with a monitor on two of its GPUs, "a" and "b".
type bench struct {
	t       *testing.T
	machine *nvmlsim.Machine
	library nvml.Library
	monitor *Monitor

	mu           sync.Mutex
	reconfigured []string
}

func newBench(t *testing.T, dir string) *bench {
	t.Helper()
	profile, err := nvmlsim.LoadProfile("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, machine: nvmlsim.NewMachine(profile, "node-1")}
	b.open(dir)
	return b
}

// open starts over with a new monitor, as a new agent does.
func (b *bench) open(dir string) {
	b.t.Helper()
	b.library = nvml.Adapt(b.machine.NVML(), "sim")
	if err := b.library.Init(); err != nil {
		b.t.Fatal(err)
	}
	b.monitor = NewMonitor(Options{Clock: clock.RealClock{}, Dir: dir, Reconfigured: func(reason string) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.reconfigured = append(b.reconfigured, reason)
	}})
	if err := b.monitor.Watch(b.machine.BootID(), b.targets(), false); err != nil {
		b.t.Error(err)
	}
}

func (b *bench) targets() []Target {
	var targets []Target
	for i, name := range []string{"a", "b"} {
		device := func() (nvml.Device, error) { return b.library.Device(i) }
		targets = append(targets, Target{
			Name:    name,
			Session: b.library,
			Ask: func() (nvml.Readings, error) {
				d, err := device()
				if err != nil {
					return nvml.Readings{}, err
				}
				return d.Readings()
			},
			Listen: func() (nvml.Watch, error) {
				d, err := device()
				if err != nil {
					return nil, err
				}
				return d.Watch()
			},
		})
	}
	return targets
}

// run runs the monitor until stop.
func (b *bench) run(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); b.monitor.Run(ctx) }()
	return func() {
		cancel()
		<-done
		time.Sleep(listenStep) // the waits for events that are under way
	}
}

func (b *bench) do(c nvmlsim.Command) {
	b.t.Helper()
	if _, err := b.machine.Do(c); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) want(name, want string) {
	b.t.Helper()
	synctest.Wait()
	if got := told(b.monitor.Of(name, nil)); got != want {
		b.t.Errorf("GPU %s at %s: %q, want %q", name, time.Now().Format(time.TimeOnly), got, want)
	}
}

func TestEventsAreToldAtOnceAndConditionsByPolling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		b := newBench(t, "")
		if all, _ := b.monitor.Known(); all {
			t.Error("all GPUs are known before one was asked")
		}
		stop := b.run(ctx)
		b.want("a", "Healthy")
		_, changed := b.monitor.Known()

		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 31})
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		b.want("a", "Unhealthy xid=119")
		b.want("b", "Healthy")
		select {
		case <-changed:
		default:
			t.Error("who waits for a change was not woken")
		}

		b.do(&nvmlsim.SetTemperature{GPU: "1", Celsius: new(uint32(95))})
		time.Sleep(rules[Temperature].set + 2*PollInterval)
		b.want("b", "Unhealthy temperature")
		b.do(&nvmlsim.SetTemperature{GPU: "1"})
		time.Sleep(rules[Temperature].clear + 2*PollInterval)
		b.want("b", "Healthy")

		time.Sleep(rules[XID].clear)
		b.want("a", "Healthy")

		// Lost: the listener of the GPU ends, and begins again when it is back.
		b.do(&nvmlsim.LoseGPU{GPU: "0"})
		b.want("a", "Healthy")
		time.Sleep(2 * PollInterval)
		b.want("a", "Unhealthy gpu-lost")
		time.Sleep(time.Hour)
		b.want("a", "Unhealthy gpu-lost")
		b.do(&nvmlsim.RestoreGPU{GPU: "0"})
		time.Sleep(time.Minute)
		b.want("a", "Healthy")
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 74})
		b.want("a", "Unhealthy xid=74")
		stop()
	})
}

// TestAnEventAsksItsGPUAlone: a program that is started again and again has one each time.
func TestAnEventAsksItsGPUAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		b := newBench(t, "")
		targets := b.targets()
		asked := make([]atomic.Int32, len(targets))
		for i := range targets {
			ask := targets[i].Ask
			targets[i].Session = i
			targets[i].Ask = func() (nvml.Readings, error) { asked[i].Add(1); return ask() }
		}
		if err := b.monitor.Watch(b.machine.BootID(), targets, false); err != nil {
			t.Fatal(err)
		}
		stop := b.run(ctx)
		time.Sleep(PollInterval / 2)
		was := []int32{asked[0].Load(), asked[1].Load()}
		for range 20 {
			b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 31})
			b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 43})
			synctest.Wait()
		}
		if a, b := asked[0].Load()-was[0], asked[1].Load()-was[1]; a < 20 || b > 0 {
			t.Errorf("after 40 events of one GPU it was asked %d times, and the other one %d times; want at least 20, and none", a, b)
		}
		stop()
	})
}

// TestAReadingThatFailsIsToldAndNotJudged: once, and again when another one fails.
// TestARecoveryActionIsReadWhenItChanges: XID 154 says that it has, and the readings which. An answer that was under way then may be of before.
func TestARecoveryActionIsReadWhenItChanges(t *testing.T) {
	for name, slow := range map[string]time.Duration{"nobody asks": 0, "a question is under way": 3 * time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				b := newBench(t, "")
				targets := b.targets()
				for i := range targets {
					ask := targets[i].Ask
					targets[i].Ask = func() (nvml.Readings, error) {
						readings, err := ask()
						time.Sleep(slow)
						return readings, err
					}
				}
				b.monitor = NewMonitor(Options{Clock: clock.RealClock{}})
				if err := b.monitor.Watch(b.machine.BootID(), targets, false); err != nil {
					t.Fatal(err)
				}
				stop := b.run(ctx)
				// Just after a poll has read.
				time.Sleep(PollInterval + time.Second)
				for _, action := range []nvmlsim.Recovery{nvmlsim.RecoveryReset, nvmlsim.RecoveryReboot} {
					b.do(&nvmlsim.SetRecovery{GPU: "0", Action: action})
					b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 154})
					time.Sleep(2 * slow)
					b.want("a", "Unhealthy recovery-action="+string(action))
					b.want("b", "Healthy")
				}
				stop()
			})
		})
	}
}

func TestAReadingThatFailsIsToldAndNotJudged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		b := newBench(t, "")
		var odd atomic.Pointer[string]
		ask := func() (nvml.Readings, error) {
			r := well()
			if failing := odd.Load(); failing != nil && *failing != "" {
				r.Odd = errors.New(*failing)
			}
			return r, nil
		}
		listen := func() (nvml.Watch, error) { return nil, nvml.ErrNotSupported }
		if err := b.monitor.Watch("boot-1", []Target{{Name: "a", Session: 1, Ask: ask, Listen: listen}}, false); err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() { defer close(done); b.monitor.Run(ctx) }()
		for _, failing := range []string{"", "no fan", "no fan", "", "no fan", "no power"} {
			odd.Store(&failing)
			time.Sleep(PollInterval)
			b.want("a", "Healthy")
		}
		time.Sleep(PollInterval)
		cancel()
		<-done
		said := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
		if fans, powers := strings.Count(said, "no fan"), strings.Count(said, "no power"); fans != 2 || powers != 1 {
			t.Errorf("told %d times of the fan and %d times of the power, want 2 and 1:\n%s", fans, powers, said)
		}
	})
}

// TestAHungGPUCostsNobodyElse: a call into NVML cannot be cancelled.
func TestAHungGPUCostsNobodyElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		b := newBench(t, "")
		stop := b.run(ctx)
		b.want("a", "Healthy")
		b.do(&nvmlsim.HangGPU{GPU: "0"})
		time.Sleep(PollInterval + Deadline + time.Second)
		b.want("a", "Healthy")
		time.Sleep(rules[Hung].set)
		b.want("a", "Unhealthy hung")

		began := time.Now()
		if err := b.monitor.Check(ctx, "b"); err != nil || time.Since(began) > 0 {
			t.Errorf("the other GPU: %v after %s", err, time.Since(began))
		}
		for range 3 {
			if err := b.monitor.Check(ctx, "a"); err == nil || time.Since(began) > 0 {
				t.Errorf("the hung GPU: %v after %s, want an error at once", err, time.Since(began))
			}
		}
		b.do(&nvmlsim.RaiseXID{GPU: "1", Code: 74})
		b.want("b", "Unhealthy xid=74")

		quick, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if b.monitor.Pause(quick) {
			t.Error("nothing is said to be under way, while a call hangs")
		}
		b.do(&nvmlsim.UnhangGPU{GPU: "0"})
		synctest.Wait()
		if !b.monitor.Pause(ctx) {
			t.Error("a call is said to be under way after all have returned")
		}
		if err := b.monitor.Check(ctx, "a"); !errors.Is(err, ErrPaused) {
			t.Errorf("a question meanwhile: %v", err)
		}
		if err := b.monitor.Watch(b.machine.BootID(), b.targets(), false); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		b.want("a", "Healthy")
		stop()
	})
}

func TestTheSuccessorKnowsWhatTheAgentKnew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "health")
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		b := newBench(t, dir)
		stop := b.run(ctx)
		b.want("a", "Healthy")
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		b.want("a", "Unhealthy xid=119")
		if left, err := os.ReadDir(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("written by an agent that does not lead: %v, %v", left, err)
		}
		b.monitor.Lead(ctx)
		stop()

		b.open(dir)
		b.want("a", "Unhealthy xid=119")
		b.want("b", "Unknown")

		// The record is unreadable: it is said, and the GPU is judged by what is seen.
		if err := os.WriteFile(filepath.Join(dir, "a.json"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		fresh := NewMonitor(Options{Clock: clock.RealClock{}, Dir: dir})
		if err := fresh.Watch(b.machine.BootID(), b.targets(), false); err == nil {
			t.Error("a broken record is read without an error")
		}
		if got := told(fresh.Of("a", nil)); got != "Unknown" {
			t.Errorf("with a broken record: %q", got)
		}
	})
}

func TestTheDriverIsLoadedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		b := newBench(t, "")
		stop := b.run(ctx)
		b.want("a", "Healthy")
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		b.do(&nvmlsim.UnloadDriver{})
		time.Sleep(PollInterval)
		synctest.Wait()
		b.mu.Lock()
		if len(b.reconfigured) == 0 {
			t.Error("nobody was told that the driver has gone")
		}
		b.mu.Unlock()
		if !b.monitor.Pause(ctx) {
			t.Error("calls are under way without a driver")
		}
		for range 4 {
			time.Sleep(PollInterval)
			b.monitor.Fail(ctx, nvml.ErrDriverNotLoaded)
		}
		b.want("b", "Unhealthy no-driver")
		b.do(&nvmlsim.LoadDriver{})
		if err := errors.Join(b.library.Shutdown(), b.library.Init()); err != nil {
			t.Fatal(err)
		}
		if err := b.monitor.Watch(b.machine.BootID(), b.targets(), true); err != nil {
			t.Error(err)
		}
		b.want("a", "Healthy")
		b.want("b", "Healthy")
		b.do(&nvmlsim.RaiseXID{GPU: "1", Code: 119})
		b.want("b", "Unhealthy xid=119")
		stop()
	})
}

// TestWhoIsWatched: what is known of a GPU stays as long as it is watched, and what was latched until the machine starts anew.
func TestWhoIsWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		b := newBench(t, "")
		stop := b.run(ctx)
		b.want("a", "Healthy")
		b.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		b.do(&nvmlsim.RaiseXID{GPU: "1", Code: 119})
		b.want("b", "Unhealthy xid=119")
		watch := func(bootID string, targets []Target) {
			t.Helper()
			if err := b.monitor.Watch(bootID, targets, false); err != nil {
				t.Error(err)
			}
		}
		watch(b.machine.BootID(), b.targets())
		b.want("a", "Unhealthy xid=119")

		watch(b.machine.BootID(), b.targets()[:1])
		b.want("a", "Unhealthy xid=119")
		b.want("b", "Unknown")
		if got := b.monitor.Whole("b"); got.Status != Unknown {
			t.Errorf("a GPU that is not watched: %v", got)
		}
		if err := b.monitor.Check(ctx, "b"); err == nil {
			t.Error("a GPU that is not watched can be asked")
		}
		if r := b.monitor.Readings("b"); r.TemperatureC != nil {
			t.Errorf("readings of a GPU that is not watched: %v", r)
		}

		watch("another boot", b.targets())
		time.Sleep(time.Second)
		b.want("a", "Healthy")
		b.want("b", "Healthy")
		stop()
	})
}

// TestWhatHappensToOneMIGDeviceIsToldAndKept: others are told of the fault once, and a successor knows whose the memory errors are.
func TestWhatHappensToOneMIGDeviceIsToldAndKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "health")
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		b := newBench(t, dir)
		told := map[string]int{}
		var mu sync.Mutex
		b.monitor.opts.Changed = func(_ context.Context, gpu string, was, is Verdict) {
			mu.Lock()
			defer mu.Unlock()
			told[gpu+" "+string(was.Status)+"-"+string(is.Status)]++
		}
		stop := b.run(ctx)
		b.monitor.Lead(ctx)
		b.want("a", "Healthy")
		b.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		result, err := b.machine.Do(&nvmlsim.CreateMIG{GPU: "0", Profile: "1g.10gb"})
		if err != nil {
			t.Fatal(err)
		}
		sick := result.MIG.Instance
		synctest.Wait()
		b.mu.Lock()
		if len(b.reconfigured) == 0 || b.reconfigured[0] != "the partitions of a have changed" {
			t.Errorf("told of the new partition: %q", b.reconfigured)
		}
		b.mu.Unlock()
		b.do(&nvmlsim.CountECC{GPU: "0", ECCCounts: nvmlsim.ECCCounts{Uncorrected: 2}, Instance: &sick})
		whole := func(what string) {
			t.Helper()
			synctest.Wait()
			if got := b.monitor.Whole("a"); got.Status != Healthy {
				t.Errorf("%s: the whole GPU: %v", what, got)
			}
			if got := b.monitor.Of("a", &nvml.Instance{GPU: sick.GPU, Compute: sick.Compute}); got.Status != Unhealthy {
				t.Errorf("%s: the MIG device: %v", what, got)
			}
		}
		whole("told")
		time.Sleep(time.Minute)
		whole("counted")
		mu.Lock()
		if told["a Healthy-Unhealthy"] != 1 || len(told) != 3 { // the others are from Unknown
			t.Errorf("others were told %v", told)
		}
		mu.Unlock()
		stop()
		b.open(dir)
		stop = b.run(ctx)
		time.Sleep(time.Minute)
		whole("a successor")
		b.monitor.Partitioned(ctx, "a", time.Now(), nil)
		b.monitor.Ended(ctx, "nobody", nvml.Instance{})
		b.want("a", "Healthy")
		stop()
	})
}

// TestQuestionsBeginWhileEarlierOnesAreWaitedFor: who opens NVML anew gives up waiting when a call hangs, and goes on.
func TestQuestionsBeginWhileEarlierOnesAreWaitedFor(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	given, giveUp := context.WithCancel(ctx)
	giveUp()
	m := NewMonitor(Options{Clock: clock.RealClock{}})
	watch := func(session int) {
		target := Target{Name: "a", Session: session, Ask: func() (nvml.Readings, error) { return nvml.Readings{}, nil }}
		if err := m.Watch("boot", []Target{target}, false); err != nil {
			t.Fatal(err)
		}
	}
	watch(0)
	var group sync.WaitGroup
	defer group.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range 4 {
		group.Go(func() {
			for ctx.Err() == nil {
				_ = m.Check(ctx, "a") // it may be paused just now
			}
		})
	}
	for session := range 5_000 {
		m.Pause(given)
		watch(session)
	}
}

// TestAPauseSaysNothingOfTheGPU: NVML is closed between the question and its answer, for a moment or as long as the driver is released.
func TestAPauseSaysNothingOfTheGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		m := NewMonitor(Options{Clock: clock.RealClock{}})
		paused := Target{
			Name:   "gpu-0",
			Ask:    func() (nvml.Readings, error) { return nvml.Readings{}, fmt.Errorf("gpu-0: %w", ErrPaused) },
			Listen: func() (nvml.Watch, error) { return nil, nvml.ErrNotSupported },
		}
		if err := m.Watch("boot", []Target{paused}, false); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			if err := m.Check(ctx, "gpu-0"); !errors.Is(err, ErrPaused) {
				t.Errorf("asked during a pause: %v", err)
			}
			time.Sleep(PollInterval)
		}
		if v := m.Of("gpu-0", nil); v.Status != Unknown || len(v.Faults) > 0 || !v.Asked.IsZero() {
			t.Errorf("what is known of the GPU: %+v", v)
		}
	})
}
