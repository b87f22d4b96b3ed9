// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package failures says what is told of an attempt that failed: which failures postpone a pod and are nobody's mistake,
// what their events say, and what preemption that found nobody need not say.
package failures

import (
	"errors"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/tracker"
)

// AsPostponed tells which failures of PreBind postpone the pod. Nil stands for all others, which are errors.
func AsPostponed(err error) *podevents.Postponed {
	var known *podevents.Postponed
	var lost *fence.YieldError
	var changed *tracker.ClaimError
	var notReady *binding.NotReadyError
	var adopted *binding.AdoptedError
	switch {
	case errors.As(err, &known):
		return &podevents.Postponed{EventType: known.EventType, Reason: known.Reason, Claim: known.Claim, Err: err}
	case errors.Is(err, fence.ErrTimeout):
		return &podevents.Postponed{EventType: v1.EventTypeWarning, Reason: podevents.ReasonFenceTimeout, Err: err}
	case errors.As(err, &lost):
		claim := types.NamespacedName{Namespace: lost.Claim.Namespace, Name: lost.Claim.Name}
		return &podevents.Postponed{EventType: v1.EventTypeNormal, Reason: podevents.ReasonLostRace, Claim: claim, Err: err}
	case errors.As(err, &changed):
		return &podevents.Postponed{EventType: v1.EventTypeNormal, Reason: podevents.ReasonClaimChanged, Err: err}
	case errors.As(err, &notReady):
		return &podevents.Postponed{EventType: v1.EventTypeWarning, Reason: podevents.ReasonNotReady, Err: err}
	case errors.As(err, &adopted):
		return &podevents.Postponed{EventType: v1.EventTypeNormal, Reason: podevents.ReasonLostRace, Err: err}
	}
	return nil
}

// StatusOfBinding is the status with which PreBind fails. A pod that is postponed is one that does not fit the node now: the framework
// pauses before it tries it again, as it does after an error, and logs no error.
func StatusOfBinding(pod *v1.Pod, node string, err error) *fwk.Status {
	postponed := AsPostponed(err)
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

// PostponedIn finds out whether an attempt failed because the pod is postponed: PreFilter has refused it, or what comes after a node was
// chosen; or PostFilter waits for claims that leave, which the framework passes on as a text. In all other failures nodes
// were looked at, and they count for many.
func PostponedIn(status *fwk.Status) *podevents.Postponed {
	fit, ok := status.AsError().(*framework.FitError) //nolint:errorlint // as the framework does it
	if !ok || fit.Diagnosis.NodeToStatus == nil {
		return nil
	}
	if strings.Contains(fit.Diagnosis.PostFilterMsg, contention.WaitingForDeallocation) {
		return &podevents.Postponed{
			EventType: v1.EventTypeNormal, Reason: podevents.ReasonDeallocation,
			Err: errors.New(fit.Diagnosis.PostFilterMsg),
		}
	}
	var cause error
	switch nodes := fit.Diagnosis.NodeToStatus; {
	case nodes.Len() == 0:
		cause = nodes.AbsentNodesStatus().AsError()
	case nodes.Len() == 1 && fit.NumAllNodes == 1:
		nodes.ForEachExplicitNode(func(_ string, status *fwk.Status) { cause = status.AsError() })
	}
	var postponed *podevents.Postponed
	if !errors.As(cause, &postponed) {
		return nil
	}
	return &podevents.Postponed{EventType: postponed.EventType, Reason: postponed.Reason, Claim: postponed.Claim, Err: cause}
}

// Retelling returns a profile whose events about a failed attempt have the type and reason of a postponement. It tells none
// if that has been told before.
func Retelling(profile framework.Framework, why *podevents.Postponed, toldBefore bool) framework.Framework {
	return retelling{profile, why, toldBefore}
}

type retelling struct {
	framework.Framework
	why        *podevents.Postponed
	toldBefore bool
}

// EventRecorder implements [fwk.Handle].
func (p retelling) EventRecorder() events.EventRecorderLogger {
	return retellingRecorder{p.Framework.EventRecorder(), p.why, p.toldBefore}
}

type retellingRecorder struct {
	events.EventRecorderLogger
	why        *podevents.Postponed
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
	if claim := r.why.Claim; claim.Name != "" {
		related = podevents.Claim(claim)
	}
	r.EventRecorderLogger.Eventf(podevents.Pod(pod), related, r.why.EventType, r.why.Reason, action, "%s", podevents.Note(r.why))
}
