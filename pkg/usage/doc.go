// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package usage says which claims hold which devices.
//
// It is the vocabulary that pkg/tracker, which knows the claims, and
// pkg/allocator, which chooses devices, have in common: identifiers, immutable
// views, and the index from which views are taken. Views are persistent data
// structures: taking one costs nothing, and a change copies only the path to
// what changed.
//
// The package knows nothing of the API server, of what devices exist
// (pkg/inventory), or of which claim is right when two hold one device.
package usage
