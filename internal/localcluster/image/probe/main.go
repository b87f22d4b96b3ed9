// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command probe is the only program in the test images. As a container it prints what it sees of its GPUs, one JSON line
// (package report), and waits for SIGTERM. As the sandbox image it holds the pod's namespaces and nothing else.
//
//	probe          print, print again on SIGUSR1, exit 0 on SIGTERM
//	probe once     print and exit 0
//	probe hostile DURATION
//	               do to its MPS daemon's folder and to the node what a tenant can, print what came of it, exit 0 on SIGTERM
//	probe pause    the sandbox: reap what is orphaned into the pod, exit 0 on SIGTERM
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"stowage.dev/stowage/internal/localcluster/image/report"
)

func main() {
	mode := "run"
	if len(os.Args) > 1 {
		mode = os.Args[1]
	}
	if err := run(mode); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(mode string) error {
	// A container's first process ignores every signal that it does not ask for, so this comes before anything that takes time.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGUSR1, unix.SIGCHLD)

	switch mode {
	case "run", "once":
		if err := print("start"); err != nil || mode == "once" {
			return err
		}
	case "hostile":
		if err := startHostile(os.Args[2:]); err != nil {
			return err
		}
	case "pause":
	default:
		return fmt.Errorf("unknown mode %q: want run, once, hostile or pause", mode)
	}
	for s := range signals {
		switch s {
		case unix.SIGCHLD:
			reap()
		case unix.SIGUSR1:
			if mode == "run" {
				if err := print("signal"); err != nil {
					return err
				}
			}
		default:
			return nil
		}
	}
	return nil
}

// reap collects every child that has ended. One SIGCHLD may stand for several.
func reap() {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
	}
}

func print(reason string) error {
	devices, err := devices("/dev")
	if err != nil {
		return fmt.Errorf("looking for NVIDIA device nodes: %w", err)
	}
	told, err := told("/var/run/kubernetes.io/dra-device-attributes")
	if err != nil {
		return fmt.Errorf("reading device metadata: %w", err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("reading which files are mounted: %w", err)
	}
	line, err := json.Marshal(report.Report{
		Reason:         reason,
		VisibleDevices: os.Getenv("NVIDIA_VISIBLE_DEVICES"),
		Env:            environment(os.Environ()),
		User:           os.Getuid(),
		Rights:         rights(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "/dev/shm"),
		Told:           told,
		Files:          files(string(mounts)),
		Devices:        devices,
	})
	if err != nil {
		return err
	}
	// One write, so that the runtime logs one line.
	_, err = os.Stdout.Write(append(line, '\n'))
	return err
}

// rights are those in these folders. Without a daemon none is looked at.
func rights(pipes, shm string) map[string]string {
	if pipes == "" {
		return nil
	}
	all := map[string]string{}
	for _, dir := range []string{pipes, shm} {
		for _, right := range []struct {
			mode uint32
			name string
		}{{unix.R_OK, "r"}, {unix.W_OK, "w"}, {unix.X_OK, "x"}} {
			if unix.Access(dir, right.mode) == nil {
				all[dir] += right.name
			}
		}
	}
	return all
}

// environment keeps the variables that tell something about GPUs.
func environment(environ []string) map[string]string {
	kept := map[string]string{}
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		for _, prefix := range []string{"NVIDIA_", "CUDA_", "STOWAGE_"} {
			if strings.HasPrefix(name, prefix) {
				kept[name] = value
			}
		}
	}
	return kept
}

// told reads the device metadata files below root, which has none for a container without claims.
func told(root string) ([]string, error) {
	var uuids []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "-metadata.json") {
			return err
		}
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		// A file says the same in several versions of the API, of which the first one is the newest.
		var claim struct {
			Requests []struct {
				Devices []struct {
					Attributes map[string]struct{ String string }
				}
			}
		}
		if err := json.NewDecoder(file).Decode(&claim); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for _, request := range claim.Requests {
			for _, device := range request.Devices {
				uuids = append(uuids, device.Attributes["uuid"].String)
			}
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return uuids, err
}

// driversFile is how the driver's libraries and programs are called.
var driversFile = regexp.MustCompile(`/usr/.*/(lib(cuda|nvidia-)[^/]*\.so[^/]*|nvidia-[^/]*)$`)

// files are the driver's among the mounts, which are in the form of /proc/self/mountinfo (proc_pid_mountinfo(5)).
func files(mounts string) (found []string) {
	const mountPoint = 4
	for line := range strings.Lines(mounts) {
		fields := strings.Fields(line)
		if len(fields) > mountPoint && driversFile.MatchString(fields[mountPoint]) {
			found = append(found, fields[mountPoint])
		}
	}
	slices.Sort(found)
	return found
}

// devices describes every node below root in whose path, relative to root, the first part starts with "nvidia".
func devices(root string) ([]report.Device, error) {
	found := []report.Device{}
	tops, err := filepath.Glob(filepath.Join(root, "nvidia*"))
	if err != nil {
		return nil, err
	}
	for _, top := range tops {
		err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			d, err := describe(path)
			if err == nil {
				found = append(found, d)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	slices.SortFunc(found, func(a, b report.Device) int { return strings.Compare(a.Path, b.Path) })
	return found, nil
}

func describe(path string) (report.Device, error) {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return report.Device{}, fmt.Errorf("stat %s: %w", path, err)
	}
	d := report.Device{
		Path: path,
		Type: "other",
		Mode: fmt.Sprintf("%04o", stat.Mode&0o7777),
		Open: report.Opened,
	}
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		d.Type = "char"
	case unix.S_IFBLK:
		d.Type = "block"
	}
	if d.Type != "other" {
		d.Major, d.Minor = unix.Major(uint64(stat.Rdev)), unix.Minor(uint64(stat.Rdev))
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		errno, _ := errors.AsType[unix.Errno](err)
		d.Open = unix.ErrnoName(errno)
		return d, nil
	}
	return d, unix.Close(fd)
}
