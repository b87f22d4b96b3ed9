package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// Conditions of a device in a claim's status (resource.k8s.io/v1, AllocatedDeviceStatus).
const (
	// ConditionReady: the device has been prepared for the claim's pods. It is the API's own name.
	ConditionReady = "Ready"
	// ConditionHealthy: nothing is wrong with it.
	ConditionHealthy = "Healthy"
)

// Reasons of the conditions and of events.
const (
	reasonPrepared  = "Prepared"
	reasonHealthy   = "Healthy"
	reasonUnhealthy = "Unhealthy"
	reasonUnknown   = "Unknown"

	// These failures to prepare do not pass by themselves.
	reasonLost = "GPULost"
	reasonHeld = "DeviceHeld"
	reasonOwed = "DeviceQuarantined"
	// A share of a GPU does not go with those that others have.
	reasonShare = "ShareRefused"
)

// permanent tells whether a failure to prepare will not pass by itself, and its reason.
func permanent(err error) (reason string, ok bool) {
	var held *prepare.HeldError
	var quarantined *prepare.QuarantinedError
	var share *prepare.ShareError
	switch {
	case errors.Is(err, nvml.ErrGPULost), errors.Is(err, nvml.ErrNotFound):
		return reasonLost, true
	case errors.As(err, &held):
		return reasonHeld, true
	case errors.As(err, &quarantined):
		return reasonOwed, true
	case errors.As(err, &share):
		return reasonShare, true
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

	mu sync.Mutex
	// failures to prepare that do not pass, by claim.
	failures map[types.UID]error
}

func newReporter(opts Options, claims *ledger.Ledger) *reporter {
	events := record.NewBroadcaster()
	return &reporter{
		events:   events,
		recorder: events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: Name, Host: opts.NodeName}),
		client:   opts.Client,
		node:     opts.NodeName,
		pool:     opts.NodeName,
		ledger:   claims,
		health:   opts.Hardware.Health,
		failures: map[types.UID]error{},
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[ledger.Claim](500*time.Millisecond, time.Minute),
			workqueue.TypedRateLimitingQueueConfig[ledger.Claim]{Name: "claim_status"}),
	}
}

// prepared notes the outcome of preparing a claim. Failures that pass are the kubelet's to tell: it does, with each try.
func (r *reporter) prepared(claim *resourceapi.ResourceClaim, err error) {
	if _, lasting := permanent(err); err != nil && !lasting {
		return
	}
	r.mu.Lock()
	if err != nil {
		r.failures[claim.UID] = err
	} else {
		delete(r.failures, claim.UID)
	}
	r.mu.Unlock()
	r.queue.Add(ledger.Claim{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name})
}

// unprepared forgets the claim.
func (r *reporter) unprepared(uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.failures, uid)
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
		if record.Entry == nil {
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
	node := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.node, UID: types.UID(r.node)}
	switch {
	case is.Status == health.Unhealthy:
		r.recorder.Eventf(node, corev1.EventTypeWarning, "GPU"+reasonUnhealthy, "Device %s: %s", gpu, is.Message())
	case was.Status == health.Unhealthy:
		r.recorder.Eventf(node, corev1.EventTypeNormal, "GPU"+reasonHealthy, "Device %s is healthy again; it was not: %s", gpu, was.Message())
	case len(is.Faults) > 0:
		r.recorder.Eventf(node, corev1.EventTypeNormal, "GPUNeedsAttention", "Device %s: %s", gpu, is.Message())
	}
}

// run reports until ctx ends.
func (r *reporter) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "reporter"))
	r.events.StartRecordingToSink(&corev1client.EventSinkImpl{Interface: r.client.CoreV1().Events("")})
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
	switch {
	case err == nil, apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		// A claim that is gone, or allocated elsewhere by now, is nobody's business any more.
		r.queue.Forget(claim)
	case ctx.Err() == nil:
		klog.FromContext(ctx).V(2).Info("Status of the claim's devices could not be written, trying again", "claim", klog.KRef(claim.Namespace, claim.Name), "reason", err.Error())
		r.queue.AddRateLimited(claim)
	}
}

// report brings the status of one claim's devices, and events about them, up to date.
func (r *reporter) report(ctx context.Context, ref ledger.Claim) error {
	claim, err := r.client.ResourceV1().ResourceClaims(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if claim.UID != ref.UID || claim.Status.Allocation == nil {
		return nil
	}
	record, err := r.ledger.Get(ref.UID)
	if err != nil {
		return err
	}
	r.mu.Lock()
	failure := r.failures[ref.UID]
	r.mu.Unlock()
	var entry *ledger.Entry
	if record != nil && record.Entry != nil && record.Entry.State == ledger.PrepareCompleted {
		entry = record.Entry
	}
	devices := r.devices(claim, entry, failure)
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

// devices are what the claim's status should say of our devices: of each that was prepared, and of each that could not be. What is not known
// is left out.
func (r *reporter) devices(claim *resourceapi.ResourceClaim, entry *ledger.Entry, failure error) []resourceapi.AllocatedDeviceStatus {
	var list []resourceapi.AllocatedDeviceStatus
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != Name || result.Pool != r.pool {
			continue
		}
		status := resourceapi.AllocatedDeviceStatus{Driver: result.Driver, Pool: result.Pool, Device: result.Device}
		if result.ShareID != nil {
			share := string(*result.ShareID)
			status.ShareID = &share
		}
		status.Conditions = keptConditions(claim.Status.Devices, &status)
		prepared := preparedDevice(entry, result)
		switch {
		case failure != nil:
			reason, _ := permanent(failure)
			r.set(claim, &status, ConditionReady, metav1.ConditionFalse, reason, failure.Error())
		case prepared != nil:
			r.set(claim, &status, ConditionReady, metav1.ConditionTrue, reasonPrepared, "")
			status.Data = deviceData(prepared)
		default:
			continue
		}
		switch verdict := r.health(result.Device); verdict.Status {
		case health.Unhealthy:
			r.set(claim, &status, ConditionHealthy, metav1.ConditionFalse, reasonUnhealthy, verdict.Message())
		case health.Healthy:
			r.set(claim, &status, ConditionHealthy, metav1.ConditionTrue, reasonHealthy, verdict.Message())
		default:
			r.set(claim, &status, ConditionHealthy, metav1.ConditionUnknown, reasonUnknown, "NVML has not been asked yet")
		}
		list = append(list, status)
	}
	return list
}

// maxConditionMessage is the API's limit (metav1.Condition).
const maxConditionMessage = 32768

func (r *reporter) set(claim *resourceapi.ResourceClaim, device *resourceapi.AllocatedDeviceStatus, kind string, status metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&device.Conditions, metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: message[:min(len(message), maxConditionMessage)], ObservedGeneration: claim.Generation,
	})
}

func sameDevice(a, b *resourceapi.AllocatedDeviceStatus) bool {
	return a.Driver == b.Driver && a.Pool == b.Pool && a.Device == b.Device && (a.ShareID == nil) == (b.ShareID == nil) && (a.ShareID == nil || *a.ShareID == *b.ShareID)
}

// keptConditions are those that the status has of the device, so that the time of their last transition stays.
func keptConditions(devices []resourceapi.AllocatedDeviceStatus, of *resourceapi.AllocatedDeviceStatus) []metav1.Condition {
	for i := range devices {
		if sameDevice(&devices[i], of) {
			return append([]metav1.Condition(nil), devices[i].Conditions...)
		}
	}
	return nil
}

func preparedDevice(entry *ledger.Entry, result resourceapi.DeviceRequestAllocationResult) *ledger.Device {
	if entry == nil {
		return nil
	}
	for i := range entry.Devices {
		d := &entry.Devices[i]
		if d.Device == result.Device && d.Pool == result.Pool && (d.ShareID == nil || result.ShareID != nil && *d.ShareID == *result.ShareID) {
			return d
		}
	}
	return nil
}

// deviceData names the hardware that the claim got, which for a MIG device is not known before.
func deviceData(device *ledger.Device) *runtime.RawExtension {
	name := "uuid"
	if device.Passthrough {
		name = "pciBusID"
	}
	raw, err := json.Marshal(map[string]string{name: device.UUID})
	if err != nil {
		return nil // a map of strings always is JSON
	}
	return &runtime.RawExtension{Raw: raw}
}

// conditionChange is a condition of a device that has become another.
type conditionChange struct {
	device  string
	was, is *metav1.Condition // was is nil for a new one
}

// changedConditions are those whose status, reason or message differ.
func changedConditions(was, is []resourceapi.AllocatedDeviceStatus) []conditionChange {
	var changes []conditionChange
	for i := range is {
		before := keptConditions(was, &is[i])
		for j := range is[i].Conditions {
			now := &is[i].Conditions[j]
			old := meta.FindStatusCondition(before, now.Type)
			if old == nil || old.Status != now.Status || old.Reason != now.Reason || old.Message != now.Message {
				changes = append(changes, conditionChange{device: is[i].Device, was: old, is: now})
			}
		}
	}
	return changes
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
	_, err := r.client.ResourceV1().ResourceClaims(claim.Namespace).ApplyStatus(ctx, config, metav1.ApplyOptions{FieldManager: Name, Force: true})
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
			case change.is.Type == ConditionReady && change.is.Status == metav1.ConditionFalse:
				r.recorder.Eventf(pod, corev1.EventTypeWarning, change.is.Reason, "Device %s of claim %s cannot be prepared, and that will not pass by itself: %s", change.device, claim.Name, change.is.Message)
			case change.is.Type == ConditionHealthy && change.is.Status == metav1.ConditionFalse:
				r.recorder.Eventf(pod, corev1.EventTypeWarning, "Device"+reasonUnhealthy, "Device %s of claim %s: %s", change.device, claim.Name, change.is.Message)
			case change.is.Type == ConditionHealthy && change.is.Status == metav1.ConditionTrue && change.was != nil && change.was.Status == metav1.ConditionFalse:
				r.recorder.Eventf(pod, corev1.EventTypeNormal, "Device"+reasonHealthy, "Device %s of claim %s is healthy again", change.device, claim.Name)
			}
		}
	}
}
