// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package checker decides whether an allocation is valid, from the rules of the resource.k8s.io/v1 API alone: the
// field documentation of k8s.io/api/resource/v1 and KEPs 4381 (structured parameters), 4816 (prioritized list), 4815
// (partitionable devices), 5075 (consumable capacity), 5018 (admin access), 5055 (taints), 5007 (binding conditions).
//
// It is for tests. It shares no code with the allocator or the inventory and takes no shortcut: it reads the objects,
// evaluates every selector, and adds up quantities as exact fractions. It does not say whether an allocation should
// have been found, nor which one of several is the best.
package checker
