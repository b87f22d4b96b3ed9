// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"stowage.dev/stowage/internal/localcluster/build"
)

// devicePluginSocket is the kubelet's own, at a place that cannot be
// configured. Every kubelet deletes all sockets beside it when it starts.
const devicePluginSocket = "/var/lib/kubelet/device-plugins/kubelet.sock"

// ForeignKubelet returns an error when this machine is somebody's Kubernetes
// node: a kubelet runs that did not come from our cache, or a kubelet's socket
// is at its fixed place. (Ours run in mount namespaces of their own, so theirs
// is not seen here.) A real node must not be started then.
func ForeignKubelet() error {
	cache, err := build.CacheDir()
	if err != nil {
		return err
	}
	// The kernel tells programs without symbolic links in their path.
	if resolved, err := filepath.EvalSymlinks(cache); err == nil {
		cache = resolved
	}
	return foreignKubelet("/proc", devicePluginSocket, cache)
}

func foreignKubelet(proc, socket, cache string) error {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return fmt.Errorf("looking for a foreign kubelet: %w", err)
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join(proc, entry.Name())
		data, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err != nil {
			continue // it has just ended
		}
		stat, err := parseProcStat(data)
		if err != nil || stat.state == 'Z' || !isKubelet(dir, stat) {
			continue
		}
		// Where another user's program is hidden from us it is not ours.
		program, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil {
			program = "unknown program"
		} else if strings.HasPrefix(program, cache+string(filepath.Separator)) {
			continue
		}
		return fmt.Errorf("this machine is a node of another cluster: a kubelet runs as process %d (%s); "+
			"a real node is started only where no other kubelet runs", pid, program)
	}
	if _, err := os.Lstat(socket); err == nil {
		return fmt.Errorf("this machine is or was a node of another cluster: %s exists; "+
			"if no kubelet uses it any more, remove it", socket)
	}
	return nil
}

// isKubelet tells whether a process is called kubelet, or is a distribution's
// all-in-one program that was started under that name.
func isKubelet(dir string, stat procStat) bool {
	if stat.command == "kubelet" {
		return true
	}
	data, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		return false
	}
	first, rest, _ := strings.Cut(string(data), "\x00")
	second, _, _ := strings.Cut(rest, "\x00")
	return filepath.Base(first) == "kubelet" || filepath.Base(first) == "hyperkube" && second == "kubelet"
}
