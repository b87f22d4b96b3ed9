// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/agent/sharing/internal/confine"
)

// HelperCommand is the subcommand by which the agent's program is run to become a daemon.
const HelperCommand = confine.Command

// Become is what HelperCommand does: it reads from the agent what to run, and becomes that. It returns only if it cannot.
func Become(input io.Reader) error { return confine.Become(input) }

// cgroups supervises daemons without systemd. Each is a process of the host in a cgroup of its own, beside the kubelet's, and so
// outlives the agent's container. What runs is told by what is in the cgroup; there is no other record.
type cgroups struct{ folders }

const (
	// containerLog is where a daemon has its logs, as containerPipe is where it meets its clients: it sees both below a /tmp of its own.
	containerLog = "/tmp/nvidia-log"
	// stopGrace is for a daemon to end by itself, before it is killed. It leaves the time of the step to that.
	stopGrace = 5 * time.Second
	// tasksPercent of the node's tasks are a daemon's at most, as systemd's DefaultTasksMax has it.
	tasksPercent = 15
	// memoryParts of the node's memory, one of them is a daemon's at most. A daemon that takes more ends, and not another process
	// of the node.
	memoryParts = 2
)

// find looks for the host's cgroups.
func (c *cgroups) find() (*confine.Cgroups, error) {
	limits, err := limitsOf(c.opts.ProcRoot)
	if err != nil {
		return nil, err
	}
	return confine.Find(filepath.Join(c.opts.HostRoot, "sys/fs/cgroup"), limits)
}

// limitsOf a daemon on the node. They are no bounds between tenants: those of a daemon end with it. They keep the node.
func limitsOf(proc string) ([]confine.Limit, error) {
	tasks := uint64(1 << 22) // the most that the kernel knows
	for _, file := range []string{"sys/kernel/pid_max", "sys/kernel/threads-max"} {
		path := filepath.Join(proc, file)
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		number, err := strconv.ParseUint(string(bytes.TrimSpace(data)), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		tasks = min(tasks, number)
	}
	path := filepath.Join(proc, "meminfo")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	found := memTotal.FindSubmatch(data)
	if found == nil {
		return nil, fmt.Errorf("%s has no MemTotal in kB", path)
	}
	kib, err := strconv.ParseUint(string(found[1]), 10, 54)
	if err != nil {
		return nil, fmt.Errorf("%s: MemTotal: %w", path, err)
	}
	return []confine.Limit{
		{Controller: "memory", V1: "memory.limit_in_bytes", V2: "memory.max", Value: strconv.FormatUint(kib<<10/memoryParts, 10)},
		// A daemon without its server, or the other way round, serves nobody.
		{Controller: "memory", V2: "memory.oom.group", Value: "1"},
		{Controller: "pids", V1: "pids.max", V2: "pids.max", Value: strconv.FormatUint(max(tasks*tasksPercent/100, 1), 10)},
	}, nil
}

var memTotal = regexp.MustCompile(`(?m)^MemTotal: +([0-9]+) kB$`)

func (c *cgroups) group(name string) (*confine.Group, error) {
	all, err := c.find()
	if err != nil {
		return nil, err
	}
	return all.Group(name), nil
}

func (c *cgroups) usable(context.Context, string) error {
	_, err := c.how()
	return err
}

// how daemons are started, for the log.
func (c *cgroups) how() (string, error) {
	all, err := c.find()
	if err == nil {
		err = all.Writable()
	}
	if err == nil && !c.opts.Unconfined {
		err = confine.HasMountSetattr()
	}
	if err == nil {
		err = c.seesHost()
	}
	if err != nil {
		return "", fmt.Errorf("the host does not run systemd (it has no /%s), and the agent cannot start MPS daemons itself: %w", booted, err)
	}
	return "processes of the agent's making, as the host does not run systemd, in " + all.String(), nil
}

// host is the folder in /proc of the process whose namespaces are the host's; empty if the agent is in them.
func (c *cgroups) host() string {
	if c.opts.HostRoot == "/" {
		return ""
	}
	return filepath.Join(c.opts.ProcRoot, "1")
}

// seesHost returns an error if PID 1 is none of the host's.
func (c *cgroups) seesHost() error {
	if c.host() == "" {
		return nil
	}
	path := filepath.Join(c.host(), "root")
	theirs, err := os.Stat(path)
	if err != nil {
		return err
	}
	ours, err := os.Stat(c.opts.HostRoot)
	if err == nil && !os.SameFile(theirs, ours) {
		err = fmt.Errorf("%s is another folder than --host-root=%s: the agent needs hostPID: true", path, c.opts.HostRoot)
	}
	return err
}

func (c *cgroups) start(ctx context.Context, p program, options []string, daemon Daemon) error {
	group, err := c.group(daemon.Name)
	if err != nil {
		return err
	}
	// Servers may be left of a daemon that has ended, and hold its GPUs.
	if err := group.End(ctx, stopGrace); err != nil {
		return err
	}
	if err := group.Make(); err != nil {
		return err
	}
	majors, err := driverMajors(c.opts.ProcRoot)
	if err != nil {
		return err
	}
	return group.Start(ctx, c.host(), confine.Program{
		Root:  p.root,
		Paths: p.candidates(),
		Args:  append([]string{p.path}, options...),
		Env: append(slices.Clone(p.environment()), pipeEnv, "CUDA_MPS_LOG_DIRECTORY="+containerLog,
			"CUDA_VISIBLE_DEVICES="+strings.Join(daemon.GPUs, ",")),
		Binds: []confine.Bind{
			{From: c.dir(daemon.Name, shmFolder), To: "/dev/shm"},
			{From: c.dir(daemon.Name, pipeFolder), To: containerPipe},
			{From: c.dir(daemon.Name, logFolder), To: containerLog},
		},
		Output: filepath.Join(containerLog, "output"),
		Hide:   c.hidden(p),
		// For sockets, files and servers of the clients' users.
		Capabilities: []uintptr{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_KILL, unix.CAP_SETGID, unix.CAP_SETUID},
		Majors:       majors,
		Unconfined:   c.opts.Unconfined,
	})
}

// hidden are folders with sockets of the host's services, with people's files, and with the other daemons' folders. One that has
// the driver's files is not hidden.
func (c *cgroups) hidden(p program) []string {
	return slices.DeleteFunc([]string{"/home", "/root", "/run", c.opts.MPSRoot}, func(folder string) bool {
		return slices.ContainsFunc(append([]string{p.path}, p.env...), func(has string) bool {
			return strings.HasPrefix(has, folder+"/") || strings.Contains(has, "="+folder+"/") || strings.Contains(has, ":"+folder+"/")
		})
	})
}

// driverMajors are the numbers of the driver's character devices, by their names in /proc/devices.
func driverMajors(proc string) (majors []uint32, err error) {
	path := filepath.Join(proc, "devices")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	characters, _, _ := strings.Cut(string(data), "Block devices:")
	for _, found := range driverDevice.FindAllStringSubmatch(characters, -1) {
		major, err := strconv.ParseUint(found[1], 10, 32)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		majors = append(majors, uint32(major))
	}
	return majors, nil
}

var driverDevice = regexp.MustCompile(`(?m)^ *([0-9]+) nvidia`)

// daemonProcess is the process in the cgroup that runs one of these programs: of a daemon, or of the helper that is about to become
// one. Servers are none, nor is what they start. held is its pidfd, to be closed.
func (c *cgroups) daemonProcess(group *confine.Group, programs ...string) (pid, held int, err error) {
	pids, err := group.Processes()
	if err != nil {
		return 0, 0, err
	}
	for _, pid := range pids {
		fd, isIn, err := group.Hold(pid)
		if err != nil {
			return 0, 0, err
		}
		if !isIn {
			continue
		}
		line, err := os.ReadFile(filepath.Join(c.opts.ProcRoot, strconv.Itoa(pid), "cmdline"))
		if err == nil && runs(string(line), programs) {
			return pid, fd, nil
		}
		_ = unix.Close(fd) // it has ended, or is another
	}
	return 0, 0, nil
}

// runs tells by a command line whether one of the programs runs. One that is a script, or a subcommand, is the second word.
func runs(line string, programs []string) bool {
	words := strings.Split(line, "\x00")
	return slices.ContainsFunc(words[:min(len(words), 2)], func(word string) bool {
		return slices.Contains(programs, filepath.Base(word))
	})
}

func (c *cgroups) running(_ context.Context, name string) (bool, error) {
	group, err := c.group(name)
	if errors.Is(err, confine.ErrMissing) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	pid, held, err := c.daemonProcess(group, control, HelperCommand)
	if err != nil {
		return false, fmt.Errorf("look for MPS daemon %s: %w", name, err)
	}
	if pid == 0 {
		return false, nil
	}
	return true, unix.Close(held)
}

// tell runs the control program where the daemon sees its folders: in the root of its process, which is held meanwhile, so that
// it is nobody else's. A helper has the host's root yet, where another daemon may be met.
func (c *cgroups) tell(ctx context.Context, p program, name, said string) error {
	group, err := c.group(name)
	if err != nil {
		return err
	}
	pid, held, err := c.daemonProcess(group, control)
	if err != nil {
		return err
	}
	if pid == 0 {
		return errors.New("it has ended, or has not begun: what it said is in " + c.dir(name, logFolder))
	}
	defer unix.Close(held)
	root, err := unix.Open(filepath.Join(c.opts.ProcRoot, strconv.Itoa(pid), "root"), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("root of process %d: %w", pid, err)
	}
	defer unix.Close(root)
	if err := unix.PidfdSendSignal(held, 0, nil, 0); err != nil {
		return fmt.Errorf("process %d has ended: %w", pid, err)
	}
	return run(command{
		ctx: ctx, root: "/proc/self/fd/" + strconv.Itoa(root), env: append(slices.Clone(p.env), pipeEnv), args: []string{p.path},
	}, said+"\n")
}

func (c *cgroups) stop(ctx context.Context, name string) error {
	group, err := c.group(name)
	if errors.Is(err, confine.ErrMissing) {
		return nil
	}
	if err != nil {
		return err
	}
	return group.End(ctx, stopGrace)
}

func (c *cgroups) names() ([]string, error) {
	all, err := c.find()
	if errors.Is(err, confine.ErrMissing) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return all.Names()
}
