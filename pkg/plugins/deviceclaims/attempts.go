package deviceclaims

import (
	"context"
	"errors"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"
	fwk "k8s.io/kube-scheduler/framework"
)

// attempts are the pods between Reserve and the end of their binding. A pod can be preempted in this time without
// being deleted, and nothing but its context tells: that of PreBind. Between Permit and PreBind one cannot know.
type attempts struct {
	mutex sync.Mutex
	byPod map[types.UID]*bindingAttempt
	// gaveWay are the pods of a group whose last attempt ended at the fence. That of a group without such pods is not kept.
	gaveWay map[types.NamespacedName]sets.Set[types.UID]
}

// bindingAttempt is one of them.
type bindingAttempt struct {
	pod    *v1.Pod
	handle fwk.Handle
	mutex  sync.Mutex
	// binding is the context of PreBind, nil before.
	binding context.Context
}

func newAttempts() *attempts {
	return &attempts{byPod: map[types.UID]*bindingAttempt{}, gaveWay: map[types.NamespacedName]sets.Set[types.UID]{}}
}

func (a *attempts) begin(handle fwk.Handle, pod *v1.Pod) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.byPod[pod.UID] = &bindingAttempt{pod: pod, handle: handle}
	a.forgetWay(pod)
}

// giveWay notes that a pod of a group ends its attempt at the fence, and returns all of the group that have.
func (a *attempts) giveWay(pod *v1.Pod) sets.Set[types.UID] {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	left := a.gaveWay[groupKey(pod)]
	if left == nil {
		left = sets.New[types.UID]()
		a.gaveWay[groupKey(pod)] = left
	}
	return left.Insert(pod.UID).Clone()
}

// podHandler forgets pods that are gone.
func (a *attempts) podHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = tombstone.Obj
		}
		if pod, ok := obj.(*v1.Pod); ok && groupOf(pod) != "" {
			a.mutex.Lock()
			defer a.mutex.Unlock()
			a.forgetWay(pod)
		}
	}}
}

// forgetWay forgets that a pod of a group has given way. The mutex is held.
func (a *attempts) forgetWay(pod *v1.Pod) {
	key := groupKey(pod)
	if a.gaveWay[key].Delete(pod.UID).Len() == 0 {
		delete(a.gaveWay, key)
	}
}

func groupKey(pod *v1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: pod.Namespace, Name: groupOf(pod)}
}

func (a *attempts) end(pod types.UID) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	delete(a.byPod, pod)
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

// isCancelled tells whether the pod will not be bound, because it was preempted. If that need not be certain, a pod
// between Permit and PreBind counts, too: it does not stay there.
func (a *bindingAttempt) isCancelled(certain bool) bool {
	a.mutex.Lock()
	binding := a.binding
	a.mutex.Unlock()
	if binding == nil {
		return !certain && a.handle.GetWaitingPod(a.pod.UID) == nil
	}
	// A binding that just ends cancels its context, too, and gives no cause.
	cause := context.Cause(binding)
	return cause != nil && !errors.Is(cause, context.Canceled)
}

// PostBind forgets the attempt of a pod that is bound.
func (pl *Plugin) PostBind(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ string) {
	pl.shared.attempts.end(pod.UID)
}
