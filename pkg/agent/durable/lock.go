package durable

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// lockPoll is the longest pause between two attempts to get a lock. flock(2) has no waiting with a timeout.
const lockPoll = 20 * time.Millisecond

// Lock takes the file lock (flock) of path, which is made if it is missing and never removed. It excludes other
// processes and, because every call opens the file anew, other goroutines of this one; the kernel drops it
// when the process dies. It waits no longer than ctx; the error then wraps ctx's.
func Lock(ctx context.Context, path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
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
			return nil, errors.Join(fmt.Errorf("the lock %s has been held by another call for %s: %w", path, time.Since(start).Round(time.Millisecond), ctx.Err()), file.Close())
		case <-time.After(pause):
		}
	}
}
