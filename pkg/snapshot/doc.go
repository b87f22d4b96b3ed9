// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package snapshot is a cluster's objects that scheduling depends on, as one file: taken from an API server, trimmed,
// written, read again with bounds, and with its names hashed.
//
// It holds no environment, command, argument, image, annotation or message of a container: what it has can be sent to
// somebody else. docs/kubectl.md, *The snapshot file*, is its format.
package snapshot
