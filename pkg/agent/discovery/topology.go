// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"slices"

	"stowage.dev/stowage/pkg/topology"
)

// Topology is where GPUs of the node are, in the order of their names. A name that the node does not have, as of a GPU
// that has been lost, is close to none.
func (n *Node) Topology(names []string) []topology.Device {
	devices := make([]topology.Device, len(names))
	for i := range n.GPUs {
		gpu := &n.GPUs[i]
		at := slices.Index(names, gpu.Name)
		if at < 0 {
			continue
		}
		devices[at] = topology.Device{NUMANode: gpu.NUMANode, PCIeRoot: gpu.PCIeRoot, NVLinks: map[int]int{}}
		if gpu.NVLink == nil {
			continue
		}
		for _, peer := range gpu.NVLink.Peers {
			if to := slices.Index(names, peer.Name); to >= 0 {
				devices[at].NVLinks[to] = peer.Links
			}
		}
	}
	return devices
}
