// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// procStat is what we need of /proc/<pid>/stat.
type procStat struct {
	command string // at most 15 characters
	state   byte   // 'Z' for a process that has ended and was not waited for
	parent  int
}

func readProcStat(pid int) (procStat, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return procStat{}, err
	}
	return parseProcStat(data)
}

// parseProcStat reads "pid (command) state ppid …"; see proc(5). A command may
// hold any character, so the last parenthesis counts.
func parseProcStat(data []byte) (procStat, error) {
	begin, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if begin < 0 || end < begin {
		return procStat{}, fmt.Errorf("unexpected process status %q", data)
	}
	fields := strings.Fields(string(data[end+1:]))
	if len(fields) < 2 {
		return procStat{}, fmt.Errorf("unexpected process status %q", data)
	}
	parent, err := strconv.Atoi(fields[1])
	if err != nil {
		return procStat{}, fmt.Errorf("unexpected process status %q: %w", data, err)
	}
	return procStat{command: string(data[begin+1 : end]), state: fields[0][0], parent: parent}, nil
}
