// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"
)

// A runtime makes a device node in a container from its numbers, and needs no node of the host, unless there is a user namespace
// ([MakeNode]). So what is missing below /dev is described by what the kernel says in /proc: NVML makes the nodes of GPUs in the /dev that
// it sees, which is not a driver container's, and nobody but CUDA makes /dev/nvidia-uvm, for which no container may start before.

const (
	uvmModule = "nvidia-uvm"
	uvmNode   = "/dev/nvidia-uvm"
	// capsModule is the name of a device alone.
	capsModule = "nvidia-caps"
	// controlMinor is /dev/nvidiactl's. Below are those of GPUs.
	controlMinor = 255
)

// gpuMajors are names of the driver's character devices in /proc/devices, of which each driver has one.
var gpuMajors = []string{"nvidia", "nvidia-frontend", "nvidiactl"}

// numbers are what the kernel says of device nodes in its proc file system.
type numbers struct {
	proc string
	// load loads a module of the kernel; it may be nil.
	load func(ctx context.Context, module string) error
}

// control are nodes that whatever uses CUDA opens.
func (n *numbers) control(ctx context.Context, name string) ([]*specs.DeviceNode, error) {
	if name != uvmNode {
		major, err := n.major(gpuMajors...)
		if err != nil {
			return nil, err
		}
		return []*specs.DeviceNode{byNumber(name, major, controlMinor, 0o666)}, nil
	}
	major, err := n.major(uvmModule)
	if err != nil && n.load != nil {
		if err := n.load(ctx, uvmModule); err != nil {
			return nil, err
		}
		major, err = n.major(uvmModule)
	}
	if err != nil {
		return nil, err
	}
	return []*specs.DeviceNode{byNumber(name, major, 0, 0o666), byNumber(name+"-tools", major, 1, 0o666)}, nil
}

// gpu is the node of the GPU with that minor.
func (n *numbers) gpu(minor int) (*specs.DeviceNode, error) {
	major, err := n.major(gpuMajors...)
	if err != nil {
		return nil, err
	}
	return byNumber(gpuNode(minor), major, int64(minor), 0o666), nil
}

// partition are the nodes in [capsFolder] of a MIG device.
func (n *numbers) partition(lib nvml.Interface, gpu GPU) ([]*specs.DeviceNode, error) {
	if lib == nil {
		return nil, errors.New("no NVML library is loaded")
	}
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return nil, fmt.Errorf("initialise NVML: %w", ret)
	}
	defer lib.Shutdown()
	device, ret := lib.DeviceGetHandleByUUID(gpu.UUID)
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("find the MIG device %s: %w", gpu.UUID, ret)
	}
	instance, ret := device.GetGpuInstanceId()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("ask for the GPU instance of %s: %w", gpu.UUID, ret)
	}
	compute, ret := device.GetComputeInstanceId()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("ask for the compute instance of %s: %w", gpu.UUID, ret)
	}
	major, err := n.major(capsModule)
	if err != nil {
		return nil, err
	}
	minors, err := n.migMinors()
	if err != nil {
		return nil, err
	}
	var nodes []*specs.DeviceNode
	for _, capability := range []string{
		fmt.Sprintf("gpu%d/gi%d/access", gpu.Minor, instance),
		fmt.Sprintf("gpu%d/gi%d/ci%d/access", gpu.Minor, instance, compute),
	} {
		minor, known := minors[capability]
		if !known {
			return nil, fmt.Errorf("%s has no %s", n.migMinorsFile(), capability)
		}
		nodes = append(nodes, byNumber(filepath.Join(capsFolder, "nvidia-cap"+strconv.FormatInt(minor, 10)), major, minor, 0o444))
	}
	return nodes, nil
}

func gpuNode(minor int) string { return "/dev/nvidia" + strconv.Itoa(minor) }

// byNumber is a node that is on no disk.
func byNumber(path string, major, minor int64, mode fs.FileMode) *specs.DeviceNode {
	return &specs.DeviceNode{Path: path, Type: "c", Major: major, Minor: minor, FileMode: ptr.To(mode)}
}

// major is the number of the character device that has the first of these names.
func (n *numbers) major(names ...string) (int64, error) {
	file := filepath.Join(n.proc, "devices")
	majors := map[string]int64{}
	block := false
	err := lines(file, func(line string) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			return
		}
		if fields[1] == "devices:" {
			block = fields[0] == "Block"
		} else if number, err := strconv.ParseInt(fields[0], 10, 32); err == nil && !block {
			majors[fields[1]] = number
		}
	})
	if err != nil {
		return 0, err
	}
	if i := slices.IndexFunc(names, func(name string) bool { return majors[name] > 0 }); i >= 0 {
		return majors[names[i]], nil
	}
	return 0, fmt.Errorf("%s has no character device %s: its module is not loaded", file, strings.Join(names, " or "))
}

func (n *numbers) migMinorsFile() string {
	return filepath.Join(n.proc, "driver/nvidia-caps/mig-minors")
}

// closedToOthers is an error where an administrator keeps the driver's nodes from processes of the host: then none is made that is open to
// all. What is not known is as the driver's default, 0666 (its parameter NVreg_DeviceFileMode, as /proc has it in decimal).
func (n *numbers) closedToOthers() (closed error) {
	file := filepath.Join(n.proc, "driver/nvidia/params")
	_ = lines(file, func(line string) {
		if text, found := strings.CutPrefix(line, "DeviceFileMode:"); found {
			if mode, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32); err == nil && mode&0o006 != 0o006 {
				closed = fmt.Errorf("%s has DeviceFileMode %04o", file, mode)
			}
		}
	})
	return closed
}

// current tells whether there is the node, and not one of a module that has been loaded anew since, with another number, or that was taken
// out and is not loaded.
func (n *numbers) current(nodes []*specs.DeviceNode, name string) bool {
	i := slices.IndexFunc(nodes, func(node *specs.DeviceNode) bool { return node.Path == name })
	if i < 0 {
		return false
	}
	names := gpuMajors
	switch {
	case filepath.Dir(name) == capsFolder:
		names = []string{capsModule}
	case name == uvmNode:
		names = []string{uvmModule}
	}
	major, err := n.major(names...)
	if err != nil && name == uvmNode {
		_, err := n.major(gpuMajors...)
		return err != nil // otherwise the driver is there, without the module
	}
	return err != nil || major == nodes[i].Major
}

// migMinors are the minors of all capabilities that MIG devices can have (NVIDIA's MIG user guide, "Device Nodes and Capabilities").
func (n *numbers) migMinors() (map[string]int64, error) {
	minors := map[string]int64{}
	err := lines(n.migMinorsFile(), func(line string) {
		if capability, number, found := strings.Cut(line, " "); found {
			if minor, err := strconv.ParseInt(strings.TrimSpace(number), 10, 32); err == nil {
				minors[capability] = minor
			}
		}
	})
	return minors, err
}

// lines of a file of the kernel's.
func lines(path string, each func(line string)) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		each(scanner.Text())
	}
	return scanner.Err()
}
