// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"

	"stowage.dev/stowage/pkg/usage"
)

// Store returns what a Reflector on ResourceClaims writes to. Run uses it; call
// it only to feed a tracker without an API server.
//
// Add, Update and Delete must come in the order of resource versions, as a watch
// brings them. What comes once more later on changes nothing. The store accepts
// streamed lists: the Reflector collects those in a store of its own and hands
// them over in one Replace.
func (t *Tracker) Store() cache.ReflectorStore { return store{t} }

// store is the Reflector's side of a Tracker.
type store struct{ tracker *Tracker }

var (
	_ cache.ReflectorStore         = store{}
	_ cache.ReflectorBookmarkStore = store{}
)

// Add takes a claim that the watch has seen for the first time.
func (s store) Add(obj any) error { return s.tracker.observe(obj) }

// Update takes a claim that the watch has seen change.
func (s store) Update(obj any) error { return s.tracker.observe(obj) }

// Delete takes the last state of a claim that the watch has seen go.
func (s store) Delete(obj any) error { return s.tracker.observeDeletion(obj) }

// Replace takes all claims as they were at version.
func (s store) Replace(objs []any, version string) error {
	return s.tracker.observeList(objs, version)
}

// Bookmark takes note that there were no changes up to version.
func (s store) Bookmark(version string) error {
	s.tracker.mutex.Lock()
	defer s.tracker.mutex.Unlock()
	s.tracker.advance(version)
	return nil
}

// Resync does nothing: what the tracker derives from claims is always complete.
func (s store) Resync() error { return nil }

// observe applies a watch event that adds or changes a claim.
func (t *Tracker) observe(obj any) error {
	claim, err := claimOf(obj)
	if err != nil {
		return err
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.claims.get(nameOf(claim)) == nil && t.claims.hasObserved(claim.ResourceVersion) {
		// Brought once more after the claim's deletion. No tombstone is needed to tell: the watch is past it.
		staleObjects.Inc()
		return nil
	}
	// Before layer 1, which ignores what it knows from an answer already.
	if s := t.standings.event(claim, t.claims.observed); s != nil && t.judge != nil {
		s.verdict = t.verdictOf(s, usage.View{})
	}
	t.put(claim)
	t.advance(claim.ResourceVersion)
	return nil
}

// observeDeletion applies a watch event that deletes a claim. The event carries
// the version of the deletion. A UID never comes back, so it is final for that
// UID. Another UID under the same name is a later claim, which we made.
func (t *Tracker) observeDeletion(obj any) error {
	claim, err := claimOf(obj)
	if err != nil {
		return err
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	delete(t.standings, claim.UID)
	switch known := t.claims.byUID[claim.UID]; {
	case known != nil:
		t.remove(known)
	case t.claims.get(nameOf(claim)) != nil:
		staleObjects.Inc()
	}
	t.advance(claim.ResourceVersion)
	return nil
}

// observeList applies a list: all claims as they were at version. A claim that is
// not in it is gone, unless what we know of it is later than the list, which
// only the answer to a write of ours can be. All of it is one change: no
// snapshot shows a part.
func (t *Tracker) observeList(objs []any, version string) error {
	if !wellFormed(version) {
		return fmt.Errorf("list of ResourceClaims: resourceVersion %q: %w", version, ErrClaimVersion)
	}
	listed := make([]*resourceapi.ResourceClaim, 0, len(objs))
	names := make(sets.Set[types.NamespacedName], len(objs))
	for _, obj := range objs {
		claim, err := claimOf(obj)
		if err != nil {
			return fmt.Errorf("list of ResourceClaims at resourceVersion %s: %w", version, err)
		}
		listed = append(listed, claim)
		names.Insert(nameOf(claim))
	}

	t.mutex.Lock()
	defer t.mutex.Unlock()
	if before := t.claims.observed; before != "" && newer(before, version) {
		t.logger.Error(nil, "The API server's ResourceClaims went back in time, keeping what is known to be newer; restart all components if "+
			"its storage was restored", "observed", before, "listed", version)
	}

	var gone []*resourceapi.ResourceClaim
	kept := 0
	for name, known := range t.claims.byName {
		switch {
		case names.Has(name):
		case wellFormed(known.ResourceVersion) && newer(known.ResourceVersion, version):
			kept++
		default:
			gone = append(gone, known)
		}
	}
	slices.SortFunc(gone, compareNames)
	for _, known := range gone {
		t.remove(known)
	}
	t.standings = t.standings.list(listed, t.claims.observed, version)
	t.events.pending = slices.Grow(t.events.pending, len(listed)) // at the start each claim is an event
	for _, claim := range listed {
		t.put(claim)
	}
	// Also if that is a step back: the watch begins at version and brings again
	// whatever came after it.
	t.claims.observed = version
	t.tellWaiters()

	select {
	case <-t.synced:
	default:
		close(t.synced)
	}
	t.logger.V(2).Info("ResourceClaims listed", "resourceVersion", version, "claims", len(listed), "keptNewer", kept,
		"heldDevices", t.index.Len())
	return nil
}

// Assume takes the object with which the API server answered a write, so that
// nothing waits for the watch to bring it. It is ignored if something as new is
// known already. Call it before Release: then the device passes from in flight
// to allocated without being free in between.
//
// It fails with a ClaimError, changing nothing, if the claim is known to be gone
// (ErrClaimGone) or replaced by a later one (ErrClaimRecreated), or if the
// object's resource version is not comparable (ErrClaimVersion).
func (t *Tracker) Assume(claim *resourceapi.ResourceClaim) error {
	ref := usage.RefOf(claim)
	if !wellFormed(claim.ResourceVersion) {
		return &ClaimError{Claim: ref, Reason: ErrClaimVersion, Found: claim.ResourceVersion}
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	known := t.claims.get(nameOf(claim))
	switch {
	case known == nil && t.claims.hasObserved(claim.ResourceVersion):
		// The watch is past this write, and the claim is not there any more.
		staleObjects.Inc()
		return claimError(ref, ErrClaimGone)
	case known != nil && known.UID != claim.UID && !newer(claim.ResourceVersion, known.ResourceVersion):
		staleObjects.Inc()
		return recreatedError(ref, known.UID)
	}
	t.put(trimmed(claim))
	return nil
}

// advance notes that the watch has reached version.
func (t *Tracker) advance(version string) {
	t.claims.advance(version)
	t.tellWaiters()
}

// put makes claim the known object, if it is newer, and moves the usage. All
// changes of layer 1 other than deletions go through here.
func (t *Tracker) put(claim *resourceapi.ResourceClaim) {
	old, stored := t.claims.put(claim)
	if !stored {
		if old.ResourceVersion != claim.ResourceVersion {
			staleObjects.Inc()
		}
		return
	}
	if old != nil && old.UID != claim.UID {
		t.changed(Event{Kind: ClaimDeleted, Claim: usage.RefOf(old), Old: old, Freed: t.refold(usage.RefOf(old))})
		old = nil
	}
	event := Event{Kind: ClaimUpdated, Claim: usage.RefOf(claim), Old: old, New: claim}
	if old == nil {
		event.Kind = ClaimAdded
	}
	event.Freed = t.refold(event.Claim)
	t.changed(event)
}

// remove forgets a claim and what it holds. An allocation of it in flight holds
// on until it is released.
func (t *Tracker) remove(claim *resourceapi.ResourceClaim) {
	t.claims.remove(claim)
	ref := usage.RefOf(claim)
	t.changed(Event{Kind: ClaimDeleted, Claim: ref, Old: claim, Freed: t.refold(ref)})
}

// claimOf returns obj as a claim.
func claimOf(obj any) (*resourceapi.ResourceClaim, error) {
	claim, ok := obj.(*resourceapi.ResourceClaim)
	if !ok {
		return nil, fmt.Errorf("claim tracker: unexpected object of type %T instead of *ResourceClaim", obj)
	}
	return trimmed(claim), nil
}

// trimmed returns the claim without managedFields, which are often the larger
// part of it. An update without them leaves them as they are in the API.
func trimmed(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	if len(claim.ManagedFields) == 0 {
		return claim
	}
	smaller := *claim
	smaller.ManagedFields = nil
	return &smaller
}

func compareNames(a, b *resourceapi.ResourceClaim) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}
