// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package source feeds an inventory.Store from the API server: ResourceSlices with DeviceTaintRules applied by
// upstream's tracker, and DeviceClasses. It is the edge of pkg/inventory that has clients and goroutines, and
// decides nothing.
package source
