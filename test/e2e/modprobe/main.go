// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command modprobe is that of a simulated driver container: it loads nvidia-uvm by telling of its device where the kernel would, in
// /proc/devices, which is a file of the test's there.
package main

import (
	"fmt"
	"os"
	"strings"
)

func main() {
	if err := load(os.Args[len(os.Args)-1]); err != nil {
		fmt.Fprintln(os.Stderr, "modprobe:", err)
		os.Exit(1)
	}
}

func load(module string) error {
	if module != "nvidia-uvm" {
		return fmt.Errorf("%s: there is no such module", module)
	}
	const devices = "/proc/devices"
	content, err := os.ReadFile(devices)
	if err != nil || strings.Contains(string(content), module) {
		return err
	}
	var major int
	for line := range strings.Lines(string(content)) {
		if _, err := fmt.Sscanf(line, "%d nvidia", &major); err == nil {
			break
		}
	}
	if major == 0 {
		return fmt.Errorf("the module nvidia, on which %s depends, is not loaded", module)
	}
	return os.WriteFile(devices, append([]byte(fmt.Sprintf("Character devices:\n%3d %s\n", major+1, module)), content...), 0o644)
}
