// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"stowage.dev/stowage/pkg/agent/vfio"
)

// Device is the name of the GPU's device, empty if it is not known which GPU it is.
func (f *Failure) Device() string {
	if f.PCIBusID == "" {
		return ""
	}
	return deviceName(f.PCIBusID)
}

// String names the GPU as far as it is known, and says what is wrong.
func (f Failure) String() string {
	name := f.Device()
	switch {
	case name != "":
	case len(f.Candidates) > 0:
		name = "one of " + strings.Join(f.Candidates, ", ")
	default:
		name = fmt.Sprintf("GPU %d in NVML's order", f.Index)
	}
	reason := f.Reason
	if errors.Is(f.Err, ErrHung) {
		reason = ErrHung.Error() // for how long changes
	}
	return name + ": " + reason
}

// nameFailures finds out which GPUs do not answer from those that the NVIDIA driver has on the bus.
func (n *Node) nameFailures(sysfs fs.ReadLinkFS) {
	functions, err := vfio.GPUs(sysfs)
	if err != nil {
		return // there is no PCI bus, or none that can be read
	}
	var addresses []string
	for _, f := range functions {
		if f.Driver == "nvidia" {
			addresses = append(addresses, f.Address)
		}
	}
	n.NameFailures(addresses)
}

// NameFailures finds out which GPUs do not answer, from the addresses where they may be. Candidates of an earlier call rule out others.
// NVML numbers GPUs in the order of the bus, and leaves out those that the driver is told to exclude (NVreg_ExcludedGpus). So GPUs that do
// not answer get names if as many addresses lie between the same neighbours. If NVML is seen not to keep that order, they may be any.
func (n *Node) NameFailures(addresses []string) {
	var nameless []*Failure
	numbered := map[int]string{} // addresses
	for i := range n.Failures {
		if f := &n.Failures[i]; f.PCIBusID != "" {
			numbered[f.Index] = f.PCIBusID
		} else {
			nameless = append(nameless, f)
		}
	}
	for i := range n.GPUs {
		if g := &n.GPUs[i]; !g.LeftOut() {
			numbered[g.Index] = g.PCIBusID
		}
	}
	indices, taken := slices.Sorted(maps.Keys(numbered)), slices.Sorted(maps.Values(numbered))
	inOrder := slices.EqualFunc(indices, taken, func(index int, address string) bool { return numbered[index] == address })
	between := map[int][]*Failure{} // by the number of neighbours before
	for _, f := range nameless {
		before, _ := slices.BinarySearch(indices, f.Index)
		if !inOrder {
			before = 0
		}
		between[before] = append(between[before], f)
	}
	places := map[int][]string{}
	for _, address := range slices.Sorted(slices.Values(addresses)) {
		before, known := slices.BinarySearch(taken, address)
		if !inOrder {
			before = 0
		}
		if failed := between[before]; !known && len(failed) > 0 && failed[0].MayBe(deviceName(address)) {
			places[before] = append(places[before], address)
		}
	}
	for before, failed := range between {
		at := places[before]
		for i, f := range failed {
			switch {
			case len(at) == len(failed) && (inOrder || len(at) == 1):
				f.PCIBusID, f.Candidates = at[i], nil
			case len(at) >= len(failed):
				f.Candidates = nil
				for _, address := range at {
					f.Candidates = append(f.Candidates, deviceName(address))
				}
			}
		}
	}
}

// MayBe tells whether the GPU with that device name may be the one that does not answer: no address is known, and there are no candidates,
// or it is one of them.
func (f *Failure) MayBe(device string) bool {
	return f.PCIBusID == "" && (len(f.Candidates) == 0 || slices.Contains(f.Candidates, device))
}
