// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/uuid"
)

var (
	driverVersion = regexp.MustCompile(`^[0-9]+(\.[0-9]+){1,2}$`)
	majorMinor    = regexp.MustCompile(`^([0-9]{1,3})\.([0-9])$`)
)

// validate reports every fault of the profile, each with its field and value,
// so that what passes can be served without a further check.
func (p *Profile) validate() error {
	var errs []error
	bad := func(field string, value any, want string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %v: %s", field, value, fmt.Sprintf(want, args...)))
	}
	if p.Name == "" {
		bad("name", `""`, "want a name")
	}
	p.System.validate(bad)
	p.GPU.validate(bad)
	if p.Fabric != nil {
		if _, err := uuid.Parse(p.Fabric.ClusterUUID); err != nil {
			bad("fabric.clusterUUID", quote(p.Fabric.ClusterUUID), "want a UUID; all zeros for a fabric inside the machine")
		}
		if p.GPU.NVLink == nil {
			bad("fabric", "set", "a GPU without gpu.nvlink has no fabric")
		}
	}
	p.validateGPUs(bad)
	return errors.Join(errs...)
}

type report func(field string, value any, want string, args ...any)

func (s *System) validate(bad report) {
	if !driverVersion.MatchString(s.DriverVersion) {
		bad("system.driverVersion", quote(s.DriverVersion), "want numbers such as 570.172.08")
	}
	if !majorMinor.MatchString(s.CUDADriverVersion) {
		bad("system.cudaDriverVersion", quote(s.CUDADriverVersion), "want major.minor such as 12.8")
	}
}

func (m *Model) validate(bad report) {
	if m.ProductName == "" || len(m.ProductName) >= nvml.DEVICE_NAME_V2_BUFFER_SIZE {
		bad("gpu.productName", quote(m.ProductName), "want 1 to %d characters", nvml.DEVICE_NAME_V2_BUFFER_SIZE-1)
	}
	if _, ok := brands[m.Brand]; !ok {
		bad("gpu.brand", quote(m.Brand), "want one of %s", words(brands))
	}
	if _, ok := architectures[m.Architecture]; !ok {
		bad("gpu.architecture", quote(m.Architecture), "want one of %s", words(architectures))
	}
	if !majorMinor.MatchString(m.CUDAComputeCapability) {
		bad("gpu.cudaComputeCapability", quote(m.CUDAComputeCapability), "want major.minor such as 9.0")
	}
	if m.MemoryMiB == 0 || m.MemoryMiB > 1<<30 {
		bad("gpu.memoryMiB", m.MemoryMiB, "want the memory in MiB, at most a PiB")
	}
	if m.ReservedMiB >= m.MemoryMiB && m.ReservedMiB > 0 {
		bad("gpu.reservedMiB", m.ReservedMiB, "want less than gpu.memoryMiB, %d", m.MemoryMiB)
	}
	if m.BAR1MiB > 1<<30 {
		bad("gpu.bar1MiB", m.BAR1MiB, "want at most a PiB")
	}
	if m.Multiprocessors <= 0 {
		bad("gpu.multiprocessors", m.Multiprocessors, "want a positive number")
	}
	if m.CUDACores < m.Multiprocessors {
		bad("gpu.cudaCores", m.CUDACores, "want at least one per multiprocessor")
	}
	m.Card.validate(bad)
	if m.PCIe.Generation < 1 || m.PCIe.Generation > 7 {
		bad("gpu.pcie.generation", m.PCIe.Generation, "want 1 to 7")
	}
	if g := m.PCIe.DeviceGeneration; g != 0 && (g < m.PCIe.Generation || g > 7) {
		bad("gpu.pcie.deviceGeneration", g, "want gpu.pcie.generation, %d, to 7", m.PCIe.Generation)
	}
	for field, width := range map[string]int{
		"width": m.PCIe.Width, "linkWidth": m.PCIe.link().Width, "portWidth": m.PCIe.port(),
	} {
		if width < 1 || width > 32 || width&(width-1) != 0 || field != "portWidth" && width > 16 {
			bad("gpu.pcie."+field, width, "want 1, 2, 4, 8 or 16")
		}
	}
	if m.PCIe.link().Width > min(m.PCIe.Width, m.PCIe.port()) {
		bad("gpu.pcie.linkWidth", m.PCIe.LinkWidth, "want at most what the card and the port above have")
	}
	if p := m.Power; p.MinWatts > p.DefaultWatts || p.DefaultWatts > p.MaxWatts || p.MaxWatts == 0 || p.MaxWatts > 1e6 {
		bad("gpu.power", fmt.Sprintf("%+v", p), "want minWatts ≤ defaultWatts ≤ maxWatts ≤ 1000000")
	}
	for _, c := range []struct {
		field         string
		idle, highest uint32
	}{
		{"graphics", m.Clocks.Idle.Graphics, m.Clocks.Highest.Graphics},
		{"sm", m.Clocks.Idle.SM, m.Clocks.Highest.SM},
		{"memory", m.Clocks.Idle.Memory, m.Clocks.Highest.Memory},
		{"video", m.Clocks.Idle.Video, m.Clocks.Highest.Video},
	} {
		if c.idle > c.highest || (c.idle == 0) != (c.highest == 0) || c.highest > 1e5 {
			bad("gpu.clocks.idle."+c.field, c.idle, "want at most gpu.clocks.highest.%s, %d, which is at most 100000; or none of both",
				c.field, c.highest)
		}
	}
	if h := m.thermal(); (h.SlowdownC == 0) != (h.ShutdownC == 0) || (h.SlowdownC == 0) == (h.IdleMarginC == 0) ||
		h.SlowdownC > h.ShutdownC || h.SlowdownMarginC < h.ShutdownMarginC || h.IdleMarginC < 0 {
		bad("gpu.thermal", fmt.Sprintf("%+v", h), "want slowdownC ≤ shutdownC, or idleMarginC and slowdownMarginC ≥ shutdownMarginC")
	}
	if m.MIG != nil {
		m.validateMIG(bad)
	}
	if m.AddressingMode != "" {
		if _, ok := addressingModes[m.AddressingMode]; !ok {
			bad("gpu.addressingMode", quote(m.AddressingMode), "want one of %s, or nothing", words(addressingModes))
		}
	}
	if m.NVLink != nil {
		m.NVLink.validate(bad)
	}
}

func (c *Card) validate(bad report) {
	if c.PCIDeviceID == 0 {
		bad("gpu.pciDeviceID", c.PCIDeviceID, "want device<<16|vendor such as 0x233010DE")
	}
	if len(c.VBIOSVersion) >= nvml.DEVICE_VBIOS_VERSION_BUFFER_SIZE {
		bad("gpu.vbiosVersion", quote(c.VBIOSVersion), "want less than %d bytes", nvml.DEVICE_VBIOS_VERSION_BUFFER_SIZE)
	}
	if len(c.BoardPartNumber) >= nvml.DEVICE_PART_NUMBER_BUFFER_SIZE {
		bad("gpu.boardPartNumber", quote(c.BoardPartNumber), "want less than %d bytes", nvml.DEVICE_PART_NUMBER_BUFFER_SIZE)
	}
}

func (m *Model) validateMIG(bad report) {
	if m.MIG.MaxDevices < 1 || m.MIG.MaxDevices > 7 {
		bad("gpu.mig.maxDevices", m.MIG.MaxDevices, "want 1 to 7")
	}
	t := m.MIG.table()
	if t == nil {
		bad("gpu.mig.table", quote(m.MIG.Table), "want one of %s", words(migTables))
	} else if need := t.whole().memoryMiB; need > m.MemoryMiB {
		bad("gpu.mig.table", quote(m.MIG.Table), "is for GPUs with at least %d MiB, gpu.memoryMiB is %d", need, m.MemoryMiB)
	}
}

func (n *NVLink) validate(bad report) {
	if _, ok := nvlinkVersions[n.Version]; !ok {
		bad("gpu.nvlink.version", n.Version, "want the generation, 1 to %d", len(nvlinkVersions))
	}
	if n.Links < 1 || n.Links > nvml.NVLINK_MAX_LINKS {
		bad("gpu.nvlink.links", n.Links, "want 1 to %d", nvml.NVLINK_MAX_LINKS)
	}
	sum := 0
	for i, s := range n.Switches {
		if _, err := parseKernelAddress(s.Address); err != nil {
			bad(fmt.Sprintf("gpu.nvlink.switches[%d].address", i), quote(s.Address), "want a PCI address such as 0000:05:00.0")
		}
		if s.Links < 1 {
			bad(fmt.Sprintf("gpu.nvlink.switches[%d].links", i), s.Links, "want a positive number")
		}
		sum += s.Links
	}
	if len(n.Switches) > 0 && sum != n.Links {
		bad("gpu.nvlink.switches", sum, "the links to all switches must add up to gpu.nvlink.links, %d", n.Links)
	}
}

func (p *Profile) validateGPUs(bad report) {
	if len(p.GPUs) == 0 || len(p.GPUs) > 64 {
		bad("gpus", len(p.GPUs), "want 1 to 64 GPUs")
	}
	addresses, minors := map[pciAddress]int{}, map[int]int{}
	peered := len(p.GPUs) > 0 && p.GPUs[0].NVLinkPeers != nil
	for i, g := range p.GPUs {
		field := func(name string) string { return fmt.Sprintf("gpus[%d].%s", i, name) }
		if path, err := parsePCIPath(g.PCI); err != nil {
			bad(field("pci"), quote(g.PCI), "%v", err)
		} else if first, taken := addresses[path.address]; taken {
			bad(field("pci"), quote(g.PCI), "gpus[%d] has that address", first)
		} else {
			addresses[path.address] = i
		}
		if g.NUMANode < -1 || g.NUMANode > 1023 {
			bad(field("numaNode"), g.NUMANode, "want 0 to 1023, or -1 for none")
		}
		minor := p.minor(i)
		if first, taken := minors[minor]; taken {
			bad(field("minor"), minor, "gpus[%d] has that minor", first)
		}
		minors[minor] = i
		if minor < 0 || minor > 254 {
			bad(field("minor"), minor, "want 0 to 254: 255 is /dev/nvidiactl")
		}
		if g.Board != nil && *g.Board < 0 {
			bad(field("board"), *g.Board, "want 0 or more")
		}
		if g.MIGEnabled != nil && *g.MIGEnabled && p.GPU.MIG == nil {
			bad(field("migEnabled"), true, "gpu.mig says that the GPU can't be partitioned")
		}
		p.validatePeers(i, peered, bad)
	}
}

func (p *Profile) validatePeers(i int, peered bool, bad report) {
	peers, field := p.GPUs[i].NVLinkPeers, fmt.Sprintf("gpus[%d].nvlinkPeers", i)
	switch {
	case peers == nil && !peered:
		return
	case (peers != nil) != peered:
		bad(field, peers, "want it on all GPUs or on none")
		return
	case p.GPU.NVLink == nil:
		bad(field, peers, "the GPU has no gpu.nvlink")
		return
	case len(p.GPU.NVLink.Switches) > 0:
		bad(field, peers, "the links end at gpu.nvlink.switches")
		return
	case len(peers) != p.GPU.NVLink.Links:
		bad(field, peers, "want one peer for each of the %d links", p.GPU.NVLink.Links)
		return
	}
	count := map[int]int{}
	for _, peer := range peers {
		if peer < 0 || peer >= len(p.GPUs) || peer == i {
			bad(field, peer, "want the index of another GPU")
			return
		}
		count[peer]++
	}
	for peer, links := range count {
		back := 0
		for _, q := range p.GPUs[peer].NVLinkPeers {
			if q == i {
				back++
			}
		}
		if back != links {
			bad(field, peers, "%d links to GPU %d, which has %d links back", links, peer, back)
		}
	}
}

// minor of GPU i's device node.
func (p *Profile) minor(i int) int {
	if m := p.GPUs[i].Minor; m != nil {
		return *m
	}
	return i
}

// splitVersion returns the parts of a validated "major.minor".
func splitVersion(s string) (major, minor int) {
	m := majorMinor.FindStringSubmatch(s)
	if m == nil {
		return 0, 0
	}
	major, _ = strconv.Atoi(m[1])
	minor, _ = strconv.Atoi(m[2])
	return major, minor
}

func quote(s string) string { return strconv.Quote(s) }
