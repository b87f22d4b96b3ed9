// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kmod loads modules of the host's kernel, by the host's own modprobe: which file a module is in, and what it needs, is the
// host's to say. The package does not know what a module is good for.
package kmod

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/singleflight"
)

// places are where modprobe is on a host.
var places = []string{"/sbin/modprobe", "/usr/sbin/modprobe", "/bin/modprobe", "/usr/bin/modprobe"}

const (
	// patience is how long modprobe may take.
	patience = 30 * time.Second
	// maxSaid of modprobe, in bytes, goes into an error.
	maxSaid = 500
)

// Loader loads modules.
type Loader struct {
	root   string
	places []string
	runs   singleflight.Group
}

// New returns a loader for the host whose root folder the agent sees there; "/" on the host itself.
func New(root string) *Loader { return &Loader{root: root, places: places} }

// Load returns when the module is loaded, which it may have been before, or at the end of the context: a driver that hangs cannot be ended,
// and all who want the module wait for one modprobe.
func (l *Loader) Load(ctx context.Context, module string) error {
	select {
	case result := <-l.runs.DoChan(module, func() (any, error) { return nil, l.modprobe(module) }):
		return result.Err
	case <-ctx.Done():
		return fmt.Errorf("load the kernel's module %s: modprobe in %s has not ended yet: %w", module, l.root, context.Cause(ctx))
	}
}

func (l *Loader) modprobe(module string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, place := range l.places {
		cmd := exec.CommandContext(ctx, place, "--", module)
		var said bytes.Buffer
		cmd.Stdout, cmd.Stderr, cmd.WaitDelay, cmd.Dir = &said, &said, time.Second, "/"
		if l.root != "/" {
			cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: l.root}
		}
		err := cmd.Run()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			text := said.String()
			text = strings.ToValidUTF8(strings.TrimSpace(text[:min(len(text), maxSaid)]), "�")
			return fmt.Errorf("load the kernel's module %s: %s in %s: %w: %s", module, place, l.root, err, text)
		}
		return nil
	}
	return fmt.Errorf("load the kernel's module %s: the host (here in %s) has no %s", module, l.root, strings.Join(l.places, ", "))
}
