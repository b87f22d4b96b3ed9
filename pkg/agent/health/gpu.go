// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// gpu is one GPU's worker: everything that is asked about it goes through here, one question at a time.
type gpu struct {
	monitor *Monitor
	name    string

	// saving is held while the record is written, so that the newest state is written last.
	saving sync.Mutex

	mu     sync.Mutex
	state  State
	target *Target       // nil while it must not be asked
	stop   chan struct{} // closed when target is replaced
	// listening tells that there is a listener for target.
	listening bool
	call      *call
	// again: something has happened since that question was put, so another one follows.
	again bool
	// calls into NVML are under way, and quiet is closed when none is any more; nil before the first one. It is no WaitGroup, which must not
	// be added to while somebody who has given up still waits for it.
	calls int
	quiet chan struct{}
	// odd is what was last said of readings that failed.
	odd string
}

// call is a question to NVML that is under way.
type call struct {
	began time.Time
	// err may be read once done is closed.
	err  error
	done chan struct{}
}

func (g *gpu) watch(target Target, renewed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if renewed {
		g.state.Renewed()
	}
	g.state.policy = g.monitor.opts.Policy
	g.state.Is(target.UUID, target.Model)
	if g.target != nil && g.target.Session == target.Session {
		return
	}
	g.unwatchLocked()
	g.target, g.stop, g.listening = &target, make(chan struct{}), false
}

// unwatch ends the listener, and questions that have not begun.
func (g *gpu) unwatch() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unwatchLocked()
}

func (g *gpu) unwatchLocked() {
	if g.target != nil {
		close(g.stop)
		g.target = nil
	}
}

// ErrPaused means that NVML is being opened anew, and no GPU can be asked meanwhile.
var ErrPaused = errors.New("NVML is being opened anew")

// ask asks about the GPU and enters the answer in its state. Who asks while a question is under way joins it: a call that hangs costs one
// thread, and blocks nothing but its GPU.
func (g *gpu) ask(ctx context.Context) error {
	c := g.join(ctx)
	if c == nil {
		return ErrPaused
	}
	clock := g.monitor.opts.Clock
	late := clock.NewTimer(Deadline - clock.Since(c.began))
	defer late.Stop()
	select {
	case <-c.done:
		return c.err
	case <-late.C():
		g.observe(ctx, func(now time.Time, s *State) { s.Silent(now, c.began) })
		return fmt.Errorf("NVML has not answered for %s since %s", g.name, c.began.UTC().Format(time.RFC3339))
	case <-ctx.Done():
		return fmt.Errorf("wait for NVML to answer for %s: %w", g.name, ctx.Err())
	}
}

// join returns the question that is under way, or puts one; nil while none may be.
func (g *gpu) join(ctx context.Context) *call {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.call != nil {
		return g.call
	}
	if g.target == nil {
		return nil
	}
	c := &call{began: g.monitor.opts.Clock.Now(), done: make(chan struct{})}
	g.call = c
	ask := g.target.Ask
	ctx = context.WithoutCancel(ctx) // the answer counts, whoever asked
	g.goLocked(func() {
		defer close(c.done)
		var readings nvml.Readings
		readings, c.err = ask()
		g.mu.Lock()
		again := g.again
		g.call, g.again = nil, false
		g.mu.Unlock()
		g.tellOdd(ctx, readings.Odd)
		if !errors.Is(c.err, ErrPaused) { // which says nothing of the GPU
			g.observe(ctx, func(now time.Time, s *State) {
				if c.err != nil {
					s.Failed(now, c.err)
				} else {
					s.Answered(now, readings)
				}
			})
		}
		if errors.Is(c.err, nvml.ErrNoSession) || errors.Is(c.err, nvml.ErrDriverNotLoaded) {
			g.monitor.opts.Reconfigured("the driver has gone")
		}
		if again {
			_ = g.join(ctx)
		}
	})
	return c
}

// renew puts a question whose answer is newer than what has happened until now. It does not wait.
func (g *gpu) renew(ctx context.Context) {
	g.mu.Lock()
	g.again = g.call != nil
	underWay := g.again
	g.mu.Unlock()
	if !underWay {
		_ = g.join(ctx)
	}
}

// tellOdd says when other readings fail than before. A GPU that answers else is not judged by them.
func (g *gpu) tellOdd(ctx context.Context, odd error) {
	text := ""
	if odd != nil {
		text = odd.Error()
	}
	g.mu.Lock()
	was := g.odd
	g.odd = text
	g.mu.Unlock()
	if text != was && text != "" {
		klog.FromContext(ctx).Info("The GPU answers, but does not give some of its readings: nothing is concluded from them",
			"device", g.name, "reason", text)
	}
}

// startListening returns the target to listen to, if nobody does.
func (g *gpu) startListening() (target Target, stop <-chan struct{}, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.target == nil || g.listening {
		return Target{}, nil, false
	}
	g.listening = true
	return *g.target, g.stop, true
}

// listen enters events until stop is closed or ctx ends. Calls into NVML that are under way then end by themselves.
func (g *gpu) listen(ctx context.Context, target Target, stop <-chan struct{}) {
	logger := klog.FromContext(ctx)
	said := ""
	for {
		ended := make(chan error, 1)
		if !g.begin(stop, func() { ended <- g.listenOnce(ctx, target, stop) }) {
			return
		}
		var err error
		select {
		case <-ctx.Done():
			return
		case <-stop:
			return
		case err = <-ended:
		}
		if errors.Is(err, nvml.ErrNotSupported) {
			logger.Info("The GPU tells no events, it is only polled", "device", target.Name, "reason", err.Error())
			return
		}
		if err != nil && err.Error() != said {
			said = err.Error()
			logger.Info("Events of the GPU are not heard now, trying on", "device", target.Name, "reason", said)
		}
		retry := g.monitor.opts.Clock.NewTimer(PollInterval)
		select {
		case <-ctx.Done():
		case <-stop:
		case <-retry.C():
		}
		retry.Stop()
	}
}

// begin starts f, unless stop is closed: who closes it may wait for all calls then.
func (g *gpu) begin(stop <-chan struct{}, f func()) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-stop:
		return false
	default:
		g.goLocked(f)
		return true
	}
}

// goLocked runs f, which calls into NVML, in a goroutine of its own.
func (g *gpu) goLocked(f func()) {
	if g.calls == 0 {
		g.quiet = make(chan struct{})
	}
	g.calls++
	go func() {
		defer func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.calls--; g.calls == 0 {
				close(g.quiet)
			}
		}()
		f()
	}()
}

// isQuiet returns when no call into NVML is under way, or when ctx ends, and tells which.
func (g *gpu) isQuiet(ctx context.Context) bool {
	g.mu.Lock()
	calls, quiet := g.calls, g.quiet
	g.mu.Unlock()
	if calls == 0 {
		return true
	}
	select {
	case <-quiet:
		return true
	case <-ctx.Done():
		return false
	}
}

func (g *gpu) listenOnce(ctx context.Context, target Target, stop <-chan struct{}) (err error) {
	events, err := target.Listen()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, events.Close()) }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-stop:
			return nil
		default:
		}
		event, err := events.Wait(listenStep)
		switch {
		case errors.Is(err, nvml.ErrTimeout):
			continue
		case err != nil:
			return err
		case event.Kind == nvml.EventMIGConfig:
			g.monitor.opts.Reconfigured("the partitions of " + target.Name + " have changed")
		}
		klog.FromContext(ctx).V(2).Info("NVML event", "device", target.Name, "kind", event.Kind, "data", event.Data, "instance", event.Instance)
		g.monitor.opts.Event(target.Name, event)
		g.observe(ctx, func(now time.Time, s *State) { s.Happened(now, event) })
		// The readings may tell more. They are not waited for: the next event may be there.
		g.renew(ctx)
	}
}

// observe enters something that was seen in the state, and tells everybody what has changed by it.
func (g *gpu) observe(ctx context.Context, enter func(now time.Time, s *State)) {
	g.mu.Lock()
	was, explained, explaining, lanes := g.state.Of(nil), g.state.explained, g.state.explaining, g.state.lanes
	enter(g.monitor.opts.Clock.Now(), &g.state)
	is := g.state.Of(nil)
	accounted := explained != g.state.explained || explaining != g.state.explaining || lanes != g.state.lanes ||
		!slices.EqualFunc(was.Faults, is.Faults, func(a, b Fault) bool { return a.Gone.Equal(b.Gone) })
	g.mu.Unlock()
	if was.equal(&is) {
		if accounted {
			g.save(ctx)
		}
		if was.Asked.IsZero() {
			g.monitor.wake()
		}
		return
	}
	logger := klog.FromContext(ctx)
	switch {
	case is.Status == Unhealthy:
		logger.Info("GPU is not healthy", "device", g.name, "reason", is.Message())
	case was.Status == Unhealthy:
		logger.Info("GPU is healthy again", "device", g.name, "was", was.Message())
	case len(is.Faults) > 0:
		logger.Info("GPU needs attention", "device", g.name, "reason", is.Message())
	}
	g.save(ctx)
	g.monitor.wake()
	g.monitor.opts.Changed(ctx, g.name, was, is)
}

func (g *gpu) verdict(instance *nvml.Instance) Verdict {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.state.Of(instance)
}

func (g *gpu) whole() Verdict {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.state.Whole()
}

// save writes the record of the state as it is now.
func (g *gpu) save(ctx context.Context) {
	g.saving.Lock()
	defer g.saving.Unlock()
	g.mu.Lock()
	state := g.state
	state.faults = slices.Clone(state.faults)
	g.mu.Unlock()
	g.monitor.write(ctx, g.name, &state)
}
