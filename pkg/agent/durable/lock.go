// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// LockPoll is the longest pause between two attempts to get a lock. flock(2) and fcntl(2) have no waiting with a timeout.
const LockPoll = 20 * time.Millisecond

// Lock takes the file lock (flock) of path, which is made if it is missing and never removed. It excludes other
// processes and, because every call opens the file anew, other goroutines of this one; the kernel drops it
// when the process dies. It waits no longer than ctx; the error then wraps ctx's.
func Lock(ctx context.Context, path string) (unlock func(), err error) {
	return lock(ctx, path, path, openAnyhow, func(file *os.File) error {
		return unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	})
}

// Share takes the same lock together with others that do, and keeps out who wants it alone.
func Share(ctx context.Context, path string) (unlock func(), err error) {
	return lock(ctx, path, path, openAnyhow, func(file *os.File) error {
		return unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	})
}

// LockKey is Lock for one of any number of keys that come and go: each has a byte of the file, by a hash of 63 bits, and the file stays
// empty. Files of their own could not be removed safely, and keys that share a lock would wait for what is not theirs.
func LockKey(ctx context.Context, path, key string) (unlock func(), err error) {
	hash := fnv.New64a()
	hash.Write([]byte(key))
	byteOfKey := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: int64(hash.Sum64() >> 1), Len: 1}
	return lock(ctx, path, path+" for "+key, open, func(file *os.File) error {
		// An open file description's lock (fcntl(2)): like flock, and unlike a process's record locks.
		request := byteOfKey
		return unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &request)
	})
}

func open(path string) (*os.File, error) { return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600) }

// openAnyhow is open for flock(2), which takes a file that can only be read, too: who cannot write has things to tell under the lock.
func openAnyhow(path string) (*os.File, error) {
	file, err := open(path)
	if errors.Is(err, unix.EROFS) {
		if file, readErr := os.Open(path); readErr == nil {
			return file, nil
		}
	}
	return file, err
}

func lock(ctx context.Context, path, name string, open func(string) (*os.File, error),
	try func(*os.File) error,
) (unlock func(), err error) {
	file, err := open(path)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	for pause := time.Millisecond; ; pause = min(2*pause, LockPoll) {
		err := try(file)
		if err == nil {
			return func() { _ = file.Close() }, nil
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		// fcntl(2) may say it with either.
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EACCES) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", name, err), file.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("the lock %s has been held by another call for %s: %w", name,
				time.Since(start).Round(time.Millisecond), ctx.Err()), file.Close())
		case <-time.After(pause):
		}
	}
}
