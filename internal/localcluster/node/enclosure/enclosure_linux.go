// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package enclosure

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// stopTimeout is how long the janitor may take to clean.
const stopTimeout = killTimeout + 10*time.Second

// Enclosure is a running janitor.
type Enclosure struct {
	spec      Spec
	binary    string
	logFile   string
	cmd       *exec.Cmd
	namespace string
	life      io.Closer // its end tells the janitor to clean up

	stop   sync.Once
	exited chan struct{}
	err    error // how the janitor ended; set before exited is closed
}

// Start makes an enclosure with the given janitor binary. The folder dir keeps its specification and its log.
func Start(ctx context.Context, binary, dir string, spec Spec) (*Enclosure, error) {
	specFile := filepath.Join(dir, "enclosure.json")
	if err := spec.WriteFile(specFile); err != nil {
		return nil, err
	}
	logFile := filepath.Join(dir, "janitor.log")
	log, err := os.Create(logFile)
	if err != nil {
		return nil, err
	}
	defer log.Close()

	cmd := exec.Command(binary, "janitor", specFile)
	cmd.Stderr = log
	// In a session of its own no Ctrl-C and no lost terminal reaches it, and it has no parent-death signal: it has to clean up
	// after us.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Setsid: true}
	life, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the node's janitor: %w", err)
	}
	e := &Enclosure{spec: spec, binary: binary, logFile: logFile, cmd: cmd, life: life, exited: make(chan struct{})}
	ready := make(chan error, 1)
	go func() {
		line, err := bufio.NewReader(out).ReadString('\n')
		if err == nil && line != readyLine {
			err = fmt.Errorf("janitor said %q", line)
		}
		ready <- err
		e.err = cmd.Wait()
		close(e.exited)
	}()
	select {
	case err = <-ready:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err == nil {
		e.namespace, err = MountNamespace(cmd.Process.Pid)
	}
	if err != nil {
		return nil, fmt.Errorf("making the node's mount namespace and cgroup: %w", errors.Join(err, e.Stop()))
	}
	return e, nil
}

// Wrap turns a command into one that runs inside. Path must be absolute.
func (e *Enclosure) Wrap(path string, args ...string) (string, []string) {
	return e.binary, append([]string{"enter", strconv.Itoa(e.cmd.Process.Pid), path}, args...)
}

// Root is a path under which everything inside is to be seen from outside, while the enclosure lives.
func (e *Enclosure) Root() string { return fmt.Sprintf("/proc/%d/root", e.cmd.Process.Pid) }

// Processes lists what runs inside, without the janitor.
func (e *Enclosure) Processes() ([]int, error) {
	return Processes(e.namespace, e.spec.Cgroup, e.cmd.Process.Pid)
}

// Stop kills what is left inside, removes everything, and says what could not be removed. It can be called again.
func (e *Enclosure) Stop() error {
	e.stop.Do(func() { _ = e.life.Close() }) // an error only says that the janitor is gone, and Wait tells of that
	select {
	case <-e.exited:
	case <-time.After(stopTimeout):
		return fmt.Errorf("the node's janitor (process %d) has not ended after %s, see %s", e.cmd.Process.Pid, stopTimeout, e.logFile)
	}
	if e.err == nil {
		return nil
	}
	text, err := os.ReadFile(e.logFile)
	if err != nil {
		text = []byte(err.Error())
	}
	return fmt.Errorf("the node's janitor: %w: %s", e.err, text)
}
