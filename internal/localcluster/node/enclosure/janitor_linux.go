// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package enclosure

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	readyLine = "ready\n"

	// killTimeout is long, for a process in the middle of disk I/O dies only after it.
	killTimeout = 20 * time.Second
)

// RunJanitor is the life of the janitor: make the enclosure, say so on out, wait until in ends, remove it. The calling process must
// have been started in a mount namespace of its own.
func RunJanitor(spec Spec, in io.Reader, out io.Writer) error {
	namespace, err := MountNamespace(os.Getpid())
	if err != nil {
		return err
	}
	// In the machine's own namespace, the killing at the end would spare nothing.
	outer, err := MountNamespace(os.Getppid())
	if err != nil {
		return err
	}
	if outer == namespace {
		return errors.New("refusing to be the janitor of a mount namespace that the parent process is in, too")
	}
	points, err := mountAll(spec)
	if err == nil {
		err = makeCgroup(spec.Cgroup)
	}
	if err == nil {
		_, err = io.WriteString(out, readyLine)
	}
	if err == nil {
		_, err = io.Copy(io.Discard, in)
	}
	// From here on nothing stops the cleaning: each step is tried whatever became of the one before.
	return errors.Join(
		err,
		killAll(namespace, spec.Cgroup, os.Getpid(), killTimeout),
		removeCgroup(spec.Cgroup),
		unmountAll(spec, points),
	)
}

// mountAll returns the mount points in use, in the order of the binds.
func mountAll(spec Spec) (points []*mountPoint, err error) {
	// Nothing mounted here may show outside, and nothing unmounted here may vanish there.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("making the node's mounts private: %w", err)
	}
	for _, bind := range spec.Binds {
		point, err := useMountPoint(bind.Target)
		if point != nil {
			points = append(points, point)
		}
		if err != nil {
			return points, err
		}
		if err := unix.Mount(bind.Source, bind.Target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return points, fmt.Errorf("mounting %s at %s: %w", bind.Source, bind.Target, err)
		}
	}
	return points, nil
}

// unmountAll takes the mounts away, and the mount points that nobody else uses.
func unmountAll(spec Spec, points []*mountPoint) error {
	var errs []error
	for i := len(spec.Binds) - 1; i >= 0; i-- {
		if err := unmount(spec.Binds[i].Target); err != nil {
			errs = append(errs, err)
		}
	}
	for _, point := range slices.Backward(points) {
		if err := point.release(); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// unmount removes every mount at a path: the kubelet puts one of its own over its root folder, to share what it mounts below.
func unmount(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, fs.ErrNotExist) { // nothing is mounted there, any more
			return nil
		}
		if err != nil {
			return fmt.Errorf("unmounting %s: %w", path, err)
		}
	}
}
