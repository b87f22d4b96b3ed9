// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package capi is the simulated NVML as C programs see it: linked into a shared
// library (cmd/nvmlsim-library) it exports every function of nvml.h. Those that
// package nvmlsim answers take and fill in C's structures, as the driver's
// library does; the others answer NVML_ERROR_NOT_SUPPORTED.
//
// Which machine is simulated is read from the environment when the first
// session is opened:
//
//   - NVMLSIM_SOCKET: the control socket of a machine, whose folder has the state
//     that all processes share. Nobody needs to serve it.
//   - NVMLSIM_PROFILE: the profile, a name or a file. Without a socket the machine
//     is one of this process alone. With a socket it can be left out, if the
//     machine is there already.
//   - NVMLSIM_NODE: the node's name, which the GPUs have their UUIDs from; the
//     socket's machine has its own, otherwise it is the host name.
//
// Handles are addresses of memory that is this library's own and are looked up
// in a table: one that was never handed out, or whose object is gone, is an
// invalid argument and not a crash. No address is handed out twice.
//
// The C symbols of this package stand beside those that go-nvml jumps to. A
// program must not import both and mean the driver's: only the library does.
package capi

//go:generate go run ../internal/gencapi -o .
