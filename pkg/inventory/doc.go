// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package inventory knows what devices exist: it turns events about ResourceSlices (with DeviceTaintRules
// already applied) and DeviceClasses into immutable views that answer, for one node, which devices of which
// pools it can reach.
//
// A [Store] is fed one object at a time; what an event costs depends on the pool that changed, not on the
// cluster. [Store.View] costs nothing and gives a [View] that never changes. Whether a pool is complete and
// valid is decided when its slice arrives; a pool that is not has a [Problem], concerns only the nodes that
// see it, and is never an error elsewhere.
//
// A [Matcher] is a list of CEL selectors with tolerations. Each selector is evaluated at most once per slice
// object, not per pod; results are kept in bounded caches.
//
// What it is not: it does not know who holds a device (pkg/usage, pkg/tracker), and it has no client and no
// informer (pkg/inventory/source feeds it).
package inventory
