// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// daemons are control daemons of a real driver: their folders, and whoever starts them.
type daemons struct {
	folders
	on supervisor
}

// supervisor starts daemons as processes that are no children of the agent, and not in the cgroup of its container: systemd or,
// where the host does not run it, cgroups. A daemon that ends is not started again by it, because its limits would be lost; the
// agent does that, with the limits, when it finds it missing.
type supervisor interface {
	// usable returns an error if no daemon can be started. It changes nothing.
	usable(ctx context.Context, name string) error
	// start starts a daemon that does not run, in its folder, which is there.
	start(ctx context.Context, p program, options []string, daemon Daemon) error
	// tell gives a command to the daemon, from where its folders are seen.
	tell(ctx context.Context, p program, name, said string) error
	// running tells whether there is one, or one that is ending.
	running(ctx context.Context, name string) (bool, error)
	// stop ends the daemon and its servers. That there is none is no error.
	stop(ctx context.Context, name string) error
	// names of daemons of which it has something.
	names() ([]string, error)
}

func newDaemons(opts DriverOptions) *daemons {
	d := &daemons{folders: folders{opts}}
	if booted, err := opts.hasSystemd(); booted || err != nil {
		d.on = &systemd{d.folders}
	} else {
		d.on = &cgroups{d.folders}
	}
	return d
}

const (
	// containerPipe is where clients look for the daemon, by default.
	containerPipe = "/tmp/nvidia-mps"
	pipeEnv       = "CUDA_MPS_PIPE_DIRECTORY=" + containerPipe
	control       = "nvidia-cuda-mps-control"
	multiUser     = "--multiuser-server"
)

// Check implements Daemons.
func (d *daemons) Check(ctx context.Context, daemon Daemon) error {
	_, err := d.opts.find(control)
	if err == nil {
		err = d.on.usable(ctx, daemon.Name)
	}
	if err != nil {
		return fmt.Errorf("no MPS daemon can be started on this node: %w", err)
	}
	_, err = d.options(ctx, daemon)
	return err
}

const (
	// maxHelp of a program, in bytes, is looked at.
	maxHelp = 64 << 10
	// defaultHelpTimeout is for a program to tell its options. It leaves the time of the step to what is done then.
	defaultHelpTimeout = 2 * time.Second
)

// options of the control program for the daemon.
func (d *daemons) options(ctx context.Context, daemon Daemon) ([]string, error) {
	foreground := []string{"-f"}
	if daemon.MultiUser == MultiUserNo {
		return foreground, nil
	}
	can, err := d.servesSeveral(ctx)
	switch {
	case err != nil:
		return nil, err
	case can:
		return append(foreground, multiUser), nil
	case daemon.MultiUser == MultiUserIfPossible:
		return foreground, nil
	}
	return nil, fmt.Errorf("sharing.mpsConfig.multiUser: the driver cannot do that: %s has no option %s", control, multiUser)
}

// servesSeveral tells whether a daemon can serve several users at once. That it cannot is only known of a program that has ended
// by itself and has said something, whatever its status: one that does not know --help says something else. It may read commands,
// of which there are none.
func (d *daemons) servesSeveral(ctx context.Context) (can bool, err error) {
	program, err := d.opts.find(control)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, d.opts.helpTimeout)
	defer cancel()
	help := head{most: maxHelp}
	err = d.opts.command(ctx, program, "--help").run("", &help)
	said := strings.TrimSpace(help.String())
	if strings.Contains(said, multiUser) {
		return true, nil
	}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	// with the latter a child has its output
	case errors.As(err, &exit) && exit.Exited() && !notRun[exit.ExitCode()], errors.Is(err, exec.ErrWaitDelay):
		err = nil
	}
	if err == nil && said == "" {
		err = errors.New("it says nothing")
	}
	if err != nil {
		return false, fmt.Errorf("ask the program %s for its options: %w: %s", control, err, clipped(said))
	}
	return false, nil
}

// notRun are exit statuses of a program, such as a shell or env, that could not run another one in its place.
var notRun = map[int]bool{125: true, 126: true, 127: true}

// Start implements Daemons.
func (d *daemons) Start(ctx context.Context, daemon Daemon) error {
	running, err := d.Running(ctx, daemon.Name)
	if err != nil {
		return err
	}
	commands := limits(daemon)
	if running && d.limited(daemon.Name, commands) {
		return nil
	}
	program, err := d.opts.find(control)
	if err != nil {
		return fmt.Errorf("start MPS daemon %s: %w", daemon.Name, err)
	}
	if running {
		// Whoever started it did not come to set its limits, or did not get to know that they are. It has clients, maybe, so it stays.
		return d.limit(ctx, program, daemon.Name, commands)
	}
	options, err := d.options(ctx, daemon)
	if err != nil {
		return fmt.Errorf("start MPS daemon %s: %w", daemon.Name, err)
	}
	if err := d.makeFolder(daemon.Name); err != nil {
		return fmt.Errorf("folder of MPS daemon %s: %w", daemon.Name, err)
	}
	if err := d.on.start(ctx, program, options, daemon); err != nil {
		return fmt.Errorf("start MPS daemon %s: %w", daemon.Name, err)
	}
	return d.limit(ctx, program, daemon.Name, commands)
}

// limits are the commands that set a daemon's limits, after one that it answers as soon as it takes any.
func limits(daemon Daemon) []string {
	commands := []string{"get_server_list"}
	if daemon.ActiveThreadPercentage > 0 {
		commands = append(commands, "set_default_active_thread_percentage "+strconv.Itoa(daemon.ActiveThreadPercentage))
	}
	for i, mib := range daemon.MemoryMiB {
		if mib > 0 {
			commands = append(commands, fmt.Sprintf("set_default_device_pinned_mem_limit %d %dM", i, mib))
		}
	}
	return commands
}

// limited tells whether a daemon that runs has these limits.
func (d *daemons) limited(name string, commands []string) bool {
	has, err := os.ReadFile(d.limitedFile(name))
	return err == nil && string(has) == asText(commands)
}

func asText(commands []string) string { return strings.Join(commands, "\n") + "\n" }

// limit sets the limits. The daemon takes commands a moment after its start.
func (d *daemons) limit(ctx context.Context, p program, name string, commands []string) error {
	for _, command := range commands {
		var last error
		err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, 5*time.Second, true, func(ctx context.Context) (bool, error) {
			last = d.on.tell(ctx, p, name, command)
			return last == nil, nil
		})
		if err != nil {
			return fmt.Errorf("MPS daemon %s does not take %q: %w", name, command, errors.Join(err, last))
		}
	}
	if err := os.WriteFile(d.limitedFile(name), []byte(asText(commands)), 0o600); err != nil {
		return fmt.Errorf("limits of MPS daemon %s: %w", name, err)
	}
	return nil
}

// Stop implements Daemons.
func (d *daemons) Stop(ctx context.Context, name string) error {
	if err := d.on.stop(ctx, name); err != nil {
		return fmt.Errorf("stop MPS daemon %s: %w", name, err)
	}
	if err := d.removeFolder(name); err != nil {
		return fmt.Errorf("folder of MPS daemon %s: %w", name, err)
	}
	return nil
}

// Running implements Daemons.
func (d *daemons) Running(ctx context.Context, name string) (bool, error) {
	return d.on.running(ctx, name)
}

// List implements Daemons.
func (d *daemons) List() ([]string, error) {
	started, err := d.on.names()
	if err != nil {
		return nil, err
	}
	made, err := d.folders.List()
	names := append(started, made...)
	slices.Sort(names)
	return slices.Compact(names), err
}

// Ready implements Daemons.
func (d *daemons) Ready(ctx context.Context, daemon Daemon) (bool, error) {
	running, err := d.Running(ctx, daemon.Name)
	return running && d.limited(daemon.Name, limits(daemon)), err
}

// CheckHost says how MPS daemons are started on the host, or returns an error if none can ever be: it has no systemd, and the
// agent cannot do in its place what is needed.
func CheckHost(opts DriverOptions) (how string, err error) {
	booted, err := opts.hasSystemd()
	if err != nil {
		return "", err
	}
	if booted {
		return "units of the host's systemd", nil
	}
	return (&cgroups{folders{opts}}).how()
}
