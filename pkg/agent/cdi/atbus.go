// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// atBus is a library that finds one GPU, or a MIG device of it, at the GPU's PCI address. nvcdi asks for it by UUID, and NVML looks for a
// UUID on all GPUs: if any has fallen off the bus no other is found (nvml.h, nvmlDeviceGetHandleByUUID).
type atBus struct {
	nvml.Interface
	busID string
}

func (l atBus) DeviceGetHandleByUUID(uuid string) (nvml.Device, nvml.Return) {
	gpu, ret := l.DeviceGetHandleByPciBusId(l.busID)
	if ret != nvml.SUCCESS {
		return gpu, ret
	}
	if !strings.HasPrefix(uuid, "MIG-") {
		return is(gpu, uuid)
	}
	places, ret := gpu.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return gpu, ret
	}
	for i := range places {
		mig, ret := gpu.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue // there is none
		}
		if found, ret := is(mig, uuid); ret == nvml.SUCCESS {
			return found, ret
		}
	}
	return gpu, nvml.ERROR_NOT_FOUND
}

// is returns the device if it has that UUID.
func is(device nvml.Device, uuid string) (nvml.Device, nvml.Return) {
	got, ret := device.GetUUID()
	if ret == nvml.SUCCESS && got != uuid {
		ret = nvml.ERROR_NOT_FOUND
	}
	return device, ret
}
