// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package enclosure

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Enter moves the calling thread into the mount namespace of the janitor with the given process id and becomes the given command. The
// process keeps its id and its parent-death signal. It must be called on the main thread, and returns only an error.
func Enter(janitor string, argv []string) error {
	pid, err := strconv.Atoi(janitor)
	if err != nil {
		return fmt.Errorf("process id of the janitor: %w", err)
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening the mount namespace of process %d: %w", pid, err)
	}
	folder, err := os.Getwd()
	if err != nil {
		return err
	}
	// The kernel lets a thread change its mount namespace only if it shares no file system state with others.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unsharing file system state: %w", err)
	}
	if err := unix.Setns(fd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("entering the mount namespace of process %d: %w", pid, err)
	}
	// Entering has set the working folder to the root.
	if err := unix.Chdir(folder); err != nil {
		return fmt.Errorf("going back to folder %s: %w", folder, err)
	}
	if err := unix.Exec(argv[0], argv, os.Environ()); err != nil {
		return fmt.Errorf("executing %s: %w", argv[0], err)
	}
	return nil
}
