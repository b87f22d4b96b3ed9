// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package reconcile compares what the ledger says with everything else that knows who uses the node's GPUs: the API server, the
// kubelet, NVML, and the CDI folder. It finds claims that are prepared although nobody uses them any more, which happens when the kubelet
// has forgotten what it prepared, and releases them; but only on proof.
//
// decide is the proof, a function of two readings. [Reconciler] takes the readings and acts.
package reconcile
