// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capi

import "C"

import (
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The first version of the data ends before the MIG instance.

type firstEventData struct {
	device          uintptr
	eventType, data uint64
}

type eventData struct {
	firstEventData
	gpuInstanceID, computeInstanceID uint32
}

//export nvmlEventSetWait
func nvmlEventSetWait(set uintptr, data unsafe.Pointer, milliseconds uint32) int32 {
	return wait(set, data, milliseconds, func(e eventData) firstEventData { return e.firstEventData })
}

//export nvmlEventSetWait_v2
func nvmlEventSetWait_v2(set uintptr, data unsafe.Pointer, milliseconds uint32) int32 {
	return wait(set, data, milliseconds, func(e eventData) eventData { return e })
}

func wait[T any](set uintptr, data unsafe.Pointer, milliseconds uint32, convert func(eventData) T) int32 {
	on, ret := eventSetOf(set, data)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	event, ret := on.Wait(milliseconds)
	if ret == nvml.SUCCESS {
		put(data, convert(eventData{
			firstEventData: firstEventData{process.handles.of(event.Device), event.EventType, event.EventData},
			gpuInstanceID:  event.GpuInstanceId, computeInstanceID: event.ComputeInstanceId,
		}))
	}
	return int32(ret)
}

//export nvmlEventSetFree
func nvmlEventSetFree(set uintptr) int32 {
	on, ret := eventSetOf(set)
	if ret == nvml.SUCCESS {
		ret = on.Free()
	}
	if ret == nvml.SUCCESS {
		process.handles.drop(set)
	}
	return int32(ret)
}
