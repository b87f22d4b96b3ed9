// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// cpuTimes is the processor time of a cluster's programs and of this one, by process.
type cpuTimes map[process]time.Duration

// process is a program that runs, or has run.
type process struct {
	pid  int
	name string
}

// ticksPerSecond is USER_HZ, which Linux has fixed at 100 for what it tells user space.
const ticksPerSecond = 100

// cpuNow reads the processor times of this program and its children.
func cpuNow() (cpuTimes, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	times := cpuTimes{}
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		name, pid, parent, used, err := parseStat(data)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", path, err)
		}
		if pid == os.Getpid() {
			name = "this program"
		}
		if pid == os.Getpid() || parent == os.Getpid() {
			times[process{pid, name}] = used
		}
	}
	return times, nil
}

// parseStat reads "pid (command) state ppid … utime stime …"; see proc(5). A command may hold any character.
func parseStat(data []byte) (name string, pid, parent int, used time.Duration, err error) {
	begin, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if begin < 0 || end < begin {
		return "", 0, 0, 0, fmt.Errorf("unexpected process status %q", data)
	}
	fields := strings.Fields(string(data[end+1:])) // from field 3 of the manual on
	if len(fields) < 13 {
		return "", 0, 0, 0, fmt.Errorf("unexpected process status %q", data)
	}
	var numbers [4]int
	for i, text := range []string{string(data[:begin]), fields[1], fields[11], fields[12]} {
		if numbers[i], err = strconv.Atoi(strings.TrimSpace(text)); err != nil {
			return "", 0, 0, 0, fmt.Errorf("unexpected process status %q: %w", data, err)
		}
	}
	ticks := numbers[2] + numbers[3]
	return string(data[begin+1 : end]), numbers[0], numbers[1], time.Duration(ticks) * time.Second / ticksPerSecond, nil
}

// since is what each program has used since earlier, those aside that have ended since.
func (t cpuTimes) since(earlier cpuTimes) map[string]time.Duration {
	used := map[string]time.Duration{}
	for p, now := range t {
		used[p.name] += now - earlier[p]
	}
	return used
}

// of is what one process has used.
func (t cpuTimes) of(pid int) time.Duration {
	for p, used := range t {
		if p.pid == pid {
			return used
		}
	}
	return 0
}

// peakMemory is the most memory that a process had at any time, in bytes.
func peakMemory(pid int) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	return parsePeak(data)
}

func parsePeak(status []byte) (int64, error) {
	for line := range strings.Lines(string(status)) {
		value, ok := strings.CutPrefix(line, "VmHWM:")
		if !ok {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("unexpected peak memory %q: %w", line, err)
		}
		return kib << 10, nil
	}
	return 0, fmt.Errorf("no VmHWM in %q", status)
}

// loadAverage is that of the last minute: how many programs wanted a processor.
func loadAverage() (float64, error) {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(data), " ")
	return strconv.ParseFloat(first, 64)
}
