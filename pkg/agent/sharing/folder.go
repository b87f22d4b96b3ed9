// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"
)

// The folder of an MPS daemon has what the daemon and its clients meet in. The clients are containers, of tenants, and may write there: to
// the shared memory, and, as root of their containers, beside the daemon's sockets. So the folder is a file system of its own in memory,
// with room for that daemon alone, on which nothing is executed, no device opened and no link followed. It ends by being unmounted. What is
// in it, which may be nested deeper than anybody can walk, is never looked through.

// The parts of a daemon's folder.
const (
	pipeFolder = "pipe"
	logFolder  = "log"
	shmFolder  = "shm"
	// movedPrefix begins the names of what tenants left in the pipe folder of a daemon before.
	movedPrefix = "moved-"
)

// DefaultShmBytes is what containers have as shared memory without a daemon.
const DefaultShmBytes = 64 << 20

// bytesPerFile is how much of the memory there is for each file that can be made.
const bytesPerFile = 16 << 10

// mounts are those of the host, as far as they matter here; tests have others.
type mounts interface {
	// mount mounts a new file system of that size in memory.
	mount(path string, bytes int64) error
	// unmount takes away the one on top, although it may be in use: what is in it goes with its last user.
	unmount(path string) error
	// mounted tells whether one is mounted there. A path that does not exist has none.
	mounted(path string) (bool, error)
	// followsNoLinks returns an error if the kernel follows links in what is mounted there.
	followsNoLinks(path string) error
}

// kernelMounts are the kernel's. The agent's and the host's have to be the same for the folder of the daemons.
type kernelMounts struct{ hostRoot string }

func (k kernelMounts) mount(path string, bytes int64) error {
	options := fmt.Sprintf("size=%d,nr_inodes=%d,mode=0755", bytes, max(bytes/bytesPerFile, 64))
	if err := unix.Mount("stowage-mps", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_NOSYMFOLLOW, options); err != nil {
		return fmt.Errorf("mount a tmpfs at %s: %w", path, err)
	}
	if k.hostRoot == "/" {
		return nil
	}
	here, err := deviceOf(path)
	if err == nil {
		var there uint64
		if there, err = deviceOf(filepath.Join(k.hostRoot, path)); err == nil && here != there {
			err = errors.New("the host does not see it: the agent's volume for the folder needs mountPropagation Bidirectional, and that for " +
				"--host-root HostToContainer")
		}
	}
	if err != nil {
		return fmt.Errorf("mount a tmpfs at %s: %w", path, errors.Join(err, k.unmount(path)))
	}
	return nil
}

func (kernelMounts) unmount(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return nil
}

const nosymfollow = 0x2000 // ST_NOSYMFOLLOW, which is not in the package unix

// A kernel before Linux 5.10 takes no notice of MS_NOSYMFOLLOW, and says nothing of it.
func (kernelMounts) followsNoLinks(path string) error {
	var stat unix.Statfs_t
	var host unix.Utsname
	if err := errors.Join(unix.Statfs(path, &stat), unix.Uname(&host)); err != nil {
		return &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	if stat.Flags&nosymfollow == 0 {
		return fmt.Errorf("links at %s are followed by Linux %s: a container could have the daemon, which is root, write to any file of the "+
			"host; MPS needs Linux 5.10 or later, "+
			"and --allow-sharing=time-slicing forbids it on this node", path, unix.ByteSliceToString(host.Release[:]))
	}
	return nil
}

func (kernelMounts) mounted(path string) (bool, error) {
	here, err := deviceOf(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	parent, err := deviceOf(filepath.Dir(path))
	return here != parent, err
}

// deviceOf is the file system that a path is on.
func deviceOf(path string) (uint64, error) {
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return uint64(stat.Dev), nil
}

// folders are those of all daemons of a node.
type folders struct{ opts DriverOptions }

func (f *folders) dir(name string, parts ...string) string {
	return filepath.Join(append([]string{f.opts.MPSRoot, name}, parts...)...)
}

// limitedFile is there once a daemon has its limits, and says which: it loses them if it ends, and an agent can end before it has set them.
// It lies beside the daemon's folder, in which tenants can take all the room there is.
func (f *folders) limitedFile(name string) string { return f.dir(name) + ".limited" }

// Edits implements Daemons.
func (f *folders) Edits(name string) *specs.ContainerEdits {
	bind := []string{"rw", "nosuid", "nodev", "noexec", "bind"}
	return &specs.ContainerEdits{
		Env: []string{pipeEnv},
		Mounts: []*specs.Mount{
			{HostPath: f.dir(name, pipeFolder), ContainerPath: containerPipe, Options: bind},
			{HostPath: f.dir(name, shmFolder), ContainerPath: "/dev/shm", Options: bind},
		},
	}
}

// makeFolder makes the folder of a daemon that does not run. If there is one, containers may have it: then it stays, for them to find the
// daemon that is started again, without what the one before has left.
func (f *folders) makeFolder(name string) error {
	dir := f.dir(name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	mounted, err := f.mounts().mounted(dir)
	if err != nil {
		return err
	}
	if mounted {
		err = f.emptyPipe(name)
	} else {
		err = f.mounts().mount(dir, f.opts.ShmBytes)
	}
	if err := errors.Join(err, removeIfThere(f.limitedFile(name))); err != nil {
		return err
	}
	if err := f.mounts().followsNoLinks(dir); err != nil {
		return err
	}
	for folder, mode := range map[string]os.FileMode{pipeFolder: 0o755, logFolder: 0o755, shmFolder: 0o777 | os.ModeSticky} {
		path := f.dir(name, folder)
		if err := errors.Join(os.MkdirAll(path, 0o755), os.Chmod(path, mode)); err != nil {
			return err
		}
	}
	return nil
}

// emptyPipe leaves nothing in the folder that a daemon and its clients meet in, which stays the one that containers have. What tenants
// have nested there, maybe under the name of a socket, is not looked through: it is moved out of their sight and the daemon's, and
// ends with the mount. A move needs no room.
func (f *folders) emptyPipe(name string) error {
	pipe := f.dir(name, pipeFolder)
	entries, err := os.ReadDir(pipe)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	beside, err := os.ReadDir(f.dir(name))
	if err != nil {
		return err
	}
	moved := len(beside) // no less than have been moved before: none of them is in the way
	for _, entry := range entries {
		path := filepath.Join(pipe, entry.Name())
		err := removeIfThere(path)
		if errors.Is(err, unix.ENOTEMPTY) {
			err = os.Rename(path, f.dir(name, fmt.Sprintf("%s%d", movedPrefix, moved)))
			moved++
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// removeFolder takes a daemon's folder away. One of an agent that mounted nothing is left where it is not empty: the next one of that name
// is mounted over it, and a reboot ends it.
func (f *folders) removeFolder(name string) error {
	dir := f.dir(name)
	if err := removeIfThere(f.limitedFile(name)); err != nil {
		return err
	}
	for {
		mounted, err := f.mounts().mounted(dir)
		if err != nil {
			return err
		}
		if !mounted {
			break
		}
		if err := f.mounts().unmount(dir); err != nil {
			return err
		}
	}
	if err := removeIfThere(dir); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// List implements Daemons.
func (f *folders) List() ([]string, error) {
	entries, err := os.ReadDir(f.opts.MPSRoot)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("folders of MPS daemons: %w", err)
	}
	var names []string
	for _, entry := range entries {
		if entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

func (f *folders) mounts() mounts {
	if f.opts.mounts != nil {
		return f.opts.mounts
	}
	return kernelMounts{hostRoot: f.opts.HostRoot}
}
