package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// closeTimeout is how long the opening of another session waits until nobody uses the old one. It leaves time to what waits for the new one.
const closeTimeout = 5 * time.Second

// library is an open session of NVML, with those who are using it. What happens to a library that is closed under a call is not known, so the
// last one closes it, which may be never if a call hangs.
type library struct {
	*nvml.Handle
	// closed is closed after Shutdown, whose error is in err then.
	closed chan struct{}
	err    error

	mu    sync.Mutex
	users int
	ended bool // nobody may begin any more
}

func newLibrary(handle *nvml.Handle) *library {
	return &library{Handle: handle, closed: make(chan struct{})}
}

// use keeps the session open until done is called; ok is false once it is to be closed.
func (l *library) use() (done func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return nil, false
	}
	l.users++
	return sync.OnceFunc(l.done), true
}

func (l *library) done() {
	l.mu.Lock()
	l.users--
	last := l.ended && l.users == 0
	l.mu.Unlock()
	if last {
		l.shutdown()
	}
}

// end closes the session as soon as nobody uses it, and keeps others from beginning. To be called once.
func (l *library) end() {
	l.mu.Lock()
	l.ended = true
	last := l.users == 0
	l.mu.Unlock()
	if last {
		l.shutdown()
	}
}

func (l *library) shutdown() {
	l.err = l.Shutdown()
	close(l.closed)
}

// using returns the open session, which stays open until done is called. While another one is being opened it waits for that.
func (h *Hardware) using(ctx context.Context) (lib *library, done func(), err error) {
	for {
		h.mu.Lock()
		lib, looked, reason := h.library, h.looked, h.reason
		h.mu.Unlock()
		if lib != nil {
			if done, ok := lib.use(); ok {
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

// close ends the session: nothing begins in it any more, and it is closed when what is under way has returned. That is waited for, up to
// closeTimeout, because a library that has not been closed does not see what has changed when it is opened again.
func (h *Hardware) close(ctx context.Context, lib *library, stale bool) {
	h.mu.Lock()
	h.library, h.stale = nil, h.stale || stale
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	h.monitor.Pause(ctx)
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
		klog.FromContext(ctx).Info("NVML is opened anew while a call hangs, and the old session is closed when that returns: until then GPUs that were plugged in may not be seen")
	}
}

// session returns the open session, or opens one if there is none or if it does not see what is there. renewed tells that the driver was
// loaded anew.
func (h *Hardware) session(ctx context.Context) (lib *library, renewed bool, err error) {
	h.mu.Lock()
	lib, stale, bus := h.library, h.stale, h.bus
	h.mu.Unlock()
	if lib != nil && !stale {
		_, err := lib.DriverVersion()
		if stale = err != nil; !stale && sameGPUs(bus, gpusOnBus(lib.Sysfs)) {
			return lib, false, nil
		}
	}
	if lib != nil {
		h.close(ctx, lib, stale)
	}
	opened, err := h.opts.Open()
	if err != nil {
		return nil, false, err
	}
	// Read first: a GPU that is plugged in meanwhile makes the next look open another session.
	bus = gpusOnBus(opened.Sysfs)
	if err := h.start(ctx, opened); err != nil {
		return nil, false, fmt.Errorf("initialize NVML (%s): %w", opened.Source, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.library, h.bus = newLibrary(opened), bus
	renewed, h.stale = h.stale, false
	return h.library, renewed, nil
}

// noSession remembers that the session is over, if that is what the error says.
func (h *Hardware) noSession(err error) {
	if errors.Is(err, nvml.ErrNoSession) || errors.Is(err, nvml.ErrDriverNotLoaded) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.stale = true
	}
}

// start opens a session. That may hang, and then no GPU answers.
func (h *Hardware) start(ctx context.Context, opened *nvml.Handle) error {
	done := make(chan error, 1)
	go func() { done <- opened.Init() }()
	late := h.opts.Clock.NewTicker(health.Deadline)
	defer late.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-late.C():
			h.monitor.Fail(ctx, fmt.Errorf("NVML (%s) does not start", opened.Source))
		}
	}
}
