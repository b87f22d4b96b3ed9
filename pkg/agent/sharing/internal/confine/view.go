// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// HasMountSetattr returns an error if the kernel cannot make all mounts read-only at once, which is new in Linux 5.12.
func HasMountSetattr() error {
	if err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{}); errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("mount_setattr: %w: the kernel is older than Linux 5.12", err)
	}
	return nil
}

// tree is a mount that is not anywhere yet.
type tree struct {
	bind Bind
	fd   int
}

// makeView gives the program mounts of its own. All that it has is read-only, has no devices and gives no rights (setuid), but
// its binds, a /dev of its own, and an empty /tmp. What is mounted on the host later is seen, what is unmounted is gone.
func (o *orders) makeView() error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("a namespace for its mounts: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("let its mounts not be the host's: %w", err)
	}
	var trees []tree
	for _, bind := range o.Binds {
		fd, err := unix.OpenTree(unix.AT_FDCWD, bind.From, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
		if err != nil {
			return &fs.PathError{Op: "open", Path: bind.From, Err: err}
		}
		trees = append(trees, tree{bind, fd})
	}
	nodes, err := o.nodes()
	if err != nil {
		return err
	}
	if !o.Unconfined {
		attributes := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID}
		if err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &attributes); err != nil {
			return fmt.Errorf("make all mounts read-only: %w", err)
		}
	}
	if o.Root != "" {
		if err := unix.Chroot(o.Root); err != nil {
			return &fs.PathError{Op: "chroot", Path: o.Root, Err: err}
		}
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	return o.furnish(trees, nodes)
}

// furnish puts into the root what is the program's own. What is hidden is hidden first: a bind may be in there.
func (o *orders) furnish(trees []tree, nodes []node) error {
	if !o.Unconfined {
		for _, path := range o.Hide {
			if info, err := os.Lstat(path); err != nil || !info.IsDir() {
				continue // no such folder, or a link to one that is hidden or is not
			}
			const flags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
			if err := unix.Mount("tmpfs", path, "tmpfs", flags, "size=4k,nr_inodes=2,mode=0755"); err != nil {
				return fmt.Errorf("hide %s: %w", path, err)
			}
		}
		if err := makeDev(nodes); err != nil {
			return err
		}
	}
	if err := unix.Mount("tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=16m,mode=1777"); err != nil {
		return fmt.Errorf("mount a tmpfs at /tmp: %w", err)
	}
	for _, t := range trees {
		if err := os.MkdirAll(t.bind.To, 0o755); err != nil {
			return err
		}
		if err := unix.MoveMount(t.fd, "", unix.AT_FDCWD, t.bind.To, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("show %s at %s: %w", t.bind.From, t.bind.To, err)
		}
	}
	if o.Unconfined {
		return nil
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/dev", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("make /dev read-only: %w", err)
	}
	return nil
}

// node is a character device, by its path below /dev.
type node struct {
	path     string
	mode     uint32
	uid, gid uint32
	device   uint64
}

// memory are the devices that any program has.
var memory = []string{"null", "zero", "full", "random", "urandom"}

// nodes are the devices that the program is to have: of the host, and of the root that it runs in, which may have some that the
// host lacks.
func (o *orders) nodes() (nodes []node, err error) {
	var seen []string
	for _, dev := range slices.Compact([]string{"/dev", filepath.Join("/", o.Root, "dev")}) {
		for _, pattern := range []string{"*", "*/*"} {
			paths, err := filepath.Glob(filepath.Join(dev, pattern))
			if err != nil {
				return nil, err
			}
			for _, path := range paths {
				var stat unix.Stat_t
				if unix.Lstat(path, &stat) != nil || stat.Mode&unix.S_IFMT != unix.S_IFCHR {
					continue // it has gone, or is none
				}
				name, err := filepath.Rel(dev, path)
				if err != nil {
					return nil, err
				}
				if slices.Contains(seen, name) || !slices.Contains(memory, name) && !slices.Contains(o.Majors, unix.Major(uint64(stat.Rdev))) {
					continue
				}
				seen = append(seen, name)
				nodes = append(nodes, node{name, stat.Mode, stat.Uid, stat.Gid, uint64(stat.Rdev)})
			}
		}
	}
	return nodes, nil
}

// makeDev makes a /dev that has these devices alone.
func makeDev(nodes []node) error {
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", unix.MS_NOSUID, "size=64k,mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs at /dev: %w", err)
	}
	for _, n := range nodes {
		path := filepath.Join("/dev", n.path)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = unix.Mknod(path, n.mode, int(n.device))
		}
		// The mode is less than asked for by the umask.
		if err := errors.Join(err, os.Chown(path, int(n.uid), int(n.gid)), os.Chmod(path, fs.FileMode(n.mode&0o777))); err != nil {
			return fmt.Errorf("device %s: %w", path, err)
		}
	}
	for name, target := range map[string]string{"fd": "", "stdin": "0", "stdout": "1", "stderr": "2"} {
		if err := os.Symlink(filepath.Join("/proc/self/fd", target), filepath.Join("/dev", name)); err != nil {
			return err
		}
	}
	return nil
}
