// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvml is how the node agent sees NVML: a narrow interface with Go
// errors and Go types, an adapter from go-nvml to it, and [Open], which turns
// the agent's --nvml flag into a library, real or simulated.
//
// It adds no judgement of its own: what a GPU is worth publishing as is decided
// in pkg/agent/discovery.
package nvml
