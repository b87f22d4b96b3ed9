// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// doubts are claims whose allocation or reservation this process wanted to take away when no answer came. Such a write can take effect as
// long as the claim has the same resource version. A pod that is bound with the claim writes to it first, so that it no longer can.
type doubts struct {
	// newest returns the newest object of a claim.
	newest func(namespace, name string) (*resourceapi.ResourceClaim, error)

	mutex  sync.Mutex
	claims map[types.UID]*resourceapi.ResourceClaim // as they were sent
}

func newDoubts(newest func(namespace, name string) (*resourceapi.ResourceClaim, error)) *doubts {
	return &doubts{newest: newest, claims: map[types.UID]*resourceapi.ResourceClaim{}}
}

// Note notes that a write of the claim failed, unless it certainly had no effect. It forgets claims that have changed since, and notes none
// that has: another write of it may be on its way.
func (d *doubts) Note(sent *resourceapi.ResourceClaim, err error) {
	if IsRefusal(err) {
		return
	}
	d.mutex.Lock()
	defer d.mutex.Unlock()
	for uid, claim := range d.claims {
		if !d.isNewest(claim) {
			delete(d.claims, uid)
		}
	}
	if d.isNewest(sent) {
		d.claims[sent.UID] = sent
	}
}

// isNewest tells whether the claim has not changed.
func (d *doubts) isNewest(claim *resourceapi.ResourceClaim) bool {
	newest, err := d.newest(claim.Namespace, claim.Name)
	return err == nil && newest.ResourceVersion == claim.ResourceVersion
}

// about tells whether a write that was not answered can still change the claim as it is.
func (d *doubts) about(claim *resourceapi.ResourceClaim) bool {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	sent := d.claims[claim.UID]
	return sent != nil && sent.ResourceVersion == claim.ResourceVersion
}
