// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// takeTerminal makes this process alone the one that a Ctrl-C of the terminal reaches, and not make or go run, which would call it an
// error. It does nothing where there is no terminal. The result gives the terminal back.
func takeTerminal() (restore func()) {
	fd := int(os.Stdin.Fd())
	before, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	if err != nil || before != syscall.Getpgrp() { // no terminal, or in the background
		return func() {}
	}
	signal.Ignore(syscall.SIGTTOU) // which who is not in the foreground gets for taking it
	if err := syscall.Setpgid(0, 0); err != nil {
		return func() {}
	}
	take := func(group int) { _ = unix.IoctlSetPointerInt(fd, unix.TIOCSPGRP, group) } // without it Ctrl-C ends make, too
	take(syscall.Getpgrp())
	return func() { take(before) }
}
