// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package enclosure

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Hierarchies returns the mount points of all cgroup hierarchies of the machine: one for each controller set of cgroup v1, and that of
// cgroup v2. A hybrid machine has both; then runc makes its cgroups in every one, and the v2 hierarchy has no controllers.
func Hierarchies() ([]string, error) {
	v1, v2, err := hierarchies()
	return append(v1, v2...), err
}

func hierarchies() (v1, v2 []string, err error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		// "36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices": see proc_pid_mountinfo(5).
		before, after, ok := strings.Cut(scanner.Text(), " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(kind) == 0 {
			continue
		}
		switch kind[0] {
		case "cgroup":
			v1 = append(v1, fields[4])
		case "cgroup2":
			v2 = append(v2, fields[4])
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, nil, err
	}
	if len(v1)+len(v2) == 0 {
		return nil, nil, errors.New("this machine has no cgroup hierarchy mounted: a real node needs one at /sys/fs/cgroup")
	}
	return v1, v2, nil
}

// makeCgroup makes the cgroup wherever there are controllers, ready for children with limits.
func makeCgroup(cgroup string) error {
	v1, v2, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range v1 {
		if err := makeCgroupV1(root, cgroup); err != nil {
			return err
		}
	}
	if len(v1) > 0 {
		return nil
	}
	root := v2[0]
	if err := delegate(root); err != nil {
		return err
	}
	if err := mkdir(filepath.Join(root, cgroup)); err != nil {
		return err
	}
	return delegate(filepath.Join(root, cgroup))
}

func makeCgroupV1(root, cgroup string) error {
	path := filepath.Join(root, cgroup)
	if err := mkdir(path); err != nil {
		return err
	}
	// A cpuset of cgroup v1 starts empty, and takes no process before it has both.
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(root, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(path, name), value, 0)
		}
		if err != nil {
			return fmt.Errorf("setting up the node's cpuset cgroup: %w", err)
		}
	}
	return nil
}

func mkdir(path string) error {
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("making the node's cgroup: %w", err)
	}
	return nil
}

// delegate lets children of a v2 cgroup use every controller that it has.
func delegate(path string) error {
	controllers, err := os.ReadFile(filepath.Join(path, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for _, controller := range strings.Fields(string(controllers)) {
		err := os.WriteFile(filepath.Join(path, "cgroup.subtree_control"), []byte("+"+controller), 0)
		if err != nil {
			return fmt.Errorf("handing cgroup controller %q down from %s (a cgroup with processes in it, as in a container, "+
				"cannot: move them to a child first): %w", controller, path, err)
		}
	}
	return nil
}

// removeCgroup removes the cgroup and all below it. Its processes must be gone.
func removeCgroup(cgroup string) error {
	mountPoints, err := Hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, root := range mountPoints {
		errs = append(errs, removeTree(filepath.Join(root, cgroup)))
	}
	return errors.Join(errs...)
}

func removeTree(path string) error {
	children, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, child := range children {
		if child.IsDir() {
			if err := removeTree(filepath.Join(path, child.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing a cgroup of the node: %w", err)
	}
	return nil
}

// cgroupProcesses lists the processes in the cgroup and below it, in any hierarchy.
func cgroupProcesses(cgroup string) ([]int, error) {
	mountPoints, err := Hierarchies()
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, root := range mountPoints {
		err := filepath.WalkDir(filepath.Join(root, cgroup), func(path string, entry fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || !entry.IsDir() {
				return err
			}
			found, err := readPids(filepath.Join(path, "cgroup.procs"))
			pids = append(pids, found...)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("listing the processes of cgroup %s: %w", cgroup, err)
		}
	}
	return pids, nil
}

// readPids reads a cgroup.procs file. A cgroup removed meanwhile has no processes.
func readPids(path string) ([]int, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || isNoDevice(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, field := range strings.Fields(string(data)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
