// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"stowage.dev/stowage/internal/localcluster/image/report"
)

// What an MPS daemon shares with its clients.
const (
	shm  = "/dev/shm"
	pipe = "/tmp/nvidia-mps"
)

// Where more than this can be had, there is no limit. A machine survives it.
const (
	manyBytes     = 256 << 20
	manyFiles     = 20_000
	manyProcesses = 4_000
)

var errUnbounded = errors.New("there is no end")

// startHostile works beside the caller, which answers signals. When its time is over it leaves all full, and as deep as can be.
func startHostile(args []string) error {
	if len(args) != 1 {
		return errors.New("want hostile DURATION")
	}
	duration, err := time.ParseDuration(args[0])
	if err != nil {
		return err
	}
	threads()
	end := time.Now().Add(duration)
	go func() {
		r := report.Hostile{Hostile: true}
		var forks sync.WaitGroup
		var processes, rounds int
		var forkErr error
		forks.Go(func() {
			for ; forkErr == nil && time.Now().Before(end); rounds++ {
				var n int
				n, forkErr = fork()
				processes = max(processes, n)
			}
		})
		err := attack(&r, end, forks.Wait)
		r.Forks, r.Processes = rounds, processes
		if err = errors.Join(err, forkErr); errors.Is(err, errUnbounded) {
			r.Unbounded = err.Error()
		} else if err != nil {
			r.Failed = err.Error()
		}
		line, err := json.Marshal(r)
		if err != nil {
			line = []byte(err.Error())
		}
		_, _ = os.Stdout.Write(append(line, '\n'))
	}()
	return nil
}

// threads makes those that are needed later: when there is no process left to be had, Go ends for want of one.
func threads() {
	var group sync.WaitGroup
	for range 24 {
		group.Go(func() { _ = unix.Nanosleep(&unix.Timespec{Nsec: 100e6}, nil) })
	}
	group.Wait()
}

// attack calls last before its last round, in which nothing is given back. The other processes have to be gone by then: they have our
// descriptors, and with one of them all folders above, which nobody finds any more.
func attack(r *report.Hostile, end time.Time, last func()) error {
	defer last()
	var a, b unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Stat(shm, &a), unix.Stat(pipe, &b), unix.Statfs(pipe, &fs)); err != nil {
		return err
	}
	r.OneFileSystem = a.Dev == b.Dev && fs.Type == unix.TMPFS_MAGIC
	for {
		over := !time.Now().Before(end)
		if over {
			last()
		}
		// Links that lead to the host, if it follows them.
		for _, dir := range []string{shm, pipe} {
			for name, target := range map[string]string{
				"root": "/", "up": strings.Repeat("../", 40), "log": "/etc",
				"control": "/etc/passwd", "loop": "loop",
			} {
				if err := os.Symlink(target, filepath.Join(dir, name)); err != nil && !errors.Is(err, os.ErrExist) {
					return err
				}
			}
		}
		files, err := crowd(filepath.Join(pipe, "crowd"))
		r.Files = max(r.Files, files)
		if err != nil {
			return fmt.Errorf("files: %w", err)
		}
		if err := os.RemoveAll(filepath.Join(pipe, "crowd")); err != nil {
			return err
		}
		big, err := os.OpenFile(filepath.Join(shm, "big"), os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		levels, err := nest(!over)
		r.Levels = max(r.Levels, levels)
		if err != nil {
			return errors.Join(fmt.Errorf("folders in folders: %w", err), big.Close())
		}
		bytes, err := fill(big)
		r.Bytes = max(r.Bytes, bytes)
		if err == nil && !over {
			err = big.Truncate(0)
		}
		if err := errors.Join(err, big.Close()); err != nil {
			return fmt.Errorf("bytes: %w", err)
		}
		r.Rounds++
		if over {
			return nil
		}
	}
}

// full tells whether that was the end of the room.
func full(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// crowd makes files until there is no more to be had.
func crowd(dir string) (files int, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 0, err
	}
	for ; files < manyFiles; files++ {
		err := os.WriteFile(filepath.Join(dir, strconv.Itoa(files)), nil, 0o600)
		if full(err) {
			return files, nil
		} else if err != nil {
			return files, err
		}
	}
	return files, errUnbounded
}

// fill writes until there is no room.
func fill(file *os.File) (bytes int, err error) {
	data := make([]byte, 1<<20)
	for bytes < manyBytes {
		n, err := file.Write(data)
		bytes += n
		if full(err) {
			return bytes, nil
		} else if err != nil {
			return bytes, err
		}
	}
	return bytes, errUnbounded
}

// nest makes a folder in a folder, and so on: no path is long enough for the last one.
func nest(undo bool) (levels int, err error) {
	name := strings.Repeat("d", 200)
	at, err := unix.Open(shm, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Close(at) }()
	step := func(name string) error {
		next, err := unix.Openat(at, name, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err == nil {
			_ = unix.Close(at)
			at = next
		}
		return err
	}
	for ended := false; !ended; {
		if levels == manyFiles {
			return levels, errUnbounded
		}
		err := unix.Mkdirat(at, name, 0o777)
		if ended = full(err); ended {
			break
		}
		if err == nil {
			levels++
			err = step(name)
		}
		if err != nil {
			return levels, err
		}
	}
	for range levels {
		if !undo {
			break
		}
		if err := errors.Join(step(".."), unix.Unlinkat(at, name, unix.AT_REMOVEDIR)); err != nil {
			return levels, err
		}
	}
	return levels, nil
}

// fork has as many processes as can be had, and ends them.
func fork() (processes int, err error) {
	var pids []int
	defer func() {
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		for _, pid := range pids {
			// The signal's handler may have been the first to hear of it.
			for {
				if _, err := unix.Wait4(pid, nil, 0, nil); !errors.Is(err, unix.EINTR) {
					break
				}
			}
		}
	}()
	for len(pids) < manyProcesses {
		pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if errno == 0 && pid == 0 {
			// The child has one thread and no use of Go.
			for {
				_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
			}
		}
		if errno == unix.EAGAIN {
			return len(pids), nil
		} else if errno != 0 {
			return len(pids), errno
		}
		pids = append(pids, int(pid))
	}
	return len(pids), errUnbounded
}
