// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gate is about pods that PreEnqueue keeps out of the scheduling queue: why, and what they are told of that.
package gate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
)

// ReasonWaitingForClaim is the reason of the condition PodScheduled while a pod is kept out of the scheduling queue for want of a claim. It
// is neither SchedulingGated, which is for gates in the pod's spec, nor Unschedulable, which has autoscalers look for a node.
const ReasonWaitingForClaim = "WaitingForResourceClaim"

// ReasonWaitingToBeTried is the reason of the condition PodScheduled from when the pod is let in until an attempt has ended.
const ReasonWaitingToBeTried = "WaitingToBeScheduled"

// waitingToBeTried is its message.
const waitingToBeTried = "the pod's claims can be used now, it waits to be scheduled"

// grace is how long a pod that nothing has been told yet is kept back before it is told why: most claims are made together with
// their pods, or a moment later by kube-controller-manager.
const grace = 2 * time.Second

// Pods keep the condition PodScheduled of pods true that PreEnqueue keeps out of the scheduling queue. kube-scheduler writes it
// only when an attempt fails: a pod that was never tried has none, and one that was is left with what was true then.
//
// What a pod is kept back for is noted by PreEnqueue, and by the waiting room when a claim of the pod has changed. A goroutine of the
// scheduler that leads gives up what is reserved for the pod, which holds nothing while it waits, and writes the reason, with the
// pod's resource version as the precondition, so that it never writes over what it has not seen. Whenever somebody else changes
// the pod it looks again. Once the pod is let in, the condition says so. It is not removed:
// kube-scheduler patches what differs from the condition as it knows it, which may be the one before, and would leave one without status.
type Pods struct {
	lister corelisters.PodLister
	// Queue has those of which something is to be told.
	Queue workqueue.TypedRateLimitingInterface[types.NamespacedName]
	Grace time.Duration

	mutex sync.Mutex
	// profiles are those of this scheduler, by name. Pods of others are told by others.
	profiles map[string]fwk.Handle
	// giveUp gives up what is reserved for a pod of a profile, by its name.
	giveUp map[string]func(context.Context, *v1.Pod) error
	pods   map[types.NamespacedName]*gatedPod
}

// gatedPod is what is to be told.
type gatedPod struct {
	uid  types.UID
	why  *podclaims.UnusableError
	told string // by an event
}

// New returns no pods.
func New(lister corelisters.PodLister) *Pods {
	return &Pods{
		lister: lister, Grace: grace,
		Queue:    workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[types.NamespacedName]()),
		profiles: map[string]fwk.Handle{}, giveUp: map[string]func(context.Context, *v1.Pod) error{},
		pods: map[types.NamespacedName]*gatedPod{},
	}
}

// Serve has the pods of a profile told, and what is reserved for them given up.
func (g *Pods) Serve(profile fwk.Handle, giveUp func(context.Context, *v1.Pod) error) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.profiles[profile.ProfileName()], g.giveUp[profile.ProfileName()] = profile, giveUp
}

// Keep notes why a pod is kept back. It is false for a pod that is gone: the scheduling queue may take it up after its end,
// and a pod that is kept back keeps back its whole group. Who first notes a pod and then asks learns of what has ended by
// then; of what ends later, PodHandler is told.
func (g *Pods) Keep(pod *v1.Pod, err error) bool {
	var why *podclaims.UnusableError
	if errors.As(err, &why) {
		g.note(pod, why)
	}
	if now, err := g.lister.Pods(pod.Namespace).Get(pod.Name); err == nil && now.UID == pod.UID {
		return true
	}
	g.forget(pod)
	return false
}

func (g *Pods) note(pod *v1.Pod, why *podclaims.UnusableError) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	known := g.pods[podclaims.PodName(pod)]
	if known == nil || known.uid != pod.UID {
		known = &gatedPod{uid: pod.UID}
		g.pods[podclaims.PodName(pod)] = known
	}
	if known.why != nil && known.why.Error() == why.Error() {
		return
	}
	known.why = why
	if ScheduledCondition(pod) == nil {
		g.Queue.AddAfter(podclaims.PodName(pod), g.Grace)
	} else {
		g.Queue.Add(podclaims.PodName(pod)) // what it says is not true any more
	}
}

// Keeps tells whether the pod is kept back, as far as it is known.
func (g *Pods) Keeps(pod *v1.Pod) bool {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	known := g.pods[podclaims.PodName(pod)]
	return known != nil && known.uid == pod.UID
}

// LetIn notes that a pod is not kept back.
func (g *Pods) LetIn(pod *v1.Pod) {
	g.mutex.Lock()
	known := g.pods[podclaims.PodName(pod)]
	delete(g.pods, podclaims.PodName(pod))
	g.mutex.Unlock()
	if known != nil || isToldToWait(pod) {
		g.Queue.Add(podclaims.PodName(pod))
	}
}

// forget forgets a pod, and returns its profile if it was kept back, nil otherwise.
func (g *Pods) forget(pod *v1.Pod) fwk.Handle {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if known := g.pods[podclaims.PodName(pod)]; known == nil || known.uid != pod.UID {
		return nil
	}
	delete(g.pods, podclaims.PodName(pod))
	return g.profiles[pod.Spec.SchedulerName]
}

// PodHandler looks again at pods whose condition somebody has changed, and forgets those that are bound or gone. When one is gone, the
// rest of its group may be tried: the scheduling queue does not look at a group again that has lost a pod.
func (g *Pods) PodHandler(ctx context.Context) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, obj any) {
			pod, ok := obj.(*v1.Pod)
			if !ok {
				return
			}
			if pod.Spec.NodeName != "" {
				g.forget(pod)
				return
			}
			g.mutex.Lock()
			known, ours := g.pods[podclaims.PodName(pod)] != nil, g.profiles[pod.Spec.SchedulerName] != nil
			g.mutex.Unlock()
			if known && ScheduledCondition(pod) != nil || ours && isToldToWait(pod) {
				g.Queue.Add(podclaims.PodName(pod))
			}
		},
		DeleteFunc: func(obj any) {
			pod, ok := obj.(*v1.Pod)
			if !ok {
				return
			}
			if profile := g.forget(pod); profile != nil && podclaims.GroupOf(pod) != "" {
				profile.Activate(klog.FromContext(ctx), map[string]*v1.Pod{podclaims.PodName(pod).String(): pod}) // activates the group
			}
		},
	}
}

// Run writes conditions until the queue is shut down.
func (g *Pods) Run(ctx context.Context) {
	for {
		name, ended := g.Queue.Get()
		if ended {
			return
		}
		switch err := g.tell(ctx, name); {
		case err == nil:
			g.Queue.Forget(name)
		case ctx.Err() == nil:
			if !apierrors.IsConflict(err) {
				klog.FromContext(ctx).Error(err,
					"Cannot write why a pod is kept out of the scheduling queue, or give up what is reserved for it, trying again",
					"pod", klog.KRef(name.Namespace, name.Name))
			}
			g.Queue.AddRateLimited(name)
		}
		g.Queue.Done(name)
	}
}

// tell makes the pod's condition what it should be.
func (g *Pods) tell(ctx context.Context, name types.NamespacedName) error {
	var why *podclaims.UnusableError
	var profile fwk.Handle
	var giveUp func(context.Context, *v1.Pod) error
	g.mutex.Lock()
	pod, err := g.lister.Pods(name.Namespace).Get(name.Name) // under the mutex: as new as what has been noted, or newer
	known := g.pods[name]
	if known != nil && err == nil && known.uid == pod.UID {
		why = known.why
	}
	if err == nil {
		profile, giveUp = g.profiles[pod.Spec.SchedulerName], g.giveUp[pod.Spec.SchedulerName]
	}
	g.mutex.Unlock()
	if profile == nil || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
		return nil // gone, about to be, or none of ours
	}

	if len(pod.Spec.SchedulingGates) > 0 || why == nil && !isToldToWait(pod) {
		return nil // the condition says what it should
	}
	condition := &v1.PodCondition{
		Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: ReasonWaitingToBeTried, Message: waitingToBeTried,
		ObservedGeneration: podutil.CalculatePodConditionObservedGeneration(&pod.Status, pod.Generation, v1.PodScheduled),
	}
	if why != nil {
		condition.Reason, condition.Message = ReasonWaitingForClaim, why.Error()
	}
	if err := patchCondition(ctx, profile, pod, condition); err != nil || why == nil {
		return err
	}
	g.mutex.Lock()
	isNews := known.told != why.Error()
	known.told = why.Error()
	g.mutex.Unlock()
	if isNews {
		var claim runtime.Object
		if why.Claim.Name != "" {
			claim = podevents.Claim(why.Claim.NamespacedName)
		}
		recorder := profile.EventRecorder().WithLogger(klog.FromContext(ctx))
		recorder.Eventf(podevents.Pod(pod), claim, v1.EventTypeWarning, why.Reason, "Scheduling", "%s", podevents.Note(why))
	}
	var adopted *binding.AdoptedError
	if err := giveUp(ctx, pod); errors.As(err, &adopted) {
		g.Queue.AddAfter(name, binding.AdoptionRenewal)
	} else if err != nil {
		return err
	}
	return nil
}

// patchCondition writes the pod's condition, if that differs from what it is.
func patchCondition(ctx context.Context, handle fwk.Handle, pod *v1.Pod, condition *v1.PodCondition) error {
	podutil.UpdatePodCondition(pod.Status.DeepCopy(), condition) // sets the time of the last transition
	if was := ScheduledCondition(pod); was != nil && *condition == *was {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID, "resourceVersion": pod.ResourceVersion},
		"status":   map[string]any{"conditions": []any{condition}},
	})
	if err != nil {
		return err
	}
	pods := handle.ClientSet().CoreV1().Pods(pod.Namespace)
	_, err = pods.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("patch the condition %s: %w", v1.PodScheduled, err)
	}
	return nil
}

// ScheduledCondition returns the condition PodScheduled, nil if the pod has none.
func ScheduledCondition(pod *v1.Pod) *v1.PodCondition {
	_, condition := podutil.GetPodCondition(&pod.Status, v1.PodScheduled)
	return condition
}

// isToldToWait tells whether the pod's condition says that it waits for a claim.
func isToldToWait(pod *v1.Pod) bool {
	condition := ScheduledCondition(pod)
	return condition != nil && condition.Reason == ReasonWaitingForClaim && condition.Status == v1.ConditionFalse
}
