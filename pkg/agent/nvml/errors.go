// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// States of the machine, not faults of a call: the agent waits and tries again.
var (
	// ErrLibraryNotFound means that libnvidia-ml.so.1 could not be loaded.
	ErrLibraryNotFound = errors.New("NVML library not found")
	// ErrDriverNotLoaded means that the library is there, but no kernel driver.
	ErrDriverNotLoaded = errors.New("NVIDIA kernel driver not loaded")
	// ErrVersionMismatch means that the library and the kernel driver are of
	// different versions, as after an upgrade without a reboot.
	ErrVersionMismatch = errors.New("NVML library and NVIDIA kernel driver have different versions")
)

// Answers of a single call that callers decide on.
var (
	// ErrNotSupported means that this GPU or driver lacks the feature.
	ErrNotSupported error = gonvml.ERROR_NOT_SUPPORTED
	// ErrNoPermission means that this process may not change it.
	ErrNoPermission error = gonvml.ERROR_NO_PERMISSION
	// ErrNotFound means that there is no such GPU or MIG instance.
	ErrNotFound error = gonvml.ERROR_NOT_FOUND
	// ErrInUse means that processes or instances stand against it.
	ErrInUse error = gonvml.ERROR_IN_USE
	// ErrNoResources means that a MIG instance does not fit.
	ErrNoResources error = gonvml.ERROR_INSUFFICIENT_RESOURCES
	// ErrResetRequired means that it takes effect with a reset of the GPU, or
	// that the GPU answers nothing before one.
	ErrResetRequired error = gonvml.ERROR_RESET_REQUIRED
	// ErrTimeout means that nothing happened in the time.
	ErrTimeout error = gonvml.ERROR_TIMEOUT
	// ErrNoSession means that no session is open, or that the driver was
	// reloaded since: Init again.
	ErrNoSession error = gonvml.ERROR_UNINITIALIZED
	// ErrGPULost means that the GPU has fallen off the bus.
	ErrGPULost error = gonvml.ERROR_GPU_IS_LOST
)

// CallError is an NVML call that did not succeed.
type CallError struct {
	// Call is the C function, such as "nvmlDeviceGetUUID".
	Call   string
	Return gonvml.Return
}

func (e *CallError) Error() string { return fmt.Sprintf("%s: %v", e.Call, e.Return) }

// Unwrap makes errors.Is work with the answers above.
func (e *CallError) Unwrap() error { return e.Return }

// Is tells a state of the machine that a single call has run into.
func (e *CallError) Is(target error) bool {
	switch target {
	case ErrLibraryNotFound:
		return e.Return == gonvml.ERROR_LIBRARY_NOT_FOUND
	case ErrDriverNotLoaded:
		return e.Return == gonvml.ERROR_DRIVER_NOT_LOADED
	case ErrVersionMismatch:
		return e.Return == gonvml.ERROR_LIB_RM_VERSION_MISMATCH
	}
	return false
}

// initError explains why NVML did not start and what can be done about it.
func initError(library string, ret gonvml.Return) error {
	cause := &CallError{Call: "nvmlInit", Return: ret}
	switch ret {
	case gonvml.SUCCESS:
		return nil
	case gonvml.ERROR_LIBRARY_NOT_FOUND:
		return fmt.Errorf("%w: tried %s: install the NVIDIA driver, or name its library with --nvml=<path>, "+
			"or the folder where a driver container mounts it with --driver-root, or simulate GPUs with --nvml=sim:<profile>: %w",
			ErrLibraryNotFound, library, cause)
	case gonvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%w: library %s is there: load the nvidia module, or wait for the driver container: %w",
			ErrDriverNotLoaded, library, cause)
	case gonvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return fmt.Errorf("%w: library %s: reload the nvidia module or reboot the node: %w",
			ErrVersionMismatch, library, cause)
	}
	return fmt.Errorf("start NVML from %s: %w", library, cause)
}
