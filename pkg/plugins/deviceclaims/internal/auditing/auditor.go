// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package auditing has pkg/audit look: for devices held twice whenever claims change, and from time to time for differences
// from the API. What is found, it tells, and repairs nothing.
package auditing

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/audit"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

const (
	// DoubleHoldGrace is how long two claims may hold a device, beyond the time that a pod may wait at the fence, before it is told. Of
	// two schedulers that allocate the same device at the same time one gives way within it.
	DoubleHoldGrace = 10 * time.Second
	// MaxReports bounds how many findings of one comparison are told one by one.
	MaxReports = 10
)

// Auditor looks for devices held twice whenever claims change, and compares the tracker with the API from time to time
// (pkg/audit). It runs beside scheduling, and takes the tracker's lock only for a moment.
type Auditor struct {
	tracker *tracker.Tracker
	devices func() *inventory.View
	client  kubernetes.Interface
	handle  fwk.Handle
	Events  events.EventRecorderLogger
	Clock   clock.Clock
	// period is the time between two comparisons, 0 for none.
	period time.Duration
	// inFlightLimit is how long an allocation may be in flight while no pod is being bound with it.
	inFlightLimit time.Duration

	// Disclosure says what events on a claim tell of claims of other namespaces.
	Disclosure config.ClaimDisclosure

	doubles *audit.Doubles
	ages    *audit.Ages
	// failing is why the last comparison could not be made, "" if it was. Only Compare uses it.
	failing string

	mutex   sync.Mutex
	touched sets.Set[usage.DeviceID] // since they were looked at
	wake    chan struct{}            // one token while there is something to look at
}

// New returns an auditor that does not run yet. period is the time between two comparisons, 0 for none; inFlightLimit is how
// long an allocation may be in flight for nobody; fenceTimeout is how long a pod may wait at the fence.
func New(t *tracker.Tracker, devices func() *inventory.View, handle fwk.Handle, period, inFlightLimit, fenceTimeout time.Duration,
	clock clock.Clock,
) *Auditor {
	return &Auditor{
		tracker: t, devices: devices, client: handle.ClientSet(), handle: handle, Events: handle.EventRecorder(), Clock: clock,
		period: period, inFlightLimit: inFlightLimit,
		doubles: audit.NewDoubles(fenceTimeout + DoubleHoldGrace), ages: audit.NewAges(),
		touched: sets.New[usage.DeviceID](), wake: make(chan struct{}, 1),
	}
}

// OnClaimEvent takes the tracker's events.
func (a *Auditor) OnClaimEvent(event tracker.Event) {
	if (event.New == nil || event.New.Status.Allocation == nil) && len(event.Freed) == 0 {
		return
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if event.New != nil && event.New.Status.Allocation != nil {
		for i := range event.New.Status.Allocation.Devices.Results {
			a.touched.Insert(usage.DeviceOf(&event.New.Status.Allocation.Devices.Results[i]))
		}
	}
	select {
	case a.wake <- struct{}{}:
	default: // there is a token already
	}
}

// Run audits until ctx ends.
func (a *Auditor) Run(ctx context.Context) {
	logger := klog.LoggerWithName(klog.FromContext(ctx), "auditor")
	ctx = klog.NewContext(ctx, logger)
	if a.period > 0 {
		// From here on, so that claims which cannot be listed at all are noticed as well.
		ComparisonPeriod.Set(a.period.Seconds())
		LastComparison.Set(float64(a.Clock.Now().Unix()))
	}
	if err := a.tracker.WaitForSync(ctx); err != nil {
		return
	}
	a.lookAt(logger, func(yield func(usage.DeviceID) bool) {
		for device := range a.tracker.Snapshot().Usage.All() {
			if !yield(device) {
				return
			}
		}
	})
	// Beside, as it may take minutes.
	var comparing sync.WaitGroup
	defer comparing.Wait()
	comparing.Go(func() { a.compareRegularly(ctx) })
	for {
		timer := a.timer()
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-a.wake:
			timer.Stop()
		case <-timer.C():
		}
		a.Look(logger)
	}
}

// compareRegularly compares until ctx ends.
func (a *Auditor) compareRegularly(ctx context.Context) {
	if a.period <= 0 {
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.Clock.After(a.period):
		}
		a.Compare(ctx)
	}
}

// timer fires when there may be a double hold to tell of without an event.
func (a *Auditor) timer() clock.Timer {
	next, ok := a.doubles.Next()
	if !ok {
		return a.Clock.NewTimer(24 * time.Hour) // an event comes first, or there is nothing to do
	}
	return a.Clock.NewTimer(max(0, next.Sub(a.Clock.Now())))
}

func (a *Auditor) takeTouched() iter.Seq[usage.DeviceID] {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	touched := a.touched
	a.touched = sets.New[usage.DeviceID]()
	return maps.Keys(touched)
}

// Look looks at what events have touched since the last time.
func (a *Auditor) Look(logger klog.Logger) { a.lookAt(logger, a.takeTouched()) }

// Touched is how many devices are still to be looked at.
func (a *Auditor) Touched() int {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.touched.Len()
}

// lookAt looks for double holds of the given devices, and of those that were held twice before, and whether there is enough of what
// they give and take.
func (a *Auditor) lookAt(logger klog.Logger, devices iter.Seq[usage.DeviceID]) {
	found, over := a.doubles.Look(a.Clock.Now(), a.tracker.Snapshot().Usage, a.devices(), devices)
	for _, hold := range found {
		a.reportDouble(logger, hold)
	}
	for _, hold := range over {
		logger.Info("Device is no longer held by claims that must not have it together", "device", hold.Device, "claims", hold.Claims)
	}
	DoubleHeldDevices.Set(float64(a.doubles.Len()))
}

// reportDouble tells of a double hold in the log and, for each of the claims, in an event.
func (a *Auditor) reportDouble(logger klog.Logger, hold audit.DoubleHold) {
	DoubleHoldsTotal.Inc()
	claims := make([]*resourceapi.ResourceClaim, len(hold.Claims))
	descriptions := make([]string, len(hold.Claims))
	for i, ref := range hold.Claims {
		claims[i] = a.claim(ref)
		descriptions[i] = DescribeHolder(claims[i])
	}
	message, reason := "Device is held by more than one claim", "DeviceHeldTwice"
	if hold.What != "" {
		message, reason = "More is held of a device than there is", "DeviceOverdrawn"
	}
	logger.Error(nil, message, "device", hold.Device, "tooLittleOf", hold.What, "holders", descriptions,
		"since", hold.Since.UTC().Format(time.RFC3339))
	for i, claim := range claims {
		others := strings.Join(a.TellOthers(claims, descriptions, i), ", and by ")
		if hold.What == "" {
			a.event(logger, claim, reason, "device %s is also held by %s", hold.Device, others)
			continue
		}
		a.event(logger, claim, reason, "device %s: with what is held by %s, more is taken of its %s than there is", hold.Device,
			cmp.Or(others, "nobody else"), hold.What)
	}
}

// TellOthers describes all claims but the i-th to whoever may read that one: of other namespaces' claims no more than the number.
func (a *Auditor) TellOthers(claims []*resourceapi.ResourceClaim, descriptions []string, i int) []string {
	var others []string
	foreign := 0
	for j, description := range descriptions {
		switch {
		case j == i:
		case claims[j].Namespace != claims[i].Namespace && a.Disclosure != config.NameClaims:
			foreign++
		default:
			others = append(others, description)
		}
	}
	if foreign > 0 {
		others = append(others, explain.ListClaims(nil, foreign))
	}
	return others
}

// claim returns the claim as it is known or, if it is not any more, what is known of it.
func (a *Auditor) claim(ref usage.ClaimRef) *resourceapi.ResourceClaim {
	if claim, err := a.tracker.Get(ref.Namespace, ref.Name); err == nil && claim.UID == ref.UID {
		return claim
	}
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID}}
}

// DescribeHolder names a claim, when it was allocated, and who uses it.
func DescribeHolder(claim *resourceapi.ResourceClaim) string {
	allocated := "at an unknown time"
	if allocation := claim.Status.Allocation; allocation != nil && allocation.AllocationTimestamp != nil {
		allocated = allocation.AllocationTimestamp.UTC().Format(time.RFC3339)
	}
	users := make([]string, len(claim.Status.ReservedFor))
	for i, user := range claim.Status.ReservedFor {
		users[i] = fmt.Sprintf("%s %s/%s", strings.TrimSuffix(user.Resource, "s"), claim.Namespace, user.Name)
	}
	return fmt.Sprintf("claim %s (allocated %s, resourceVersion %s, reserved for %s)", klog.KObj(claim), allocated, claim.ResourceVersion,
		cmp.Or(strings.Join(users, ", "), "nobody"))
}

// maxEventNote is the API's limit for the text of an event.
const maxEventNote = 1024

func (a *Auditor) event(logger klog.Logger, claim *resourceapi.ResourceClaim, reason, format string, args ...any) {
	note := fmt.Sprintf(format, args...)
	if len(note) > maxEventNote {
		note = strings.ToValidUTF8(note[:maxEventNote-3], "") + "..."
	}
	a.Events.WithLogger(logger).Eventf(claim, nil, v1.EventTypeWarning, reason, "Auditing", "%s", note)
}

// reportStale tells of allocations that are in flight for nobody.
func (a *Auditor) reportStale(logger klog.Logger, inFlight []tracker.InFlight) {
	stale := a.ages.Look(a.Clock.Now(), inFlight, a.inFlightLimit, func(pod types.UID) bool {
		return a.handle.GetWaitingPod(pod) != nil || a.handle.GetPodInPreBind(pod) != nil
	})
	StaleInFlight.Set(float64(len(stale)))
	for _, s := range stale[:min(len(stale), MaxReports)] {
		logger.Error(nil, "An allocation is in flight and no pod is being bound with it", "claim", klog.KRef(s.Claim.Namespace, s.Claim.Name),
			"claimUID", s.Claim.UID,
			"devices", decisions.DeviceNames(s.Allocation), "pods", s.Owners, "since", s.Since.UTC().Format(time.RFC3339))
		a.event(logger, a.claim(s.Claim), "AllocationStale", "devices %s are kept for the claim since %s, and no pod is being bound with them",
			strings.Join(decisions.DeviceNames(s.Allocation), ", "), s.Since.UTC().Format(time.RFC3339))
	}
	if more := len(stale) - MaxReports; more > 0 {
		logger.Error(nil, "Further allocations are in flight and no pods are being bound with them", "allocations", more)
	}
}
