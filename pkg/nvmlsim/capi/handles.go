// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capi

// #include <stdlib.h>
import "C"

import (
	"sync"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// handles are the objects that C programs have, by the address that stands for each. An address is memory of its own, so that
// it is a pointer wherever a program keeps it. That memory is never freed: an address stands for one object, and no other one
// later, so a program that frees a set twice does not end another's. Each event set, instance and MIG device that a process is
// shown costs 32 bytes for ever, as malloc has them in glibc: a million sets cost 32 MB.
type handles struct {
	mu        sync.RWMutex
	objects   map[uintptr]any
	addresses map[any]uintptr // by the object's identity
}

// of returns the object's handle, the same one for the same object.
func (h *handles) of(object any) uintptr {
	identity := nvmlsim.Identity(object)
	h.mu.Lock()
	defer h.mu.Unlock()
	if address, ok := h.addresses[identity]; ok {
		return address
	}
	if h.objects == nil {
		h.objects, h.addresses = map[uintptr]any{}, map[any]uintptr{}
	}
	address := uintptr(C.malloc(1)) // cgo ends the process if there is none
	h.objects[address], h.addresses[identity] = object, address
	return address
}

// find returns the object of a handle, nil if there is none.
func (h *handles) find(address uintptr) any {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.objects[address]
}

// drop ends a handle.
func (h *handles) drop(address uintptr) {
	h.dropIf(func(a uintptr, _ any) bool { return a == address })
}

func (h *handles) dropAll() { h.dropIf(func(uintptr, any) bool { return true }) }

// dropTemporary ends the handles of all but whole GPUs.
func (h *handles) dropTemporary() {
	h.dropIf(func(_ uintptr, object any) bool {
		_, isDevice := object.(nvml.Device)
		return !isDevice || nvmlsim.Identity(object) != object
	})
}

func (h *handles) dropIf(gone func(address uintptr, object any) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for address, object := range h.objects {
		if gone(address, object) {
			delete(h.objects, address)
			delete(h.addresses, nvmlsim.Identity(object))
		}
	}
}

// opened returns the library for a call that has no handle, and checks that no pointer is null.
func opened(pointers ...unsafe.Pointer) (*nvmlsim.Library, nvml.Return) {
	l, ret := process.open()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	for _, p := range pointers {
		if p == nil {
			return nil, nvml.ERROR_INVALID_ARGUMENT
		}
	}
	return l, nvml.SUCCESS
}

// objectOf is opened for a call on an object.
func objectOf[T any](handle uintptr, pointers ...unsafe.Pointer) (object T, ret nvml.Return) {
	if _, ret = opened(pointers...); ret != nvml.SUCCESS {
		return object, ret
	}
	object, ok := process.handles.find(handle).(T)
	if !ok {
		return object, nvml.ERROR_INVALID_ARGUMENT
	}
	return object, nvml.SUCCESS
}

func deviceOf(handle uintptr, pointers ...unsafe.Pointer) (nvml.Device, nvml.Return) {
	return objectOf[nvml.Device](handle, pointers...)
}

func gpuInstanceOf(handle uintptr, pointers ...unsafe.Pointer) (nvml.GpuInstance, nvml.Return) {
	return objectOf[nvml.GpuInstance](handle, pointers...)
}

func computeInstanceOf(handle uintptr, pointers ...unsafe.Pointer) (nvml.ComputeInstance, nvml.Return) {
	return objectOf[nvml.ComputeInstance](handle, pointers...)
}

func eventSetOf(handle uintptr, pointers ...unsafe.Pointer) (nvml.EventSet, nvml.Return) {
	return objectOf[nvml.EventSet](handle, pointers...)
}
