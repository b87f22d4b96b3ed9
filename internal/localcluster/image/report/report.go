// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package report is what the probe of package image prints about itself: one JSON object on one line of its standard
// output. It is shared by the probe, which writes it, and the tests and the demo, which read it back from the pod's log.
//
// It holds only types, so that the probe stays a small static binary.
package report

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Outcomes of opening a device node, as errno names. No driver stands behind a simulated GPU, so opening its node never succeeds.
const (
	// Admitted says that the devices cgroup let the open through and the kernel then found no driver.
	Admitted = "ENXIO"
	// Denied says that the devices cgroup refused the open.
	Denied = "EPERM"
	// Opened says that a driver answered.
	Opened = "ok"
)

// Report is what a container sees of its GPUs.
type Report struct {
	// Reason is why the report was printed: "start" or "signal".
	Reason string `json:"reason"`
	// VisibleDevices is the value of NVIDIA_VISIBLE_DEVICES, empty when it is not set.
	VisibleDevices string `json:"visibleDevices"`
	// Env holds every variable whose name starts with NVIDIA_, CUDA_ or STOWAGE_.
	Env map[string]string `json:"env"`
	// User that the container runs as, and Rights what that user may do with the folders of its MPS daemon: "rwx", or less.
	User   int               `json:"user,omitempty"`
	Rights map[string]string `json:"rights,omitempty"`
	// Told are the UUIDs of the devices that the device metadata files (KEP-5304) tell of, in order of the files' paths.
	Told []string `json:"told,omitempty"`
	// Files of the driver that are mounted, in order: libraries and programs, by their paths in the container.
	Files []string `json:"files,omitempty"`
	// Devices are the nodes below /dev whose name starts with "nvidia", ordered by path.
	Devices []Device `json:"devices"`
}

// Device is one node below /dev.
type Device struct {
	Path string `json:"path"`
	// Type is "char", "block", or "other" for what is no device node.
	Type  string `json:"type"`
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
	// Mode is the permission bits in octal, for instance "0666".
	Mode string `json:"mode"`
	// Open is "ok" or the name of the errno of open(2) for reading and writing.
	Open string `json:"open"`
}

// Last returns the last report in a container's log. It is an error if there is none.
func Last(log io.Reader) (*Report, error) {
	var last *Report
	scanner := bufio.NewScanner(log)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		line := strings.TrimSpace(scanner.Text())
		if !strings.HasPrefix(line, "{") {
			continue
		}
		r := &Report{}
		if err := json.Unmarshal([]byte(line), r); err != nil {
			return nil, fmt.Errorf("reading the probe's report %q: %w", line, err)
		}
		last = r
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("reading the container's log: %w", err)
	}
	if last == nil {
		return nil, fmt.Errorf("the container's log holds no report of the probe")
	}
	return last, nil
}

// Hostile is what a container could do to the folder of its MPS daemon, and to the node, as the one line that it prints at the end.
type Hostile struct {
	Hostile bool `json:"hostile"`
	// OneFileSystem says that shared memory and the daemon's pipes are on one file system, which is a tmpfs.
	OneFileSystem bool `json:"oneFileSystem"`
	// Unbounded is what could be done without an end, empty for nothing.
	Unbounded string `json:"unbounded"`
	// Rounds of filling, nesting and forking until there was no more.
	Rounds, Forks int
	// Bytes, Files, Levels and Processes are the most that there were at once.
	Bytes, Files, Levels, Processes int
	// Failed is what went wrong but for room.
	Failed string `json:"failed"`
}
