// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stateFile keeps a machine's state in a folder that several processes share.
// It is replaced as a whole, under a lock.
type stateFile struct{ folder string }

// stamp tells one content of the file from the next: each is a file of its own.
type stamp struct {
	inode uint64
	time  time.Time
	size  int64
}

func openStateFile(folder string) (*stateFile, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	info, err := os.Stat(folder)
	if err != nil {
		return nil, err
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("mode %#o: want 0700: who can open the control socket commands the GPUs", mode)
	}
	return &stateFile{folder: folder}, nil
}

func (f *stateFile) path() string { return filepath.Join(f.folder, "state.json") }

// lock excludes other writers, in this process and in others.
func (f *stateFile) lock() (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(f.folder, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock(file, unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", file.Name(), err), file.Close())
	}
	return func() { file.Close() }, nil
}

// load returns the state, nil if there is none yet.
func (f *stateFile) load() (*State, stamp, error) {
	file, err := os.Open(f.path())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, stamp{}, nil
	}
	if err != nil {
		return nil, stamp{}, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, stamp{}, err
	}
	decoder := json.NewDecoder(file)
	decoder.DisallowUnknownFields()
	s := &State{}
	if err := decoder.Decode(s); err != nil {
		return nil, stamp{}, fmt.Errorf("decode %s: %w: remove it to start with a new machine", f.path(), err)
	}
	return s, stampOf(info), nil
}

// SavedMachine says which profile and node the machine in a folder is of. It makes nothing: without a machine both are empty.
func SavedMachine(folder string) (profile, node string, err error) {
	s, _, err := (&stateFile{folder: folder}).load()
	if err != nil || s == nil {
		return "", "", err
	}
	return s.Profile, s.Node, nil
}

// loadChanged is load, or nil if the content is the one that was seen.
func (f *stateFile) loadChanged(seen stamp) (*State, stamp, error) {
	info, err := os.Stat(f.path())
	if err != nil || stampOf(info) == seen {
		return nil, seen, err
	}
	return f.load()
}

// save replaces the state. A reader sees the old or the new one; so does who
// comes after a crash of the process. It does not wait for the disk: when the
// power fails, a simulated machine is gone as a whole.
func (f *stateFile) save(s *State) (stamp, error) {
	data, err := json.Marshal(s)
	if err != nil {
		return stamp{}, err
	}
	temp, err := os.CreateTemp(f.folder, "state-*.tmp") // mode 0600
	if err != nil {
		return stamp{}, err
	}
	_, err = temp.Write(append(data, '\n'))
	info, statErr := temp.Stat()
	err = errors.Join(err, statErr, temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), f.path())
	}
	if err != nil {
		return stamp{}, errors.Join(err, os.Remove(temp.Name()))
	}
	return stampOf(info), nil
}

func stampOf(info fs.FileInfo) stamp {
	s := stamp{time: info.ModTime(), size: info.Size()}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		s.inode = sys.Ino
	}
	return s
}

// hostBootID of the machine that this runs on.
func hostBootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	return string(bytes.TrimSpace(data)), nil
}

// A process that has a session has a file that it holds locked: the kernel gives up the lock of one that dies.

func (f *stateFile) sessionPath(name string) string { return filepath.Join(f.folder, "sessions", name) }

// openSession notes a session of this process, until end is called.
func (f *stateFile) openSession() (end func(), err error) {
	if err := os.MkdirAll(f.sessionPath(""), 0o700); err != nil {
		return nil, err
	}
	for {
		file, err := os.CreateTemp(f.sessionPath(""), strconv.Itoa(os.Getpid())+"-")
		if err != nil {
			return nil, err
		}
		end = func() {
			os.Remove(file.Name())
			file.Close()
		}
		if err := flock(file, unix.LOCK_EX); err != nil {
			end()
			return nil, err
		}
		// Somebody may have removed it before it was locked.
		if _, err := os.Stat(file.Name()); err == nil {
			return end, nil
		}
		file.Close()
	}
}

// sessions are the processes that have some, in order. Files of those that have died are removed.
func (f *stateFile) sessions() (pids []uint32) {
	entries, err := os.ReadDir(f.sessionPath(""))
	if err != nil {
		return nil // nobody has had any
	}
	for _, entry := range entries {
		number, _, _ := strings.Cut(entry.Name(), "-")
		pid, err := strconv.ParseUint(number, 10, 32)
		if err != nil {
			continue
		}
		file, err := os.Open(f.sessionPath(entry.Name()))
		if err != nil {
			continue // it has just ended
		}
		if err := flock(file, unix.LOCK_SH|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
			pids = append(pids, uint32(pid))
		} else if err == nil {
			os.Remove(file.Name())
		}
		file.Close()
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}

func flock(file *os.File, how int) error {
	for {
		if err := unix.Flock(int(file.Fd()), how); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
