// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package advertise says through which of the kubelet's ways each GPU of a node is offered: by claims (DRA), by the
// device plugin API, or by none. A GPU has one way. It decides by what an administrator has said, and tells which GPUs
// other device plugins mean. That nobody has a GPU by the other way any more is for those who offer it to prove.
package advertise
