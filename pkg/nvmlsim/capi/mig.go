// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capi

import "C"

import (
	"fmt"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// GPU instances. Profiles are named by ID, which is all that package nvmlsim looks at.

func gpuProfile(id uint32) *nvml.GpuInstanceProfileInfo {
	return &nvml.GpuInstanceProfileInfo{Id: id}
}

//export nvmlDeviceGetGpuInstanceProfileInfoV
func nvmlDeviceGetGpuInstanceProfileInfoV(device uintptr, profile uint32, info unsafe.Pointer) int32 {
	on, ret := deviceOf(device, info)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	p, ret := on.GetGpuInstanceProfileInfo(int(profile))
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	return int32(putGPUInstanceProfile(on, p, info))
}

//export nvmlDeviceGetGpuInstanceProfileInfoByIdV
func nvmlDeviceGetGpuInstanceProfileInfoByIdV(device uintptr, id uint32, info unsafe.Pointer) int32 {
	on, ret := deviceOf(device, info)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	for profile := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		p, ret := on.GetGpuInstanceProfileInfo(profile)
		switch {
		case ret == nvml.SUCCESS && p.Id == id:
			return int32(putGPUInstanceProfile(on, p, info))
		case ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_SUPPORTED:
			return int32(ret)
		}
	}
	return int32(nvml.ERROR_NOT_SUPPORTED)
}

// profilePrefix stands before the names of profiles, as nvidia-smi mig -lgip prints them.
const profilePrefix = "MIG "

func putGPUInstanceProfile(on nvml.Device, p nvml.GpuInstanceProfileInfo, info unsafe.Pointer) nvml.Return {
	name := chars[[96]int8](profilePrefix + nvmlsim.GPUInstanceProfileName(on, p.Id))
	if version, ret := versionOf[nvml.GpuInstanceProfileInfo_v2](info, 2); ret == nvml.SUCCESS {
		put(info, nvml.GpuInstanceProfileInfo_v2{
			Version: version, Id: p.Id, IsP2pSupported: p.IsP2pSupported, SliceCount: p.SliceCount, InstanceCount: p.InstanceCount,
			MultiprocessorCount: p.MultiprocessorCount, CopyEngineCount: p.CopyEngineCount, DecoderCount: p.DecoderCount,
			EncoderCount: p.EncoderCount, JpegCount: p.JpegCount, OfaCount: p.OfaCount, MemorySizeMB: p.MemorySizeMB, Name: name,
		})
		return ret
	}
	version, ret := versionOf[nvml.GpuInstanceProfileInfo_v3](info, 3)
	if ret == nvml.SUCCESS {
		put(info, nvml.GpuInstanceProfileInfo_v3{
			Version: version, Id: p.Id, SliceCount: p.SliceCount, InstanceCount: p.InstanceCount,
			MultiprocessorCount: p.MultiprocessorCount, CopyEngineCount: p.CopyEngineCount, DecoderCount: p.DecoderCount,
			EncoderCount: p.EncoderCount, JpegCount: p.JpegCount, OfaCount: p.OfaCount, MemorySizeMB: p.MemorySizeMB, Name: name,
		})
	}
	return ret
}

// Placements: how many there are can be asked for without an array.

//export nvmlDeviceGetGpuInstancePossiblePlacements
func nvmlDeviceGetGpuInstancePossiblePlacements(device uintptr, id uint32, placements, count unsafe.Pointer) int32 {
	return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, placements, count)
}

//export nvmlDeviceGetGpuInstancePossiblePlacements_v2
func nvmlDeviceGetGpuInstancePossiblePlacements_v2(device uintptr, id uint32, placements, count unsafe.Pointer) int32 {
	on, ret := deviceOf(device, count)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	found, ret := on.GetGpuInstancePossiblePlacements(gpuProfile(id))
	return int32(putList(placements, count, found, ret))
}

// putList stores elements, if there is an array, and their number.
func putList[T any](into, count unsafe.Pointer, values []T, ret nvml.Return) nvml.Return {
	if ret != nvml.SUCCESS {
		return ret
	}
	if into != nil {
		putArray(into, values)
	}
	put(count, uint32(len(values)))
	return nvml.SUCCESS
}

//export nvmlDeviceGetGpuInstanceRemainingCapacity
func nvmlDeviceGetGpuInstanceRemainingCapacity(device uintptr, id uint32, count unsafe.Pointer) int32 {
	on, ret := deviceOf(device, count)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	n, ret := on.GetGpuInstanceRemainingCapacity(gpuProfile(id))
	if ret == nvml.SUCCESS {
		put(count, uint32(n))
	}
	return int32(ret)
}

// putHandle stores the handle of what a call returned.
func putHandle(into unsafe.Pointer, object any, ret nvml.Return) int32 {
	if ret == nvml.SUCCESS {
		put(into, process.handles.of(object))
	}
	return int32(ret)
}

//export nvmlDeviceCreateGpuInstance
func nvmlDeviceCreateGpuInstance(device uintptr, id uint32, instance unsafe.Pointer) int32 {
	on, ret := deviceOf(device, instance)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	made, ret := on.CreateGpuInstance(gpuProfile(id))
	return putHandle(instance, made, ret)
}

//export nvmlDeviceCreateGpuInstanceWithPlacement
func nvmlDeviceCreateGpuInstanceWithPlacement(device uintptr, id uint32, placement, instance unsafe.Pointer) int32 {
	on, ret := deviceOf(device, placement, instance)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	at := *(*nvml.GpuInstancePlacement)(placement)
	made, ret := on.CreateGpuInstanceWithPlacement(gpuProfile(id), &at)
	return putHandle(instance, made, ret)
}

//export nvmlDeviceGetGpuInstances
func nvmlDeviceGetGpuInstances(device uintptr, id uint32, instances, count unsafe.Pointer) int32 {
	on, ret := deviceOf(device, instances, count)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	found, ret := on.GetGpuInstances(gpuProfile(id))
	return int32(putList(instances, count, handlesOf(found), ret))
}

type gpuInstanceInfo struct {
	device        uintptr
	id, profileID uint32
	placement     nvml.GpuInstancePlacement
}

//export nvmlGpuInstanceGetInfo
func nvmlGpuInstanceGetInfo(instance uintptr, info unsafe.Pointer) int32 {
	on, ret := gpuInstanceOf(instance, info)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	i, ret := on.GetInfo()
	if ret == nvml.SUCCESS {
		put(info, gpuInstanceInfo{process.handles.of(i.Device), i.Id, i.ProfileId, i.Placement})
	}
	return int32(ret)
}

//export nvmlGpuInstanceDestroy
func nvmlGpuInstanceDestroy(instance uintptr) int32 {
	on, ret := gpuInstanceOf(instance)
	if ret == nvml.SUCCESS {
		ret = on.Destroy()
	}
	if ret == nvml.SUCCESS {
		process.handles.drop(instance)
	}
	return int32(ret)
}

// Compute instances.

func computeProfile(id uint32) *nvml.ComputeInstanceProfileInfo {
	return &nvml.ComputeInstanceProfileInfo{Id: id}
}

//export nvmlGpuInstanceGetComputeInstanceProfileInfoV
func nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance uintptr, profile, engines uint32, info unsafe.Pointer) int32 {
	on, ret := gpuInstanceOf(instance, info)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	p, ret := on.GetComputeInstanceProfileInfo(int(profile), int(engines))
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	text, ret := computeProfileName(on, p)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	name := chars[[96]int8](text)
	if version, ret := versionOf[nvml.ComputeInstanceProfileInfo_v2](info, 2); ret == nvml.SUCCESS {
		put(info, nvml.ComputeInstanceProfileInfo_v2{
			Version: version, Id: p.Id, SliceCount: p.SliceCount, InstanceCount: p.InstanceCount, MultiprocessorCount: p.MultiprocessorCount,
			SharedCopyEngineCount: p.SharedCopyEngineCount, SharedDecoderCount: p.SharedDecoderCount, SharedEncoderCount: p.SharedEncoderCount,
			SharedJpegCount: p.SharedJpegCount, SharedOfaCount: p.SharedOfaCount, Name: name,
		})
		return int32(ret)
	}
	version, ret := versionOf[nvml.ComputeInstanceProfileInfo_v3](info, 3)
	if ret == nvml.SUCCESS {
		put(info, nvml.ComputeInstanceProfileInfo_v3{
			Version: version, Id: p.Id, SliceCount: p.SliceCount, InstanceCount: p.InstanceCount, MultiprocessorCount: p.MultiprocessorCount,
			SharedCopyEngineCount: p.SharedCopyEngineCount, SharedDecoderCount: p.SharedDecoderCount, SharedEncoderCount: p.SharedEncoderCount,
			SharedJpegCount: p.SharedJpegCount, SharedOfaCount: p.SharedOfaCount, Name: name,
		})
	}
	return int32(ret)
}

// computeProfileName is "MIG 1c.3g.40gb" for a part of a GPU instance, and the GPU instance's own for all of it.
func computeProfileName(on nvml.GpuInstance, p nvml.ComputeInstanceProfileInfo) (string, nvml.Return) {
	i, ret := on.GetInfo()
	if ret != nvml.SUCCESS {
		return "", ret
	}
	name := nvmlsim.GPUInstanceProfileName(i.Device, i.ProfileId)
	if p.InstanceCount > 1 {
		name = fmt.Sprintf("%dc.%s", p.SliceCount, name)
	}
	return profilePrefix + name, nvml.SUCCESS
}

//export nvmlGpuInstanceGetComputeInstancePossiblePlacements
func nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance uintptr, id uint32, placements, count unsafe.Pointer) int32 {
	on, ret := gpuInstanceOf(instance, count)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	found, ret := on.GetComputeInstancePossiblePlacements(computeProfile(id))
	return int32(putList(placements, count, found, ret))
}

//export nvmlGpuInstanceGetComputeInstanceRemainingCapacity
func nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance uintptr, id uint32, count unsafe.Pointer) int32 {
	on, ret := gpuInstanceOf(instance, count)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	n, ret := on.GetComputeInstanceRemainingCapacity(computeProfile(id))
	if ret == nvml.SUCCESS {
		put(count, uint32(n))
	}
	return int32(ret)
}

//export nvmlGpuInstanceCreateComputeInstance
func nvmlGpuInstanceCreateComputeInstance(instance uintptr, id uint32, compute unsafe.Pointer) int32 {
	on, ret := gpuInstanceOf(instance, compute)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	made, ret := on.CreateComputeInstance(computeProfile(id))
	return putHandle(compute, made, ret)
}

//export nvmlGpuInstanceCreateComputeInstanceWithPlacement
func nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance uintptr, id uint32, placement, compute unsafe.Pointer) int32 {
	on, ret := gpuInstanceOf(instance, placement, compute)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	at := *(*nvml.ComputeInstancePlacement)(placement)
	made, ret := on.CreateComputeInstanceWithPlacement(computeProfile(id), &at)
	return putHandle(compute, made, ret)
}

//export nvmlGpuInstanceGetComputeInstances
func nvmlGpuInstanceGetComputeInstances(instance uintptr, id uint32, computes, count unsafe.Pointer) int32 {
	on, ret := gpuInstanceOf(instance, computes, count)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	found, ret := on.GetComputeInstances(computeProfile(id))
	return int32(putList(computes, count, handlesOf(found), ret))
}

// The first version of a compute instance's description ends before its placement.

type firstComputeInstanceInfo struct {
	device, gpuInstance uintptr
	id, profileID       uint32
}

type computeInstanceInfo struct {
	firstComputeInstanceInfo
	placement nvml.ComputeInstancePlacement
}

//export nvmlComputeInstanceGetInfo
func nvmlComputeInstanceGetInfo(compute uintptr, info unsafe.Pointer) int32 {
	return describe(compute, info, func(i computeInstanceInfo) firstComputeInstanceInfo { return i.firstComputeInstanceInfo })
}

//export nvmlComputeInstanceGetInfo_v2
func nvmlComputeInstanceGetInfo_v2(compute uintptr, info unsafe.Pointer) int32 {
	return describe(compute, info, func(i computeInstanceInfo) computeInstanceInfo { return i })
}

func describe[T any](compute uintptr, info unsafe.Pointer, convert func(computeInstanceInfo) T) int32 {
	on, ret := computeInstanceOf(compute, info)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	i, ret := on.GetInfo()
	if ret == nvml.SUCCESS {
		first := firstComputeInstanceInfo{process.handles.of(i.Device), process.handles.of(i.GpuInstance), i.Id, i.ProfileId}
		put(info, convert(computeInstanceInfo{first, i.Placement}))
	}
	return int32(ret)
}

//export nvmlComputeInstanceDestroy
func nvmlComputeInstanceDestroy(compute uintptr) int32 {
	on, ret := computeInstanceOf(compute)
	if ret == nvml.SUCCESS {
		ret = on.Destroy()
	}
	if ret == nvml.SUCCESS {
		process.handles.drop(compute)
	}
	return int32(ret)
}
