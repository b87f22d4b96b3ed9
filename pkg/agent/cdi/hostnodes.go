// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"
)

// A runtime makes a device node from its numbers, except in a user namespace, which the kernel lets make none: for a pod with hostUsers:
// false it mounts the host's node of the same path (runc, bindMountDeviceNode). So the driver's nodes are made on the host, too.

// making is held while a node is made: claims are prepared at the same time.
var making sync.Mutex

// MakeNode makes a character device with these numbers in the host's /dev, as NVIDIA's nvidia-modprobe does. A node that is there and has
// others is of a module that is not loaded any more, which the kernel's /proc/devices tells, and is replaced: who has it open keeps it.
// What is no character device is left alone.
func MakeNode(path string, major, minor uint32, mode fs.FileMode) error {
	making.Lock()
	defer making.Unlock()
	var is unix.Stat_t
	err := unix.Lstat(path, &is)
	switch {
	case errors.Is(err, unix.ENOENT):
	case err != nil:
		return fmt.Errorf("device node %s: %w", path, err)
	case is.Mode&unix.S_IFMT != unix.S_IFCHR:
		return fmt.Errorf("device node %s is no character device", path)
	case is.Rdev == unix.Mkdev(major, minor):
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	// Whoever looks finds the old node or the new one, with its mode. Two agents make it during an upgrade.
	temp := fmt.Sprintf("%s.stowage.%d", path, os.Getpid())
	if err := unix.Unlink(temp); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove %s: %w", temp, err)
	}
	if err := unix.Mknod(temp, unix.S_IFCHR|uint32(mode.Perm()), int(unix.Mkdev(major, minor))); err != nil {
		return fmt.Errorf("make device node %s: %w", temp, err)
	}
	err = os.Chmod(temp, mode.Perm()) // whatever the umask
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return nil
}

// makeNodes makes sure that the host has the driver's nodes under the paths that containers have them under. Where it cannot, containers
// without a user namespace get them all the same.
func (d *Driver) makeNodes(ctx context.Context, nodes []*specs.DeviceNode) {
	if d.opts.MakeNode == nil {
		return
	}
	closed := d.numbers.closedToOthers()
	for _, node := range nodes {
		if node.Type != "c" || !strings.HasPrefix(node.Path, "/dev/nvidia") || node.FileMode == nil {
			continue
		}
		err := closed
		if err == nil {
			err = d.opts.MakeNode(node.Path, uint32(node.Major), uint32(node.Minor), *node.FileMode)
		}
		if err != nil {
			klog.FromContext(ctx).Info("A pod with hostUsers: false cannot have the GPU: the host has no such device node, and none can be made",
				"node", node.Path, "reason", err)
		}
	}
}
