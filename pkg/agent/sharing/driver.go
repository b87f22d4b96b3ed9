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
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/pkg/agent/config"
)

// DriverOptions say where the real driver's programs are.
type DriverOptions struct {
	// DriverRoot is the folder below which the agent sees the driver's files.
	DriverRoot string
	// HostDriverRoot is the same folder as the host sees it: "/" for a driver that is installed there. Empty if it has the same path.
	HostDriverRoot string
	// MPSRoot gets a folder for each daemon, on which a file system of ShmBytes is mounted. The host has it under the same path, and sees
	// what is mounted there.
	MPSRoot string
	// ShmBytes is DefaultShmBytes if 0.
	ShmBytes int64
	// HostRoot is the host's root folder as the agent sees it; "/" if the agent runs on the host itself.
	HostRoot string
	// Unconfined daemons have all rights of root on the host. Else systemd takes from them what they do not need.
	Unconfined bool
	// ProcRoot is /proc, of the host.
	ProcRoot string

	mounts      mounts        // the kernel's if nil
	helpTimeout time.Duration // defaultHelpTimeout if 0
}

// NewDriver returns the tools for real GPUs.
func NewDriver(opts DriverOptions) Tools {
	opts.ShmBytes = cmp.Or(opts.ShmBytes, DefaultShmBytes)
	opts.helpTimeout = cmp.Or(opts.helpTimeout, defaultHelpTimeout)
	return Tools{
		TimeSlicer: &smi{opts}, Daemons: &systemd{folders{opts}}, Processes: &processes{proc: opts.ProcRoot}, Persistenced: newPersistenced(opts),
		Pods: func() (map[types.UID]bool, error) { return PodsRunning(opts.ProcRoot) },
	}
}

// smi runs nvidia-smi.
type smi struct{ opts DriverOptions }

// SetTimeSlice implements TimeSlicer.
func (s *smi) SetTimeSlice(ctx context.Context, gpu string, interval config.Interval) error {
	smi, err := s.opts.find("nvidia-smi")
	if err == nil {
		err = run(s.opts.command(ctx, smi, "compute-policy", "-i", gpu, "--set-timeslice", strconv.Itoa(interval.Number())), "")
	}
	if err != nil {
		return fmt.Errorf("set the time slice of %s to %s: %w", gpu, interval, err)
	}
	return nil
}

// systemd supervises daemons as transient units of the host: they are no children of the agent, and not in the
// cgroup of its container. A daemon that ends is not started again by systemd, because its limits would be
// lost; the agent does that, with the limits, when it finds it missing.
type systemd struct{ folders }

const (
	// containerPipe is where clients look for the daemon, by default.
	containerPipe = "/tmp/nvidia-mps"
	pipeEnv       = "CUDA_MPS_PIPE_DIRECTORY=" + containerPipe
	control       = "nvidia-cuda-mps-control"
	multiUser     = "--multiuser-server"
)

// CheckHost returns an error if no MPS daemon can ever be started on the host, which has no systemd (Talos, for example), as
// sd_booted(3) finds out.
func CheckHost(hostRoot string) error {
	const booted = "run/systemd/system"
	_, err := os.Stat(filepath.Join(hostRoot, booted))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("MPS daemons are units of systemd, which the host does not run: it has no /%s", booted)
	}
	return err
}

const (
	unitPrefix = "stowage-mps-"
	unitSuffix = ".service"
)

func unit(name string) string { return unitPrefix + name + unitSuffix }

// Check implements Daemons.
func (s *systemd) Check(ctx context.Context, daemon Daemon) error {
	_, err := s.opts.find(control)
	if err == nil {
		_, err = s.active(ctx, daemon.Name)
	}
	if err != nil {
		return fmt.Errorf("no MPS daemon can be started on this node: %w", err)
	}
	_, err = s.options(ctx, daemon)
	return err
}

const (
	// maxHelp of a program, in bytes, is looked at.
	maxHelp = 64 << 10
	// defaultHelpTimeout is for a program to tell its options. It leaves the time of the step to what is done then.
	defaultHelpTimeout = 2 * time.Second
)

// options of the control program for the daemon.
func (s *systemd) options(ctx context.Context, daemon Daemon) ([]string, error) {
	foreground := []string{"-f"}
	if daemon.MultiUser == MultiUserNo {
		return foreground, nil
	}
	can, err := s.servesSeveral(ctx)
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

// servesSeveral tells whether a daemon can serve several users at once. That it cannot is only known of a program that has ended by itself and has said
// something, whatever its status: one that does not know --help says something else. It may read commands, of which there are none.
func (s *systemd) servesSeveral(ctx context.Context) (can bool, err error) {
	program, err := s.opts.find(control)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.helpTimeout)
	defer cancel()
	help := head{most: maxHelp}
	err = s.opts.command(ctx, program, "--help").run("", &help)
	said := strings.TrimSpace(help.String())
	if strings.Contains(said, multiUser) {
		return true, nil
	}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case errors.As(err, &exit) && exit.Exited() && !notRun[exit.ExitCode()], errors.Is(err, exec.ErrWaitDelay): // with the latter a child has its output
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
func (s *systemd) Start(ctx context.Context, daemon Daemon) error {
	running, err := s.Running(ctx, daemon.Name)
	if err != nil {
		return err
	}
	commands := limits(daemon)
	if running && s.limited(daemon.Name, commands) {
		return nil
	}
	program, err := s.opts.find(control)
	if err != nil {
		return fmt.Errorf("start MPS daemon %s: %w", daemon.Name, err)
	}
	if running {
		// Whoever started it did not come to set its limits, or did not get to know that they are. It has clients, maybe, so it stays.
		return s.limit(ctx, program, daemon.Name, commands)
	}
	options, err := s.options(ctx, daemon)
	if err != nil {
		return fmt.Errorf("start MPS daemon %s: %w", daemon.Name, err)
	}
	if err := s.makeFolder(daemon.Name); err != nil {
		return fmt.Errorf("folder of MPS daemon %s: %w", daemon.Name, err)
	}
	args := append([]string{"systemd-run", "--quiet", "--collect", "--unit=" + unit(daemon.Name), "--description=NVIDIA MPS control daemon of Stowage"}, s.sandbox(program, daemon.Name)...)
	args = append(args, s.sight(program, daemon.Name)...)
	args = append(args, "--setenv=CUDA_VISIBLE_DEVICES="+strings.Join(daemon.GPUs, ","), "--setenv=CUDA_MPS_LOG_DIRECTORY="+s.dir(daemon.Name, logFolder))
	if err := run(s.onHost(ctx, append(args, program.line(options...)...)...), ""); err != nil {
		return fmt.Errorf("start MPS daemon %s: %w", daemon.Name, err)
	}
	return s.limit(ctx, program, daemon.Name, commands)
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

// tell gives a command to the daemon, from where its folders are seen.
func (s *systemd) tell(ctx context.Context, p program, name, said string) error {
	if p.root == "" {
		return run(command{ctx: ctx, root: s.opts.HostRoot, env: append(slices.Clone(p.env), s.pipe(name)), args: []string{p.path}}, said+"\n")
	}
	args := append([]string{"systemd-run", "--quiet", "--collect", "--wait", "--pipe"}, s.sight(p, name)...)
	return run(s.onHost(ctx, append(args, p.line()...)...), said+"\n")
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
func (s *systemd) limited(name string, commands []string) bool {
	has, err := os.ReadFile(s.limitedFile(name))
	return err == nil && string(has) == asText(commands)
}

func asText(commands []string) string { return strings.Join(commands, "\n") + "\n" }

// limit sets the limits. The daemon takes commands a moment after its start.
func (s *systemd) limit(ctx context.Context, p program, name string, commands []string) error {
	for _, command := range commands {
		var last error
		err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, 5*time.Second, true, func(ctx context.Context) (bool, error) {
			last = s.tell(ctx, p, name, command)
			return last == nil, nil
		})
		if err != nil {
			return fmt.Errorf("MPS daemon %s does not take %q: %w", name, command, errors.Join(err, last))
		}
	}
	if err := os.WriteFile(s.limitedFile(name), []byte(asText(commands)), 0o600); err != nil {
		return fmt.Errorf("limits of MPS daemon %s: %w", name, err)
	}
	return nil
}

// Stop implements Daemons. systemd ends the server with the daemon: both are in the unit's cgroup.
func (s *systemd) Stop(ctx context.Context, name string) error {
	running, err := s.Running(ctx, name)
	if err != nil {
		return err
	}
	if running {
		if err := run(s.onHost(ctx, "systemctl", "stop", unit(name)), ""); err != nil {
			// It may have ended since, for another of its GPUs for example: then systemd does not know it any more.
			if running, unknown := s.Running(ctx, name); running || unknown != nil {
				return fmt.Errorf("stop MPS daemon %s: %w", name, err)
			}
		}
	}
	if err := s.removeFolder(name); err != nil {
		return fmt.Errorf("folder of MPS daemon %s: %w", name, err)
	}
	return nil
}

var (
	// inactive is the exit status of systemctl is-active for a unit that is not, or does not exist.
	inactive = map[int]bool{3: true, 4: true}
	// changing are states (systemd(1)) of units that are not active and have processes all the same, one that is being stopped for example.
	changing = []string{"activating", "deactivating"}
)

// Running implements Daemons.
func (s *systemd) Running(ctx context.Context, name string) (bool, error) {
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

// Ready implements Daemons.
func (s *systemd) Ready(ctx context.Context, daemon Daemon) (bool, error) {
	running, err := s.Running(ctx, daemon.Name)
	return running && s.limited(daemon.Name, limits(daemon)), err
}

func (s *systemd) onHost(ctx context.Context, args ...string) command {
	return command{ctx: ctx, root: s.opts.HostRoot, args: args}
}
