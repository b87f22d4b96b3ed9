// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/anishathalye/porcupine"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/usage"
)

// sequential is the tracker as the design describes it, for one caller at a
// time: the specification that concurrent histories are judged by. It shares no
// code with the tracker. Revisions are numbers here, and usage is never kept but
// always computed from layers 1 and 2.
type sequential struct {
	observed int                  // up to where list and watch have come
	known    map[string]claimFact // layer 1, by name
	flying   map[types.UID]flyingFact
	revision uint64
	// moved has the revision at which what is held in a pool changed last.
	moved map[string]uint64
	// told are the events so far; heard says how far each subscriber has come:
	// the next event it must hear, or earlier while it has heard none.
	told  []string
	heard map[int]cursor
	key   string
}

// claimFact is what matters of a claim object.
type claimFact struct {
	name     string
	uid      types.UID
	revision int
	deleting bool
	takes    []take // nil without an allocation
	isThere  bool   // has an allocation, be it without devices
}

// flyingFact is an allocation in flight.
type flyingFact struct {
	takes  []take
	owners []types.UID // ordered
}

// take is one result of an allocation; share is empty for a whole device.
type take struct {
	device usage.DeviceID
	share  types.UID
}

type cursor struct {
	next    int
	started bool
}

func factOf(c *resourceapi.ResourceClaim) claimFact {
	return claimFact{
		name: c.Name, uid: c.UID, revision: revisionOf(c), deleting: c.DeletionTimestamp != nil,
		takes: takesOf(c.Status.Allocation), isThere: c.Status.Allocation != nil,
	}
}

func takesOf(a *resourceapi.AllocationResult) (takes []take) {
	if a == nil {
		return nil
	}
	for i := range a.Devices.Results {
		r := &a.Devices.Results[i]
		if !ptr.Deref(r.AdminAccess, false) {
			takes = append(takes, take{usage.DeviceOf(r), ptr.Deref(r.ShareID, "")})
		}
	}
	return takes
}

// sequentialModel judges operations, which carry their outputs with them.
func sequentialModel() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return (&sequential{}).sealed() },
		Step: func(state, input, _ any) (bool, any) {
			next := state.(*sequential).clone()
			fits := input.(operation).apply(next)
			return fits, next.sealed()
		},
		Equal:             func(a, b any) bool { return a.(*sequential).key == b.(*sequential).key },
		DescribeOperation: func(input, _ any) string { return fmt.Sprintf("%T%+v", input, input) },
		DescribeState:     func(state any) string { return state.(*sequential).key },
	}
}

func (s *sequential) clone() *sequential {
	next := *s
	next.known, next.flying = cloned(s.known), cloned(s.flying)
	next.moved, next.heard = cloned(s.moved), cloned(s.heard)
	next.told = slices.Clip(s.told)
	return &next
}

func cloned[K comparable, V any](m map[K]V) map[K]V {
	if m == nil {
		return map[K]V{}
	}
	return maps.Clone(m)
}

// sealed computes the key by which states are compared. Maps print in order.
func (s *sequential) sealed() *sequential {
	s.key = fmt.Sprintf("seen %d revision %d moved %v\nknown %v\nflying %v\nheard %v\ntold %s",
		s.observed, s.revision, s.moved, s.known, s.flying, s.heard, strings.Join(s.told, "; "))
	return s
}

// marked are the holds of a claim: those of layer 1, and with a true those that
// are in flight only.
func (s *sequential) marked(uid types.UID) map[take]bool {
	holds := map[take]bool{}
	for _, t := range s.flying[uid].takes {
		holds[t] = true
	}
	for _, c := range s.known {
		if c.uid == uid {
			for _, t := range c.takes {
				holds[t] = false
			}
		}
	}
	return holds
}

// holders spells out the usage, like held.
func (s *sequential) holders() map[string][]string {
	uids := map[types.UID]bool{}
	for _, c := range s.known {
		uids[c.uid] = true
	}
	for uid := range s.flying {
		uids[uid] = true
	}
	found := map[string][]string{}
	for uid := range uids {
		for t, inFlight := range s.marked(uid) {
			found[t.device.String()] = append(found[t.device.String()], holderName(uid, inFlight, t.share))
		}
	}
	for _, names := range found {
		slices.Sort(names)
	}
	return found
}

func holderName(uid types.UID, inFlight bool, share types.UID) string {
	name := string(uid)
	if inFlight {
		name += "*"
	}
	if share != "" {
		name += "/" + string(share)
	}
	return name
}

// change counts one change of what is known or in flight of a claim, and tells
// of it if it has a kind.
func (s *sequential) change(kind EventKind, uid types.UID, before, after int, do func()) {
	held := s.marked(uid)
	do()
	holds := s.marked(uid)
	s.revision++

	var freed []string
	for t, inFlight := range held {
		if mark, ok := holds[t]; !ok || mark != inFlight {
			s.moved[t.device.Pool] = s.revision
		}
		if !slices.ContainsFunc(slices.Collect(maps.Keys(holds)), func(o take) bool { return o.device == t.device }) {
			freed = append(freed, t.device.String())
		}
	}
	for t := range holds {
		if _, ok := held[t]; !ok {
			s.moved[t.device.Pool] = s.revision
		}
	}
	if kind != "" {
		slices.Sort(freed)
		s.told = append(s.told, toldOf(s.revision, kind, uid, before, after, slices.Compact(freed)))
	}
}

func toldOf(revision uint64, kind EventKind, uid types.UID, before, after int, freed []string) string {
	return fmt.Sprintf("%d %s %s %d→%d freed %v", revision, kind, uid, before, after, freed)
}

// put is what happens to an object that may be newer than the known one.
func (s *sequential) put(c claimFact) {
	old, was := s.known[c.name]
	if was && c.revision <= old.revision {
		return // I4
	}
	if was && old.uid != c.uid { // I5
		s.forget(old)
		was, old = false, claimFact{}
	}
	kind := ClaimUpdated
	if !was {
		kind = ClaimAdded
	}
	s.change(kind, c.uid, old.revision, c.revision, func() { s.known[c.name] = c })
}

func (s *sequential) forget(c claimFact) {
	s.change(ClaimDeleted, c.uid, c.revision, 0, func() { delete(s.known, c.name) })
}

func (s *sequential) holdsIn(pool string) bool {
	for device := range s.holders() {
		if strings.HasPrefix(device, usage.PoolID{Driver: gpu0.Driver, Pool: pool}.String()+"/") {
			return true
		}
	}
	return false
}

// operation is one call with its outputs. apply does the same to a state, and
// tells whether these outputs are right for it.
type operation interface{ apply(s *sequential) bool }

type (
	// opObserve is Add or Update.
	opObserve struct{ claim claimFact }
	opDelete  struct{ claim claimFact }
	opReplace struct {
		claims   []claimFact
		revision int
	}
	opBookmark struct{ revision int }
	opAssume   struct {
		claim claimFact
		err   error // the reason
	}
	opReserve struct {
		// of the snapshot on which was decided
		revision uint64
		inUse    map[string]bool // pools in which something was held
		owner    types.UID
		wants    []want
		err      error
	}
	opShare struct {
		uid, owner types.UID
		takes      []take
		ok         bool
	}
	opRelease struct {
		uid, owner types.UID
		last       bool
	}
	opPending struct {
		uid     types.UID
		takes   []take
		sharers int
	}
	opSnapshot struct {
		revision uint64
		holders  map[string][]string
	}
	opGet struct {
		name  string
		claim *claimFact
	}
	opSubscribe struct{ subscriber int }
	// opHeard is a call of a subscriber.
	opHeard struct {
		subscriber int
		told       string
	}
	// opHeardAll says that a subscriber will hear no more.
	opHeardAll struct{ subscriber int }
)

// want is one reservation.
type want struct {
	claim claimFact
	takes []take
}

func (o *opObserve) apply(s *sequential) bool {
	if _, ok := s.known[o.claim.name]; !ok && o.claim.revision <= s.observed {
		return true // of a claim that is gone
	}
	s.put(o.claim)
	s.observed = max(s.observed, o.claim.revision)
	return true
}

func (o *opDelete) apply(s *sequential) bool {
	if known, ok := s.known[o.claim.name]; ok && known.uid == o.claim.uid {
		s.forget(known)
	}
	s.observed = max(s.observed, o.claim.revision)
	return true
}

func (o *opReplace) apply(s *sequential) bool {
	for _, name := range slices.Sorted(maps.Keys(s.known)) {
		listed := slices.ContainsFunc(o.claims, func(c claimFact) bool { return c.name == name })
		if !listed && s.known[name].revision <= o.revision {
			s.forget(s.known[name])
		}
	}
	for _, c := range o.claims {
		s.put(c)
	}
	s.observed = o.revision
	return true
}

func (o *opBookmark) apply(s *sequential) bool {
	s.observed = max(s.observed, o.revision)
	return true
}

func (o *opAssume) apply(s *sequential) bool {
	known, ok := s.known[o.claim.name]
	switch {
	case !ok && o.claim.revision <= s.observed:
		return errors.Is(o.err, ErrClaimGone)
	case ok && known.uid != o.claim.uid && o.claim.revision <= known.revision:
		return errors.Is(o.err, ErrClaimRecreated)
	}
	s.put(o.claim)
	return o.err == nil
}

// apply accepts any of the errors that there is a reason for; without one there
// must be none.
func (o *opReserve) apply(s *sequential) bool {
	var reasons []error
	taken := map[usage.DeviceID][]types.UID{} // shares
	for uid := range maps.Keys(s.holdersByUID()) {
		for t := range s.marked(uid) {
			taken[t.device] = append(taken[t.device], t.share)
		}
	}
	for i, w := range o.wants {
		known, ok := s.known[w.claim.name]
		_, inFlight := s.flying[w.claim.uid]
		twice := slices.ContainsFunc(o.wants[:i], func(other want) bool { return other.claim.uid == w.claim.uid })
		switch {
		case !ok:
			reasons = append(reasons, ErrClaimGone)
		case known.uid != w.claim.uid:
			reasons = append(reasons, ErrClaimRecreated)
		case known.deleting:
			reasons = append(reasons, ErrClaimDeleting)
		case known.isThere:
			reasons = append(reasons, ErrClaimAllocated)
		case inFlight, twice:
			reasons = append(reasons, ErrClaimInFlight)
		}
		for _, t := range w.takes {
			if pool := t.device.Pool; s.moved[pool] > o.revision && (o.inUse[pool] || s.holdsIn(pool)) {
				reasons = append(reasons, ErrStale)
			}
			for _, share := range taken[t.device] {
				if share == "" || t.share == "" {
					reasons = append(reasons, errHeld)
				}
			}
			taken[t.device] = append(taken[t.device], t.share)
		}
	}
	if len(reasons) > 0 {
		return slices.ContainsFunc(reasons, func(reason error) bool { return errors.Is(o.err, reason) })
	}
	for _, w := range o.wants {
		s.change("", w.claim.uid, 0, 0, func() {
			s.flying[w.claim.uid] = flyingFact{takes: w.takes, owners: []types.UID{o.owner}}
		})
	}
	return o.err == nil
}

// errHeld stands for any *HeldError.
var errHeld = errors.New("a device is held")

func (s *sequential) holdersByUID() map[types.UID]bool {
	uids := map[types.UID]bool{}
	for uid := range s.flying {
		uids[uid] = true
	}
	for _, c := range s.known {
		uids[c.uid] = true
	}
	return uids
}

func (o *opShare) apply(s *sequential) bool {
	f, ok := s.flying[o.uid]
	if ok && !slices.Contains(f.owners, o.owner) {
		f.owners = slices.Sorted(slices.Values(append(slices.Clip(f.owners), o.owner)))
		s.flying[o.uid] = f
	}
	return o.ok == ok && slices.Equal(o.takes, f.takes)
}

func (o *opRelease) apply(s *sequential) bool {
	f, ok := s.flying[o.uid]
	if !ok {
		return !o.last
	}
	f.owners = slices.DeleteFunc(slices.Clone(f.owners), func(owner types.UID) bool { return owner == o.owner })
	if len(f.owners) > 0 {
		s.flying[o.uid] = f
		return !o.last
	}
	s.change(AllocationReleased, o.uid, 0, 0, func() { delete(s.flying, o.uid) })
	return o.last
}

func (o *opPending) apply(s *sequential) bool {
	f := s.flying[o.uid]
	return o.sharers == len(f.owners) && slices.Equal(o.takes, f.takes)
}

func (o *opSnapshot) apply(s *sequential) bool {
	return o.revision == s.revision && maps.EqualFunc(o.holders, s.holders(), slices.Equal)
}

func (o *opGet) apply(s *sequential) bool {
	known, ok := s.known[o.name]
	if !ok || o.claim == nil {
		return !ok && o.claim == nil
	}
	return known.uid == o.claim.uid && known.revision == o.claim.revision && slices.Equal(known.takes, o.claim.takes)
}

func (o *opSubscribe) apply(s *sequential) bool {
	s.heard[o.subscriber] = cursor{next: len(s.told)}
	return true
}

// apply accepts the events without a gap and in order, beginning with any that is
// not later than the first after the subscription.
func (o *opHeard) apply(s *sequential) bool {
	c, subscribed := s.heard[o.subscriber]
	at := slices.Index(s.told, o.told)
	s.heard[o.subscriber] = cursor{next: at + 1, started: true}
	return subscribed && at >= 0 && (at == c.next || !c.started && at <= c.next)
}

func (o *opHeardAll) apply(s *sequential) bool { return s.heard[o.subscriber].next == len(s.told) }
