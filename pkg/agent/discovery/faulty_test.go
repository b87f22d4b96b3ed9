// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import "stowage.dev/stowage/pkg/agent/nvml"

// faulty is a library some of whose GPUs don't answer some questions.
type faulty struct {
	nvml.Library
	byIndex map[int]faults
}

// faults are the errors that a GPU answers with; nil lets a call through.
type faults struct {
	handle, pci, memory, links, fabric, reach error
	fabricIs                                  *nvml.Fabric
}

func (f faulty) Device(index int) (nvml.Device, error) {
	faults := f.byIndex[index]
	if faults.handle != nil {
		return nil, faults.handle
	}
	d, err := f.Library.Device(index)
	return faultyDevice{d, faults}, err
}

type faultyDevice struct {
	nvml.Device
	faults faults
}

func (d faultyDevice) PCIBusID() (string, error) {
	return through(d.faults.pci, d.Device.PCIBusID)
}

func (d faultyDevice) MemoryBytes() (uint64, error) {
	return through(d.faults.memory, d.Device.MemoryBytes)
}

func (d faultyDevice) NVLinks() ([]nvml.NVLink, error) {
	return through(d.faults.links, d.Device.NVLinks)
}

func (d faultyDevice) Fabric() (*nvml.Fabric, error) {
	if d.faults.fabricIs != nil {
		return d.faults.fabricIs, nil
	}
	return through(d.faults.fabric, d.Device.Fabric)
}

func (d faultyDevice) ReachesOverNVLink(other nvml.Device) (bool, error) {
	if d.faults.reach != nil {
		return false, d.faults.reach
	}
	return d.Device.ReachesOverNVLink(other.(faultyDevice).Device)
}

func through[T any](fault error, call func() (T, error)) (T, error) {
	if fault != nil {
		var none T
		return none, fault
	}
	return call()
}
