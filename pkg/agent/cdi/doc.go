// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cdi turns the GPUs of one claim into a Container Device Interface specification, which the
// container runtime applies to the containers that use the claim.
//
// One claim has one file, <dir>/k8s.gpu.nvidia.com-claim_<claim UID>.json, of kind
// k8s.gpu.nvidia.com/claim. The vendor is not nvidia.com, so that a specification made by the NVIDIA
// container toolkit for all GPUs of the node (kind nvidia.com/gpu) can never answer for a claim's device, and
// "claim" says what the names after it are scoped to. All names follow from the claim: the same claim has the
// same files and devices after a restart, and no other claim ever has them, so a runtime that caches
// specifications by name cannot be wrong.
//
// The file has one CDI device for each allocation result, named
// <claim UID>_<request>[.<subrequest>]_<device>[_<share>]. The kubelet gives a container the devices of the requests
// that the container uses, in the order of the prepare response, or all of them if it names no request; the
// runtime applies the edits in that order. A variable that several devices set has the value of the last one.
// Therefore:
//
//   - STOWAGE_<DEVICE>=<UUID> (for example STOWAGE_GPU_0000_1B_00_0=GPU-…) is set by each device under a name of
//     its own. The set of these variables is exactly the container's GPUs, whatever it uses: one request, several
//     requests of a claim, or several claims.
//   - SHARE_<DEVICE>_MEMORY_MIB and SHARE_<DEVICE>_COMPUTE_PERCENT say how much the request has of a GPU that several claims
//     share. They are exact for a container that uses one request of that GPU.
//   - NVIDIA_VISIBLE_DEVICES has one value and no way to be added to, so it cannot be exact for a container
//     that uses several requests or claims. With a real driver it is "void", as in NVIDIA's own DRA driver:
//     an NVIDIA runtime below the container engine acts on this variable and must not inject anything beside
//     CDI. In simulation nothing acts on it, and it lists the UUIDs of the request as the NVIDIA device plugin
//     would have it: exact for a container that uses one request, and the last request's GPUs for others.
//
// What a GPU needs in a container is a Backend's knowledge: Driver asks nvcdi about the real driver, Simulated
// offers device nodes without a driver behind them.
//
// The package does not know claims' allocations, who holds a GPU, or when files are written and removed.
package cdi
