// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/sharing/internal/confine"
)

// processes are the host's, seen through /proc.
type processes struct{ proc string }

// podCgroup finds the pod's UID in a cgroup path, as the kubelet's systemd and cgroupfs drivers write it:
// …/kubepods-burstable-pod<uid with underscores>.slice/… and …/kubepods/burstable/pod<uid>/…. From a container that has a
// namespace of its own for cgroups, a pod beside its own is /../../pod<uid>/…. Of a cluster within a pod it is the outer one.
var podCgroup = regexp.MustCompile(
	`(?:kubepods[^:\n]*?[-/]|/\.\./)pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(\.slice)?(/|$)`)

// daemonCgroup finds the name of a daemon in the cgroup path of its unit (see systemd), which is one of the host's services, or
// in that of its own cgroup (see cgroups), which is at the root.
var daemonCgroup = regexp.MustCompile(`/system\.slice/` + unitPrefix + `([^/]+)` + regexp.QuoteMeta(unitSuffix) + `(?:/|$)` +
	`|^[0-9]+:[^:]*:(?:/\.\.)*/` + confine.Parent + `/([^/]+)(?:/|$)`)

// DaemonOf implements Processes. A container may give a cgroup of its own any name, and is a pod's all the same.
func (p *processes) DaemonOf(pid uint32) (string, error) {
	if pod, err := p.PodOf(pid); pod != "" || err != nil {
		return "", err
	}
	data, err := p.read(pid, "cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		if found := daemonCgroup.FindStringSubmatch(strings.TrimSpace(line)); found != nil {
			return found[1] + found[2], nil // one of them is empty
		}
	}
	return "", nil
}

// read reads a file of the process.
func (p *processes) read(pid uint32, file string) ([]byte, error) {
	data, err := os.ReadFile(filepath.Join(p.proc, strconv.FormatUint(uint64(pid), 10), file))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		err = ErrNoProcess
	}
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	return data, nil
}

// PodOf implements Processes.
func (p *processes) PodOf(pid uint32) (types.UID, error) {
	data, err := p.read(pid, "cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		if found := podCgroup.FindStringSubmatch(strings.TrimSpace(line)); found != nil {
			return types.UID(strings.ReplaceAll(found[1], "_", "-")), nil
		}
	}
	return "", nil
}

// NameOf implements Processes.
func (p *processes) NameOf(pid uint32) (string, error) {
	data, err := p.read(pid, "comm")
	if err != nil {
		return "", err
	}
	// A program may give itself any bytes for a name, and the name goes into events and conditions.
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == unicode.ReplacementChar {
			return '?'
		}
		return r
	}, strings.TrimSpace(string(data))), nil
}

// End implements Processes. The process is held by a file descriptor while its pod is looked up, so that no other
// process that gets its ID is hit.
func (p *processes) End(pid uint32, pod types.UID) error {
	fd, err := unix.PidfdOpen(int(pid), 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	of, err := p.PodOf(pid)
	if errors.Is(err, ErrNoProcess) {
		return nil
	}
	if err != nil {
		return err
	}
	if of != pod {
		return fmt.Errorf("process %d is not of pod %s any more", pid, pod) // whose it is concerns nobody else
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d of pod %s: %w", pid, pod, err)
	}
	return nil
}

// PodsRunning are the pods of which a process is there, by the process table at proc, which must be the host's.
func PodsRunning(proc string) (map[types.UID]bool, error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	all, pods := &processes{proc: proc}, map[types.UID]bool{}
	for _, entry := range entries {
		pid, err := strconv.ParseUint(entry.Name(), 10, 32)
		if err != nil {
			continue
		}
		pod, err := all.PodOf(uint32(pid))
		if err != nil && !errors.Is(err, ErrNoProcess) {
			return nil, err
		}
		pods[pod] = true
	}
	return pods, nil
}
