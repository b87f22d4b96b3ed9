// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package kmod

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// modprobe writes down how it is called, and then does the rest.
func modprobe(t *testing.T, rest string) (path string, calls func() string) {
	t.Helper()
	dir := t.TempDir()
	path, log := filepath.Join(dir, "modprobe"), filepath.Join(dir, "log")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho \"$*\" >> "+log+"\ncd "+dir+"\n"+rest), 0o755); err != nil {
		t.Fatal(err)
	}
	return path, func() string {
		data, err := os.ReadFile(log)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return string(data)
	}
}

func TestModulesAreLoadedByTheHostsModprobe(t *testing.T) {
	const absent = "/nowhere/modprobe"
	tests := map[string]struct {
		root, rest string
		absent     bool
		calls      string
		want       []string // an error with this
	}{
		"on the host":         {root: "/", calls: "-- nvidia-uvm\n"},
		"in the host's root":  {root: "/proc/self/root", calls: "-- nvidia-uvm\n"}, // which is the same, and entered
		"without such a root": {root: "/nowhere", want: []string{"nvidia-uvm", "here in /nowhere"}},
		"without modprobe":    {root: "/", absent: true, want: []string{"nvidia-uvm", "has no " + absent}},
		"without the module": {
			root: "/", rest: `echo "FATAL: Module nvidia-uvm not found in directory /lib/modules/6.1"; exit 1`, calls: "-- nvidia-uvm\n",
			want: []string{"nvidia-uvm", "exit status 1", "not found in directory"},
		},
		"with much to say": {root: "/", rest: "head -c 3000000 /dev/zero | tr '\\0' '\\377'; exit 1", calls: "-- nvidia-uvm\n", want: []string{"exit status 1"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.root == "/proc/self/root" && os.Geteuid() != 0 {
				t.Skip("only root may enter another root")
			}
			path, calls := modprobe(t, tc.rest)
			l := New(tc.root)
			l.places = []string{absent, path}
			if tc.absent {
				l.places = l.places[:1]
			}
			err := l.Load(t.Context(), "nvidia-uvm")
			if (err == nil) != (tc.want == nil) {
				t.Fatalf("%v, want an error with %q", err, tc.want)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want an error with %q", err, want)
				}
			}
			if err != nil && len(err.Error()) > 4*maxSaid {
				t.Errorf("%d bytes of error", len(err.Error()))
			}
			if got := calls(); got != tc.calls {
				t.Errorf("modprobe was called with %q, want %q", got, tc.calls)
			}
		})
	}
}

// TestAModprobeThatHangsHoldsNobodyUp: two claims want a module, there is one modprobe, and each goes on at its own end.
func TestAModprobeThatHangsHoldsNobodyUp(t *testing.T) {
	path, calls := modprobe(t, "echo > began; cat < go")
	dir := filepath.Dir(path)
	for _, fifo := range []string{"began", "go"} {
		if err := unix.Mkfifo(filepath.Join(dir, fifo), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l := New("/")
	l.places = []string{path}
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := errors.New("the claim's time is over")
	var claims sync.WaitGroup
	for range 2 {
		claims.Go(func() {
			if err := l.Load(ctx, "nvidia-uvm"); !errors.Is(err, ended) || !strings.Contains(err.Error(), "nvidia-uvm") {
				t.Errorf("%v, want an error that names the module and wraps %q", err, ended)
			}
		})
	}
	if _, err := os.ReadFile(filepath.Join(dir, "began")); err != nil {
		t.Fatal(err)
	}
	cancel(ended)
	claims.Wait()
	var later sync.WaitGroup
	later.Go(func() {
		if err := l.Load(t.Context(), "nvidia-uvm"); err != nil {
			t.Errorf("who waits until it answers: %v", err)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0); err != nil {
		t.Fatal(err)
	}
	later.Wait()
	if n := strings.Count(calls(), "\n"); n > 2 {
		t.Errorf("modprobe was called %d times", n)
	}
}
