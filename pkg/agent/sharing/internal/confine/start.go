// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Command is the subcommand of the agent's program that becomes another one (Become).
const Command = "mps-daemon"

// Bind shows a folder of the host to the program, in the root that it runs in.
type Bind struct{ From, To string }

// Program is one that is to run, and what it gets. All paths are the host's, but those that are said to be in its root.
type Program struct {
	// Root is the file system that it runs in; empty for the host's.
	Root string
	// Paths in its root that are tried in turn, and its arguments with its name as the first one.
	Paths, Args []string
	// Env is all of its environment, in the form NAME=value.
	Env []string
	// Binds are put into its root. Their targets are made where nothing is: on its own /dev and /tmp.
	Binds []Bind
	// Output is a file in its root that gets what it says.
	Output string
	// Hide are folders in its root that it sees empty.
	Hide []string
	// Capabilities that it keeps.
	Capabilities []uintptr
	// Majors are numbers of the character devices that it sees in its /dev, and may open, beside /dev/null and the like.
	Majors []uint32
	// Unconfined lets it have all rights of root, and all files and devices.
	Unconfined bool
}

// orders are what the helper is told.
type orders struct {
	Program
	// Doors are files that it writes itself to, as the agent sees them, to be in its cgroup.
	Doors []string
	// Host is the folder in /proc of the process whose namespaces it enters; empty to stay in the agent's.
	Host string
}

// maxFailure of a helper, in bytes, is read.
const maxFailure = 4 << 10

// Start runs the program in the cgroup, which is made. It returns once the program runs, or has not been able to. host is the
// folder in /proc of a process in whose namespaces the program runs, that of PID 1 for example; empty for the agent's own. When
// the context ends first the program may run or not, as the cgroup tells.
func (g *Group) Start(ctx context.Context, host string, p Program) error {
	if !p.Unconfined {
		if err := g.allowDevices(p.Majors); err != nil {
			return err
		}
	}
	told, err := json.Marshal(orders{Program: p, Doors: g.doors(), Host: host})
	if err != nil {
		return err
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reader.Close()
	cmd := exec.Command("/proc/self/exe", Command)
	cmd.Env, cmd.Dir = []string{}, "/"
	cmd.Stdin = bytes.NewReader(told)
	cmd.ExtraFiles = []*os.File{writer}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	if err := errors.Join(err, writer.Close()); err != nil {
		return fmt.Errorf("run %s: %w", Command, err)
	}
	// The program outlives this process. If it does not, it is waited for, so that nothing is left of it.
	go func() { _ = cmd.Wait() }()
	defer context.AfterFunc(ctx, func() { _ = reader.SetReadDeadline(time.Unix(1, 0)) })()
	failure, err := io.ReadAll(io.LimitReader(reader, maxFailure))
	switch {
	case len(failure) > 0:
		return errors.New(string(bytes.ToValidUTF8(failure, []byte("�"))))
	case err != nil && ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return err
}
