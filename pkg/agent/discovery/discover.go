package discovery

import (
	"context"
	"io"
	"io/fs"

	"k8s.io/dynamic-resource-allocation/resourceslice"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// Discover asks the library and the kernel about every GPU.
func Discover(ctx context.Context, lib nvml.Library, sysfs fs.ReadLinkFS) (*Node, error) {
	return nil, nil
}

// DriverResources returns one pool with one slice per offered GPU.
func (n *Node) DriverResources(pool string) resourceslice.DriverResources {
	return resourceslice.DriverResources{}
}

// PrintTable writes the GPUs as a table for people.
func (n *Node) PrintTable(w io.Writer) error { return nil }
