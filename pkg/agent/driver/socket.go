// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// socket is a listener on a Unix socket that can be made anew while its server goes on: connections stay, and so do the calls on them.
// Other than that of package net it only ever removes its own file.
type socket struct {
	path string

	mu       sync.Mutex
	listener *net.UnixListener
	file     fs.FileInfo // the listener's
	closed   bool
}

var _ net.Listener = &socket{}

// socketError says why a socket is not ours.
type socketError struct {
	Path string
	// Err says why it is missing and cannot be made. If it is nil another process serves it, with this PID, or 0 if that is not known.
	// The message does not have the PID: it is in the Node's condition, and would change whenever that process is started anew.
	Err error
	PID int32
}

func (e *socketError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("the socket %s is missing and cannot be made anew: %v", e.Path, e.Err)
	}
	return fmt.Sprintf("the socket %s is served by another process, not by this agent", e.Path)
}

func (e *socketError) Unwrap() error { return e.Err }

// listenOn makes the socket. What a process that is gone has left there is removed.
func listenOn(path string) (*socket, error) {
	s := &socket{path: path}
	_, err := s.keep(func() {})
	return s, err
}

// keep makes the socket anew if it is not this listener's any more, unless another process serves it: two that take it from each other
// would be worse than one that does not work. renewed tells that it did, and lost is called before.
func (s *socket) keep(lost func()) (renewed bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.isOurs() {
		return false, nil
	}
	lost()
	if _, err := os.Lstat(s.path); err == nil {
		if !stale(s.path) {
			return false, &socketError{Path: s.path, PID: servedBy(s.path)}
		}
		if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, &socketError{Path: s.path, Err: err}
		}
	}
	if dir := filepath.Dir(s.path); filepath.Base(dir) == Name {
		// The driver's folder is the agent's own. That of the registrations is the kubelet's, which would not watch one that we make.
		if err := os.Mkdir(dir, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
			return false, &socketError{Path: s.path, Err: err}
		}
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.path, Net: "unix"})
	if err != nil {
		return false, &socketError{Path: s.path, Err: err}
	}
	listener.SetUnlinkOnClose(false)
	file, err := os.Lstat(s.path)
	if err != nil {
		return false, &socketError{Path: s.path, Err: errors.Join(err, listener.Close())}
	}
	was := s.listener
	s.listener, s.file = listener, file
	if was != nil {
		_ = was.Close() // which Accept waits for
	}
	return true, nil
}

// isOurs compares inodes. Nobody gets the number of one that a listener is bound to.
func (s *socket) isOurs() bool {
	if s.listener == nil {
		return false
	}
	now, err := os.Lstat(s.path)
	return err == nil && os.SameFile(s.file, now)
}

// Accept implements net.Listener.
func (s *socket) Accept() (net.Conn, error) {
	for {
		listener, _ := s.current()
		conn, err := listener.Accept()
		if err == nil {
			return conn, nil
		}
		if now, closed := s.current(); closed || now == listener {
			return nil, err
		}
	}
}

func (s *socket) current() (listener *net.UnixListener, closed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listener, s.closed
}

// Close implements net.Listener.
func (s *socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	s.closed = true
	var err error
	if s.isOurs() {
		err = os.Remove(s.path)
	}
	return errors.Join(s.listener.Close(), err)
}

// Addr implements net.Listener.
func (s *socket) Addr() net.Addr { return &net.UnixAddr{Name: s.path, Net: "unix"} }

// servedBy returns the process that listens on the socket, 0 if the kernel does not tell.
func servedBy(path string) int32 {
	conn, err := net.DialTimeout("unix", path, rivalTimeout)
	if err != nil {
		return 0
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	var pid int32
	_ = raw.Control(func(fd uintptr) {
		if peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = peer.Pid
		}
	})
	return pid
}
