// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capi

import "C"

import (
	"sync"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

//export nvmlInit
func nvmlInit() int32 { return nvmlInitWithFlags(0) }

//export nvmlInit_v2
func nvmlInit_v2() int32 { return nvmlInitWithFlags(0) }

//export nvmlInitWithFlags
func nvmlInitWithFlags(flags uint32) int32 {
	return int32(process.init(flags, environment(), driverVersion()))
}

//export nvmlShutdown
func nvmlShutdown() int32 { return int32(process.shutdown()) }

// errorTexts are the driver's, as NVIDIA's pynvml has them where it cannot ask the library, and as nvidia-smi prints them.
var errorTexts = map[nvml.Return]string{
	nvml.SUCCESS:                         "Success",
	nvml.ERROR_UNINITIALIZED:             "Uninitialized",
	nvml.ERROR_INVALID_ARGUMENT:          "Invalid Argument",
	nvml.ERROR_NOT_SUPPORTED:             "Not Supported",
	nvml.ERROR_NO_PERMISSION:             "Insufficient Permissions",
	nvml.ERROR_ALREADY_INITIALIZED:       "Already Initialized",
	nvml.ERROR_NOT_FOUND:                 "Not Found",
	nvml.ERROR_INSUFFICIENT_SIZE:         "Insufficient Size",
	nvml.ERROR_INSUFFICIENT_POWER:        "Insufficient External Power",
	nvml.ERROR_DRIVER_NOT_LOADED:         "Driver Not Loaded",
	nvml.ERROR_TIMEOUT:                   "Timeout",
	nvml.ERROR_IRQ_ISSUE:                 "Interrupt Request Issue",
	nvml.ERROR_LIBRARY_NOT_FOUND:         "NVML Shared Library Not Found",
	nvml.ERROR_FUNCTION_NOT_FOUND:        "Function Not Found",
	nvml.ERROR_CORRUPTED_INFOROM:         "Corrupted infoROM",
	nvml.ERROR_GPU_IS_LOST:               "GPU is lost",
	nvml.ERROR_RESET_REQUIRED:            "GPU requires reset",
	nvml.ERROR_OPERATING_SYSTEM:          "The operating system has blocked the request.",
	nvml.ERROR_LIB_RM_VERSION_MISMATCH:   "Driver/library version mismatch",
	nvml.ERROR_IN_USE:                    "In use by another client",
	nvml.ERROR_MEMORY:                    "Insufficient Memory",
	nvml.ERROR_INSUFFICIENT_RESOURCES:    "Insufficient Resources",
	nvml.ERROR_ARGUMENT_VERSION_MISMATCH: "Argument version mismatch",
	nvml.ERROR_UNKNOWN:                   "Unknown Error",
}

// cTexts are the same for C, made once.
var cTexts sync.Map

// Its result is the library's, for ever. It is asked outside of sessions, too.
//
//export nvmlErrorString
func nvmlErrorString(ret int32) unsafe.Pointer {
	known, ok := errorTexts[nvml.Return(ret)]
	if !ok {
		known, ret = errorTexts[nvml.ERROR_UNKNOWN], int32(nvml.ERROR_UNKNOWN)
	}
	if made, ok := cTexts.Load(ret); ok {
		return made.(unsafe.Pointer)
	}
	made, _ := cTexts.LoadOrStore(ret, unsafe.Pointer(C.CString(known)))
	return made.(unsafe.Pointer)
}

// What is not simulated, see zz_generated.unanswered.c. A library that is not open and a handle that is none are found first.

//export nvmlsimUnanswered
func nvmlsimUnanswered(device uintptr) int32 {
	if _, ret := deviceOf(device); ret != nvml.SUCCESS {
		return int32(ret)
	}
	return int32(nvml.ERROR_NOT_SUPPORTED)
}

// Its handle is of a kind that was never handed out.
//
//export nvmlsimUnansweredHandle
func nvmlsimUnansweredHandle() int32 {
	if _, ret := opened(); ret != nvml.SUCCESS {
		return int32(ret)
	}
	return int32(nvml.ERROR_INVALID_ARGUMENT)
}

//export nvmlsimUnansweredSystem
func nvmlsimUnansweredSystem() int32 {
	if _, ret := opened(); ret != nvml.SUCCESS {
		return int32(ret)
	}
	return int32(nvml.ERROR_NOT_SUPPORTED)
}
