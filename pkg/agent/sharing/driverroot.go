// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// A driver need not be installed at the host's root. A driver container has its own root file system, which the host
// sees in a folder (/run/nvidia/driver), and in which the driver's programs find their libraries only if that is their root.
// Some hosts have just the driver's files in a folder: its programs run on the host, and are told where the libraries are.

// defaultPath is that of systemd's units.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// program is how a program of the driver is run on the host.
type program struct {
	// path is its name where the driver is at the host's root, else the path below the root that it runs in.
	path string
	// root is the file system that it runs in, as the host sees it; empty for the host's own.
	root string
	// env that it needs, in the form NAME=value.
	env []string
}

// Where programs and libraries are below the root of a driver.
var (
	programDirs = []string{"usr/bin", "usr/local/bin", "bin", "usr/sbin", "sbin"}
	libraryDirs = []string{"lib64", "lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/nvidia/lib64"}
)

// find looks for a program of the driver.
func (o *DriverOptions) find(name string) (program, error) {
	root := o.HostDriverRoot
	if root == "" {
		root = o.DriverRoot
	}
	if root == "/" {
		return program{path: name}, nil
	}
	for _, dir := range programDirs {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(filepath.Join(o.DriverRoot, path)); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			continue
		}
		if _, err := os.Stat(filepath.Join(o.DriverRoot, "usr/bin/env")); err == nil {
			return program{path: "/" + path, root: root}, nil
		}
		var libraries []string
		for _, dir := range libraryDirs {
			if info, err := os.Stat(filepath.Join(o.DriverRoot, dir)); err == nil && info.IsDir() {
				libraries = append(libraries, filepath.Join(root, dir))
			}
		}
		return program{path: filepath.Join(root, path), env: []string{
			"LD_LIBRARY_PATH=" + strings.Join(libraries, ":"),
			// It starts others of its kind.
			"PATH=" + filepath.Join(root, dir) + ":" + defaultPath,
		}}, nil
	}
	return program{}, fmt.Errorf("the driver below %s has no %s: it is in none of %s", o.DriverRoot, name, strings.Join(programDirs, ", "))
}

// command runs the program as a child: in the driver's root as the agent sees it or, where that is none, in the host's.
func (o *DriverOptions) command(ctx context.Context, p program, args ...string) command {
	root := o.DriverRoot
	if len(p.env) > 0 {
		root = o.HostRoot
	}
	return command{ctx: ctx, root: root, env: p.env, args: append([]string{p.path}, args...)}
}

// line is the command line by which the host's systemd starts the program.
func (p program) line(args ...string) []string {
	line := append([]string{p.path}, args...)
	if p.root != "" {
		line = append([]string{"chroot", p.root}, line...)
	}
	return line
}

// bind is systemd's property that shows a folder of the host to the program, in its root, under that path.
func (p program) bind(path, as string) string {
	return "--property=BindPaths=" + path + ":" + filepath.Join("/", p.root, as)
}

// candidates are the paths at which the program may be, in the root that it runs in.
func (p program) candidates() (paths []string) {
	if strings.Contains(p.path, "/") {
		return []string{p.path}
	}
	for _, dir := range filepath.SplitList(defaultPath) {
		paths = append(paths, filepath.Join(dir, p.path))
	}
	return paths
}

// environment is all that the program gets where nothing is passed on to it.
func (p program) environment() []string {
	if len(p.env) > 0 {
		return p.env
	}
	return []string{"PATH=" + defaultPath}
}
