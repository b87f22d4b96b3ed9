// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package durabletest provides a durable.FS whose operations fail, or stop happening, where a test wants it.
package durabletest

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"syscall"

	"stowage.dev/stowage/pkg/agent/durable"
)

// ErrCrashed is returned by every operation after the crash point: nothing reaches the disk any more.
var ErrCrashed = errors.New("the process was killed here")

// Mode says what happens at the chosen step.
type Mode int

const (
	// Fail makes the chosen step alone return ENOSPC.
	Fail Mode = iota
	// CrashBefore ends all writing just before the chosen step.
	CrashBefore
	// CrashAfter lets the chosen step happen (a write only by half) and ends all writing after it.
	CrashAfter
	// KillBefore and KillAfter end the process itself there, with SIGKILL.
	KillBefore
	KillAfter
)

// String names the mode in the names of tests.
func (m Mode) String() string {
	return [...]string{"fail at", "crash before", "crash after", "kill before", "kill after"}[m]
}

// Faulty counts the changing operations of an FS (reads are not counted) and interferes at step At, counted
// from 1. With At = 0 it only counts.
type Faulty struct {
	durable.FS
	Mode Mode
	At   int

	mu    sync.Mutex
	steps []string
}

// Steps returns a description of every changing operation that was asked for, in order.
func (f *Faulty) Steps() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.steps...)
}

// step decides about one operation: whether it happens, and what it returns if it does not or although it did.
func (f *Faulty) step(op, path string) (do bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.steps = append(f.steps, op+" "+path)
	n := len(f.steps)
	switch {
	case f.At == 0 || n < f.At:
		return true, nil
	case n == f.At && f.Mode == Fail:
		return false, fmt.Errorf("%s %s: %w", op, path, syscall.ENOSPC)
	case f.Mode == Fail:
		return true, nil
	case n == f.At && (f.Mode == CrashAfter || f.Mode == KillAfter):
		return true, ErrCrashed
	case f.Mode == KillBefore:
		kill()
	}
	return false, ErrCrashed
}

// kill does not return.
func kill() {
	_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
	select {}
}

// Do is a step that is no file operation: something that is done to hardware, for example.
func (f *Faulty) Do(op, target string, fn func() error) error { return f.run(op, target, fn) }

func (f *Faulty) run(op, path string, fn func() error) error {
	do, err := f.step(op, path)
	if do {
		err = errors.Join(err, fn())
	}
	f.ended(err)
	return err
}

// ended kills the process after the step that it was to be killed after.
func (f *Faulty) ended(err error) {
	if f.Mode == KillAfter && errors.Is(err, ErrCrashed) {
		kill()
	}
}

// MkdirAll implements durable.FS.
func (f *Faulty) MkdirAll(path string, perm fs.FileMode) error {
	return f.run("mkdir", path, func() error { return f.FS.MkdirAll(path, perm) })
}

// Create implements durable.FS.
func (f *Faulty) Create(path string, perm fs.FileMode) (durable.File, error) {
	do, err := f.step("create", path)
	if !do {
		return nil, err
	}
	file, createErr := f.FS.Create(path, perm)
	if createErr != nil {
		return nil, createErr
	}
	if err != nil {
		f.ended(err)
		return nil, errors.Join(err, file.Close())
	}
	return &faultyFile{File: file, fs: f, path: path}, nil
}

// Link implements durable.FS.
func (f *Faulty) Link(oldPath, newPath string) error {
	return f.run("link", newPath, func() error { return f.FS.Link(oldPath, newPath) })
}

// Rename implements durable.FS.
func (f *Faulty) Rename(oldPath, newPath string) error {
	return f.run("rename", newPath, func() error { return f.FS.Rename(oldPath, newPath) })
}

// Remove implements durable.FS.
func (f *Faulty) Remove(path string) error {
	return f.run("remove", path, func() error { return f.FS.Remove(path) })
}

// SyncDir implements durable.FS.
func (f *Faulty) SyncDir(path string) error {
	return f.run("syncdir", path, func() error { return f.FS.SyncDir(path) })
}

type faultyFile struct {
	durable.File
	fs   *Faulty
	path string
}

func (f *faultyFile) Write(data []byte) (int, error) {
	do, err := f.fs.step("write", f.path)
	if !do {
		return 0, err
	}
	if err != nil {
		data = data[:len(data)/2]
	}
	n, writeErr := f.File.Write(data)
	f.fs.ended(err)
	return n, errors.Join(err, writeErr)
}

func (f *faultyFile) Sync() error { return f.fs.run("sync", f.path, f.File.Sync) }
