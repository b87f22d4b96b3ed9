// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package audit judges the history of a cluster: it is told every change of a
// pod or a claim in the order of revisions, and says after each one whether a
// device is over-used by the claims of bound pods.
//
// It knows the rules of the API (resource.k8s.io/v1) and nothing of how Stowage
// decides: it shares no code with the allocator, the tracker or the fence. It
// recomputes everything at every change, which is slow, and has no state to get
// wrong.
package audit
