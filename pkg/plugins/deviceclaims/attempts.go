package deviceclaims

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"
)

// attempts are the pods between Reserve and the end of their binding. A pod can be preempted in this time without
// being deleted, and nothing but its context tells: that of PreBind. Between Permit and PreBind one cannot know.
type attempts struct {
	mutex sync.Mutex
	byPod map[types.UID]*bindingAttempt
	// gaveWay are the pods of a group whose last attempt ended at the fence. That of a group without such pods is not kept.
	gaveWay map[types.NamespacedName]sets.Set[types.UID]
	// failed is how often in a row the binding of a pod of a group has failed, pauses what it waits after that.
	failed map[types.UID]int
	pauses wait.Backoff
	// refused are the pods of a group that Reserve has refused though their group fitted.
	refused map[types.UID]refusals
}

// refusals are how often that was until the pod is bound, and until when it pauses.
type refusals struct {
	times int
	until time.Time
}

// memberPauses are those of the scheduling queue's defaults.
var memberPauses = wait.Backoff{Duration: time.Second, Factor: 2, Cap: 10 * time.Second, Steps: math.MaxInt32}

// bindingAttempt is one of them.
type bindingAttempt struct {
	pod    *v1.Pod
	handle fwk.Handle
	mutex  sync.Mutex
	// binding is the context of PreBind, nil before.
	binding context.Context
}

func newAttempts() *attempts {
	return &attempts{
		byPod: map[types.UID]*bindingAttempt{}, gaveWay: map[types.NamespacedName]sets.Set[types.UID]{},
		failed: map[types.UID]int{}, pauses: memberPauses, refused: map[types.UID]refusals{},
	}
}

// refuse notes that Reserve has refused a pod. One of a group pauses from the second time on: for the scheduling queue the group has been
// scheduled, and is tried again at once. The first time somebody else was faster, and another node may do.
func (a *attempts) refuse(pod *v1.Pod, now time.Time) {
	if groupOf(pod) == "" || !utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload) {
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

// pausesUntil is until when a pod pauses that Reserve has refused, zero if it does not.
func (a *attempts) pausesUntil(pod types.UID) time.Time {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.refused[pod].until
}

// pause is how long a pod waits that has failed so many times before. The mutex is held.
func (a *attempts) pause(before int) time.Duration {
	pauses := a.pauses
	for range before {
		pauses.Step()
	}
	return pauses.Step()
}

func (a *attempts) begin(handle fwk.Handle, pod *v1.Pod) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.byPod[pod.UID] = &bindingAttempt{pod: pod, handle: handle}
	a.forgetWay(pod)
}

// giveWay notes that a pod ends its attempt at the fence, if it has a group.
func (a *attempts) giveWay(pod *v1.Pod) {
	if groupOf(pod) == "" {
		return
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	key := groupKey(pod)
	if a.gaveWay[key] == nil {
		a.gaveWay[key] = sets.New[types.UID]()
	}
	a.gaveWay[key].Insert(pod.UID)
}

// haveGivenWay returns the pods of the pod's group that have given way and not begun another attempt.
func (a *attempts) haveGivenWay(pod *v1.Pod) sets.Set[types.UID] {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.gaveWay[groupKey(pod)].Clone()
}

// podHandler forgets pods that are gone.
func (a *attempts) podHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = tombstone.Obj
		}
		if pod, ok := obj.(*v1.Pod); ok && groupOf(pod) != "" {
			a.forget(pod)
		}
	}}
}

// forget forgets a pod that is gone, and has no attempt.
func (a *attempts) forget(pod *v1.Pod) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.forgetWay(pod)
	delete(a.failed, pod.UID)
	delete(a.refused, pod.UID)
}

// forgetWay forgets that a pod of a group has given way. The mutex is held.
func (a *attempts) forgetWay(pod *v1.Pod) {
	key := groupKey(pod)
	if a.gaveWay[key].Delete(pod.UID).Len() == 0 {
		delete(a.gaveWay, key)
	}
}

// end ends the attempt of a pod that is bound, or gone.
func (a *attempts) end(pod types.UID) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	delete(a.byPod, pod)
	delete(a.failed, pod)
	delete(a.refused, pod)
}

// fail is end for a pod that is not bound. It returns how long a pod of a group waits before it is tried again if its binding had begun: the
// scheduling queue makes it no pause, as it makes others. One that was preempted makes way at once.
func (a *attempts) fail(pod *v1.Pod) time.Duration {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	attempt := a.byPod[pod.UID]
	delete(a.byPod, pod.UID)
	if attempt == nil || !attempt.isBinding() || attempt.isCancelled(true) || groupOf(pod) == "" || !utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload) {
		return 0
	}
	pause := a.pause(a.failed[pod.UID])
	a.failed[pod.UID]++
	return pause
}

// of returns the attempt of a pod, nil if it has none.
func (a *attempts) of(pod types.UID) *bindingAttempt {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.byPod[pod]
}

// preBind tells that PreBind has begun.
func (a *attempts) preBind(ctx context.Context, pod types.UID) {
	if attempt := a.of(pod); attempt != nil {
		attempt.mutex.Lock()
		defer attempt.mutex.Unlock()
		attempt.binding = ctx
	}
}

// isBinding tells whether PreBind has begun.
func (a *bindingAttempt) isBinding() bool {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.binding != nil
}

// isCancelled tells whether the pod will not be bound, because it was preempted. If that need not be certain, a pod
// between Permit and PreBind counts, too: it does not stay there.
func (a *bindingAttempt) isCancelled(certain bool) bool {
	a.mutex.Lock()
	binding := a.binding
	a.mutex.Unlock()
	if binding == nil {
		return !certain && a.handle.GetWaitingPod(a.pod.UID) == nil
	}
	cause := context.Cause(binding)
	return cause != nil && !errors.Is(cause, context.Canceled) && cause.Error() != preBindHasEnded
}

// preBindHasEnded is the cause with which the framework cancels the context of PreBind when all plugins have passed, or one has failed. The pod is
// about to be bound then, or to give its devices back. One that is preempted in the moment before the framework marks it is not told from it.
const preBindHasEnded = "RunPreBindPlugins has completed"

// remembered is how many notes of pods there are: none if no pod is being bound, or pauses.
func (a *attempts) remembered() int {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return len(a.byPod) + len(a.gaveWay) + len(a.failed) + len(a.refused)
}
