// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/sets"
)

// claims is layer 1: for every name the newest object known. It has no lock of
// its own.
//
// Deleted claims leave no trace. To tell a claim that the watch has not brought
// yet from one that it has taken away, observed suffices: every change up to
// there has been seen.
type claims struct {
	byName map[types.NamespacedName]*resourceapi.ResourceClaim
	byUID  map[types.UID]*resourceapi.ResourceClaim
	// byOwner has the UIDs of the claims by the UID of the pod that controls them.
	byOwner map[types.UID]sets.Set[types.UID]
	// observed is the resource version up to which the list and the watch have
	// been applied, empty before the first list.
	observed string
}

func newClaims() claims {
	return claims{
		byName:  map[types.NamespacedName]*resourceapi.ResourceClaim{},
		byUID:   map[types.UID]*resourceapi.ResourceClaim{},
		byOwner: map[types.UID]sets.Set[types.UID]{},
	}
}

func (c *claims) get(name types.NamespacedName) *resourceapi.ResourceClaim {
	return c.byName[name]
}

// put makes claim the known object of its name, unless the known one is as new
// or newer. It returns the object that was known before.
func (c *claims) put(claim *resourceapi.ResourceClaim) (old *resourceapi.ResourceClaim, stored bool) {
	name := nameOf(claim)
	old = c.byName[name]
	if old != nil && !newer(claim.ResourceVersion, old.ResourceVersion) {
		return old, false
	}
	if old != nil {
		delete(c.byUID, old.UID)
		c.disown(old)
	}
	c.byName[name] = claim
	c.byUID[claim.UID] = claim
	if owner := owningPod(claim); owner != "" {
		if c.byOwner[owner] == nil {
			c.byOwner[owner] = sets.New[types.UID]()
		}
		c.byOwner[owner].Insert(claim.UID)
	}
	return old, true
}

// remove forgets a claim.
func (c *claims) remove(claim *resourceapi.ResourceClaim) {
	delete(c.byName, nameOf(claim))
	delete(c.byUID, claim.UID)
	c.disown(claim)
}

// disown takes a claim out of the index of owners.
func (c *claims) disown(claim *resourceapi.ResourceClaim) {
	owner := owningPod(claim)
	c.byOwner[owner].Delete(claim.UID)
	if len(c.byOwner[owner]) == 0 {
		delete(c.byOwner, owner)
	}
}

// owningPod returns the UID of the pod that controls the claim, empty if none does.
func owningPod(claim *resourceapi.ResourceClaim) types.UID {
	owner := metav1.GetControllerOfNoCopy(claim)
	if owner == nil || owner.APIVersion != "v1" || owner.Kind != "Pod" {
		return ""
	}
	return owner.UID
}

// advance notes that the watch has reached version. Versions that cannot be
// compared leave it where it is, and so does what comes before the first list, which
// tells nothing of other claims.
func (c *claims) advance(version string) {
	if order, _ := resourceversion.CompareResourceVersion(version, c.observed); order > 0 { // 0 with an error
		c.observed = version
	}
}

// hasObserved tells whether the list and the watch have reached version.
func (c *claims) hasObserved(version string) bool {
	return !newer(version, c.observed) // whatever it is, it is newer than nothing
}

func nameOf(claim *resourceapi.ResourceClaim) types.NamespacedName {
	return types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
}

// newer tells whether resource version a is later than b. The API server's
// versions are totally ordered within a resource. A version that cannot be
// compared counts as newer: such objects come from incomplete fakes only, in the
// order in which they were made.
func newer(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err != nil || order > 0
}

// wellFormed tells whether a resource version can be compared. "" and "0" stand
// for "any version" in requests and are no versions of anything.
func wellFormed(version string) bool {
	_, err := resourceversion.CompareResourceVersion(version, version)
	return err == nil
}
