// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fence keeps schedulers in different processes from binding pods to the
// same devices.
//
// The API server does not compare the allocations of different ResourceClaims.
// But it puts all writes of claims in one order, which every scheduler's watch
// brings. So a scheduler first writes an allocation, then waits until its watch
// has brought that write, and with it every earlier one, and only binds the pod
// if the allocation fits on top of the earlier ones. Of two schedulers that take
// one device the second one always sees the first one.
//
// A Judge is the pure part: does an allocation fit on top of others? A Fence
// waits, asks, and says what to do. What is to be done about it, and the waiting
// for the next attempt, is the caller's.
//
// Among schedulers that all do so, no device is over-used by the claims of two
// bound pods. No particular scheduler wins: who takes what somebody holds that is
// itself about to give way, gives way, too.
//
// The package knows nothing of nodes' CPU, memory or ports, and writes nothing.
package fence
