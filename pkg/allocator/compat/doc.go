// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package compat offers this project's allocator with the signature and the result type of
// k8s.io/dynamic-resource-allocation/structured.NewAllocator, in the policy FirstFit, so that whatever can use
// upstream's allocator can use ours: the same devices, in the same order, with the same configuration, node
// selector and errors. Upstream's own cases are run against it.
//
// It differs from upstream's in few points, each with a test. It finds allocations where upstream's gives up: where an
// expression fails on a device that is not needed, where a request for all devices contradicts a constraint and another choice
// does not, or where upstream's search takes too long. What is wrong with one node only (a selector that fails on one of its
// devices, a pool that is being updated) is reported with an error that is structured.ErrFailedAllocationOnNode, so that the
// caller goes on with other nodes. The answer for a node does not depend on which node was asked about before. And a device
// that was shared, and is not any more, is given to nobody while someone has a share of it.
//
// What it is not: the way in which the scheduler plugin uses the allocator. An Allocator of this package builds an
// inventory and a usage index anew, as upstream's interface demands; the plugin keeps both up to date by events.
package compat
