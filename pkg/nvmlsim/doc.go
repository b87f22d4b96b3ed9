// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvmlsim is a simulated NVIDIA management library (NVML): the same
// Go interfaces that go-nvml offers over libnvidia-ml.so, answered from a
// profile of a real machine instead of from a driver.
//
// It is for machines without a GPU: demos, tests, benchmarks, and the node
// agent with --nvml=sim:<profile>. Every method that it does not simulate
// answers ERROR_NOT_SUPPORTED, as NVML does for a feature that a GPU lacks;
// none panics. It holds state, as the library does: a call before Init answers
// ERROR_UNINITIALIZED, Init and Shutdown are counted, and what is set on a GPU
// through one handle is seen through every other.
//
// The hardware is a [Machine], which a [Library] is one process's view of. It
// follows the rules of real GPUs (MIG modes and placements, compute modes, what
// a reset or a reboot forgets), outlives the process if it has a folder, and
// things happen to it on command: [Machine.Do] in a test, or the control socket
// and cmd/nvmlsimctl.
//
// Beside NVML the package serves what the kernel knows about the same machine:
// a tree like /sys with the PCI devices and their NUMA nodes ([Library.Sysfs]).
//
// It is not a CUDA simulation: there are no device nodes, no contexts and no
// memory behind it. It knows nothing of the node agent.
package nvmlsim

//go:generate go run ./internal/gen -o zz_generated.unsupported.go
