// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"cmp"
	"maps"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// PoolID identifies a pool of devices. Pool names are unique per driver.
type PoolID struct {
	Driver, Pool string
}

// String returns "driver/pool".
func (p PoolID) String() string {
	return p.Driver + "/" + p.Pool
}

// Compare orders pools by driver, then by name.
func (p PoolID) Compare(other PoolID) int {
	return cmp.Or(strings.Compare(p.Driver, other.Driver), strings.Compare(p.Pool, other.Pool))
}

// DeviceID identifies a device as resource.k8s.io/v1 does: the triple is unique
// in the cluster.
type DeviceID struct {
	Driver, Pool, Device string
}

// String returns "driver/pool/device", the notation of the API documentation.
func (d DeviceID) String() string {
	return d.Driver + "/" + d.Pool + "/" + d.Device
}

// DeviceOf returns the device that a result names.
func DeviceOf(result *resourceapi.DeviceRequestAllocationResult) DeviceID {
	return DeviceID{Driver: result.Driver, Pool: result.Pool, Device: result.Device}
}

// PoolID returns the pool that the device is in.
func (d DeviceID) PoolID() PoolID {
	return PoolID{Driver: d.Driver, Pool: d.Pool}
}

// Compare orders devices by pool, then by name.
func (d DeviceID) Compare(other DeviceID) int {
	return cmp.Or(d.PoolID().Compare(other.PoolID()), strings.Compare(d.Device, other.Device))
}

// ClaimRef names one incarnation of a ResourceClaim. A claim that is deleted and
// created again under the same name has another UID and is another claim.
type ClaimRef struct {
	UID             types.UID
	Namespace, Name string
}

// RefOf returns the reference to claim.
func RefOf(claim *resourceapi.ResourceClaim) ClaimRef {
	return ClaimRef{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name}
}

// String returns "namespace/name".
func (c ClaimRef) String() string {
	return c.Namespace + "/" + c.Name
}

// Holder is one hold on a device: one result of one claim's allocation. A claim
// holds a device more than once if several of its results name it, each with a
// share of its own.
//
// A result with admin access holds nothing and is never a Holder (KEP-5018).
type Holder struct {
	Claim ClaimRef
	// InFlight is true while the allocation has been decided in this process
	// and is not known to be in the API.
	InFlight bool
	// ShareID is set for a device that allows multiple allocations (KEP-5075).
	// Nil means that the claim holds the device for itself alone.
	ShareID *types.UID
	// ConsumedCapacity is what the share takes of the device, by capacity name.
	// Shared with the claim object: read only.
	ConsumedCapacity map[resourceapi.QualifiedName]resource.Quantity
}

// Equal compares by value; capacities are equal if they are the same amount.
func (h Holder) Equal(other Holder) bool {
	return h.Claim == other.Claim &&
		h.InFlight == other.InFlight &&
		ptr.Equal(h.ShareID, other.ShareID) &&
		maps.EqualFunc(h.ConsumedCapacity, other.ConsumedCapacity, amount.Equal)
}

// compare orders the holders of one device, so that equal usage has an equal
// representation whatever the order of events was.
func (h Holder) compare(other Holder) int {
	return cmp.Or(
		cmp.Compare(h.Claim.UID, other.Claim.UID),
		compareBool(h.InFlight, other.InFlight),
		cmp.Compare(ptr.Deref(h.ShareID, ""), ptr.Deref(other.ShareID, "")),
	)
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	default:
		return 1
	}
}
