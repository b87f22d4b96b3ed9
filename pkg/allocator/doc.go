// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package allocator decides which devices a pod's claims get on one node.
//
// It is a pure function of the claims, an inventory view, a usage view and a policy: [Compile] turns a pod's
// claims into [Requests] once, [Check] says whether one node can satisfy them and how well, [Allocate] says
// with which devices. The same code that decides also counts why a node was refused ([Failure]), and
// [Explain] sums them up over all nodes as a value ([Explanation]) that prints itself in one line, and
// [FindHolders] says which claims would have to be released.
//
// Semantics are those of k8s.io/dynamic-resource-allocation/structured; in the policy [FirstFit] the result
// is the very one that upstream's allocator gives. Where upstream gives up the whole pod (a CEL selector that
// fails on one device, an incomplete pool, a node that takes too long), this package gives up the one node.
//
// What it is not: it knows no client, informer, clock, goroutine or scheduler framework, and it keeps no
// account of what has been handed out. That is what pkg/tracker is for.
package allocator
