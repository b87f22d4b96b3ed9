// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package enclosure

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

func isNoDevice(err error) bool { return errors.Is(err, unix.ENODEV) }

// MountNamespace names the mount namespace of a process, for instance "mnt:[4026532281]".
func MountNamespace(pid int) (string, error) {
	return os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
}

// Processes lists what runs in a mount namespace or below a cgroup, except the given process.
func Processes(namespace, cgroup string, except int) ([]int, error) {
	pids, err := cgroupProcesses(cgroup)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		// A process that ends meanwhile has no namespace any more.
		if other, err := MountNamespace(pid); err == nil && other == namespace {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	pids = slices.Compact(pids)
	return slices.DeleteFunc(pids, func(pid int) bool { return pid == except }), nil
}

// killAll kills until nothing is left: what is killed may just have started something.
func killAll(namespace, cgroup string, except int, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for {
		pids, err := Processes(namespace, cgroup, except)
		if err != nil || len(pids) == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v of the node are still there %s after SIGKILL", pids, timeout)
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("killing process %d of the node: %w", pid, err)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
}
