// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package doctor looks for faults of an installation in a snapshot. The table in table.go is the one place that says what is looked at:
// kubectl stowage doctor runs it, and docs/kubectl.md has its lines. A new check is a line there, a function, and a fault in the tests.
//
// It knows no client: what a snapshot does not have is not looked at, and the report says so.
package doctor
