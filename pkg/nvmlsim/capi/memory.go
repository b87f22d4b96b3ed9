// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capi

import "C"

import (
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// put stores a result where the caller wants it.
func put[T any](into unsafe.Pointer, value T) { *(*T)(into) = value }

// text is a string of the caller.
func text(s unsafe.Pointer) string { return C.GoString((*C.char)(s)) }

// putText stores a string with its end, if there is room for both.
func putText(into unsafe.Pointer, room uint32, value string) nvml.Return {
	if uint64(room) < uint64(len(value))+1 {
		return nvml.ERROR_INSUFFICIENT_SIZE
	}
	to := unsafe.Slice((*byte)(into), len(value)+1)
	to[copy(to, value)] = 0
	return nvml.SUCCESS
}

// putArray stores all elements. The caller has as much room as nvml.h tells it to have.
func putArray[T any](into unsafe.Pointer, values []T) {
	if len(values) > 0 {
		copy(unsafe.Slice((*T)(into), len(values)), values)
	}
}

// putCounted stores elements where there is room for *count of them, and sets it to how many there are. What does not fit
// is not stored at all.
func putCounted[T any](into, count unsafe.Pointer, values []T) nvml.Return {
	room := *(*uint32)(count)
	put(count, uint32(len(values)))
	switch {
	case uint64(room) < uint64(len(values)):
		return nvml.ERROR_INSUFFICIENT_SIZE
	case len(values) > 0 && into == nil:
		return nvml.ERROR_INVALID_ARGUMENT
	}
	putArray(into, values)
	return nvml.SUCCESS
}

// versionOf checks the version that the caller wrote into the structure: its size and the version's number, as
// NVML_STRUCT_VERSION has them.
func versionOf[T any](structure unsafe.Pointer, number uint32) (uint32, nvml.Return) {
	var t T
	version := uint32(unsafe.Sizeof(t)) | number<<24
	if *(*uint32)(structure) != version {
		return 0, nvml.ERROR_ARGUMENT_VERSION_MISMATCH
	}
	return version, nvml.SUCCESS
}

// chars is a string in an array of a structure.
func chars[A [32]int8 | [96]int8](value string) (array A) {
	for i := range min(len(value), len(array)-1) {
		array[i] = int8(value[i])
	}
	return array
}

func oneIf(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}
