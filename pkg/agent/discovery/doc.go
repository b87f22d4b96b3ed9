// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package discovery finds the GPUs of the node and describes them: first as Go
// values, then as the ResourceSlices that the node agent publishes and as the
// table that `node-agent discover` prints.
//
// It only reads. What happens to a GPU after it was published (prepare, health,
// taints) is other packages' business.
package discovery
