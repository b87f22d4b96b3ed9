// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"
)

// nvcdi leaves out, with a warning, what it does not find. A container without one of the nodes below would start, and
// find out that CUDA does not work.

// controlNodes are opened by whatever uses CUDA.
var controlNodes = []string{"/dev/nvidiactl", uvmNode}

const (
	migPrefix = "MIG-"
	// capsFolder has a node for each GPU instance and for each compute instance. Who may open both may use the MIG
	// device (NVIDIA's MIG user guide, "Device Nodes and Capabilities").
	capsFolder = "/dev/nvidia-caps"
	migCaps    = 2
)

// completeControl adds the nodes that whatever uses CUDA opens, where nvcdi has found none or one that is not current.
func (d *Driver) completeControl(ctx context.Context, edits *specs.ContainerEdits) error {
	for _, name := range controlNodes {
		if d.numbers.current(edits.DeviceNodes, name) {
			continue
		}
		nodes, err := d.numbers.control(ctx, name)
		if err != nil {
			return fmt.Errorf("there is no %s: %w", name, err)
		}
		edits.DeviceNodes = with(edits.DeviceNodes, nodes...)
	}
	d.makeNodes(ctx, edits.DeviceNodes)
	return nil
}

// ControlNodes implements Backend.
func (d *Driver) ControlNodes(ctx context.Context) error {
	there := &specs.ContainerEdits{}
	for _, name := range controlNodes {
		if major, minor, err := host(d.devRoot()).charDevice(name); err == nil {
			there.DeviceNodes = append(there.DeviceNodes, byNumber(name, int64(major), int64(minor), 0o666))
		}
	}
	return d.completeControl(ctx, there)
}

// completeGPU adds the nodes of a GPU or of a MIG device, where nvcdi has found none.
func (d *Driver) completeGPU(edits *specs.ContainerEdits, gpu GPU) error {
	if name := gpuNode(gpu.Minor); !d.numbers.current(edits.DeviceNodes, name) {
		node, err := d.numbers.gpu(gpu.Minor)
		if err != nil {
			return fmt.Errorf("there is no %s: %w", name, err)
		}
		edits.DeviceNodes = with(edits.DeviceNodes, node)
	}
	if !strings.HasPrefix(gpu.UUID, migPrefix) {
		return nil
	}
	var caps []string
	others := slices.DeleteFunc(slices.Clone(edits.DeviceNodes), func(node *specs.DeviceNode) bool {
		inFolder := path.Dir(node.Path) == capsFolder
		if inFolder && d.numbers.current(edits.DeviceNodes, node.Path) {
			caps = append(caps, path.Base(node.Path))
		}
		return inFolder
	})
	if len(caps) == migCaps {
		return nil
	}
	nodes, err := d.numbers.partition(d.library(gpu), gpu)
	if err != nil {
		return fmt.Errorf("in %s there is [%s], and a MIG device needs two nodes there, of its GPU instance and of its compute instance: %w",
			capsFolder, strings.Join(caps, " "), err)
	}
	edits.DeviceNodes = append(others, nodes...)
	return nil
}

// with are the nodes and those, which take the place of others of their names.
func with(nodes []*specs.DeviceNode, those ...*specs.DeviceNode) []*specs.DeviceNode {
	kept := slices.DeleteFunc(slices.Clone(nodes), func(node *specs.DeviceNode) bool {
		return slices.ContainsFunc(those, func(other *specs.DeviceNode) bool { return other.Path == node.Path })
	})
	return append(kept, those...)
}

// letEverybodyOpen gives the driver's nodes modes by which a container need not run as root to use its GPU, whatever an
// administrator wants of processes of the host (the driver's parameter NVreg_DeviceFileMode): who may use the GPU is said by
// the claim. Nodes are made anew for each container, with the mode that is asked for. Nodes for rendering are open to the
// group that nvcdi adds to the container.
//
// It also says what kind of node it is, and of which path, so that it can be checked from where the host has another root.
func letEverybodyOpen(nodes []*specs.DeviceNode) {
	for _, node := range nodes {
		if node.Major != 0 {
			node.Type, node.HostPath = "c", cmp.Or(node.HostPath, node.Path)
		}
		var mode fs.FileMode
		switch {
		case path.Dir(node.Path) == capsFolder:
			mode = 0o444 // all that is done with it is to open it
		case strings.HasPrefix(node.Path, "/dev/nvidia"):
			mode = 0o666
		default:
			continue
		}
		if node.FileMode != nil {
			mode |= node.FileMode.Perm()
		}
		node.FileMode = &mode
	}
}
