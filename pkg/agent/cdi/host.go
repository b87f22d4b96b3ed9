package cdi

import (
	"fmt"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"
)

// host is the machine's root folder as the agent sees it: CDI names the host's files, which in the agent's container
// are elsewhere.
type host string

// stat is of the file itself or, to follow, of what it links to, with links that are absolute meant in the host's root.
func (h host) stat(path string, follow bool) (stat unix.Stat_t, err error) {
	if h == "/" {
		if follow {
			err = unix.Stat(path, &stat)
		} else {
			err = unix.Lstat(path, &stat)
		}
		return stat, err
	}
	flags := unix.O_PATH | unix.O_CLOEXEC
	if !follow {
		flags |= unix.O_NOFOLLOW
	}
	root, err := unix.Open(string(h), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return stat, fmt.Errorf("the host's root folder %s: %w", h, err)
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, path, &unix.OpenHow{Flags: uint64(flags), Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return stat, err
	}
	defer unix.Close(fd)
	return stat, unix.Fstat(fd, &stat)
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
		stat, err := h.stat(hook.Path, true)
		if err == nil && (stat.Mode&unix.S_IFMT != unix.S_IFREG || stat.Mode&0o111 == 0) {
			err = unix.EACCES
		}
		if err != nil {
			return fmt.Errorf("%s hook: the host (here in %s) has no program %s: install NVIDIA's container toolkit there, or say with --nvidia-cdi-hook where it is: %w", hook.HookName, h, hook.Path, err)
		}
	}
	return nil
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
			return fmt.Errorf("device node %s is c %d:%d, the CDI specification says %s %d:%d", path, major, minor, node.Type, node.Major, node.Minor)
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
