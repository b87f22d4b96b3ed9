// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package poolstate

import (
	"slices"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
	"stowage.dev/stowage/pkg/usage"
)

// Owner is a namespace that has shares of a device that keeps namespaces apart.
type Owner struct {
	device    int
	namespace string
}

// OwnersOf returns who has shares of the devices of the pool that keep namespaces apart; nil if nobody has. What is held in no namespace
// at all, as in what compat makes of upstream's sets, is nobody's.
func OwnersOf(p *inventory.NodePool, in *usage.Pool) []Owner {
	if p.Apart() == nil || in == nil {
		return nil
	}
	var owners []Owner
	for name, device := range in.All() {
		i := p.Index(name)
		if i < 0 || !p.Apart().Has(i) {
			continue
		}
		first := len(owners)
		for _, h := range device.Holders() {
			if h.ShareID != nil && h.Claim.Namespace != "" && !IsAmong(owners[first:], h.Claim.Namespace) {
				owners = append(owners, Owner{i, h.Claim.Namespace})
			}
		}
	}
	return owners
}

// IsAmong tells whether the namespace is one of the owners.
func IsAmong(owners []Owner, namespace string) bool {
	return slices.ContainsFunc(owners, func(o Owner) bool { return o.namespace == namespace })
}

// Foreign are the devices, of n, of which other namespaces have shares; nil if there are none.
func Foreign(owners []Owner, namespace string, n int) bitset.Set {
	var set bitset.Set
	for i := range owners {
		if owners[i].namespace != namespace {
			set = addTo(set, owners[i].device, n)
		}
	}
	return set
}

// Without returns the state for who must not have the devices. With admin access they can be had as before.
func (s *State) Without(foreign bitset.Set) *State {
	if foreign == nil {
		return s
	}
	next := *s
	next.Foreign = foreign
	next.Held, next.taken = foreign.Clone(), foreign.Clone()
	next.Held.Or(s.Held)
	next.taken.Or(s.taken)
	return &next
}
