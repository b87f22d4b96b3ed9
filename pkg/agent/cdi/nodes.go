// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"context"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"
)

// noDevices is for containers into which an NVIDIA runtime must not inject anything.
const noDevices = "void"

// passedThrough tells whether the GPU is for a virtual machine: then the NVIDIA driver does not have it, and its files are of no use.
func (d *Device) passedThrough() bool { return len(d.Nodes) > 0 }

// commonEdits returns what every container with a GPU of the NVIDIA driver needs, and whether that is all of the claim's containers.
func commonEdits(ctx context.Context, backend Backend, devices []Device) (common *specs.ContainerEdits, forAll bool, err error) {
	passed := slices.ContainsFunc(devices, func(d Device) bool { return d.passedThrough() })
	if passed && !slices.ContainsFunc(devices, func(d Device) bool { return !d.passedThrough() }) {
		return &specs.ContainerEdits{}, true, nil
	}
	common, err = backend.CommonEdits(ctx)
	return common, !passed, err
}

// edits are what a container needs for the device itself.
func (d *Device) edits(ctx context.Context, backend Backend) (*specs.ContainerEdits, error) {
	if d.passedThrough() {
		return backend.NodeEdits(ctx, d.Nodes)
	}
	return backend.GPUEdits(ctx, d.GPU)
}

// both joins edits, which stay as they are.
func both(a, b *specs.ContainerEdits) *specs.ContainerEdits {
	return &specs.ContainerEdits{
		Env:            slices.Concat(a.Env, b.Env),
		DeviceNodes:    slices.Concat(a.DeviceNodes, b.DeviceNodes),
		NetDevices:     slices.Concat(a.NetDevices, b.NetDevices),
		Hooks:          slices.Concat(a.Hooks, b.Hooks),
		Mounts:         slices.Concat(a.Mounts, b.Mounts),
		IntelRdt:       cmp.Or(b.IntelRdt, a.IntelRdt),
		AdditionalGIDs: slices.Concat(a.AdditionalGIDs, b.AdditionalGIDs),
	}
}

// NodeEdits implements Backend: the nodes are the kernel's.
func (d *Driver) NodeEdits(_ context.Context, names []string) (*specs.ContainerEdits, error) {
	edits := &specs.ContainerEdits{}
	for _, name := range names {
		node := path.Join("/dev", name)
		if _, _, err := host("/").charDevice(node); err != nil {
			return nil, err
		}
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{Path: node, HostPath: node, Permissions: "rw"})
	}
	return edits, nil
}

// NodeEdits implements Backend.
func (s *Simulated) NodeEdits(_ context.Context, names []string) (*specs.ContainerEdits, error) {
	nodes := make([]simulatedNode, 0, len(names))
	for _, name := range names {
		minor, err := vfioMinor(name)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, simulatedNode{name: name, minor: minor})
	}
	return s.edits(nodes...)
}

// Minors of simulated nodes for virtual machines, above all others: one for each of the kernel's interfaces, and from there on those of
// IOMMU groups and of PCI functions.
const (
	minorContainer = 256
	minorIOMMU     = 257
	minorGroups    = 1 << 10
	minorFunctions = 1 << 15
)

// vfioMinor is the minor number of a simulated node with that name below /dev.
func vfioMinor(name string) (int, error) {
	base, prefix := minorGroups, "vfio/"
	switch {
	case name == "vfio/vfio":
		return minorContainer, nil
	case name == "iommu":
		return minorIOMMU, nil
	case strings.HasPrefix(name, "vfio/devices/vfio"):
		base, prefix = minorFunctions, "vfio/devices/vfio"
	}
	n, err := strconv.Atoi(strings.TrimPrefix(name, prefix))
	if err != nil || n < 0 || n >= minorFunctions-minorGroups {
		return 0, fmt.Errorf("no device node %s can be simulated", name)
	}
	return base + n, nil
}
