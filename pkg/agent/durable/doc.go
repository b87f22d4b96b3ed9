// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package durable writes small files so that they survive a crash at any moment: a reader finds the old
// content or the new one, never a part, and what was reported as written is on the disk.
//
// It also has the file locks by which agents that share such files exclude each other.
//
// Every operation on files goes through the small interface FS, so that tests can fail or cut off each one of them.
// The package knows nothing of what the files mean; ledger and CDI specs are written with it.
package durable
