// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package vfio

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Users tells who has device nodes open. As long as somebody has, a driver does not let go of the function behind it, and a write that
// asks it to does not return.
type Users interface {
	// Of returns the processes that have one of the nodes open, in order. That there is no such node is no error.
	Of(ctx context.Context, nodes ...string) ([]uint32, error)
	// OfGPU returns the processes that have the NVIDIA driver's device of that minor number open, in order, whether or not it has a node here.
	OfGPU(ctx context.Context, minor int) ([]uint32, error)
}

// nvidiaMajor is the device number of the NVIDIA driver's GPUs.
const nvidiaMajor = 195

// Proc looks into /proc, or another folder for it: at the host's processes, which must be visible there.
type Proc struct{ Root string }

var _ Users = Proc{}

// Of implements Users. Nodes are told by their device numbers: containers have nodes of their own for the same device.
func (p Proc) Of(ctx context.Context, nodes ...string) ([]uint32, error) {
	var wanted []uint64
	for _, node := range nodes {
		number, ok, err := deviceNumber(node)
		if err != nil {
			return nil, err
		}
		if ok {
			wanted = append(wanted, number)
		}
	}
	if len(wanted) == 0 {
		return nil, nil
	}
	return p.having(ctx, strings.Join(nodes, ", "), wanted)
}

// OfGPU implements Users.
func (p Proc) OfGPU(ctx context.Context, minor int) ([]uint32, error) {
	if minor < 0 {
		return nil, errors.New("the GPU's minor number is not known")
	}
	return p.having(ctx, fmt.Sprintf("device %d:%d", nvidiaMajor, minor), []uint64{unix.Mkdev(nvidiaMajor, uint32(minor))})
}

// having are the processes that have one of the devices open.
func (p Proc) having(ctx context.Context, what string, wanted []uint64) ([]uint32, error) {
	entries, err := os.ReadDir(p.Root)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var users []uint32
	for _, entry := range entries {
		pid, err := strconv.ParseUint(entry.Name(), 10, 32)
		if err != nil {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("look for who uses %s: %w", what, err)
		}
		uses, err := hasOpen(filepath.Join(p.Root, entry.Name(), "fd"), wanted)
		if err != nil {
			return nil, fmt.Errorf("open files of process %d: %w", pid, err)
		}
		if uses {
			users = append(users, uint32(pid))
		}
	}
	slices.Sort(users)
	return users, nil
}

// hasOpen tells whether one of the open files is one of the devices.
func hasOpen(dir string, wanted []uint64) (bool, error) {
	entries, err := os.ReadDir(dir)
	if gone(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(entries, func(entry os.DirEntry) bool {
		// A file of which nothing is told is on a file system whose server has gone, and no device of ours.
		number, ok, err := deviceNumber(filepath.Join(dir, entry.Name()))
		return err == nil && ok && slices.Contains(wanted, number)
	}), nil
}

// deviceNumber of a character device; ok is false for what is none, or is not there. No file system is asked for what the kernel knows: the
// server of one in user space may never answer.
func deviceNumber(path string) (number uint64, ok bool, err error) {
	var stat unix.Statx_t
	for {
		if err = unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &stat); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if gone(err) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFCHR {
		return 0, false, nil
	}
	return unix.Mkdev(stat.Rdev_major, stat.Rdev_minor), true, nil
}

// gone is the error for what belonged to a process that has ended.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }
