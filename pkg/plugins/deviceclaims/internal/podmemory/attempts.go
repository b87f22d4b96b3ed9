// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package podmemory remembers single pods between the calls of the framework: who is being bound, which devices failed
// for whom, who waits for claims to leave, and whose status may name a claim.
package podmemory

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// Attempts are the pods between Reserve and the end of their binding. A pod can be preempted in this time without
// being deleted, and nothing but its context tells: that of PreBind. Between Permit and PreBind one cannot know.
type Attempts struct {
	mutex sync.Mutex
	byPod map[types.UID]*Attempt
	// gaveWay are the pods of a group whose last attempt ended at the fence. That of a group without such pods is not kept.
	gaveWay map[types.NamespacedName]sets.Set[types.UID]
	// failed is how often in a row the binding of a pod of a group has failed, Pauses what it waits after that.
	failed map[types.UID]int
	Pauses wait.Backoff
	// refused are the pods of a group that Reserve has refused though their group fitted.
	refused map[types.UID]refusals
}

// refusals are how often that was until the pod is bound, and until when it pauses.
type refusals struct {
	times int
	until time.Time
}

// MemberPauses are those of the scheduling queue's defaults.
var MemberPauses = wait.Backoff{Duration: time.Second, Factor: 2, Cap: 10 * time.Second, Steps: math.MaxInt32}

// Attempt is one of them.
type Attempt struct {
	Pod    *v1.Pod
	handle fwk.Handle
	// binding is the context of PreBind, nil before.
	binding atomic.Pointer[context.Context]
}

// newAttempts returns no attempts.
func newAttempts() *Attempts {
	return &Attempts{
		byPod: map[types.UID]*Attempt{}, gaveWay: map[types.NamespacedName]sets.Set[types.UID]{},
		failed: map[types.UID]int{}, Pauses: MemberPauses, refused: map[types.UID]refusals{},
	}
}

// Refuse notes that Reserve has refused a pod. One of a group pauses from the second time on: for the scheduling queue the group has been
// scheduled, and is tried again at once. The first time somebody else was faster, and another node may do.
func (a *Attempts) Refuse(pod *v1.Pod, now time.Time) {
	if podclaims.GroupOf(pod) == "" || !utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload) {
		return
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	r := a.refused[pod.UID]
	if r.times > 0 {
		r.until = now.Add(a.pause(r.times - 1))
	}
	r.times++
	a.refused[pod.UID] = r
}

// PausesUntil is until when a pod pauses that Reserve has refused, zero if it does not.
func (a *Attempts) PausesUntil(pod types.UID) time.Time {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.refused[pod].until
}

// pause is how long a pod waits that has failed so many times before. The mutex is held.
func (a *Attempts) pause(before int) time.Duration {
	pauses := a.Pauses
	for range before {
		pauses.Step()
	}
	return pauses.Step()
}

// Begin notes that Reserve has begun for a pod, on a scheduler's handle that knows whether the pod waits in Permit.
func (a *Attempts) Begin(handle fwk.Handle, pod *v1.Pod) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.byPod[pod.UID] = &Attempt{Pod: pod, handle: handle}
	a.forgetWay(pod)
}

// GiveWay notes that a pod ends its attempt at the fence, if it has a group.
func (a *Attempts) GiveWay(pod *v1.Pod) {
	if podclaims.GroupOf(pod) == "" {
		return
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	key := podclaims.GroupKey(pod)
	if a.gaveWay[key] == nil {
		a.gaveWay[key] = sets.New[types.UID]()
	}
	a.gaveWay[key].Insert(pod.UID)
}

// HaveGivenWay returns the pods of the pod's group that have given way and not begun another attempt.
func (a *Attempts) HaveGivenWay(pod *v1.Pod) sets.Set[types.UID] {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.gaveWay[podclaims.GroupKey(pod)].Clone()
}

// PodHandler forgets pods that are gone.
func (a *Attempts) PodHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		if pod, ok := obj.(*v1.Pod); ok && podclaims.GroupOf(pod) != "" {
			a.Forget(pod)
		}
	}}
}

// Forget forgets a pod that is gone, and has no attempt.
func (a *Attempts) Forget(pod *v1.Pod) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.forgetWay(pod)
	delete(a.failed, pod.UID)
	delete(a.refused, pod.UID)
}

// forgetWay forgets that a pod of a group has given way. The mutex is held.
func (a *Attempts) forgetWay(pod *v1.Pod) {
	key := podclaims.GroupKey(pod)
	if a.gaveWay[key].Delete(pod.UID).Len() == 0 {
		delete(a.gaveWay, key)
	}
}

// End ends the attempt of a pod that is bound, or gone.
func (a *Attempts) End(pod types.UID) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	delete(a.byPod, pod)
	delete(a.failed, pod)
	delete(a.refused, pod)
}

// Fail is End for a pod that is not bound. It returns how long a pod of a group waits before it is tried again if its binding had begun:
// the scheduling queue makes it no pause, as it makes others. One that was preempted makes way at once.
func (a *Attempts) Fail(pod *v1.Pod) time.Duration {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	attempt := a.byPod[pod.UID]
	delete(a.byPod, pod.UID)
	if attempt == nil || attempt.binding.Load() == nil || attempt.IsCancelled(true) || podclaims.GroupOf(pod) == "" ||
		!utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload) {
		return 0
	}
	pause := a.pause(a.failed[pod.UID])
	a.failed[pod.UID]++
	return pause
}

// Of returns the attempt of a pod, nil if it has none.
func (a *Attempts) Of(pod types.UID) *Attempt {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.byPod[pod]
}

// PreBind tells that PreBind has begun.
func (a *Attempts) PreBind(ctx context.Context, pod types.UID) {
	if attempt := a.Of(pod); attempt != nil {
		attempt.binding.Store(&ctx)
	}
}

// IsCancelled tells whether the pod will not be bound, because it was preempted. If that need not be certain, a pod
// between Permit and PreBind counts, too: it does not stay there.
func (a *Attempt) IsCancelled(certain bool) bool {
	binding := a.binding.Load()
	if binding == nil {
		return !certain && a.handle.GetWaitingPod(a.Pod.UID) == nil
	}
	cause := context.Cause(*binding)
	return cause != nil && !errors.Is(cause, context.Canceled) && cause.Error() != preBindHasEnded
}

// preBindHasEnded is the cause with which the framework cancels the context of PreBind when all plugins have passed, or one
// has failed. The pod is about to be bound then, or to give its devices back. One that is preempted in the moment before
// the framework marks it is not told from it.
const preBindHasEnded = "RunPreBindPlugins has completed"
