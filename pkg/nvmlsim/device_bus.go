// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"cmp"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// PCI Express and the distance to other GPUs.

func (d *device) GetPciInfo() (nvml.PciInfo, nvml.Return) {
	return answer(d, d.path.address.info(d.model.PCIDeviceID, d.model.PCISubsystemID))
}

func (d *device) GetCurrPcieLinkGeneration() (int, nvml.Return) {
	return read(d, func(g *GPUState) int { return d.pcie(g).Generation })
}

func (d *device) GetMaxPcieLinkGeneration() (int, nvml.Return) {
	return answer(d, d.model.PCIe.Generation)
}

func (d *device) GetGpuMaxPcieLinkGeneration() (int, nvml.Return) {
	return answer(d, cmp.Or(d.model.PCIe.DeviceGeneration, d.model.PCIe.Generation))
}

func (d *device) GetCurrPcieLinkWidth() (int, nvml.Return) {
	return read(d, func(g *GPUState) int { return d.pcie(g).Width })
}

// GetMaxPcieLinkWidth is the card's: recorded T4 and L40S answer 16 with a link
// of 8 lanes, although nvml.h says "possible with this device and system".
func (d *device) GetMaxPcieLinkWidth() (int, nvml.Return) { return answer(d, d.model.PCIe.Width) }

func (d *device) GetPcieReplayCounter() (int, nvml.Return) {
	return read(d, func(g *GPUState) int { return g.Health.PCIeReplays })
}

// pcie is the link now.
func (d *device) pcie(g *GPUState) PCIe {
	if g.Health.PCIe != nil {
		return *g.Health.PCIe
	}
	return d.model.PCIe.link()
}

// GetTopologyCommonAncestor is what nvidia-smi topo -mp prints.
func (d *device) GetTopologyCommonAncestor(other nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
	peer, ret := d.peer(other)
	if ret != nvml.SUCCESS {
		return 0, ret
	}
	if peer == d {
		return nvml.TOPOLOGY_INTERNAL, nvml.SUCCESS
	}
	return d.path.level(peer.path, d.gpu.NUMANode, peer.gpu.NUMANode), nvml.SUCCESS
}

// GetTopologyNearestGpus returns the GPUs at exactly that distance, as NVML does.
func (d *device) GetTopologyNearestGpus(level nvml.GpuTopologyLevel) ([]nvml.Device, nvml.Return) {
	if ret := d.ready(); ret != nvml.SUCCESS {
		return nil, ret
	}
	gpus, ret := d.lib.gpus()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	var near []nvml.Device
	for _, other := range gpus {
		if at, _ := d.GetTopologyCommonAncestor(other); other != d && at == level {
			near = append(near, other)
		}
	}
	return near, nvml.SUCCESS
}

func (d *device) OnSameBoard(other nvml.Device) (int, nvml.Return) {
	peer, ret := d.peer(other)
	if ret != nvml.SUCCESS || peer.serial != d.serial {
		return 0, ret
	}
	return 1, nvml.SUCCESS
}

// GetP2PStatus answers for NVLink by the links, and for the bus by the distance:
// peers under different root complexes do not reach each other's memory.
func (d *device) GetP2PStatus(other nvml.Device, index nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
	peer, ret := d.peer(other)
	if ret != nvml.SUCCESS {
		return nvml.P2P_STATUS_UNKNOWN, ret
	}
	linked := d.reaches(peer)
	level := d.path.level(peer.path, d.gpu.NUMANode, peer.gpu.NUMANode)
	switch index {
	case nvml.P2P_CAPS_INDEX_NVLINK, nvml.P2P_CAPS_INDEX_ATOMICS:
		if !linked {
			return nvml.P2P_STATUS_NOT_SUPPORTED, nvml.SUCCESS
		}
	case nvml.P2P_CAPS_INDEX_READ, nvml.P2P_CAPS_INDEX_WRITE:
		if !linked && level > nvml.TOPOLOGY_HOSTBRIDGE {
			return nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED, nvml.SUCCESS
		}
	case nvml.P2P_CAPS_INDEX_PROP:
		if level > nvml.TOPOLOGY_HOSTBRIDGE {
			return nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED, nvml.SUCCESS
		}
	default:
		return nvml.P2P_STATUS_UNKNOWN, nvml.ERROR_INVALID_ARGUMENT
	}
	return nvml.P2P_STATUS_OK, nvml.SUCCESS
}

// peer returns the other handle if it belongs to the same library.
func (d *device) peer(other nvml.Device) (*device, nvml.Return) {
	if ret := d.ready(); ret != nvml.SUCCESS {
		return nil, ret
	}
	peer, ok := other.(*device)
	if !ok || peer == nil || peer.lib != d.lib {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	return peer, nvml.SUCCESS
}
