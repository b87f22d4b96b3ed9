// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

// LookAgain asks for a look at the ledger now, and not in a minute.
func (a *Agent) LookAgain() { a.opts.Hardware.reached <- struct{}{} }

// LookAtFolders asks for a look at the folders now, and not in a minute.
func (a *Agent) LookAtFolders() { a.check.soon <- struct{}{} }
