// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"
)

// host is the machine's root folder as the agent sees it: CDI names the host's files, which in the agent's container
// are elsewhere.
type host string

// stat is of the file itself or, to follow, of what it links to, with links that are absolute meant in the host's root.
func (h host) stat(path string, follow bool) (stat unix.Stat_t, err error) {
	fd, err := h.open(path, follow)
	if err != nil {
		return stat, err
	}
	defer unix.Close(fd)
	return stat, unix.Fstat(fd, &stat)
}

// open returns a descriptor of the file itself or, to follow, of what it links to. It is for questions, and not to read.
func (h host) open(path string, follow bool) (fd int, err error) {
	flags := unix.O_PATH | unix.O_CLOEXEC
	if !follow {
		flags |= unix.O_NOFOLLOW
	}
	if h == "/" {
		return unix.Open(path, flags, 0)
	}
	root, err := unix.Open(string(h), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("the host's root folder %s: %w", h, err)
	}
	defer unix.Close(root)
	return unix.Openat2(root, path, &unix.OpenHow{Flags: uint64(flags), Resolve: unix.RESOLVE_IN_ROOT})
}

// verify checks that all that the edits name is there: runtimes fail to start containers otherwise, and the kubelet
// tells the pod's owner of a path that means nothing to them.
func (h host) verify(edits *specs.ContainerEdits) error {
	if err := h.verifyNodes(edits.DeviceNodes); err != nil {
		return err
	}
	for _, mount := range edits.Mounts {
		if mount.Type != "" && mount.Type != "bind" {
			continue // its source is no file
		}
		if _, err := h.stat(mount.HostPath, true); err != nil {
			return fmt.Errorf("mount at %s: the host (here in %s) has no %s: %w", mount.ContainerPath, h, mount.HostPath, err)
		}
	}
	for _, hook := range edits.Hooks {
		if hook.HookName == "startContainer" {
			continue // it is a program of the container
		}
		if err := h.program(hook.Path); err != nil {
			return fmt.Errorf("%s hook: the host (here in %s) has no program %s: install NVIDIA's container toolkit there, or say with "+
				"--nvidia-cdi-hook where it is: %w", hook.HookName, h, hook.Path, err)
		}
	}
	return nil
}

// program checks that root can run it.
func (h host) program(path string) error {
	stat, err := h.stat(path, true)
	if err == nil && (stat.Mode&unix.S_IFMT != unix.S_IFREG || stat.Mode&0o111 == 0) {
		err = unix.EACCES
	}
	return err
}

// programForRoot is program, and checks that the file system runs programs.
func (h host) programForRoot(path string) error {
	if err := h.program(path); err != nil {
		return fmt.Errorf("the host (here in %s) has no program %s: %w", h, path, err)
	}
	_, err := h.locate(path)
	return err
}

// programForAll checks that everybody can run it: the file itself, and each folder above it, be it named in the path or behind a link.
func (h host) programForAll(program string) error {
	folder, err := h.locate(program)
	if err != nil {
		return err
	}
	for _, path := range []string{program, folder} {
		for at := path; ; at = filepath.Dir(at) {
			stat, err := h.stat(at, true)
			if err != nil {
				return fmt.Errorf("program %s: %w", program, err)
			}
			if stat.Mode&0o001 == 0 {
				return fmt.Errorf("a pod with hostUsers: false cannot run %s, in its user namespace root of the host is nobody: %s has mode %04o, "+
					"run chmod o+x on it", program, at, stat.Mode&0o7777)
			}
			if at == "/" {
				break
			}
		}
	}
	return nil
}

// locate returns the folder on the host that has the file to which a path leads, with no link in it. It is an error if no program runs from
// that file system. The file's own name is not told: another agent may have replaced it meanwhile.
func (h host) locate(path string) (folder string, err error) {
	fd, err := h.open(path, true)
	if err != nil {
		return "", fmt.Errorf("the host (here in %s) has no program %s: %w", h, path, err)
	}
	defer unix.Close(fd)
	var file unix.Statfs_t
	if err := unix.Fstatfs(fd, &file); err != nil {
		return "", fmt.Errorf("the file system of %s: %w", path, err)
	}
	if file.Flags&unix.ST_NOEXEC != 0 {
		return "", fmt.Errorf("no program can be run from the file system of %s: it is mounted with noexec", path)
	}
	link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", fmt.Errorf("where %s is: %w", path, err)
	}
	if h != "/" {
		link = strings.TrimPrefix(link, string(h))
	}
	return filepath.Dir(link), nil
}

// verifyNodes checks the nodes that name a file of the host. A node given by its numbers alone (a simulated
// GPU on a machine where nodes cannot be made) has nothing to check.
func (h host) verifyNodes(nodes []*specs.DeviceNode) error {
	for _, node := range nodes {
		path := node.HostPath
		if path == "" {
			if node.Type != "" {
				continue
			}
			path = node.Path
		}
		major, minor, err := h.charDevice(path)
		if err != nil {
			return err
		}
		if node.Type != "" && (node.Type != "c" || node.Major != int64(major) || node.Minor != int64(minor)) {
			return fmt.Errorf("device node %s is c %d:%d, the CDI specification says %s %d:%d", path, major, minor,
				node.Type, node.Major, node.Minor)
		}
	}
	return nil
}

// charDevice returns the numbers of a character device.
func (h host) charDevice(path string) (major, minor uint32, err error) {
	stat, err := h.stat(path, false)
	if err != nil {
		return 0, 0, fmt.Errorf("device node %s: %w", path, err)
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFCHR {
		return 0, 0, fmt.Errorf("device node %s is no character device", path)
	}
	return unix.Major(stat.Rdev), unix.Minor(stat.Rdev), nil
}
