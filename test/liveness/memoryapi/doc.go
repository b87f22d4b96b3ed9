// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package memoryapi is an API server in memory, behind the real client: a client of it encodes, sends, retries and
// decodes as with a real one. It has what a scheduler's correctness rests on:
//
//   - resource versions, UIDs, preconditions and conflicts; writes that change nothing have no version;
//   - subresources: a write to status changes nothing else, a binding is refused for a pod that has a node;
//   - the real validation of a claim's status, and the real field managers of claims;
//   - finalizers, graceful deletion of pods;
//   - watches that begin with what there is, can be held back by kind, and end when the server says so;
//   - faults by request: refused, conflict, no answer with effect, without effect, or with an effect that comes later.
//
// It has no admission, no defaulting and no authorization. It starts no goroutine but one for each watch, and uses
// no network, so it runs inside a bubble of testing/synctest.
package memoryapi
