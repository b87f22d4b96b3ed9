// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/stepaside"
)

// library is an open session of NVML, with those who are using it. What happens to a library that is closed under a call is not known, so
// the last one closes it, which may be never if a call hangs.
type library struct {
	*nvml.Handle
	// leave is called when the session is closed.
	leave func()
	// closed is closed after Shutdown, whose error is in err then.
	closed chan struct{}
	err    error

	mu    sync.Mutex
	users map[string]int // by what they do
	ended bool           // nobody may begin any more

	// within is the library for others, always the same: by it they know that it is not another one.
	within *within
}

func newLibrary(handle *nvml.Handle, leave func()) *library {
	l := &library{Handle: handle, leave: leave, closed: make(chan struct{}), users: map[string]int{}}
	l.within = &within{Interface: handle.Raw, library: l}
	return l
}

// use keeps the session open until done is called; ok is false once it is to be closed. what is said of a session that
// does not come to its end.
func (l *library) use(what string) (done func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return nil, false
	}
	l.users[what]++
	return sync.OnceFunc(func() { l.done(what) }), true
}

func (l *library) done(what string) {
	l.mu.Lock()
	if l.users[what]--; l.users[what] == 0 {
		delete(l.users, what)
	}
	last := l.ended && len(l.users) == 0
	l.mu.Unlock()
	if last {
		l.shutdown()
	}
}

// isClosed returns what keeps the session open; nil if nothing does.
func (l *library) isClosed() error {
	select {
	case <-l.closed:
		return nil
	default:
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.users) == 0 {
		return errors.New("a call that closes NVML")
	}
	return errors.New(strings.Join(slices.Sorted(maps.Keys(l.users)), ", "))
}

// end closes the session as soon as nobody uses it, and keeps others from beginning. To be called once.
func (l *library) end() {
	l.mu.Lock()
	l.ended = true
	last := len(l.users) == 0
	l.mu.Unlock()
	if last {
		l.shutdown()
	}
}

func (l *library) shutdown() {
	l.err = l.Shutdown()
	l.leave()
	close(l.closed)
}

// closeTimeout is how long the opening of another session waits until nobody uses the old one. It
// leaves time to what waits for the new one.
const closeTimeout = 5 * time.Second

// sessions opens and closes sessions with NVML, of which one is open at a time.
type sessions struct {
	open  func() (*nvml.Handle, error)
	clock clock.WithTicker
	// keeper says whether the driver may be open.
	keeper *stepaside.Keeper
	// monitor is told of a session that does not come to be, and asks nothing while one is closed.
	monitor *health.Monitor
	// reached is told that GPUs can be asked that could not be before.
	reached chan<- struct{}
	// looking is held by who may open and close sessions.
	looking chan struct{}

	mu      sync.Mutex
	library *library // the open session, nil if none is
	// closing are sessions that are closed as soon as nobody uses them.
	closing []*library
	// stale tells that the session cannot be used any more: the driver has gone.
	stale  bool
	bus    []string      // the GPUs on the bus when the session was opened
	reason error         // why no GPU can be asked; nil if they can
	looked chan struct{} // closed at the end of the look that is under way; nil if none is
}

// alone does look when nobody else may open or close sessions. When ctx ends it is not waited for any longer, and comes
// to its end by itself; hangs is told then.
func (s *sessions) alone(ctx context.Context, hangs string, look func() error) error {
	select {
	case s.looking <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("wait for NVML: %w", ctx.Err())
	}
	s.mu.Lock()
	s.looked = make(chan struct{})
	s.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		err := look()
		<-s.looking
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", hangs, ctx.Err())
	}
}

// ended keeps the outcome of a look and lets go who waits for it.
func (s *sessions) ended(ctx context.Context, err error) {
	// A driver that is let go is no fault of the GPUs.
	if err != nil && !letGo(err) {
		s.monitor.Fail(ctx, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && s.reason != nil {
		signal(s.reached)
	}
	s.reason = err
	close(s.looked)
	s.looked = nil
}

// underWay returns a channel that is closed at the end of the look that is under way, nil if none is. reason is why no GPU
// can be asked, nil if they can.
func (s *sessions) underWay() (looked <-chan struct{}, reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.looked, s.reason
}

// current is the open session, nil if none is.
func (s *sessions) current() *library {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.library
}

// handle is the open session's, or one that is not loaded.
func (s *sessions) handle() (*nvml.Handle, error) {
	if lib := s.current(); lib != nil {
		return lib.Handle, nil
	}
	return s.open()
}

// letGo tells whether there is no session because the agent keeps off the driver.
func letGo(err error) bool {
	var why *stepaside.Why
	return errors.As(err, &why)
}

// using returns the open session, which stays open until done is called. While another one is being opened it waits for
// that. what is said of a session that does not come to its end.
func (s *sessions) using(ctx context.Context, what string) (lib *library, done func(), err error) {
	for {
		s.mu.Lock()
		lib, looked, reason := s.library, s.looked, s.reason
		s.mu.Unlock()
		if lib != nil {
			if done, ok := lib.use(what); ok {
				return lib, done, nil
			}
			continue // it has been taken away since, by a look that was not under way then
		}
		if looked == nil {
			return nil, nil, fmt.Errorf("the node's GPUs are not known: %w", reason)
		}
		select {
		case <-looked:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("wait for NVML: %w", ctx.Err())
		}
	}
}

// suspend ends the session that is open, if one is.
func (s *sessions) suspend(ctx context.Context) {
	s.mu.Lock()
	lib, stale := s.library, s.stale
	s.mu.Unlock()
	if lib != nil {
		s.close(ctx, lib, stale)
	}
}

// close ends the session: nothing begins in it any more, and it is closed when what is under way has returned. That is waited for, up to
// closeTimeout, because a library that has not been closed does not see what has changed when it is opened again.
func (s *sessions) close(ctx context.Context, lib *library, stale bool) {
	s.mu.Lock()
	s.library, s.stale = nil, s.stale || stale
	s.closing = append(slices.DeleteFunc(s.closing, func(l *library) bool { return l.isClosed() == nil }), lib)
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	s.monitor.Pause(ctx)
	lib.end()
	select {
	case <-lib.closed:
	case <-ctx.Done():
	}
	select {
	case <-lib.closed:
		if lib.err != nil && !errors.Is(lib.err, nvml.ErrNoSession) {
			klog.FromContext(ctx).Error(lib.err, "Close NVML")
		}
	default:
		klog.FromContext(ctx).Info("NVML is opened anew while a call hangs, and the old session is closed when that returns: until then GPUs " +
			"that were plugged in may not be seen")
	}
}

// closed returns what keeps sessions open that are to be closed; nil if nothing does.
func (s *sessions) closed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, lib := range s.closing {
		if err := lib.isClosed(); err != nil {
			return err
		}
	}
	return nil
}

// renew returns the open session, or opens one if there is none or if it does not see what is there. renewed tells that the driver was
// loaded anew.
func (s *sessions) renew(ctx context.Context) (lib *library, renewed bool, err error) {
	s.mu.Lock()
	lib, stale, bus := s.library, s.stale, s.bus
	s.mu.Unlock()
	if lib != nil && !stale {
		_, err := lib.DriverVersion()
		if stale = err != nil; !stale && sameGPUs(bus, gpusOnBus(lib.Sysfs)) {
			return lib, false, nil
		}
	}
	if lib != nil {
		s.close(ctx, lib, stale)
	}
	opened, err := s.open()
	if err != nil {
		return nil, false, err
	}
	leave, err := s.keeper.Enter(ctx, opened.Source)
	if err != nil {
		return nil, false, err
	}
	// Read first: a GPU that is plugged in meanwhile makes the next look open another session.
	bus = gpusOnBus(opened.Sysfs)
	if err := s.start(ctx, opened); err != nil {
		leave()
		err = fmt.Errorf("initialize NVML (%s): %w", opened.Source, err)
		switch {
		case errors.Is(err, nvml.ErrVersionMismatch):
			err = s.keeper.Replaced(err)
		case errors.Is(err, nvml.ErrLibraryNotFound):
			s.keeper.NotLoaded()
		}
		return nil, false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.library, s.bus = newLibrary(opened, leave), bus
	renewed, s.stale = s.stale, false
	return s.library, renewed, nil
}

// noSession remembers that the session is over, if that is what the error says.
func (s *sessions) noSession(err error) {
	if errors.Is(err, nvml.ErrNoSession) || errors.Is(err, nvml.ErrDriverNotLoaded) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.stale = true
	}
}

// start opens a session. That may hang, and then no GPU answers.
func (s *sessions) start(ctx context.Context, opened *nvml.Handle) error {
	done := make(chan error, 1)
	go func() { done <- opened.Init() }()
	late := s.clock.NewTicker(health.Deadline)
	defer late.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-late.C():
			s.monitor.Fail(ctx, fmt.Errorf("NVML (%s) does not start", opened.Source))
		}
	}
}

// Close closes the session, and says at the latest when ctx ends who is still using one.
func (h *Hardware) Close(ctx context.Context) error {
	const look = "a look for GPUs"
	reason := errors.New("NVML is closed")
	if why := h.opts.Keeper.Why(); why != nil {
		reason = why
	}
	if err := h.sessions.alone(ctx, look, func() error {
		ctx := context.WithoutCancel(ctx)
		h.sessions.suspend(ctx)
		h.sessions.ended(ctx, reason)
		return nil
	}); err != nil {
		return errors.New(look) // which has not ended
	}
	return h.sessions.closed()
}
