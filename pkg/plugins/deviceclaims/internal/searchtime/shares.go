// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package searchtime

import (
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Shares is the time of the scheduling loop that the pods of each namespace have for long searches and for CEL expressions: for what
// most pods do not need. Of each second a namespace saves a part, up to mostSaved. An attempt may use what is saved, and has
// FreeTime in any case. Where that was too little the next one waits until twice as much is saved, so that what is hard comes to an
// end and is seldom tried. So however many hard pods a namespace has, they take no more of the loop than 1/savedPart, after the
// first mostSaved, beside what any pod takes.
type Shares struct {
	now func() time.Time
	// evaluation is how long the CEL expressions of a pod may be evaluated in one attempt.
	evaluation time.Duration

	mutex    sync.Mutex
	accounts map[string]*account
}

const (
	// savedPart: one part in so many of the time is a namespace's. With more, long searches delay more than one in a hundred of the pods of
	// others, where the loop is busy half of the time.
	savedPart = 250
	// mostSaved is saved at first. It is enough for some hundred selectors on 5,000 nodes of 8 GPUs, which are all new after a restart.
	mostSaved  = 20 * time.Second
	leastSaved = 250 * time.Millisecond
	// FreeTime is not counted. Without long searches an attempt takes about as much.
	FreeTime = 10 * time.Millisecond
	// manyAccounts is when those are forgotten that are as if they were new.
	manyAccounts = 1000
)

// NewShares returns those of a scheduler that has just begun. evaluation is how long the CEL expressions
// of a pod may be evaluated in one attempt.
func NewShares(now func() time.Time, evaluation time.Duration) *Shares {
	return &Shares{now: now, evaluation: evaluation, accounts: map[string]*account{}}
}

// of returns the account of a pod's namespace.
func (s *Shares) of(pod *v1.Pod) *account {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	a := s.accounts[pod.Namespace]
	if a == nil {
		if len(s.accounts) >= manyAccounts {
			for namespace, other := range s.accounts {
				if other.update(); other.saved >= mostSaved && other.wanted == 0 {
					delete(s.accounts, namespace)
				}
			}
		}
		a = &account{shares: s, saved: max(mostSaved, s.evaluation), at: s.now()} // who lifts one bound means both
		s.accounts[pod.Namespace] = a
	}
	return a
}

// Saved is what the pod's namespace has saved, less than zero where more was used.
func (s *Shares) Saved(pod *v1.Pod) time.Duration {
	a := s.of(pod)
	s.mutex.Lock()
	defer s.mutex.Unlock()
	a.update()
	return a.saved
}

// Spend takes from what the pod's namespace has saved.
func (s *Shares) Spend(pod *v1.Pod, used time.Duration) { s.of(pod).spend(used) }

// account is what a namespace has saved, guarded by the mutex of shares.
type account struct {
	shares *Shares
	saved  time.Duration
	at     time.Time // up to which it has been saved
	// wanted is how much has to be saved until an attempt gets more than FreeTime.
	wanted time.Duration
}

func (a *account) update() {
	now := a.shares.now()
	a.saved = min(a.saved+now.Sub(a.at)/savedPart, max(a.saved, mostSaved))
	a.at = now
}

// missing is how much has to be saved yet, with the mutex held.
func (a *account) missing() time.Duration {
	a.update()
	return max(0, max(a.wanted, leastSaved)-a.saved)
}

// grant returns how long an attempt may take.
func (a *account) grant() time.Duration {
	a.shares.mutex.Lock()
	defer a.shares.mutex.Unlock()
	if a.missing() > 0 {
		return FreeTime
	}
	a.wanted = 0
	return a.saved + FreeTime
}

// spend takes what an attempt has used.
func (a *account) spend(used time.Duration) {
	a.shares.mutex.Lock()
	defer a.shares.mutex.Unlock()
	a.update()
	a.saved -= used
}

// want notes that what was granted was not enough.
func (a *account) want(granted time.Duration) {
	a.shares.mutex.Lock()
	defer a.shares.mutex.Unlock()
	if granted > FreeTime {
		a.wanted = max(a.wanted, min(2*granted, mostSaved))
	}
}

// wait returns when an attempt gets more than FreeTime again, zero if it does now.
func (a *account) wait() time.Time {
	a.shares.mutex.Lock()
	defer a.shares.mutex.Unlock()
	missing := a.missing()
	if missing == 0 {
		return time.Time{}
	}
	return a.shares.now().Add(missing * savedPart)
}

// PutOff says until when a pod without an answer is put off because its namespace has no time for it, nothing if it is not.
func PutOff(pod *v1.Pod, until, now time.Time) string {
	if until.IsZero() {
		return ""
	}
	return fmt.Sprintf("namespace %s has used its share of the scheduler's time for long searches and CEL expressions: more in %s",
		pod.Namespace, until.Sub(now).Round(time.Second))
}
