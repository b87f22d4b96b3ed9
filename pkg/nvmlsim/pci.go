// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// pciAddress is a place on the PCI bus.
type pciAddress struct {
	domain, bus, device, function uint32
}

var (
	kernelAddress = regexp.MustCompile(`^([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$`)
	// NVML takes a domain of up to eight digits, or none, and no function.
	nvmlAddress = regexp.MustCompile(`^(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.([0-7]))?$`)
	rootComplex = regexp.MustCompile(`^pci[0-9a-f]{4}:[0-9a-f]{2}$`)
)

// parseKernelAddress parses an address as sysfs has it: "0000:1b:00.0".
func parseKernelAddress(s string) (pciAddress, error) {
	if !kernelAddress.MatchString(s) {
		return pciAddress{}, fmt.Errorf("%q is no PCI address such as 0000:1b:00.0", s)
	}
	a, _ := parseNVMLAddress(s)
	return a, nil
}

// parseNVMLAddress parses an address in any form that NVML takes.
func parseNVMLAddress(s string) (pciAddress, bool) {
	m := nvmlAddress.FindStringSubmatch(s)
	if m == nil {
		return pciAddress{}, false
	}
	hex := func(digits string) uint32 {
		n, _ := strconv.ParseUint(digits, 16, 32) // at most eight digits; none is 0
		return uint32(n)
	}
	return pciAddress{hex(m[1]), hex(m[2]), hex(m[3]), hex(m[4])}, true
}

// String is the kernel's form, "0000:1b:00.0".
func (a pciAddress) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.domain, a.bus, a.device, a.function)
}

// info fills NVML's description of the address.
func (a pciAddress) info(deviceID, subsystemID uint32) nvml.PciInfo {
	info := nvml.PciInfo{
		Domain: a.domain, Bus: a.bus, Device: a.device,
		PciDeviceId: deviceID, PciSubSystemId: subsystemID,
	}
	fill(info.BusId[:], fmt.Sprintf("%08X:%02X:%02X.%X", a.domain, a.bus, a.device, a.function))
	fill(info.BusIdLegacy[:], fmt.Sprintf("%04X:%02X:%02X.%X", a.domain, a.bus, a.device, a.function))
	return info
}

// fill copies s into a C string of fixed size, leaving its final zero.
func fill(dst []int8, s string) {
	for i := range min(len(s), len(dst)-1) {
		dst[i] = int8(s[i])
	}
}

// pciPath is the way from a root complex to a device.
type pciPath struct {
	root    string   // "pci0000:15"
	bridges []string // root port, then the ports of switches
	address pciAddress
}

// parsePCIPath parses the part of a sysfs path below /sys/devices.
func parsePCIPath(s string) (pciPath, error) {
	parts := strings.Split(s, "/")
	if len(parts) < 2 || !rootComplex.MatchString(parts[0]) {
		return pciPath{}, fmt.Errorf("%q is no path such as pci0000:15/0000:15:01.0/0000:1b:00.0", s)
	}
	for _, part := range parts[1:] {
		if _, err := parseKernelAddress(part); err != nil {
			return pciPath{}, fmt.Errorf("in path %q: %w", s, err)
		}
	}
	address, err := parseKernelAddress(parts[len(parts)-1])
	return pciPath{root: parts[0], bridges: parts[1 : len(parts)-1], address: address}, err
}

// level is the distance of two GPUs as nvmlDeviceGetTopologyCommonAncestor has
// it. The NUMA nodes matter only for GPUs under different root complexes.
func (p pciPath) level(q pciPath, numaP, numaQ int) nvml.GpuTopologyLevel {
	if p.root != q.root {
		if numaP == numaQ && numaP >= 0 {
			return nvml.TOPOLOGY_NODE
		}
		return nvml.TOPOLOGY_SYSTEM
	}
	shared := 0
	for shared < min(len(p.bridges), len(q.bridges)) && p.bridges[shared] == q.bridges[shared] {
		shared++
	}
	switch below := max(len(p.bridges), len(q.bridges)) - shared; {
	case shared == 0:
		return nvml.TOPOLOGY_HOSTBRIDGE
	case below <= 1: // the downstream ports of one switch
		return nvml.TOPOLOGY_SINGLE
	default:
		return nvml.TOPOLOGY_MULTIPLE
	}
}

// sysfs returns the path below /sys/devices of the device itself (depth 0) or
// of the bridge that many steps above it.
func (p pciPath) sysfs(depth int) string {
	parts := slices.Concat([]string{p.root}, p.bridges, []string{p.address.String()})
	return strings.Join(parts[:len(parts)-depth], "/")
}
