// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// DeviceID is a GPU, or a MIG device of it, as a device plugin's ID names it. One of UUID, PCIBusID and Minor is set.
type DeviceID struct {
	// UUID such as GPU-… or MIG-…; of a MIG device of drivers before R470 it is the GPU's.
	UUID string
	// PCIBusID as the kernel writes it: 0000:1b:00.0.
	PCIBusID string
	// Minor is the number in /dev/nvidia<minor>.
	Minor *int
	// GPUInstance of the GPU, nil for all of it, and ComputeInstance of that, nil for any.
	GPUInstance, ComputeInstance *int
	// Replica of a device that is given out several times.
	Replica *int
}

// maxDeviceID is longer than any ID here: DNS subdomains are at most as long.
const maxDeviceID = 253

const uuidPattern = `[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`

// The forms of IDs. Numbers have at most 5 digits.
var (
	// byUUID: NVIDIA's plugin has GPU-… and MIG-…, with ::<replica> if it replicates them; HAMi has GPU-…-<replica>, and plugins that
	// share by memory have GPU-…-_-<part>.
	byUUID = regexp.MustCompile(`^((?:GPU|MIG)-` + uuidPattern + `)(?:(?:::|-_-|-)(\d{1,5}))?$`)
	// byOldMIG: NVIDIA's plugin with drivers before R470, MIG-GPU-…/<GPU instance>/<compute instance>.
	byOldMIG = regexp.MustCompile(`^MIG-(GPU-` + uuidPattern + `)/(\d{1,5})/(\d{1,5})(?:::(\d{1,5}))?$`)
	// byMinor: Google's plugin, nvidia0, nvidia0/gi1, nvidia0/vgpu2 and nvidia0/gi1/vgpu2.
	byMinor = regexp.MustCompile(`^nvidia(\d{1,5})(?:/gi(\d{1,5}))?(?:/vgpu(\d{1,5}))?$`)
	// byAddress: plugins for virtual machines.
	byAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
)

// ParseDeviceID reads the IDs of the device plugins that there are for NVIDIA's GPUs, whatever their resources are called. The error
// quotes an ID of another form.
func ParseDeviceID(id string) (DeviceID, error) {
	if len(id) > maxDeviceID {
		return DeviceID{}, fmt.Errorf("device ID %.40q… has %d bytes, at most %d are expected", id, len(id), maxDeviceID)
	}
	if m := byUUID.FindStringSubmatch(id); m != nil {
		return DeviceID{UUID: m[1], Replica: number(m[2])}, nil
	}
	if m := byOldMIG.FindStringSubmatch(id); m != nil {
		return DeviceID{UUID: m[1], GPUInstance: number(m[2]), ComputeInstance: number(m[3]), Replica: number(m[4])}, nil
	}
	if m := byMinor.FindStringSubmatch(id); m != nil {
		return DeviceID{Minor: number(m[1]), GPUInstance: number(m[2]), Replica: number(m[3])}, nil
	}
	if byAddress.MatchString(id) {
		return DeviceID{PCIBusID: KernelAddress(id)}, nil
	}
	return DeviceID{}, fmt.Errorf("device ID %q names no GPU: want GPU-…, MIG-…, either with ::<replica>, nvidia<minor>, or a PCI address", id)
}

// KernelAddress is a PCI address as the kernel writes it: nvidia-smi writes the domain with 8
// digits, the kernel with 4 unless it needs more.
func KernelAddress(pci string) string {
	domain, rest, _ := strings.Cut(pci, ":")
	n, err := strconv.ParseUint(domain, 16, 32)
	if err != nil {
		return pci
	}
	return fmt.Sprintf("%04x:%s", n, rest)
}

// number is nil for nothing. The patterns let only few digits through.
func number(digits string) *int {
	n, err := strconv.Atoi(digits)
	if err != nil {
		return nil
	}
	return &n
}
