// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// command runs a program of another root folder, with that as its root: a child of this process.
type command struct {
	ctx  context.Context
	root string
	// env is what the program has beside this process's environment, in the form NAME=value.
	env []string
	// args are its name or path, and arguments.
	args []string
}

// paths are where the program may be in its root. The kernel is who finds out, as links in another root lead elsewhere here.
func (c command) paths() (paths []string) {
	if strings.Contains(c.args[0], "/") {
		return c.args[:1]
	}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if filepath.IsAbs(dir) {
			paths = append(paths, filepath.Join(dir, c.args[0]))
		}
	}
	return paths
}

func (c command) run(input string, output *head) error {
	last := fmt.Errorf("%w below %s", exec.ErrNotFound, c.root)
	for _, path := range c.paths() {
		cmd := exec.CommandContext(c.ctx, path, c.args[1:]...)
		if c.root != "/" {
			cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: c.root}
			cmd.Dir = "/"
		}
		if len(c.env) > 0 {
			cmd.Env = append(os.Environ(), c.env...)
		}
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), output, output
		// A child that keeps the pipes open is not waited for.
		cmd.WaitDelay = time.Second
		switch err := cmd.Run(); {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		case errors.Is(err, fs.ErrPermission):
			last = err // there may be another one
		default:
			return err
		}
	}
	return last
}

// maxOutput of a program, and as much of its command line, goes into an error. What a daemon's folder is used for is its clients' to say,
// and so may be what a program says that looks there.
const maxOutput = 500

// head keeps the beginning of what is written: at most so many bytes.
type head struct {
	bytes.Buffer
	most int
}

func (h *head) Write(data []byte) (int, error) {
	if room := h.most - h.Len(); room > 0 {
		h.Buffer.Write(data[:min(room, len(data))])
	}
	return len(data), nil
}

func clipped(text string) string {
	if len(text) > maxOutput {
		return strings.ToValidUTF8(text[:maxOutput], "") + "…"
	}
	return strings.ToValidUTF8(text, "�")
}

// run returns an error with what the program said.
func run(c command, input string) error {
	_, err := output(c, input)
	return err
}

// output is what the program said, which is in the error, too.
func output(c command, input string) (string, error) {
	output := head{most: maxOutput + 1}
	err := c.run(input, &output)
	said := clipped(strings.TrimSpace(output.String()))
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", clipped(strings.Join(c.args, " ")), err, said)
	}
	return said, err
}
