// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hostcheck looks whether a node has what the agent needs of it. The table in table.go is the one place that says what that is: the
// agent looks at it at its start and every minute, node-agent check prints it, and docs/prerequisites.md is made from it.
//
// It only reads, but for one program of the host that it asks for its version. What does not answer, as a file on a dead
// network file system, holds up nothing else.
package hostcheck
