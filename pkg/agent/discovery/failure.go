// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
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

// nameFailures finds out which GPUs do not answer, from those that the NVIDIA driver has on the bus and that answer. NVML numbers GPUs in
// the order of the bus; if it is seen not to, several that do not answer may be any of those that are left.
func (n *Node) nameFailures(sysfs fs.ReadLinkFS) {
	functions, err := vfio.GPUs(sysfs)
	if err != nil {
		return // there is no PCI bus, or none that can be read
	}
	var left []string
	for _, f := range functions {
		if f.Driver != "nvidia" || slices.ContainsFunc(n.GPUs, func(g GPU) bool { return g.PCIBusID == f.Address }) ||
			slices.ContainsFunc(n.Failures, func(x Failure) bool { return x.PCIBusID == f.Address }) {
			continue
		}
		left = append(left, f.Address)
	}
	var nameless []*Failure
	for i := range n.Failures {
		if n.Failures[i].PCIBusID == "" {
			nameless = append(nameless, &n.Failures[i])
		}
	}
	slices.SortFunc(nameless, func(a, b *Failure) int { return cmp.Compare(a.Index, b.Index) })
	slices.Sort(left)
	inOrder := slices.IsSortedFunc(n.GPUs, func(a, b GPU) int { return cmp.Compare(a.Index, b.Index) })
	for i, f := range nameless {
		if len(left) == len(nameless) && (len(left) == 1 || inOrder) {
			f.PCIBusID = left[i]
			continue
		}
		for _, address := range left {
			f.Candidates = append(f.Candidates, deviceName(address))
		}
	}
}
