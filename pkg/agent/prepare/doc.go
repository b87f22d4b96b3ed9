// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package prepare hands the GPUs of a claim to the claim's containers and takes them back: the work behind
// NodePrepareResources and NodeUnprepareResources.
//
// Both are idempotent and safe against a crash at any step. Prepare records in the ledger what it is going to
// do before it does it (PrepareStarted), does it, verifies the result the way the container runtime will see
// it, and records that it is done (PrepareCompleted). Unprepare, and the roll-back of a failed prepare, undo the
// recorded steps in reverse and forget the claim last, so that a GPU is never free while something of its last
// claim is left.
//
// A GPU is held by at most one claim, judged on the physical GPU, or by several that have partitions of it which do
// not overlap, or shares that it has enough for; results with admin access use a device without holding it. A claim
// whose record cannot be read keeps holding its GPUs.
//
// During a rolling update two agents serve the same kubelet. Calls exclude each other, within and between
// processes, by file locks per claim and per physical GPU, always taken in one order and waited for no longer
// than Options.LockTimeout in all; there is no lock for the node.
//
// The package knows no Kubernetes client and no gRPC; what is published and registered is package driver's.
package prepare
