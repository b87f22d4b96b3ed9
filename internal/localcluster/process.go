// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// DefaultStopTimeout is how long a process has between SIGTERM and SIGKILL. What
// ends orderly needs far less, except on a machine that does much else.
const DefaultStopTimeout = 60 * time.Second

// DefaultReadyTimeout is how long a process has from its start until its Ready
// check passes.
const DefaultReadyTimeout = 2 * time.Minute

// readyInterval is the pause between two Ready checks.
const readyInterval = 100 * time.Millisecond

// Command says how to run a process.
type Command struct {
	// Name names the process in errors and its log file. Required.
	Name string
	// Path is the binary. Required.
	Path string
	// Args are the arguments after the binary's name.
	Args []string
	// Env is appended to our own environment.
	Env []string
	// Dir is the working directory; ours when empty.
	Dir string
	// LogFile receives stdout and stderr and is appended to, so that a process
	// that is started again keeps its history. Required; Cluster.StartProcess
	// defaults it to <LogDir>/<Name>.log.
	LogFile string
	// Customize, when set, changes the prepared command just before it starts,
	// for example Cloneflags in its SysProcAttr. Setpgid and Pdeathsig are set.
	Customize func(*exec.Cmd)
	// Ready is polled until it returns nil. When nil, a started process is ready.
	Ready func(context.Context) error
	// ReadyTimeout and StopTimeout default to the package's constants.
	ReadyTimeout time.Duration
	StopTimeout  time.Duration
}

// Process is a supervised child process in a process group of its own. The
// kernel kills it when our process dies, however that happens. (The signal
// follows the parent *thread*, so all children are started by one thread that
// lives as long as the process does.)
type Process struct {
	name        string
	logFile     string
	stopTimeout time.Duration
	cmd         *exec.Cmd
	exited      chan struct{}
	waitErr     error // set before exited is closed

	mu       sync.Mutex
	stopping bool
}

// ExitError says that a process ended although nobody had asked it to, with
// the last lines of its log.
type ExitError struct {
	Name    string
	Err     error  // of exec.Cmd.Wait; nil for exit status 0
	LogFile string // the whole log
	LogTail string // its last lines
}

// Error tells how the process ended and the last lines that it logged.
func (e *ExitError) Error() string {
	how := "exit status 0"
	if e.Err != nil {
		how = e.Err.Error()
	}
	return fmt.Sprintf("%s ended unexpectedly: %s; log %s ends with:\n%s", e.Name, how, e.LogFile, e.LogTail)
}

func (e *ExitError) Unwrap() error { return e.Err }

// StartProcess starts a process and waits until it is ready. When it does not
// become ready (it exits, its time runs out or ctx ends) it is stopped and the
// error carries the tail of its log. Once it is ready ctx has no hold on it.
func StartProcess(ctx context.Context, c Command) (*Process, error) {
	p, err := launch(c)
	if err != nil {
		return nil, err
	}
	if err := p.waitReady(ctx, c); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func launch(c Command) (*Process, error) {
	if c.StopTimeout == 0 {
		c.StopTimeout = DefaultStopTimeout
	}
	if err := os.MkdirAll(filepath.Dir(c.LogFile), 0o755); err != nil {
		return nil, fmt.Errorf("starting %s: creating the log folder: %w", c.Name, err)
	}
	log, err := os.OpenFile(c.LogFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("starting %s: opening its log: %w", c.Name, err)
	}
	defer log.Close() // the child has its own copy

	cmd := exec.Command(c.Path, c.Args...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Dir = c.Dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = childAttributes()
	if c.Customize != nil {
		c.Customize(cmd)
	}
	p := &Process{
		name:        c.Name,
		logFile:     c.LogFile,
		stopTimeout: c.StopTimeout,
		cmd:         cmd,
		exited:      make(chan struct{}),
	}
	onSpawnThread(func() { err = cmd.Start() })
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", c.Name, err)
	}
	go func() {
		p.waitErr = cmd.Wait()
		close(p.exited)
	}()
	return p, nil
}

func (p *Process) waitReady(ctx context.Context, c Command) error {
	if c.Ready == nil {
		return nil
	}
	timeout := c.ReadyTimeout
	if timeout == 0 {
		timeout = DefaultReadyTimeout
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not ready after %s", timeout))
	defer cancel()
	ticker := time.NewTicker(readyInterval)
	defer ticker.Stop()
	for {
		err := c.Ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return p.exitError()
		case <-ctx.Done():
			return fmt.Errorf("%s did not become ready: %w; last check: %w; log %s ends with:\n%s",
				p.name, context.Cause(ctx), err, p.logFile, LogTail(p.logFile))
		case <-ticker.C:
		}
	}
}

// Name is the process's name, as given in its Command.
func (p *Process) Name() string { return p.name }

// Pid is the process's id. It must not be signalled after Exited is closed;
// use Signal, which knows.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// LogPath is the file with the process's output.
func (p *Process) LogPath() string { return p.logFile }

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Err is nil while the process runs and after it was stopped by Stop or Kill;
// otherwise it is the *ExitError that says how it ended.
func (p *Process) Err() error {
	select {
	case <-p.exited:
	default:
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopping {
		return nil
	}
	return p.exitError()
}

func (p *Process) exitError() error {
	return &ExitError{Name: p.name, Err: p.waitErr, LogFile: p.logFile, LogTail: LogTail(p.logFile)}
}

// Wait waits until the process has ended or ctx ends. It returns Err, or the
// context's cause.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.exited:
		return p.Err()
	case <-ctx.Done():
		return fmt.Errorf("waiting for %s to end: %w", p.name, context.Cause(ctx))
	}
}

// Signal sends a signal to the process, not to its group. A process that has
// ended gives os.ErrProcessDone.
func (p *Process) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("sending %s to %s: %w", sig, p.name, err)
	}
	return nil
}

// Kill sends SIGKILL and waits for the end: a crash on purpose.
func (p *Process) Kill() error {
	p.markStopping()
	if err := p.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.exited
	return nil
}

// Stop ends the process: SIGTERM, then SIGKILL when it has not ended within its
// stop timeout, which is an error because it hides a hang. It returns when the
// process is gone, and can be called again.
func (p *Process) Stop() error {
	p.markStopping()
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	timer := time.NewTimer(p.stopTimeout)
	defer timer.Stop()
	select {
	case <-p.exited:
		return nil
	case <-timer.C:
	}
	if err := p.Kill(); err != nil {
		return err
	}
	return fmt.Errorf("%s did not end within %s of SIGTERM and was killed; log %s ends with:\n%s",
		p.name, p.stopTimeout, p.logFile, LogTail(p.logFile))
}

func (p *Process) markStopping() {
	select {
	case <-p.exited:
		return // ended by itself before: Err goes on telling so
	default:
	}
	p.mu.Lock()
	p.stopping = true
	p.mu.Unlock()
}

// disown makes Err nil for a process whose end has been reported already.
func (p *Process) disown() {
	p.mu.Lock()
	p.stopping = true
	p.mu.Unlock()
}

// LogTail returns the last lines of a log file, for an error message. A file
// that cannot be read gives the reason in its place.
func LogTail(path string) string {
	const maxBytes, maxLines = 16 << 10, 15
	data, err := readTail(path, maxBytes)
	if err != nil {
		return fmt.Sprintf("(unreadable: %v)", err)
	}
	lines := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	if len(lines) > maxLines {
		lines = lines[len(lines)-maxLines:]
	}
	return strings.Join(lines, "\n")
}

func readTail(path string, maxBytes int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size := min(info.Size(), maxBytes)
	data := make([]byte, size)
	if _, err := f.ReadAt(data, info.Size()-size); err != nil {
		return nil, err
	}
	return data, nil
}
