// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/uuid"
)

// link is one NVLink of a GPU.
type link struct {
	remote nvml.IntNvLinkDeviceType
	// address of the other end; nil where it is not on the PCI bus.
	address *pciAddress
	// peer is the GPU at the other end, -1 for a switch.
	peer int
	up   bool
}

// The device/vendor words of the NVSwitches on the bus, by NVLink version.
var switchDeviceIDs = map[uint32]uint32{2: 0x1AC210DE, 3: 0x1AF110DE, 4: 0x22A310DE}

// makeLinks lays out the links of GPU index of a validated profile.
func makeLinks(p *Profile, index int) []link {
	if p.GPU.NVLink == nil {
		return nil
	}
	up := !p.GPUs[index].NVLinkDown
	links := make([]link, 0, p.GPU.NVLink.Links)
	for _, peer := range p.GPUs[index].NVLinkPeers {
		path, _ := parsePCIPath(p.GPUs[peer].PCI)
		links = append(links, link{
			remote: nvml.NVLINK_DEVICE_TYPE_GPU, address: &path.address, peer: peer,
			up: up && !p.GPUs[peer].NVLinkDown,
		})
	}
	for _, s := range p.GPU.NVLink.Switches {
		address, _ := parseKernelAddress(s.Address)
		for range s.Links {
			links = append(links, link{remote: nvml.NVLINK_DEVICE_TYPE_SWITCH, address: &address, peer: -1, up: up})
		}
	}
	for len(links) < p.GPU.NVLink.Links {
		links = append(links, link{remote: nvml.NVLINK_DEVICE_TYPE_SWITCH, peer: -1, up: up})
	}
	return links
}

// reaches tells whether traffic to the other GPU goes over NVLink: over a link
// between the two, or over switches that both are connected to.
func (d *device) reaches(other *device) bool {
	if d == other {
		return false
	}
	switched := func(l link) bool { return l.up && l.remote == nvml.NVLINK_DEVICE_TYPE_SWITCH }
	for _, l := range d.links {
		if l.up && l.peer == other.index {
			return true
		}
		if switched(l) && len(other.links) > 0 && switched(other.links[0]) {
			return true
		}
	}
	return false
}

// link returns a link by its index: NVML knows indices up to NVLINK_MAX_LINKS,
// and answers ERROR_NOT_SUPPORTED for one that the GPU does not have.
func (d *device) link(index int) (link, nvml.Return) {
	ret := d.ready()
	switch {
	case ret != nvml.SUCCESS:
	case index < 0 || index >= nvml.NVLINK_MAX_LINKS:
		ret = nvml.ERROR_INVALID_ARGUMENT
	case index >= len(d.links):
		ret = nvml.ERROR_NOT_SUPPORTED
	default:
		return d.links[index], nvml.SUCCESS
	}
	return link{}, ret
}

func (d *device) GetNvLinkState(index int) (nvml.EnableState, nvml.Return) {
	l, ret := d.link(index)
	if ret == nvml.SUCCESS && l.up {
		return nvml.FEATURE_ENABLED, ret
	}
	return nvml.FEATURE_DISABLED, ret
}

// nvlinkVersions are nvml.h's nvmlNvlinkVersion_t by the generation: an H100,
// whose links are the fourth, answers 6.
var nvlinkVersions = map[uint32]nvml.NvlinkVersion{
	1: nvml.NVLINK_VERSION_1_0, 2: nvml.NVLINK_VERSION_2_0, 3: nvml.NVLINK_VERSION_3_0,
	4: nvml.NVLINK_VERSION_4_0, 5: nvml.NVLINK_VERSION_5_0, 6: nvml.NVLINK_VERSION_6_0,
}

func (d *device) GetNvLinkVersion(index int) (uint32, nvml.Return) {
	if _, ret := d.link(index); ret != nvml.SUCCESS {
		return 0, ret
	}
	return uint32(nvlinkVersions[d.model.NVLink.Version]), nvml.SUCCESS
}

func (d *device) GetNvLinkCapability(index int, capability nvml.NvLinkCapability) (uint32, nvml.Return) {
	if _, ret := d.link(index); ret != nvml.SUCCESS {
		return 0, ret
	}
	switch capability {
	case nvml.NVLINK_CAP_P2P_SUPPORTED, nvml.NVLINK_CAP_SYSMEM_ACCESS, nvml.NVLINK_CAP_P2P_ATOMICS,
		nvml.NVLINK_CAP_SYSMEM_ATOMICS, nvml.NVLINK_CAP_VALID:
		return 1, nvml.SUCCESS
	case nvml.NVLINK_CAP_SLI_BRIDGE:
		return 0, nvml.SUCCESS
	}
	return 0, nvml.ERROR_INVALID_ARGUMENT
}

func (d *device) GetNvLinkErrorCounter(index int, counter nvml.NvLinkErrorCounter) (uint64, nvml.Return) {
	if _, ret := d.link(index); ret != nvml.SUCCESS {
		return 0, ret
	}
	if counter < 0 || counter >= nvml.NVLINK_ERROR_COUNT {
		return 0, nvml.ERROR_INVALID_ARGUMENT
	}
	return 0, nvml.SUCCESS
}

func (d *device) GetNvLinkRemoteDeviceType(index int) (nvml.IntNvLinkDeviceType, nvml.Return) {
	l, ret := d.upLink(index)
	if ret != nvml.SUCCESS {
		return nvml.NVLINK_DEVICE_TYPE_UNKNOWN, ret
	}
	return l.remote, ret
}

func (d *device) GetNvLinkRemotePciInfo(index int) (nvml.PciInfo, nvml.Return) {
	l, ret := d.upLink(index)
	switch {
	case ret != nvml.SUCCESS:
		return nvml.PciInfo{}, ret
	case l.address == nil:
		return nvml.PciInfo{}, nvml.ERROR_NOT_SUPPORTED
	case l.peer >= 0:
		return l.address.info(d.model.PCIDeviceID, d.model.PCISubsystemID), nvml.SUCCESS
	}
	return l.address.info(switchDeviceIDs[d.model.NVLink.Version], 0), nvml.SUCCESS
}

// upLink is link, without those that have no other end now.
func (d *device) upLink(index int) (link, nvml.Return) {
	l, ret := d.link(index)
	if ret == nvml.SUCCESS && !l.up {
		return l, nvml.ERROR_NOT_SUPPORTED
	}
	return l, ret
}

// GetGpuFabricInfo answers for GPUs that a fabric manager probes, Hopper and
// later. A GPU whose links are down never ends the probe.
func (d *device) GetGpuFabricInfo() (nvml.GpuFabricInfo, nvml.Return) {
	fabric := d.lib.profile.Fabric
	if fabric == nil {
		return answerIf(d, false, nvml.GpuFabricInfo{})
	}
	if d.gpu.NVLinkDown {
		return answer(d, nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_IN_PROGRESS})
	}
	cluster, err := uuid.Parse(fabric.ClusterUUID)
	if err != nil {
		panic("profile not validated: " + err.Error())
	}
	return answer(d, nvml.GpuFabricInfo{
		ClusterUuid: cluster,
		CliqueId:    fabric.CliqueID,
		State:       nvml.GPU_FABRIC_STATE_COMPLETED,
		Status:      uint32(nvml.SUCCESS),
	})
}
