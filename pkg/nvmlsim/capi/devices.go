// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capi

import "C"

import (
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

//export nvmlDeviceGetFieldValues
func nvmlDeviceGetFieldValues(device uintptr, count int32, values unsafe.Pointer) int32 {
	on, ret := deviceOf(device, values)
	if ret == nvml.SUCCESS && count < 0 {
		ret = nvml.ERROR_INVALID_ARGUMENT
	}
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	return int32(on.GetFieldValues(unsafe.Slice((*nvml.FieldValue)(values), count)))
}

//export nvmlDeviceGetTopologyNearestGpus
func nvmlDeviceGetTopologyNearestGpus(device uintptr, level int32, count, devices unsafe.Pointer) int32 {
	on, ret := deviceOf(device, count)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	near, ret := on.GetTopologyNearestGpus(nvml.GpuTopologyLevel(level))
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	if room := *(*uint32)(count); room == 0 {
		put(count, uint32(len(near)))
		return int32(nvml.SUCCESS)
	} else if devices == nil || uint64(room) > uint64(len(near)) {
		return int32(nvml.ERROR_INVALID_ARGUMENT)
	} else {
		putArray(devices, handlesOf(near[:room]))
	}
	return int32(nvml.SUCCESS)
}

func handlesOf[T any](objects []T) []uintptr {
	all := make([]uintptr, len(objects))
	for i, object := range objects {
		all[i] = process.handles.of(object)
	}
	return all
}

// The processes, with the structures of three versions. The second and the third are alike.

type processList = func(nvml.Device) ([]nvml.ProcessInfo, nvml.Return)

func processes[T any](device uintptr, count, infos unsafe.Pointer, list processList, convert func(nvml.ProcessInfo) T) int32 {
	on, ret := deviceOf(device, count)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	found, ret := list(on)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	converted := make([]T, len(found))
	for i := range found {
		converted[i] = convert(found[i])
	}
	return int32(putCounted(infos, count, converted))
}

func firstProcessInfo(p nvml.ProcessInfo) nvml.ProcessInfo_v1 {
	return nvml.ProcessInfo_v1{Pid: p.Pid, UsedGpuMemory: p.UsedGpuMemory}
}

func processInfo(p nvml.ProcessInfo) nvml.ProcessInfo { return p }

//export nvmlDeviceGetComputeRunningProcesses
func nvmlDeviceGetComputeRunningProcesses(device uintptr, count, infos unsafe.Pointer) int32 {
	return processes(device, count, infos, nvml.Device.GetComputeRunningProcesses, firstProcessInfo)
}

//export nvmlDeviceGetComputeRunningProcesses_v2
func nvmlDeviceGetComputeRunningProcesses_v2(device uintptr, count, infos unsafe.Pointer) int32 {
	return processes(device, count, infos, nvml.Device.GetComputeRunningProcesses, processInfo)
}

//export nvmlDeviceGetComputeRunningProcesses_v3
func nvmlDeviceGetComputeRunningProcesses_v3(device uintptr, count, infos unsafe.Pointer) int32 {
	return processes(device, count, infos, nvml.Device.GetComputeRunningProcesses, processInfo)
}

//export nvmlDeviceGetGraphicsRunningProcesses
func nvmlDeviceGetGraphicsRunningProcesses(device uintptr, count, infos unsafe.Pointer) int32 {
	return processes(device, count, infos, nvml.Device.GetGraphicsRunningProcesses, firstProcessInfo)
}

//export nvmlDeviceGetGraphicsRunningProcesses_v2
func nvmlDeviceGetGraphicsRunningProcesses_v2(device uintptr, count, infos unsafe.Pointer) int32 {
	return processes(device, count, infos, nvml.Device.GetGraphicsRunningProcesses, processInfo)
}

//export nvmlDeviceGetGraphicsRunningProcesses_v3
func nvmlDeviceGetGraphicsRunningProcesses_v3(device uintptr, count, infos unsafe.Pointer) int32 {
	return processes(device, count, infos, nvml.Device.GetGraphicsRunningProcesses, processInfo)
}

//export nvmlDeviceGetMPSComputeRunningProcesses
func nvmlDeviceGetMPSComputeRunningProcesses(device uintptr, count, infos unsafe.Pointer) int32 {
	return processes(device, count, infos, nvml.Device.GetMPSComputeRunningProcesses, firstProcessInfo)
}

//export nvmlDeviceGetMPSComputeRunningProcesses_v2
func nvmlDeviceGetMPSComputeRunningProcesses_v2(device uintptr, count, infos unsafe.Pointer) int32 {
	return processes(device, count, infos, nvml.Device.GetMPSComputeRunningProcesses, processInfo)
}

//export nvmlDeviceGetMPSComputeRunningProcesses_v3
func nvmlDeviceGetMPSComputeRunningProcesses_v3(device uintptr, count, infos unsafe.Pointer) int32 {
	return processes(device, count, infos, nvml.Device.GetMPSComputeRunningProcesses, processInfo)
}

// The PCI attributes. The structures of the first two versions end sooner: nothing is written behind them.

type firstPciInfo struct {
	busID                            [16]int8
	domain, bus, device, pciDeviceID uint32
}

type secondPciInfo struct {
	firstPciInfo
	pciSubSystemID uint32
}

func firstOf(pci nvml.PciInfo) firstPciInfo {
	return firstPciInfo{pci.BusIdLegacy, pci.Domain, pci.Bus, pci.Device, pci.PciDeviceId}
}

//export nvmlDeviceGetPciInfo
func nvmlDeviceGetPciInfo(device uintptr, pci unsafe.Pointer) int32 {
	return pciInfo(device, pci, firstOf)
}

//export nvmlDeviceGetPciInfo_v2
func nvmlDeviceGetPciInfo_v2(device uintptr, pci unsafe.Pointer) int32 {
	return pciInfo(device, pci, func(pci nvml.PciInfo) secondPciInfo { return secondPciInfo{firstOf(pci), pci.PciSubSystemId} })
}

func pciInfo[T any](device uintptr, into unsafe.Pointer, convert func(nvml.PciInfo) T) int32 {
	on, ret := deviceOf(device, into)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	pci, ret := on.GetPciInfo()
	if ret == nvml.SUCCESS {
		put(into, convert(pci))
	}
	return int32(ret)
}

//export nvmlDeviceGetNvLinkRemotePciInfo
func nvmlDeviceGetNvLinkRemotePciInfo(device uintptr, link uint32, pci unsafe.Pointer) int32 {
	on, ret := deviceOf(device, pci)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	remote, ret := on.GetNvLinkRemotePciInfo(int(link))
	if ret == nvml.SUCCESS {
		put(pci, firstOf(remote))
	}
	return int32(ret)
}

// The caller has as much room as nvml.h tells it to have.
//
//export nvmlDeviceGetGspFirmwareVersion
func nvmlDeviceGetGspFirmwareVersion(device uintptr, version unsafe.Pointer) int32 {
	on, ret := deviceOf(device, version)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	text, ret := on.GetGspFirmwareVersion()
	if ret == nvml.SUCCESS {
		ret = putText(version, nvml.GSP_FIRMWARE_VERSION_BUF_SIZE, text)
	}
	return int32(ret)
}

// Class and subclass of a 3D controller, as the kernel's class file of simulated GPUs has them.
const (
	displayController = 0x03
	controllerFor3D   = 0x02
)

//export nvmlDeviceGetPciInfoExt
func nvmlDeviceGetPciInfoExt(device uintptr, pci unsafe.Pointer) int32 {
	on, ret := deviceOf(device, pci)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	version, ret := versionOf[nvml.PciInfoExt_v1](pci, 1)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	info, ret := on.GetPciInfo()
	if ret == nvml.SUCCESS {
		put(pci, nvml.PciInfoExt_v1{
			Version: version, Domain: info.Domain, Bus: info.Bus, Device: info.Device, PciDeviceId: info.PciDeviceId,
			PciSubSystemId: info.PciSubSystemId, BaseClass: displayController, SubClass: controllerFor3D, BusId: info.BusId,
		})
	}
	return int32(ret)
}

//export nvmlDeviceGetTemperatureV
func nvmlDeviceGetTemperatureV(device uintptr, temperature unsafe.Pointer) int32 {
	on, ret := deviceOf(device, temperature)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	if _, ret = versionOf[nvml.Temperature_v1](temperature, 1); ret != nvml.SUCCESS {
		return int32(ret)
	}
	t := (*nvml.Temperature_v1)(temperature)
	celsius, ret := on.GetTemperature(nvml.TemperatureSensors(t.SensorType))
	if ret == nvml.SUCCESS {
		t.Temperature = int32(celsius)
	}
	return int32(ret)
}

//export nvmlDeviceGetGpuFabricInfoV
func nvmlDeviceGetGpuFabricInfoV(device uintptr, fabric unsafe.Pointer) int32 {
	on, ret := deviceOf(device, fabric)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	version, ret := versionOf[nvml.GpuFabricInfo_v2](fabric, 2)
	third := ret != nvml.SUCCESS
	if third {
		if version, ret = versionOf[nvml.GpuFabricInfo_v3](fabric, 3); ret != nvml.SUCCESS {
			return int32(ret)
		}
	}
	info, ret := on.GetGpuFabricInfo()
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	// No fault of a fabric is simulated: its health has no bit set, and no summary.
	if third {
		put(fabric, nvml.GpuFabricInfo_v3{
			Version: version, ClusterUuid: info.ClusterUuid, Status: info.Status,
			CliqueId: info.CliqueId, State: info.State,
		})
	} else {
		put(fabric, nvml.GpuFabricInfo_v2{
			Version: version, ClusterUuid: info.ClusterUuid, Status: info.Status,
			CliqueId: info.CliqueId, State: info.State,
		})
	}
	return int32(nvml.SUCCESS)
}
