// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package ledger remembers, over crashes and upgrades, which claim was handed which GPUs on this node and
// what must be undone to take them back.
//
// There is one file per claim:
//
//	<claim UID>[_<GPU>…].claim        the current record
//	<claim UID>[_<GPU>…].claim.prev   the record before it, the good copy if the current one cannot be read
//	<claim UID>[_<GPU>…].claim.tmp    a record being written
//
// A file is one line of JSON, the header with the schema version and the SHA-256 of all bytes that follow,
// and then the payload. The checksum is over the raw bytes as they stand in the file: decoding and encoding
// them again can never change it. The physical GPUs that the claim holds stand in the name, so that a file
// that cannot be read still tells what it blocks ("_all" when the names would be too long for a file name).
//
// Reading never fails as a whole: each record is either readable, or readable from its previous copy, or
// unreadable with a reason, and then its GPUs stay held until somebody decides.
//
// A device that the kubelet was given through its device plugin API has a record as a claim has one; see [PluginDevice] and
// package hold.
//
// The package decides nothing: what a record means for a prepare or an unprepare is package prepare's.
package ledger
