// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// SystemGetDriverVersion returns the version of the kernel driver.
func (l *Library) SystemGetDriverVersion() (string, nvml.Return) {
	now, ret := l.now()
	if ret != nvml.SUCCESS {
		return "", ret
	}
	return now.driverVersion(l.profile), nvml.SUCCESS
}

// SystemGetNVMLVersion returns the CUDA major version and the driver version.
func (l *Library) SystemGetNVMLVersion() (string, nvml.Return) {
	driver, ret := l.SystemGetDriverVersion()
	if ret != nvml.SUCCESS {
		return "", ret
	}
	major, _, _ := strings.Cut(l.profile.System.CUDADriverVersion, ".")
	return major + "." + driver, nvml.SUCCESS
}

// SystemGetCudaDriverVersion returns 1000*major + 10*minor.
func (l *Library) SystemGetCudaDriverVersion() (int, nvml.Return) {
	if ret := l.ready(); ret != nvml.SUCCESS {
		return 0, ret
	}
	major, minor := splitVersion(l.profile.System.CUDADriverVersion)
	return 1000*major + 10*minor, nvml.SUCCESS
}

// SystemGetCudaDriverVersion_v2 is SystemGetCudaDriverVersion.
func (l *Library) SystemGetCudaDriverVersion_v2() (int, nvml.Return) {
	return l.SystemGetCudaDriverVersion()
}

// ErrorString names a return code.
func (l *Library) ErrorString(ret nvml.Return) string { return ret.Error() }

// DeviceGetCount returns the number of GPUs that were there when the session was
// opened, those since lost or removed included.
func (l *Library) DeviceGetCount() (int, nvml.Return) {
	gpus, ret := l.gpus()
	return len(gpus), ret
}

// DeviceGetHandleByIndex returns a GPU's handle.
func (l *Library) DeviceGetHandleByIndex(index int) (nvml.Device, nvml.Return) {
	gpus, ret := l.gpus()
	if ret != nvml.SUCCESS {
		return unsupportedDevice{}, ret
	}
	if index < 0 || index >= len(gpus) {
		return unsupportedDevice{}, nvml.ERROR_INVALID_ARGUMENT
	}
	return gpus[index].handle()
}

// DeviceGetHandleByUUID returns the handle of a GPU or of a MIG device. It looks
// at all GPUs: NVML answers GPU_IS_LOST "if any GPU has fallen off the bus or is
// otherwise inaccessible" (nvml.h).
func (l *Library) DeviceGetHandleByUUID(uuid string) (nvml.Device, nvml.Return) {
	if uuid == "" {
		return l.find(nil)
	}
	if ret := l.allThere(); ret != nvml.SUCCESS {
		return unsupportedDevice{}, ret
	}
	if strings.HasPrefix(uuid, migPrefix) {
		return l.findMIG(uuid)
	}
	return l.find(func(d *device) bool { return d.uuid == uuid })
}

// allThere tells whether each GPU of the session can be looked at.
func (l *Library) allThere() nvml.Return {
	gpus, ret := l.gpus()
	for i := 0; ret == nvml.SUCCESS && i < len(gpus); i++ {
		_, ret = gpus[i].handle()
	}
	return ret
}

// DeviceGetHandleBySerial returns a GPU's handle. It looks at all GPUs, as by UUID.
func (l *Library) DeviceGetHandleBySerial(serial string) (nvml.Device, nvml.Return) {
	if serial == "" {
		return l.find(nil)
	}
	if ret := l.allThere(); ret != nvml.SUCCESS {
		return unsupportedDevice{}, ret
	}
	return l.find(func(d *device) bool { return d.serial == serial })
}

// DeviceGetHandleByPciBusId takes the address in any of NVML's forms.
func (l *Library) DeviceGetHandleByPciBusId(busID string) (nvml.Device, nvml.Return) {
	address, ok := parseNVMLAddress(busID)
	if !ok {
		return l.find(nil)
	}
	return l.find(func(d *device) bool { return d.path.address == address })
}

// find returns the first GPU that matches; a nil match stands for an argument
// that no GPU could match.
func (l *Library) find(match func(*device) bool) (nvml.Device, nvml.Return) {
	gpus, ret := l.gpus()
	if ret != nvml.SUCCESS {
		return unsupportedDevice{}, ret
	}
	if match == nil {
		return unsupportedDevice{}, nvml.ERROR_INVALID_ARGUMENT
	}
	for _, d := range gpus {
		if match(d) {
			return d.handle()
		}
	}
	return unsupportedDevice{}, nvml.ERROR_NOT_FOUND
}

// findMIG returns the MIG device with that UUID. GPUs that do not answer have none.
func (l *Library) findMIG(uuid string) (nvml.Device, nvml.Return) {
	gpus, ret := l.gpus()
	if ret != nvml.SUCCESS {
		return unsupportedDevice{}, ret
	}
	for _, d := range gpus {
		for _, m := range d.migDevices() {
			if m.uuid() == uuid {
				return m, nvml.SUCCESS
			}
		}
	}
	return unsupportedDevice{}, nvml.ERROR_NOT_FOUND
}

// UnitGetCount returns 0: the machines here are no S-class systems.
func (l *Library) UnitGetCount() (int, nvml.Return) { return 0, l.ready() }
