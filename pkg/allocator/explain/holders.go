// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package explain

import "k8s.io/apimachinery/pkg/types"

// NodeHolders says whose devices keep a node from being used that would do otherwise.
type NodeHolders struct {
	Node string `json:"node"`
	// Release is a set of claims whose release would make the node usable, none of which can be left out. There
	// may be other such sets, seldom with fewer claims.
	Release []ClaimHolder `json:"release"`
	// Holders are all claims that hold devices of the node that the pod could use, or use up counters that such
	// devices need.
	Holders []ClaimHolder `json:"holders"`
}

// ClaimHolder is a claim with what it holds of a node's devices.
type ClaimHolder struct {
	Namespace string    `json:"namespace"`
	Claim     string    `json:"claim"`
	UID       types.UID `json:"uid"`
	// InFlight tells that a device was promised to the claim and the API does not have that yet.
	InFlight bool `json:"inFlight,omitempty"`
	// Devices are "driver/pool/device", in order, each once.
	Devices []string `json:"devices"`
}
