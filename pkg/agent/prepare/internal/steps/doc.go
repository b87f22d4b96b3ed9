// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package steps has the side effects of a prepared claim: for each kind of step of the ledger a file that says how it
// is done and how it is undone. NewTable lists them.
//
// Doing a step that is done, and undoing one that never happened, is no error, so that both can be tried again after a
// crash. Nothing here decides which steps a claim needs, or remembers them: package prepare lists them and keeps the
// ledger.
package steps
