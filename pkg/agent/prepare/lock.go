package prepare

import (
	"context"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
)

// locker takes file locks in one folder, which exclude other agents as well as other calls to this one.
type locker struct {
	dir     string
	timeout time.Duration
}

// lockClaim excludes every other call for the same claim, and no call for another one: it is held while a GPU is waited for.
func (l *locker) lockClaim(ctx context.Context, uid types.UID) (unlock func(), err error) {
	return l.lock(ctx, "claim", func(ctx context.Context) (func(), error) {
		return durable.LockKey(ctx, filepath.Join(l.dir, "claims.lock"), string(uid))
	})
}

// lockGPUs excludes every other call that holds or may come to hold one of the GPUs. The global order is
// the claim's lock first, then GPUs by name: no two callers can wait for each other.
func (l *locker) lockGPUs(ctx context.Context, gpus []string) (unlock func(), err error) {
	var unlocks []func()
	unlock = func() {
		for _, u := range slices.Backward(unlocks) {
			u()
		}
	}
	for _, gpu := range slices.Compact(slices.Sorted(slices.Values(gpus))) {
		u, err := l.lock(ctx, "gpu", func(ctx context.Context) (func(), error) {
			return durable.Lock(ctx, filepath.Join(l.dir, "gpu-"+gpu+".lock"))
		})
		if err != nil {
			unlock()
			return nil, err
		}
		unlocks = append(unlocks, u)
	}
	return unlock, nil
}

// lock takes a lock of that kind, and measures how long that took, with or without success.
func (l *locker) lock(ctx context.Context, kind string, take func(context.Context) (func(), error)) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	start := time.Now()
	defer func() { lockWaitSeconds.WithLabelValues(kind, outcome(err)).Observe(time.Since(start).Seconds()) }()
	return take(ctx)
}
