// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package podresources is who has what on a node, as the kubelet says: a client of its PodResources API (v1), and the way from what
// that API names to GPUs and MIG devices. Device plugins name devices by IDs of their own; claims by pool, device and share.
//
// What it answers with is plain data. How a device is prepared, and what is done about its holders, is others' matter.
package podresources
