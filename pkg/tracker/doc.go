// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package tracker knows which ResourceClaims exist and who holds which device.
//
// A Tracker has one mutex and one state of three layers:
//
//  1. the assume cache: for each claim the newest object known, be it from the
//     watch or from the answer to a write of our own;
//  2. the allocations in flight: decided in this process, not yet written;
//  3. the usage: a counting index of holders by device (pkg/usage), always the
//     fold of layer 1 overlaid by layer 2.
//
// The tracker is the store of its own Reflector rather than a user of a shared
// informer. So events arrive synchronously and in the order of their revisions,
// and a relist is one atomic Replace at a known revision.
//
// What it promises:
//
//   - I1 the usage is the fold of layers 1 and 2 in every snapshot;
//   - I2 from Reserve until the watch echoes our write, a device is never free
//     in any snapshot;
//   - I3 of two holders of a device one goes: the device is still held;
//   - I4 an older object never replaces a newer one, and a relist that changes
//     an allocation moves the usage;
//   - I5 a claim that is deleted and created again under the same name inherits
//     nothing;
//   - I6 a snapshot costs the same however many claims and devices there are.
//
// Beside the layers it keeps, for each allocated claim, when the allocation was
// written in the order of the store, which is the same for all schedulers, and
// what a Judge says about it: whether it fits on top of what was written earlier
// (pkg/fence). Only the list and the watch change that, never an answer.
//
// The package does not choose devices (pkg/allocator), does not know which
// devices exist (pkg/inventory), and never writes to the API.
//
// Claim objects and allocations that go into or come out of a Tracker are shared
// and must not be modified.
package tracker
