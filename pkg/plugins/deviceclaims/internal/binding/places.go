// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"context"
	"fmt"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
)

// places are who is about to be entered in a claim's status.reservedFor, which has room for 256. Pods that are being bound at the same
// time would find that out one by one at the API server, after all else is decided.
type places struct {
	// newest returns the newest object of a claim.
	newest func(namespace, name string) (*resourceapi.ResourceClaim, error)

	mutex sync.Mutex
	// coming are the users that have a place and are not known to be entered, by the claim's UID.
	coming map[types.UID]sets.Set[types.UID]
}

func newPlaces(newest func(namespace, name string) (*resourceapi.ResourceClaim, error)) *places {
	return &places{newest: newest, coming: map[types.UID]sets.Set[types.UID]{}}
}

// Check fails if the claim has no place for the user.
func (p *places) Check(claim *resourceapi.ResourceClaim, user types.UID) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.checkLocked(claim, user)
}

// Left is how many more users than those that have a place the claim has room for.
func (p *places) Left(claim *resourceapi.ResourceClaim, user types.UID) int {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	claim, coming := p.countLocked(claim, user)
	return resourceapi.ResourceClaimReservedForMaxSize - len(claim.Status.ReservedFor) - coming
}

// countLocked returns the newest object of the claim, and how many others than the user have a place in it and are not entered.
func (p *places) countLocked(claim *resourceapi.ResourceClaim, user types.UID) (*resourceapi.ResourceClaim, int) {
	// Read under the mutex: whoever has left has been entered before.
	if newest, err := p.newest(claim.Namespace, claim.Name); err == nil && newest.UID == claim.UID {
		claim = newest
	}
	others := p.coming[claim.UID]
	if len(others) == 0 {
		return claim, 0
	}
	entered := sets.New(user)
	for _, ref := range claim.Status.ReservedFor {
		entered.Insert(ref.UID)
	}
	coming := 0
	for other := range others {
		if !entered.Has(other) {
			coming++
		}
	}
	return claim, coming
}

func (p *places) checkLocked(claim *resourceapi.ResourceClaim, user types.UID) error {
	claim, coming := p.countLocked(claim, user)
	if podclaims.IsReservedFor(claim, user) {
		return nil
	}
	if err := checkReservedForLimit(claim, coming); err != nil {
		return fmt.Errorf("claim %s is %w", klog.KObj(claim), err)
	}
	return nil
}

// checkReservedForLimit fails if no further pod can use the claim, when so many are coming that it is not reserved for yet.
func checkReservedForLimit(claim *resourceapi.ResourceClaim, coming int) error {
	taken := len(claim.Status.ReservedFor) + coming
	if taken < resourceapi.ResourceClaimReservedForMaxSize {
		return nil
	}
	return podevents.Postpone(podevents.ReasonClaimFull, claim,
		fmt.Errorf("already reserved for %d pods, the limit is %d: the pod waits until one of them ends",
			taken, resourceapi.ResourceClaimReservedForMaxSize))
}

// Take gives the user a place, or fails if there is none.
func (p *places) Take(claim *resourceapi.ResourceClaim, user types.UID) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if err := p.checkLocked(claim, user); err != nil {
		return err
	}
	if p.coming[claim.UID] == nil {
		p.coming[claim.UID] = sets.New[types.UID]()
	}
	p.coming[claim.UID].Insert(user)
	return nil
}

// Leave ends what Take began: the user is entered in the claim, or will not be. It tells whether the user had a place.
func (p *places) Leave(claim, user types.UID) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if !p.coming[claim].Has(user) {
		return false
	}
	p.coming[claim].Delete(user)
	if len(p.coming[claim]) == 0 {
		delete(p.coming, claim)
	}
	return true
}

// turns let one pod at a time write to a claim. Of several that share one and write at once, all but one would be refused by the API
// server, and again with each further try.
type turns struct {
	mutex  sync.Mutex
	claims map[types.UID]*turn
}

// turn is whose turn it is at one claim: who sends into the channel.
type turn struct {
	token chan struct{}
	users int // who has the turn, or waits for it
}

func newTurns() *turns { return &turns{claims: map[types.UID]*turn{}} }

// take waits for the caller's turn, which lasts until done is called.
func (t *turns) take(ctx context.Context, claim types.UID) (done func(), err error) {
	t.mutex.Lock()
	mine := t.claims[claim]
	if mine == nil {
		mine = &turn{token: make(chan struct{}, 1)}
		t.claims[claim] = mine
	}
	mine.users++
	t.mutex.Unlock()
	leave := func() {
		t.mutex.Lock()
		defer t.mutex.Unlock()
		if mine.users--; mine.users == 0 {
			delete(t.claims, claim)
		}
	}
	select {
	case mine.token <- struct{}{}:
		return func() { <-mine.token; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}
