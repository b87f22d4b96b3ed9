// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

// systemFolder is where the kernel tells of CPUs and NUMA nodes (Documentation/ABI/stable/sysfs-devices-node).
const systemFolder = "/sys/devices/system"

var (
	cpuFolder = regexp.MustCompile(`^cpu([0-9]+)$`)
	memTotal  = regexp.MustCompile(`(?m)^MemTotal:\s+([0-9]+) kB$`)
)

// showNUMANodes lets the programs of the node see that many NUMA nodes, by files where the kernel's are. The kubelet reads them through
// cadvisor (lib/utils/sysfs): CPUs, memory, huge pages and distances. A container's own /sys is the kernel's.
func showNUMANodes(l layout, system string, count int) ([]enclosure.Bind, error) {
	if count == 0 {
		return nil, nil
	}
	cpus, err := cpusOf(system)
	if err != nil {
		return nil, fmt.Errorf("dealing the CPUs out to %d NUMA nodes: %w", count, err)
	}
	kilobytes, err := memoryOf("/proc/meminfo")
	if err != nil {
		return nil, fmt.Errorf("dealing the memory out to %d NUMA nodes: %w", count, err)
	}
	folder := l.path("numa")
	for i := range count {
		node := filepath.Join(folder, fmt.Sprintf("node%d", i))
		if err := os.MkdirAll(filepath.Join(node, "hugepages"), 0o755); err != nil {
			return nil, fmt.Errorf("making NUMA node %d: %w", i, err)
		}
		for _, cpu := range shareOf(cpus, i, count) {
			name := fmt.Sprintf("cpu%d", cpu)
			err := os.Symlink(filepath.Join(system, "cpu", name), filepath.Join(node, name))
			if err != nil && !errors.Is(err, fs.ErrExist) { // after a reboot
				return nil, fmt.Errorf("making NUMA node %d: %w", i, err)
			}
		}
		var distances []string
		for j := range count {
			distance := "20"
			if i == j {
				distance = "10"
			}
			distances = append(distances, distance)
		}
		for name, text := range map[string]string{
			"distance": strings.Join(distances, " "),
			"meminfo":  fmt.Sprintf("Node %d MemTotal: %d kB", i, kilobytes/count),
		} {
			if err := os.WriteFile(filepath.Join(node, name), []byte(text+"\n"), 0o644); err != nil {
				return nil, fmt.Errorf("making NUMA node %d: %w", i, err)
			}
		}
	}
	return []enclosure.Bind{{Source: folder, Target: filepath.Join(system, "node")}}, nil
}

// cpusOf lists the CPUs that are there, in the order of their numbers.
func cpusOf(system string) (cpus []int, err error) {
	entries, err := os.ReadDir(filepath.Join(system, "cpu"))
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		if match := cpuFolder.FindStringSubmatch(entry.Name()); match != nil {
			cpu, err := strconv.Atoi(match[1])
			if err != nil {
				return nil, err
			}
			cpus = append(cpus, cpu)
		}
	}
	slices.Sort(cpus)
	return cpus, nil
}

// shareOf is the i-th of count parts of the list, none of which has more than one element more than another.
func shareOf(list []int, i, count int) []int {
	return list[len(list)*i/count : len(list)*(i+1)/count]
}

// memoryOf is in kB, as the kernel says it.
func memoryOf(meminfo string) (kilobytes int, err error) {
	text, err := os.ReadFile(meminfo)
	if err != nil {
		return 0, err
	}
	match := memTotal.FindSubmatch(text)
	if match == nil {
		return 0, errors.New(meminfo + " has no MemTotal")
	}
	return strconv.Atoi(string(match[1]))
}
