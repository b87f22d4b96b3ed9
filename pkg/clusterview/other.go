// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"slices"
	"strings"

	"stowage.dev/stowage/pkg/snapshot"
)

// otherAttributes are those by which drivers describe network interfaces, whatever their domain.
var otherAttributes = []string{
	"ifName", "interfaceName", "mac", "macAddress", "rdma", "rdmaDevice", "rdmaDevName",
	"mtu", "linkType", "sriov",
}

// otherTypes are values of the attribute "type": interfaces, and the channels and daemons of NVIDIA's compute domains.
var otherTypes = []string{"nic", "net", "rdma", "cpu", "memory", "channel", "daemon"}

// otherDrivers are words in the names of drivers: not in the domain's end, which may be "net" for a driver of GPUs, but in dra.net.
var otherDrivers = []string{"cpu", "net", "nic", "rdma", "sriov", "compute-domain"}

// isOther tells whether a device is something else than a GPU or another accelerator.
func isOther(d *Device) bool {
	words := strings.Split(d.Driver, ".")
	if len(words) > 2 {
		words = words[:len(words)-1]
	}
	if slices.ContainsFunc(words, func(word string) bool { return slices.Contains(otherDrivers, word) }) {
		return true
	}
	if d.Object == nil {
		return false
	}
	if slices.Contains(otherTypes, d.Text("type")) {
		return true
	}
	for name := range d.Object.Attributes {
		_, plain, found := strings.Cut(string(name), "/")
		if !found {
			plain = string(name)
		}
		if slices.Contains(otherAttributes, plain) {
			return true
		}
	}
	return false
}

// NotGPUs tells of each driver that publishes devices whether none of them is a GPU.
func NotGPUs(s *snapshot.Snapshot) map[string]bool { return notGPUs(Devices(s)) }

// notGPUs are the drivers all of whose published devices are something else: so is one of theirs that is gone.
func notGPUs(devices []*Device) map[string]bool {
	other := map[string]bool{}
	for _, d := range devices {
		if d.Object == nil {
			continue
		}
		if is, known := other[d.Driver]; !known || is {
			other[d.Driver] = isOther(d)
		}
	}
	return other
}
