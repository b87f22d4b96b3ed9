// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package sharing is how the agent acts on a GPU beside NVML: time slices, which NVML cannot set, daemons of NVIDIA's
// Multi-Process Service (MPS), and processes that pods leave behind.
//
// Each is an interface with two implementations: one for a real driver, which runs NVIDIA's programs and signals
// processes, and one for simulated GPUs, which commands the simulated machine. All acts are idempotent, because they
// are repeated after a crash. When to act, and what to undo, is package prepare's.
package sharing
