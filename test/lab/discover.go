// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
)

// gpu is what a device name in an allocation stands for on its node. For a partition it is the MIG device's UUID, and the minor number of
// the GPU that it is a part of.
type gpu struct {
	UUID  string
	Minor int
}

// discovered is the part of `node-agent discover -o json` that we read.
type discovered struct {
	GPUs []discoveredGPU `json:"gpus"`
}

type discoveredGPU struct {
	Name         string `json:"name"`
	UUID         string `json:"uuid"`
	Minor        int    `json:"minor"`
	MIGInstances []struct {
		Placement struct{ Start int }
		Devices   []struct{ UUID string }
	} `json:"migInstances"`
}

// inventory is what there is on a node.
type inventory []discoveredGPU

// partition matches the name of a partition: the GPU's, its profile, its first memory slice.
var partition = regexp.MustCompile(`^(gpu-[0-9a-f-]+)-mig-[0-9a-z-]+-([0-9]+)$`)

// find returns what a device stands for.
func (found inventory) find(device string) (gpu, bool) {
	name, start := device, -1
	if match := partition.FindStringSubmatch(device); match != nil {
		name = match[1]
		start, _ = strconv.Atoi(match[2])
	}
	for _, g := range found {
		if g.Name != name {
			continue
		}
		if start < 0 {
			return gpu{UUID: g.UUID, Minor: g.Minor}, true
		}
		for _, instance := range g.MIGInstances {
			if instance.Placement.Start == start && len(instance.Devices) == 1 {
				return gpu{UUID: instance.Devices[0].UUID, Minor: g.Minor}, true
			}
		}
	}
	return gpu{}, false
}

// discover asks discovery what there is on a node. Whole GPUs do not change; of partitions it is what there is now.
func (l *Lab) discover(ctx context.Context, node *labNode) (inventory, error) {
	if known, ok := l.known[node.name]; ok {
		return known, nil
	}
	agent, err := filepath.Abs(l.options.Agent)
	if err != nil {
		return nil, err
	}
	command := []string{agent, "discover", "-o", "json", "--nvml=" + node.nvml, "--node-name=" + node.name}
	if node.simDir != "" {
		command = append(command, "--sim-dir="+node.simDir)
	}
	if node.enter != nil { // partitions end with the boot, and outside is another one
		command = node.enter(command[0], command[1:]...)
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("discovering the GPUs of node %s: %w: %s", node.name, err, stderr.String())
	}
	var found discovered
	if err := json.Unmarshal(output, &found); err != nil {
		return nil, fmt.Errorf("reading what discovery printed for node %s: %w", node.name, err)
	}
	if node.simDir == "" {
		l.known[node.name] = found.GPUs
	}
	return found.GPUs, nil
}
