// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// statusFD is the pipe to the agent that waits for the helper. It is closed when the program is there.
const statusFD = 3

// Become is the helper: it reads what Start has written, and becomes the program. It returns only if that fails; then the agent,
// if it is still there, is told.
func Become(input io.Reader) error {
	// Rights and namespaces are a thread's, and the thread that becomes the program keeps them.
	runtime.LockOSThread()
	unix.CloseOnExec(statusFD)
	err := become(input)
	_, _ = unix.Write(statusFD, []byte(err.Error()))
	return err
}

func become(input io.Reader) error {
	var o orders
	if err := json.NewDecoder(input).Decode(&o); err != nil {
		return fmt.Errorf("the agent has ended before it said what to run: %w", err)
	}
	// 1. The cgroup comes first: from here on the next agent can find this process, and end it.
	namespaces, err := o.openNamespaces()
	if err != nil {
		return err
	}
	if err := o.enterCgroup(namespaces); err != nil {
		return err
	}
	if err := awaited(); err != nil {
		return err
	}
	// 2. While its /proc can be written to.
	if err := ordinary(); err != nil {
		return err
	}
	// 3. The host's namespaces: those of the pod end with it.
	for _, n := range namespaces {
		if err := n.enter(); err != nil {
			return err
		}
	}
	// 4. What it sees of the host's files.
	if err := o.makeView(); err != nil {
		return err
	}
	// 5. Where it reads and writes.
	if err := o.redirect(); err != nil {
		return err
	}
	// 6. What it may do.
	if !o.Unconfined {
		if err := dropRights(o.Capabilities); err != nil {
			return err
		}
	}
	// 7. It is no helper any more.
	unix.Umask(0o022)
	failed := fmt.Errorf("%w: no path for %q", unix.ENOENT, o.Args)
	for _, path := range o.Paths {
		if failed = unix.Exec(path, o.Args, o.Env); !errors.Is(failed, unix.ENOENT) && !errors.Is(failed, unix.ENOTDIR) {
			return fmt.Errorf("run %s: %w", path, failed)
		}
	}
	return fmt.Errorf("run %q in root %q: %w", o.Paths, o.Root, failed)
}

// awaited returns an error if nobody waits for the helper any more: its agent has ended, or has given up. The cgroup that it has
// entered may be the one that another helper was started in since.
func awaited() error {
	status := []unix.PollFd{{Fd: statusFD}}
	_, err := unix.Poll(status, 0)
	for errors.Is(err, unix.EINTR) {
		_, err = unix.Poll(status, 0)
	}
	if err != nil {
		return fmt.Errorf("look whether the agent is there: %w", err)
	}
	if status[0].Revents&unix.POLLERR != 0 {
		return errors.New("the agent does not wait any more")
	}
	return nil
}

// namespace of the host.
type namespace struct {
	path string
	kind int
	fd   int
}

// openNamespaces opens those of the host while its /proc is seen. The one of cgroups is the first: a process may only enter a
// cgroup that is within its own namespace (mount option nsdelegate). The one of mounts is the last.
func (o *orders) openNamespaces() (all []namespace, err error) {
	if o.Host == "" {
		return nil, nil
	}
	for _, n := range []namespace{
		{path: "ns/cgroup", kind: unix.CLONE_NEWCGROUP},
		{path: "ns/net", kind: unix.CLONE_NEWNET},
		{path: "ns/ipc", kind: unix.CLONE_NEWIPC},
		{path: "ns/uts", kind: unix.CLONE_NEWUTS},
		{path: "ns/mnt", kind: unix.CLONE_NEWNS},
	} {
		n.path = filepath.Join(o.Host, n.path)
		if n.fd, err = unix.Open(n.path, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return nil, fmt.Errorf("namespace %s: %w", n.path, err)
		}
		all = append(all, n)
	}
	return all, nil
}

func (n namespace) enter() error {
	if n.kind == unix.CLONE_NEWNS {
		// Threads share root and working folder, and one that shares them cannot change to other mounts.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unshare the working folder: %w", err)
		}
	}
	if err := unix.Setns(n.fd, n.kind); err != nil {
		return fmt.Errorf("enter namespace %s: %w", n.path, err)
	}
	return nil
}

func (o *orders) enterCgroup(namespaces []namespace) error {
	for _, n := range namespaces {
		if n.kind == unix.CLONE_NEWCGROUP {
			if err := n.enter(); err != nil {
				return err
			}
		}
	}
	for _, door := range o.Doors {
		if err := write(door, "0"); err != nil {
			return fmt.Errorf("enter cgroup: %w", err)
		}
	}
	return nil
}

// redirect gives it nothing to read, and a file to write to. That one has no room if its clients have taken it: then what it says
// is lost.
func (o *orders) redirect() error {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/dev/null", Err: err}
	}
	output, err := unix.Open(o.Output, unix.O_WRONLY|unix.O_CREAT|unix.O_APPEND|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.ENOSPC) {
		output, err = null, nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: o.Output, Err: err}
	}
	return errors.Join(unix.Dup3(null, 0, 0), unix.Dup3(output, 1, 0), unix.Dup3(output, 2, 0))
}
