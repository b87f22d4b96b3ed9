// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package lab is a cluster with Stowage in it, on one machine: a real control
// plane, our scheduler and node agents with the rights that our manifests grant,
// and nodes with simulated GPUs. It also reads back what each container was
// given and compares it with what the scheduler allocated.
//
// The demo and the end-to-end tests walk the same path through it. Starting the
// programs is the business of internal/localcluster; what they should do for a
// user is judged here.
package lab
