// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"bufio"
	"context"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/json"
)

// ControlSocket is the name of the control socket in a machine's folder.
const ControlSocket = "control.sock"

// The environment variables by which a library of a process finds its machine: see pkg/nvmlsim/capi.
const (
	EnvSocket  = "NVMLSIM_SOCKET"
	EnvProfile = "NVMLSIM_PROFILE"
	EnvNode    = "NVMLSIM_NODE"
)

// request is one line of the control protocol; so is a response.
type request struct {
	Command   string             `json:"command"`
	Arguments stdjson.RawMessage `json:"arguments,omitempty"`
}

type response struct {
	Result *Result `json:"result,omitempty"`
	Error  string  `json:"error,omitempty"`
}

// maxLine bounds a line of the protocol; a state of 64 GPUs fits.
const maxLine = 4 << 20

// ServeControl takes commands on the socket in the machine's folder (both only
// for the user that runs this) until ctx ends. One process at a time serves a
// folder; another waits until that one has ended.
func (m *Machine) ServeControl(ctx context.Context) error {
	if m.file == nil {
		return errors.New("a simulated machine without a folder has no control socket")
	}
	turn, err := m.waitForTurn(ctx)
	if err != nil || turn == nil {
		return err
	}
	defer turn.Close()
	path := filepath.Join(m.file.folder, ControlSocket)
	// Nobody else serves: a socket that is there was left behind.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return errors.Join(err, listener.Close())
	}
	return m.accept(ctx, listener)
}

// waitForTurn returns the lock file of the process that serves, nil when ctx ended before.
func (m *Machine) waitForTurn(ctx context.Context) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(m.file.folder, "serving"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return file, nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return nil, errors.Join(fmt.Errorf("lock %s: %w", file.Name(), err), file.Close())
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, file.Close()
		}
	}
}

func (m *Machine) accept(ctx context.Context, listener net.Listener) error {
	var connections sync.WaitGroup
	defer connections.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	for {
		connection, err := listener.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("control socket: %w", err)
		}
		connections.Go(func() {
			defer connection.Close()
			stop := context.AfterFunc(ctx, func() { connection.Close() })
			defer stop()
			m.talk(connection)
		})
	}
}

// talk answers each line with one, until the other end has enough.
func (m *Machine) talk(connection io.ReadWriter) {
	lines := bufio.NewScanner(connection)
	lines.Buffer(nil, maxLine)
	encoder := stdjson.NewEncoder(connection)
	for lines.Scan() {
		answer := response{}
		if result, err := m.obey(lines.Bytes()); err != nil {
			answer.Error = err.Error()
		} else {
			answer.Result = &result
		}
		if encoder.Encode(answer) != nil {
			return
		}
	}
}

func (m *Machine) obey(line []byte) (Result, error) {
	c, err := decodeCommand(line)
	if err != nil {
		return Result{}, err
	}
	return m.Do(c)
}

// decodeCommand takes no field that it does not know.
func decodeCommand(line []byte) (Command, error) {
	var r request
	if err := unmarshal(line, &r); err != nil {
		return nil, fmt.Errorf("decode request: %w", err)
	}
	var names []string
	for _, make := range commands {
		c := make()
		if c.Name() != r.Command {
			names = append(names, c.Name())
			continue
		}
		if len(r.Arguments) == 0 {
			return c, nil
		}
		if err := unmarshal(r.Arguments, c); err != nil {
			return nil, fmt.Errorf("%s: decode arguments: %w", r.Command, err)
		}
		return c, nil
	}
	slices.Sort(names)
	return nil, fmt.Errorf("command: %q: want one of %s", r.Command, strings.Join(names, ", "))
}

func unmarshal(data []byte, into any) error {
	strict, err := json.UnmarshalStrict(data, into)
	return errors.Join(append(strict, err)...)
}

// Control has the process that serves the socket run a command.
func Control(ctx context.Context, socket string, c Command) (Result, error) {
	connection, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return Result{}, fmt.Errorf("simulated machine: %w", err)
	}
	defer connection.Close()
	stop := context.AfterFunc(ctx, func() { connection.Close() })
	defer stop()
	arguments, err := stdjson.Marshal(c)
	if err != nil {
		return Result{}, err
	}
	if err := stdjson.NewEncoder(connection).Encode(request{Command: c.Name(), Arguments: arguments}); err != nil {
		return Result{}, fmt.Errorf("send %q: %w", c.Name(), err)
	}
	lines := bufio.NewScanner(connection)
	lines.Buffer(nil, maxLine)
	if !lines.Scan() {
		return Result{}, fmt.Errorf("%s: no answer: %w", c.Name(), errors.Join(lines.Err(), io.ErrUnexpectedEOF))
	}
	var answer response
	if err := unmarshal(lines.Bytes(), &answer); err != nil {
		return Result{}, fmt.Errorf("%s: decode answer: %w", c.Name(), err)
	}
	if answer.Error != "" {
		return Result{}, errors.New(answer.Error)
	}
	if answer.Result == nil {
		return Result{}, fmt.Errorf("%s: an answer without a result", c.Name())
	}
	return *answer.Result, nil
}
