// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

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
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

// Parent is the cgroup, at the root of the host's, that all of ours are in. The kubelet, which ends what is in its own, knows
// nothing of it.
const Parent = "stowage-mps"

// Limit is a file of a cgroup and what is written to it.
type Limit struct {
	// Controller that the host must have, "memory" for example.
	Controller string
	// V1 and V2 are the file's names; an empty one is not written.
	V1, V2 string
	Value  string
}

// Cgroups are the host's.
type Cgroups struct {
	// own are the hierarchies in which a process gets a cgroup of its own: that of cgroup v2, or one for each controller of v1, the
	// last of them for devices.
	own []string
	// others are the rest of v1. A process is put into their root, since it must not stay in the pod's: container runtimes end
	// what is there.
	others []string
	v2     bool
	parent string
	limits []Limit
}

// ErrMissing is what the error of Find is where the host does not have such cgroups, and so nothing can be in one.
var ErrMissing = errors.New("no such cgroups")

// missing says what is.
type missing string

func (m missing) Error() string { return string(m) }

// Is implements errors.Is.
func (m missing) Is(target error) bool { return target == ErrMissing }

// Find looks for the cgroups of the host, mounted at that path. The error says which controller of the limits is missing where.
func Find(path string, limits []Limit) (*Cgroups, error) {
	c := &Cgroups{parent: Parent, limits: limits}
	controllers, err := os.ReadFile(filepath.Join(path, "cgroup.controllers"))
	switch {
	case err == nil:
		c.v2, c.own = true, []string{path}
		has := strings.Fields(string(controllers))
		for _, controller := range c.controllers() {
			if !slices.Contains(has, controller) {
				return nil, missing(fmt.Sprintf("cgroup v2 at %s has no controller %s, only %q", path, controller, has))
			}
		}
		return c, nil
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	var own []os.FileInfo
	for _, controller := range append(c.controllers(), devicesV1) {
		hierarchy := filepath.Join(path, controller)
		info, err := os.Stat(filepath.Join(hierarchy, procsFile))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, missing(fmt.Sprintf("there is no cgroup v2 at %s, and of v1 no controller %s", path, controller))
		}
		if err != nil {
			return nil, err
		}
		c.own, own = append(c.own, hierarchy), append(own, info)
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		hierarchy := filepath.Join(path, entry.Name())
		info, err := os.Stat(filepath.Join(hierarchy, procsFile))
		if err != nil || slices.ContainsFunc(own, func(o os.FileInfo) bool { return os.SameFile(o, info) }) {
			continue
		}
		c.others = append(c.others, hierarchy)
	}
	return c, nil
}

const procsFile = "cgroup.procs"

// String is for the log.
func (c *Cgroups) String() string {
	if c.v2 {
		return "cgroup v2 at " + c.own[0]
	}
	return "cgroup v1 at " + strings.Join(c.own, " and ")
}

// Writable returns an error if cgroups cannot be made there. It makes none.
func (c *Cgroups) Writable() error {
	for _, hierarchy := range c.own {
		if err := unix.Access(hierarchy, unix.W_OK); err != nil {
			return &fs.PathError{Op: "write to", Path: hierarchy, Err: err}
		}
	}
	return nil
}

// controllers of the limits.
func (c *Cgroups) controllers() (names []string) {
	for _, limit := range c.limits {
		if !slices.Contains(names, limit.Controller) {
			names = append(names, limit.Controller)
		}
	}
	return names
}

// Names of the cgroups that there are.
func (c *Cgroups) Names() (names []string, err error) {
	for _, hierarchy := range c.own {
		entries, err := os.ReadDir(filepath.Join(hierarchy, c.parent))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, entry := range entries {
			if entry.IsDir() {
				names = append(names, entry.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// Group is the one of that name. It need not be there.
func (c *Cgroups) Group(name string) *Group { return &Group{c, name} }

// Group is a cgroup, in one hierarchy or several.
type Group struct {
	cgroups *Cgroups
	name    string
}

func (g *Group) dirs() (dirs []string) {
	for _, hierarchy := range g.cgroups.own {
		dirs = append(dirs, filepath.Join(hierarchy, g.cgroups.parent, g.name))
	}
	return dirs
}

// Make makes the cgroup, if it is not there, and sets its limits.
func (g *Group) Make() error {
	if g.cgroups.v2 {
		root := g.cgroups.own[0]
		if err := mkdir(filepath.Join(root, g.cgroups.parent)); err != nil {
			return err
		}
		for _, dir := range []string{root, filepath.Join(root, g.cgroups.parent)} {
			for _, controller := range g.cgroups.controllers() {
				if err := write(filepath.Join(dir, "cgroup.subtree_control"), "+"+controller); err != nil {
					return err
				}
			}
		}
	}
	for _, dir := range g.dirs() {
		if err := errors.Join(mkdir(filepath.Dir(dir)), mkdir(dir)); err != nil {
			return err
		}
	}
	for _, limit := range g.cgroups.limits {
		if path := g.file(limit); path != "" {
			if err := write(path, limit.Value); err != nil {
				return err
			}
		}
	}
	return nil
}

// file of the limit; empty if this kind of cgroups has none.
func (g *Group) file(limit Limit) string {
	switch {
	case g.cgroups.v2 && limit.V2 != "":
		return filepath.Join(g.cgroups.own[0], g.cgroups.parent, g.name, limit.V2)
	case !g.cgroups.v2 && limit.V1 != "":
		return filepath.Join(g.cgroups.own[slices.Index(g.cgroups.controllers(), limit.Controller)], g.cgroups.parent, g.name, limit.V1)
	}
	return ""
}

func mkdir(path string) error {
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// write writes to a file of the kernel's, which is there.
func write(path, value string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(value)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("%q: %w", value, err)
	}
	return nil
}

// doors are the files by which a process enters: those of its own cgroup last, so that one that is in there is in no other's.
func (g *Group) doors() (paths []string) {
	for _, dir := range append(slices.Clone(g.cgroups.others), g.dirs()...) {
		paths = append(paths, filepath.Join(dir, procsFile))
	}
	return paths
}

// Processes in the cgroup, by ID. Without a cgroup there are none.
func (g *Group) Processes() (pids []int, err error) {
	for _, dir := range g.dirs() {
		data, err := os.ReadFile(filepath.Join(dir, procsFile))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, field := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", filepath.Join(dir, procsFile), err)
			}
			if pid == 0 {
				return nil, fmt.Errorf("%s has a process that cannot be seen from here: the agent needs hostPID: true", filepath.Join(dir, procsFile))
			}
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// Hold returns a pidfd of the process if it is in the cgroup: as long as the process has not ended, nobody else has its ID.
func (g *Group) Hold(pid int) (fd int, held bool, err error) {
	fd, err = unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("process %d: %w", pid, err)
	}
	pids, err := g.Processes()
	if err != nil || !slices.Contains(pids, pid) {
		return 0, false, errors.Join(err, unix.Close(fd))
	}
	return fd, true, nil
}

// signal sends one to each process in the cgroup.
func (g *Group) signal(signal unix.Signal) error {
	pids, err := g.Processes()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		fd, held, err := g.Hold(pid)
		if err != nil {
			return err
		}
		if !held {
			continue
		}
		err = unix.PidfdSendSignal(fd, signal, nil, 0)
		if err := errors.Join(err, unix.Close(fd)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("process %d of cgroup %s: %w", pid, g.name, err)
		}
	}
	return nil
}

// pollEvery is how often it is looked whether processes have ended.
const pollEvery = 20 * time.Millisecond

// End asks the processes to end (SIGTERM), kills those that are there after the grace, and removes the cgroup. That there is none
// is no error.
func (g *Group) End(ctx context.Context, grace time.Duration) error {
	if err := g.signal(unix.SIGTERM); err != nil {
		return err
	}
	asked, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	if err := g.wait(asked); err != nil {
		if ctx.Err() != nil {
			return err // who gives up before the grace is over does not kill them
		}
		if err := g.kill(ctx); err != nil {
			return err
		}
	}
	return g.remove(ctx)
}

// wait waits until nobody is in the cgroup. The error names who is.
func (g *Group) wait(ctx context.Context) error {
	var left []int
	err := wait.PollUntilContextCancel(ctx, pollEvery, true, func(context.Context) (bool, error) {
		var err error
		left, err = g.Processes()
		return len(left) == 0, err
	})
	if err != nil && len(left) > 0 {
		err = fmt.Errorf("processes %v of cgroup %s do not end: %w", left, g.name, err)
	}
	return err
}

// kill ends all processes in the cgroup at once, whatever they do, and waits for that. None is started there from then on.
func (g *Group) kill(ctx context.Context) error {
	if g.cgroups.v2 {
		err := write(filepath.Join(g.dirs()[0], "cgroup.kill"), "1")
		if err == nil {
			return g.wait(ctx)
		}
		if !errors.Is(err, fs.ErrNotExist) { // the kernel is older than Linux 5.14
			return err
		}
	}
	for _, dir := range g.dirs() {
		if err := write(filepath.Join(dir, "pids.max"), "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	// One that was about to fork when it was listed has done so once more.
	return wait.PollUntilContextCancel(ctx, pollEvery, true, func(ctx context.Context) (bool, error) {
		if err := g.signal(unix.SIGKILL); err != nil {
			return false, err
		}
		soon, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		err := g.wait(soon)
		if ctx.Err() != nil {
			return false, err
		}
		return err == nil, nil
	})
}

// remove removes the cgroup. It is busy for a moment after its last process.
func (g *Group) remove(ctx context.Context) error {
	for _, dir := range g.dirs() {
		var last error
		err := wait.PollUntilContextCancel(ctx, pollEvery, true, func(context.Context) (bool, error) {
			if last = unix.Rmdir(dir); errors.Is(last, unix.ENOENT) {
				last = nil
			}
			if last != nil && !errors.Is(last, unix.EBUSY) {
				return false, last
			}
			return last == nil, nil
		})
		if err != nil {
			return fmt.Errorf("remove cgroup %s: %w", dir, errors.Join(err, last))
		}
	}
	return nil
}
