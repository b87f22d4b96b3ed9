// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// systemd supervises daemons as transient units of the host.
type systemd struct{ folders }

// hasSystemd tells whether the host runs systemd, as sd_booted(3) does. Talos is one that does not.
func (o *DriverOptions) hasSystemd() (bool, error) {
	_, err := os.Stat(filepath.Join(cmp.Or(o.bootedRoot, o.HostRoot), booted))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

const booted = "run/systemd/system"

const (
	unitPrefix = "stowage-mps-"
	unitSuffix = ".service"
)

func unit(name string) string { return unitPrefix + name + unitSuffix }

func (s *systemd) usable(ctx context.Context, name string) error {
	_, err := s.active(ctx, name)
	return err
}

func (s *systemd) start(ctx context.Context, p program, options []string, daemon Daemon) error {
	args := []string{
		"systemd-run", "--quiet", "--collect", "--unit=" + unit(daemon.Name), "--description=NVIDIA MPS control daemon of Stowage",
	}
	args = append(args, s.sandbox(p, daemon.Name)...)
	args = append(args, s.sight(p, daemon.Name)...)
	args = append(args, "--setenv=CUDA_VISIBLE_DEVICES="+strings.Join(daemon.GPUs, ","),
		"--setenv=CUDA_MPS_LOG_DIRECTORY="+s.dir(daemon.Name, logFolder))
	return run(s.onHost(ctx, append(args, p.line(options...)...)...), "")
}

// sight are options of systemd-run by which a program sees a daemon's folders, in whatever root it runs.
func (s *systemd) sight(p program, name string) []string {
	// Server and clients meet in shared memory, which is nobody else's.
	options := []string{p.bind(s.dir(name, shmFolder), "/dev/shm")}
	if p.root != "" {
		for _, folder := range []string{pipeFolder, logFolder} {
			options = append(options, p.bind(s.dir(name, folder), s.dir(name, folder)))
		}
	}
	for _, variable := range append(slices.Clone(p.env), s.pipe(name)) {
		options = append(options, "--setenv="+variable)
	}
	return options
}

func (s *systemd) pipe(name string) string {
	return "CUDA_MPS_PIPE_DIRECTORY=" + s.dir(name, pipeFolder)
}

func (s *systemd) tell(ctx context.Context, p program, name, said string) error {
	if p.root == "" {
		return run(command{ctx: ctx, root: s.opts.HostRoot, env: append(slices.Clone(p.env), s.pipe(name)), args: []string{p.path}}, said+"\n")
	}
	args := append([]string{"systemd-run", "--quiet", "--collect", "--wait", "--pipe"}, s.sight(p, name)...)
	return run(s.onHost(ctx, append(args, p.line()...)...), said+"\n")
}

// stop leaves it to systemd to end the server with the daemon: both are in the unit's cgroup.
func (s *systemd) stop(ctx context.Context, name string) error {
	running, err := s.running(ctx, name)
	if err != nil || !running {
		return err
	}
	if err := run(s.onHost(ctx, "systemctl", "stop", unit(name)), ""); err != nil {
		// It may have ended since, for another of its GPUs for example: then systemd does not know it any more.
		if running, unknown := s.running(ctx, name); running || unknown != nil {
			return err
		}
	}
	return nil
}

var (
	// inactive is the exit status of systemctl is-active for a unit that is not, or does not exist.
	inactive = map[int]bool{3: true, 4: true}
	// changing are states (systemd(1)) of units that are not active and have processes all the same, one that is being stopped
	// for example.
	changing = []string{"activating", "deactivating"}
)

func (s *systemd) running(ctx context.Context, name string) (bool, error) {
	// A folder is made before a daemon is started: without one systemd need not be asked, or be there.
	if _, err := os.Stat(s.dir(name)); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return s.active(ctx, name)
}

// active asks systemd.
func (s *systemd) active(ctx context.Context, name string) (bool, error) {
	state, err := output(s.onHost(ctx, "systemctl", "is-active", unit(name)), "")
	var exit *exec.ExitError
	if errors.As(err, &exit) && inactive[exit.ExitCode()] {
		return slices.Contains(changing, state), nil
	}
	if err != nil {
		return false, fmt.Errorf("ask systemd for MPS daemon %s: %w", name, err)
	}
	return true, nil
}

// names: a unit that is not there any more leaves nothing.
func (s *systemd) names() ([]string, error) { return nil, nil }

func (s *systemd) onHost(ctx context.Context, args ...string) command {
	return command{ctx: ctx, root: s.opts.HostRoot, args: args}
}
