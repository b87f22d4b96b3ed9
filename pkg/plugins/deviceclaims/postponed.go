package deviceclaims

import (
	"context"
	"errors"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/tracker"
)

// Reasons of events about pods. Events of one pod, claim, type and reason are counted as one, and show the text of the first of them: so
// what differs in more than numbers has a reason of its own.
const (
	// reasonLostRace: another scheduler, or another pod, was faster. The pod is tried again.
	reasonLostRace = "LostRaceForDevices"
	// reasonClaimChanged: the claim is not what the pod was scheduled with. The pod is tried again.
	reasonClaimChanged = "ClaimChanged"
	// reasonClaimBusy: the claim is being allocated for another pod.
	reasonClaimBusy = "ClaimBeingAllocated"
	// reasonClaimFull: as many pods use the claim as the API allows.
	reasonClaimFull = "ClaimFull"
	// reasonFenceTimeout: it cannot be told whether another scheduler was faster.
	reasonFenceTimeout = "FenceTimeout"
	// reasonDeallocation: the claims of pods that were evicted for the pod are about to be deallocated.
	reasonDeallocation = "WaitingForDeallocation"
	// reasonNotReady: devices that have to be made ready before a pod is bound are not.
	reasonNotReady = "DevicesNotReady"
)

// postponedError says that a pod cannot have its devices now, and will be tried again when it can. The scheduler works as it should, so
// there is one event, of the given type and reason, and no error in the log.
type postponedError struct {
	eventType, reason string
	claim             types.NamespacedName // that it is about; empty if there are several
	err               error
}

func (e *postponedError) Error() string { return e.err.Error() }
func (e *postponedError) Unwrap() error { return e.err }

// postpone is about one claim.
func postpone(reason string, claim *resourceapi.ResourceClaim, err error) error {
	return &postponedError{v1.EventTypeNormal, reason, types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, err}
}

// asPostponed tells which failures of PreBind postpone the pod. Nil stands for all others, which are errors.
func asPostponed(err error) *postponedError {
	var known *postponedError
	var lost *fence.YieldError
	var changed *tracker.ClaimError
	var notReady *notReadyError
	var adopted *adoptedError
	switch {
	case errors.As(err, &known):
		return &postponedError{known.eventType, known.reason, known.claim, err}
	case errors.Is(err, fence.ErrTimeout):
		return &postponedError{eventType: v1.EventTypeWarning, reason: reasonFenceTimeout, err: err}
	case errors.As(err, &lost):
		claim := types.NamespacedName{Namespace: lost.Claim.Namespace, Name: lost.Claim.Name}
		return &postponedError{v1.EventTypeNormal, reasonLostRace, claim, err}
	case errors.As(err, &changed):
		return &postponedError{eventType: v1.EventTypeNormal, reason: reasonClaimChanged, err: err}
	case errors.As(err, &notReady):
		return &postponedError{eventType: v1.EventTypeWarning, reason: reasonNotReady, err: err}
	case errors.As(err, &adopted):
		return &postponedError{eventType: v1.EventTypeNormal, reason: reasonLostRace, err: err}
	}
	return nil
}

// statusOfBinding is the status with which PreBind fails. A pod that is postponed is one that does not fit the node now: the framework
// pauses before it tries it again, as it does after an error, and logs no error.
func statusOfBinding(pod *v1.Pod, node string, err error) *fwk.Status {
	postponed := asPostponed(err)
	if postponed == nil {
		return fwk.AsStatus(err)
	}
	// No plugin waits for an event, so the pod is tried again by time. The scheduling queue adds to the sets: they must not be nil.
	fit := &framework.FitError{Pod: pod, NumAllNodes: 1, Diagnosis: framework.Diagnosis{
		NodeToStatus:         framework.NewDefaultNodeToStatus(),
		UnschedulablePlugins: sets.New[string](), PendingPlugins: sets.New[string](),
	}}
	fit.Diagnosis.NodeToStatus.Set(node, fwk.NewStatus(fwk.Unschedulable).WithError(postponed))
	return fwk.NewStatus(fwk.Unschedulable).WithError(fit)
}

// postponedIn finds out whether an attempt failed because the pod is postponed: PreFilter has refused it, or what comes after a node was
// chosen; or PostFilter waits for claims that leave, which the framework passes on as a text. In all other failures nodes were looked at, and they count for many.
func postponedIn(status *fwk.Status) *postponedError {
	fit, ok := status.AsError().(*framework.FitError) //nolint:errorlint // as the framework does it
	if !ok || fit.Diagnosis.NodeToStatus == nil {
		return nil
	}
	if strings.Contains(fit.Diagnosis.PostFilterMsg, waitingForDeallocation) {
		return &postponedError{eventType: v1.EventTypeNormal, reason: reasonDeallocation, err: errors.New(fit.Diagnosis.PostFilterMsg)}
	}
	var cause error
	switch nodes := fit.Diagnosis.NodeToStatus; {
	case nodes.Len() == 0:
		cause = nodes.AbsentNodesStatus().AsError()
	case nodes.Len() == 1 && fit.NumAllNodes == 1:
		nodes.ForEachExplicitNode(func(_ string, status *fwk.Status) { cause = status.AsError() })
	}
	var postponed *postponedError
	if !errors.As(cause, &postponed) {
		return nil
	}
	return &postponedError{postponed.eventType, postponed.reason, postponed.claim, cause}
}

// HandleFailures returns a scheduler's failure handler that has its say in what is told of pods: kube-scheduler would tell each of them of
// preemption that found nobody, and warn of those that are postponed with the same reason as of all others. A pod that waits for claims to
// leave is tried whenever one of them changes; it gets one event for all that, its first.
func (s *Shared) HandleFailures(next scheduler.FailureHandlerFn) scheduler.FailureHandlerFn {
	return func(ctx context.Context, profile framework.Framework, pod *framework.QueuedPodInfo, status *fwk.Status,
		nominating *fwk.NominatingInfo, start time.Time,
	) {
		status = withoutVainPreemption(status)
		postponed := postponedIn(status)
		if postponed == nil || postponed.reason != reasonDeallocation {
			s.nominations.endWait(pod.Pod.UID)
		}
		if postponed != nil {
			toldBefore := postponed.reason == reasonDeallocation && !s.nominations.beginWait(pod.Pod)
			profile = retelling{profile, postponed, toldBefore}
		}
		next(ctx, profile, pod, status, nominating, start)
	}
}

// retelling is a profile whose events about a failed attempt have the type and reason of a postponement, unless that has been told before.
type retelling struct {
	framework.Framework
	why        *postponedError
	toldBefore bool
}

// EventRecorder implements [fwk.Handle].
func (p retelling) EventRecorder() events.EventRecorderLogger {
	return retellingRecorder{p.Framework.EventRecorder(), p.why, p.toldBefore}
}

type retellingRecorder struct {
	events.EventRecorderLogger
	why        *postponedError
	toldBefore bool
}

// WithLogger implements [events.EventRecorderLogger].
func (r retellingRecorder) WithLogger(logger klog.Logger) events.EventRecorderLogger {
	return retellingRecorder{r.EventRecorderLogger.WithLogger(logger), r.why, r.toldBefore}
}

// Eventf implements [events.EventRecorder].
func (r retellingRecorder) Eventf(pod, related runtime.Object, _, _, action, _ string, _ ...any) {
	if r.toldBefore {
		return
	}
	if claim := r.why.claim; claim.Name != "" {
		related = claimReference(claim)
	}
	r.EventRecorderLogger.Eventf(regarding(pod), related, r.why.eventType, r.why.reason, action, "%s", noteOf(r.why))
}

// noteOf is an error's text, cut to what the API server allows in an event.
func noteOf(err error) string {
	const cut = " ..."
	note := err.Error()
	if len(note) > validation.NoteLengthLimit {
		note = strings.ToValidUTF8(note[:validation.NoteLengthLimit-len(cut)], "") + cut
	}
	return note
}

// regarding stands for a pod in events. It has no resource version: each write of the pod's status changes that, and events that differ in
// it are not counted as one.
func regarding(object runtime.Object) runtime.Object {
	pod, ok := object.(*v1.Pod)
	if !ok {
		return object
	}
	return &v1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
}

// claimReference stands for a claim in events.
func claimReference(name types.NamespacedName) runtime.Object {
	return &resourceapi.ResourceClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
	}
}
