package prepare

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// claimShards is the number of lock files for claims. Claims come and go and a lock file cannot be removed
// safely, so claims share a fixed number of them; two claims that meet in one only wait for each other.
const claimShards = 256

// lockPoll is the longest pause between two attempts to get a lock. flock(2) has no waiting with a timeout.
const lockPoll = 20 * time.Millisecond

// locker takes file locks (flock) in one folder. They exclude other processes and, since every lock opens
// the file anew, other goroutines of this one; the kernel drops them when the process dies.
type locker struct {
	dir     string
	timeout time.Duration
}

// lockClaim excludes every other call for the same claim.
func (l *locker) lockClaim(ctx context.Context, uid types.UID) (unlock func(), err error) {
	hash := fnv.New32a()
	hash.Write([]byte(uid))
	return l.lock(ctx, fmt.Sprintf("claim-%02x", hash.Sum32()%claimShards))
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
		u, err := l.lock(ctx, "gpu-"+gpu)
		if err != nil {
			unlock()
			return nil, err
		}
		unlocks = append(unlocks, u)
	}
	return unlock, nil
}

func (l *locker) lock(ctx context.Context, name string) (unlock func(), err error) {
	path := filepath.Join(l.dir, name+".lock")
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	start := time.Now()
	for pause := time.Millisecond; ; pause = min(2*pause, lockPoll) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = file.Close() }, nil
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), file.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("another call has held the lock %s for %s: %w", path, time.Since(start).Round(time.Millisecond), ctx.Err()), file.Close())
		case <-time.After(pause):
		}
	}
}
