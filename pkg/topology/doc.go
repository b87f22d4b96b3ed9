// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package topology tells how close the GPUs of one machine are to each other, and which of them to use together.
//
// [NewMatrix] gives every two GPUs a closeness: NVLinks between them count most, then a PCIe root complex that they
// have in common, then a NUMA node. The closeness of a set is the sum over its pairs. [NewTable] adds up all sets of
// at most [MaxExact] GPUs once, so that [Table.Best] finds the closest set of a size by looking up, and never misses
// it. It knows no holders: who asks says which GPUs are free.
package topology
