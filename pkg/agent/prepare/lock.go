package prepare

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
)

// locker takes file locks in one folder, which exclude other agents as well as other calls to this one.
type locker struct {
	dir string
	// timeout is for all locks of one call together: the kubelet's deadline is for the whole call, too.
	timeout time.Duration
}

// locks are those of one call. The global order is the claim's lock first, then GPUs by name, all of them at once: no two calls
// can wait for each other. Not safe for concurrent use.
type locks struct {
	locker  *locker
	begun   time.Time
	timeout time.Duration
	unlocks []func()
}

// begin starts the time that the call may wait for all of its locks.
func (l *locker) begin() *locks { return l.beginWithin(l.timeout) }

// beginWithin is begin for a call that must not wait longer than that, either.
func (l *locker) beginWithin(most time.Duration) *locks {
	return &locks{locker: l, begun: time.Now(), timeout: min(most, l.timeout)}
}

// claim excludes every other call for the same claim, and no call for another one: it is held while a GPU is waited for.
func (l *locks) claim(ctx context.Context, uid types.UID) error {
	return l.take(ctx, "claim", func(ctx context.Context) (func(), error) {
		return durable.LockKey(ctx, filepath.Join(l.locker.dir, "claims.lock"), string(uid))
	})
}

// gpus excludes every other call that holds or may come to hold one of the GPUs. If it fails some may be locked.
func (l *locks) gpus(ctx context.Context, gpus ...string) error {
	for _, gpu := range slices.Compact(slices.Sorted(slices.Values(gpus))) {
		err := l.take(ctx, "gpu", func(ctx context.Context) (func(), error) {
			return durable.Lock(ctx, filepath.Join(l.locker.dir, "gpu-"+gpu+".lock"))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// unlock gives all of them back. To be called once.
func (l *locks) unlock() {
	for _, unlock := range slices.Backward(l.unlocks) {
		unlock()
	}
}

// take takes a lock of that kind, and measures how long that took, with or without success.
func (l *locks) take(ctx context.Context, kind string, lock func(context.Context) (func(), error)) (err error) {
	ctx, cancel := context.WithDeadline(ctx, l.begun.Add(l.timeout))
	defer cancel()
	start := time.Now()
	defer func() { lockWaitSeconds.WithLabelValues(kind, outcome(err)).Observe(time.Since(start).Seconds()) }()
	unlock, err := lock(ctx)
	if err != nil && ctx.Err() == nil {
		return err // the file system's, which no waiting helps
	}
	if err != nil {
		return fmt.Errorf("%s after the call began to wait for its locks: %w", time.Since(l.begun).Round(time.Millisecond), err)
	}
	l.unlocks = append(l.unlocks, unlock)
	return nil
}
