// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// Reasons of the conditions and of events.
const (
	reasonPrepared = "Prepared"
	// reasonNotPrepared: what was said of the device is over, and it is not prepared.
	reasonNotPrepared = "NotPrepared"
	reasonHealthy     = "Healthy"
	reasonUnhealthy   = "Unhealthy"
	reasonUnknown     = "Unknown"

	// What events say of a GPU's health to its Node, and of a device's to its pods.
	reasonGPUUnhealthy      = "GPUUnhealthy"
	reasonGPUHealthy        = "GPUHealthy"
	reasonGPUNeedsAttention = "GPUNeedsAttention"
	reasonDeviceUnhealthy   = "DeviceUnhealthy"
	reasonDeviceHealthy     = "DeviceHealthy"

	// reasonReleasing: another claim has the device, and is being released.
	reasonReleasing = "DeviceNotReleased"

	// All claims of the node.
	reasonCannotPrepare = "CannotPrepareClaims"
	reasonCanPrepare    = "CanPrepareClaims"

	// These failures to prepare last until others have left the GPU: who has it, or has shares with which this one does not go.
	reasonHeld  = "DeviceHeld"
	reasonShare = "ShareRefused"

	// These do not pass by themselves.
	reasonLost = "GPULost"
	reasonOwed = "DeviceQuarantined"
	// The claim's parameters are wrong.
	reasonConfig = "ConfigRefused"
	// What was done for the claim is not known.
	reasonUnreadable = "RecordUnreadable"
	// What was done for the claim cannot be undone, so its pod cannot end.
	reasonStuck = "UnprepareFailed"
)

// stuckError is a failure to unprepare. While it lasts the claim's pod stays in Terminating.
type stuckError struct{ error }

func (e stuckError) Unwrap() error { return e.error }

// known tells whether a failure to prepare is one that the agent can say more about than the kubelet, and its reason: one that will not
// pass by itself, or of which it is known what has to pass.
func known(err error) (reason string, ok bool) {
	var held *prepare.HeldError
	var quarantined *prepare.QuarantinedError
	var share *prepare.ShareError
	var refused *config.Error
	var unreadable *prepare.UnreadableError
	var stuck stuckError
	switch {
	case errors.As(err, &stuck):
		return reasonStuck, true
	case errors.As(err, &held) && held.Use.Ends, errors.As(err, &share) && share.Use.Ends:
		return reasonReleasing, true
	case errors.Is(err, nvml.ErrGPULost), errors.Is(err, nvml.ErrNotFound):
		return reasonLost, true
	case errors.As(err, &held):
		return reasonHeld, true
	case errors.As(err, &quarantined):
		return reasonOwed, true
	case errors.As(err, &share):
		return reasonShare, true
	case errors.As(err, &refused):
		return reasonConfig, true
	case errors.As(err, &unreadable):
		return reasonUnreadable, true
	}
	return "", false
}

// reporter tells what happens to the devices of claims where their users look for it: in the claims' status, and as events of the pods.
// What it cannot tell, because the API server is away, it tells later; nothing waits for it.
type reporter struct {
	client   kubernetes.Interface
	node     string
	pool     string
	ledger   *ledger.Ledger
	health   func(device string) health.Verdict
	events   record.EventBroadcaster
	recorder record.EventRecorder
	queue    workqueue.TypedRateLimitingInterface[ledger.Claim]
	// refused are the claims whose last status was not taken, and why. Only process uses it.
	refused map[ledger.Claim]string

	mu sync.Mutex
	// failures to prepare and to unprepare of which more is known, by claim.
	failures map[types.UID]noted
	// unready are the claims of which the last thing said is that a device is not ready.
	unready map[ledger.Claim]bool
}

// noted is a failure, and when it was.
type noted struct {
	err error
	at  time.Time
}

func newReporter(opts Options, claims *ledger.Ledger) *reporter {
	// From now on: an event that nobody records is lost.
	events := record.NewBroadcaster()
	if opts.Client != nil { // a release without an API server tells nobody
		events.StartRecordingToSink(&corev1client.EventSinkImpl{Interface: opts.Client.CoreV1().Events("")})
	}
	return &reporter{
		events:   events,
		recorder: events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: Name, Host: opts.NodeName}),
		client:   opts.Client,
		node:     opts.NodeName,
		pool:     opts.NodeName,
		ledger:   claims,
		health:   opts.Hardware.Health,
		failures: map[types.UID]noted{},
		unready:  map[ledger.Claim]bool{},
		refused:  map[ledger.Claim]string{},
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[ledger.Claim](500*time.Millisecond, time.Minute),
			workqueue.TypedRateLimitingQueueConfig[ledger.Claim]{Name: "claim_status"}),
	}
}

// prepared notes the outcome of preparing a claim, or what it waits for. Other failures are the kubelet's to tell: it does, with each try.
func (r *reporter) prepared(claim *resourceapi.ResourceClaim, err error) {
	_, ok := known(err)
	r.mu.Lock()
	switch reason, _ := known(r.failures[claim.UID].err); {
	case err == nil:
		delete(r.failures, claim.UID)
	case ok:
		r.failures[claim.UID] = noted{said(err), time.Now()}
	case reason == reasonReleasing:
		delete(r.failures, claim.UID) // it waits for nobody any more
	default:
		r.mu.Unlock()
		return
	}
	r.mu.Unlock()
	r.queue.Add(ledger.Claim{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name})
}

// said is an error without what differs with each try of the kubelet, such as how long it has waited.
func said(err error) error {
	var held *prepare.HeldError
	var share *prepare.ShareError
	switch {
	case errors.As(err, &held) && held.Use.Ends:
		return held
	case errors.As(err, &share) && share.Use.Ends:
		return share
	}
	return err
}

// gpusOf are the GPUs that prepared claims hold, as far as can be read.
func (r *reporter) gpusOf(claims []types.UID) (gpus []string) {
	for _, claim := range claims {
		if ledger.ValidateUID(claim) != nil {
			continue
		}
		if record, err := r.ledger.Get(claim); err == nil && record != nil && record.Entry != nil {
			gpus = append(gpus, record.Entry.HeldGPUs()...)
		}
	}
	return gpus
}

// unprepared notes the outcome of unpreparing a claim. What may pass, such as a lock that another call has, is not told: it is tried again.
func (r *reporter) unprepared(claim ledger.Claim, err error) {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.failures, claim.UID)
		if r.unready[claim] {
			r.queue.Add(claim)
		}
		return
	}
	r.failures[claim.UID] = noted{stuckError{err}, time.Now()}
	r.queue.Add(claim)
}

// review looks again at what claims are told, without a call of the kubelet: at those whose record cannot be read, and at those of which
// something is said that may be over.
func (r *reporter) review(unreadable []ledger.Claim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, claim := range unreadable {
		r.queue.Add(claim)
	}
	for claim := range r.unready {
		r.queue.Add(claim)
	}
}

// healthChanged tells the claims that have the GPU, and the node.
func (r *reporter) healthChanged(ctx context.Context, gpu string, was, is health.Verdict) {
	r.nodeEvent(gpu, was, is)
	records, err := r.ledger.Records()
	if err != nil {
		utilruntime.HandleErrorWithContext(ctx, err, "The claims that have the GPU cannot be told of its health", "device", gpu)
		return
	}
	for _, record := range records {
		if record.Entry == nil || record.Entry.Claim.Plugin != (ledger.PluginDevice{}) {
			continue
		}
		for _, device := range record.Entry.Devices {
			if device.GPU == gpu {
				r.queue.Add(record.Entry.Claim)
				break
			}
		}
	}
}

func (r *reporter) nodeEvent(gpu string, was, is health.Verdict) {
	if was.Status == is.Status && was.Message() == is.Message() {
		return
	}
	switch {
	case is.Status == health.Unhealthy:
		r.nodeEventf(corev1.EventTypeWarning, reasonGPUUnhealthy, "Device %s: %s", gpu, is.Message())
	case was.Status == health.Unhealthy:
		r.nodeEventf(corev1.EventTypeNormal, reasonGPUHealthy, "Device %s is healthy again; it was not: %s", gpu, was.Message())
	case len(is.Faults) > 0:
		r.nodeEventf(corev1.EventTypeNormal, reasonGPUNeedsAttention, "Device %s: %s", gpu, is.Message())
	}
}

// nodeEventf makes an event of the Node. Its UID is the name, as in the kubelet's events: kubectl describe shows these, and those with the
// true UID.
func (r *reporter) nodeEventf(kind, reason, format string, args ...any) {
	node := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.node, UID: types.UID(r.node)}
	r.recorder.Eventf(node, kind, reason, format, args...)
}

// run reports until ctx ends.
func (r *reporter) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "reporter"))
	var group sync.WaitGroup
	defer group.Wait()
	defer r.events.Shutdown()
	group.Go(func() {
		<-ctx.Done()
		r.queue.ShutDown()
	})
	for {
		claim, stopped := r.queue.Get()
		if stopped {
			return
		}
		r.process(ctx, claim)
	}
}

func (r *reporter) process(ctx context.Context, claim ledger.Claim) {
	defer r.queue.Done(claim)
	err := r.report(ctx, claim)
	if err != nil && ctx.Err() != nil {
		return
	}
	if apierrors.IsNotFound(err) {
		r.forget(claim)
	}
	if err == nil || apierrors.IsNotFound(err) {
		delete(r.refused, claim)
		r.queue.Forget(claim) // a claim that is gone is nobody's business any more
		return
	}
	// Also what is forbidden is tried again: if the claim is allocated elsewhere by now, the next report finds nothing to write.
	r.sayRefused(ctx, claim, err)
	r.queue.AddRateLimited(claim)
}

// sayRefused counts a failure, and logs it if it is not the claim's last one again.
func (r *reporter) sayRefused(ctx context.Context, claim ledger.Claim, err error) {
	reason := refusal(err)
	statusErrors.WithLabelValues(reason).Inc()
	if r.refused[claim] == reason {
		return
	}
	r.refused[claim] = reason
	utilruntime.HandleErrorWithContext(ctx, err, "Status of the claim's devices cannot be written, trying again", "claim",
		klog.KRef(claim.Namespace, claim.Name))
}

// refusal says in a word why the API server did not take a status.
func refusal(err error) string {
	switch {
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return "forbidden"
	case apierrors.IsInvalid(err):
		return "invalid"
	default:
		return "other"
	}
}

// report brings the status of one claim's devices, and events about them, up to date.
func (r *reporter) report(ctx context.Context, ref ledger.Claim) error {
	claim, err := r.client.ResourceV1().ResourceClaims(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if claim.UID != ref.UID || claim.Status.Allocation == nil {
		r.forget(ref)
		return nil
	}
	record, err := r.ledger.Get(ref.UID)
	if err != nil {
		return err
	}
	failure := r.failureOf(ref.UID, record)
	var entry *ledger.Entry
	switch {
	case record == nil:
	case record.Err != nil && failure == nil:
		failure = prepare.Unreadable(record)
	case record.State() == ledger.PrepareCompleted:
		entry = record.Entry
	}
	devices := r.devices(claim, entry, failure)
	r.noteUnready(ref, devices)
	changes := changedConditions(claim.Status.Devices, devices)
	if len(changes) == 0 {
		return nil
	}
	if err := r.apply(ctx, claim, devices); err != nil {
		return err
	}
	r.podEvents(claim, changes)
	return nil
}

// failureOf is what is known to have failed. A record that cannot be read is no reason any more once it can be, or is gone. Nor is anything
// from before the claim was prepared: in an update the kubelet calls another agent of the node, and this one is not told.
func (r *reporter) failureOf(claim types.UID, record *ledger.Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	failure := r.failures[claim]
	var unreadable *prepare.UnreadableError
	readable := errors.As(failure.err, &unreadable) && (record == nil || record.Err == nil)
	if readable || record != nil && record.Entry != nil && record.Entry.Completed.After(failure.at) {
		delete(r.failures, claim)
		return nil
	}
	return failure.err
}

func (r *reporter) noteUnready(claim ledger.Claim, devices []resourceapi.AllocatedDeviceStatus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.unready, claim)
	for i := range devices {
		if c := meta.FindStatusCondition(devices[i].Conditions, ConditionReady); c.Status == metav1.ConditionFalse &&
			c.Reason != reasonNotPrepared {
			r.unready[claim] = true
		}
	}
}

// forget forgets a claim that is gone, or has no devices any more.
func (r *reporter) forget(claim ledger.Claim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.failures, claim.UID)
	delete(r.unready, claim)
}

// apply writes our devices, and nothing else of the claim: other drivers have theirs.
func (r *reporter) apply(ctx context.Context, claim *resourceapi.ResourceClaim, devices []resourceapi.AllocatedDeviceStatus) error {
	status := resourceapply.ResourceClaimStatus()
	for _, device := range devices {
		config := resourceapply.AllocatedDeviceStatus().WithDriver(device.Driver).WithPool(device.Pool).WithDevice(device.Device)
		if device.ShareID != nil {
			config.WithShareID(*device.ShareID)
		}
		if device.Data != nil {
			config.WithData(*device.Data)
		}
		for _, c := range device.Conditions {
			config.WithConditions(metaapply.Condition().WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).WithMessage(c.Message).
				WithLastTransitionTime(c.LastTransitionTime).WithObservedGeneration(c.ObservedGeneration))
		}
		status.WithDevices(config)
	}
	config := resourceapply.ResourceClaim(claim.Name, claim.Namespace).WithUID(claim.UID).WithStatus(status)
	_, err := r.client.ResourceV1().ResourceClaims(claim.Namespace).
		ApplyStatus(ctx, config, metav1.ApplyOptions{FieldManager: Name, Force: true})
	if err != nil {
		return fmt.Errorf("write the status of the devices of claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return nil
}

// podEvents tells the pods that use the claim what has become worse, and that it is well again.
func (r *reporter) podEvents(claim *resourceapi.ResourceClaim, changes []conditionChange) {
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup != "" || consumer.Resource != "pods" {
			continue
		}
		pod := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: claim.Namespace, Name: consumer.Name, UID: consumer.UID}
		for _, change := range changes {
			switch {
			case change.is.Type == ConditionReady && change.is.Reason == reasonStuck:
				r.recorder.Eventf(pod, corev1.EventTypeWarning, reasonStuck,
					"The pod cannot end, because device %s of claim %s cannot be taken back: %s", change.device, claim.Name, change.is.Message)
			case change.is.Reason == reasonReleasing:
				r.recorder.Eventf(pod, corev1.EventTypeNormal, reasonReleasing, "Device %s of claim %s is prepared as soon as it is released: %s",
					change.device, claim.Name, change.is.Message)
			case change.is.Reason == reasonHeld || change.is.Reason == reasonShare:
				r.recorder.Eventf(pod, corev1.EventTypeWarning, change.is.Reason,
					"Device %s of claim %s cannot be prepared before others have left its GPU: %s", change.device, claim.Name, change.is.Message)
			case change.is.Type == ConditionReady && change.is.Status == metav1.ConditionFalse && change.is.Reason != reasonNotPrepared:
				r.recorder.Eventf(pod, corev1.EventTypeWarning, change.is.Reason,
					"Device %s of claim %s cannot be prepared, and that will not pass by itself: %s", change.device, claim.Name, change.is.Message)
			case change.is.Type == ConditionHealthy && change.is.Status == metav1.ConditionFalse:
				r.recorder.Eventf(pod, corev1.EventTypeWarning, reasonDeviceUnhealthy, "Device %s of claim %s: %s", change.device,
					claim.Name, change.is.Message)
			case change.is.Type == ConditionHealthy && change.is.Status == metav1.ConditionTrue && change.was != nil &&
				change.was.Status == metav1.ConditionFalse:
				r.recorder.Eventf(pod, corev1.EventTypeNormal, reasonDeviceHealthy, "Device %s of claim %s is healthy again", change.device, claim.Name)
			}
		}
	}
}
