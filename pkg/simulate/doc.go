// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package simulate places pods on a copy of a cluster with the scheduler's own plugins. They run under the framework's own runtime and
// cache, one pod after the other, with a seeded choice among equal nodes: equal input gives equal answers. Nothing is written: what plugins
// write is noted, and goes nowhere.
//
// It differs from a running scheduler in three ways. It looks at all nodes, where kube-scheduler stops after a share of a large cluster's.
// It has no memory of earlier attempts. And it knows of other schedulers' work what the copy shows.
package simulate
