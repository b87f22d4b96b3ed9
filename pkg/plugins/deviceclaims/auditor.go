package deviceclaims

import (
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
	// doubleHoldGrace is how long two claims may hold a device, beyond the time that a pod may wait at the fence, before it is told. Of
	// two schedulers that allocate the same device at the same time one gives way within it.
	doubleHoldGrace = 10 * time.Second
	// maxAuditReports bounds how many findings of one comparison are told one by one.
	maxAuditReports = 10
)

// auditor looks for devices held twice whenever claims change, and compares the tracker with the API from time to time
// (pkg/audit). It runs beside scheduling, and takes the tracker's lock only for a moment.
type auditor struct {
	tracker *tracker.Tracker
	devices func() *inventory.View
	client  kubernetes.Interface
	handle  fwk.Handle
	events  events.EventRecorderLogger
	clock   clock.Clock
	// period is the time between two comparisons, 0 for none.
	period time.Duration
	// inFlightLimit is how long an allocation may be in flight while no pod is being bound with it.
	inFlightLimit time.Duration

	// disclosure says what events on a claim tell of claims of other namespaces.
	disclosure config.ClaimDisclosure

	doubles *audit.Doubles
	ages    *audit.Ages
	// failing is why the last comparison could not be made, "" if it was. Only compare uses it.
	failing string

	mutex   sync.Mutex
	touched sets.Set[usage.DeviceID] // since they were looked at
	wake    chan struct{}            // one token while there is something to look at
}

func newAuditor(t *tracker.Tracker, devices func() *inventory.View, handle fwk.Handle, period, inFlightLimit, fenceTimeout time.Duration, clock clock.Clock) *auditor {
	return &auditor{
		tracker: t, devices: devices, client: handle.ClientSet(), handle: handle, events: handle.EventRecorder(), clock: clock,
		period: period, inFlightLimit: inFlightLimit,
		doubles: audit.NewDoubles(fenceTimeout + doubleHoldGrace), ages: audit.NewAges(),
		touched: sets.New[usage.DeviceID](), wake: make(chan struct{}, 1),
	}
}

// onClaimEvent takes the tracker's events.
func (a *auditor) onClaimEvent(event tracker.Event) {
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

// run audits until ctx ends.
func (a *auditor) run(ctx context.Context) {
	logger := klog.LoggerWithName(klog.FromContext(ctx), "auditor")
	ctx = klog.NewContext(ctx, logger)
	if a.period > 0 {
		// From here on, so that claims which cannot be listed at all are noticed as well.
		comparisonPeriod.Set(a.period.Seconds())
		lastComparison.Set(float64(a.clock.Now().Unix()))
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
		a.lookAt(logger, a.takeTouched())
	}
}

// compareRegularly compares until ctx ends.
func (a *auditor) compareRegularly(ctx context.Context) {
	if a.period <= 0 {
		return
	}
	for {
		timer := a.clock.NewTimer(a.period)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
		a.compare(ctx)
	}
}

// timer fires when there may be a double hold to tell of without an event.
func (a *auditor) timer() clock.Timer {
	next, ok := a.doubles.Next()
	if !ok {
		return a.clock.NewTimer(24 * time.Hour) // an event comes first, or there is nothing to do
	}
	return a.clock.NewTimer(max(0, next.Sub(a.clock.Now())))
}

func (a *auditor) takeTouched() iter.Seq[usage.DeviceID] {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	touched := a.touched
	a.touched = sets.New[usage.DeviceID]()
	return maps.Keys(touched)
}

// lookAt looks for double holds of the given devices, and of those that were held twice before, and whether there is enough of what
// they give and take.
func (a *auditor) lookAt(logger klog.Logger, devices iter.Seq[usage.DeviceID]) {
	found, over := a.doubles.Look(a.clock.Now(), a.tracker.Snapshot().Usage, a.devices(), devices)
	for _, hold := range found {
		a.reportDouble(logger, hold)
	}
	for _, hold := range over {
		logger.Info("Device is no longer held by claims that must not have it together", "device", hold.Device, "claims", hold.Claims)
	}
	doubleHeldDevices.Set(float64(a.doubles.Len()))
}

// reportDouble tells of a double hold in the log and, for each of the claims, in an event.
func (a *auditor) reportDouble(logger klog.Logger, hold audit.DoubleHold) {
	doubleHoldsTotal.Inc()
	claims := make([]*resourceapi.ResourceClaim, len(hold.Claims))
	descriptions := make([]string, len(hold.Claims))
	for i, ref := range hold.Claims {
		claims[i] = a.claim(ref)
		descriptions[i] = describeHolder(claims[i])
	}
	message, reason := "Device is held by more than one claim", "DeviceHeldTwice"
	if hold.What != "" {
		message, reason = "More is held of a device than there is", "DeviceOverdrawn"
	}
	logger.Error(nil, message, "device", hold.Device, "tooLittleOf", hold.What, "holders", descriptions, "since", hold.Since.UTC().Format(time.RFC3339))
	for i, claim := range claims {
		others := a.tellOthers(claims, descriptions, i)
		if hold.What == "" {
			a.event(logger, claim, reason, "device %s is also held by %s", hold.Device, strings.Join(others, ", and by "))
			continue
		}
		if len(others) == 0 {
			others = []string{"nobody else"}
		}
		a.event(logger, claim, reason, "device %s: with what is held by %s, more is taken of its %s than there is", hold.Device, strings.Join(others, ", and by "), hold.What)
	}
}

// tellOthers describes all claims but the i-th to whoever may read that one: of other namespaces' claims no more than the number.
func (a *auditor) tellOthers(claims []*resourceapi.ResourceClaim, descriptions []string, i int) []string {
	var others []string
	foreign := 0
	for j, description := range descriptions {
		switch {
		case j == i:
		case claims[j].Namespace != claims[i].Namespace && a.disclosure != config.NameClaims:
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
func (a *auditor) claim(ref usage.ClaimRef) *resourceapi.ResourceClaim {
	if claim, err := a.tracker.Get(ref.Namespace, ref.Name); err == nil && claim.UID == ref.UID {
		return claim
	}
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID}}
}

// describeHolder names a claim, when it was allocated, and who uses it.
func describeHolder(claim *resourceapi.ResourceClaim) string {
	allocated := "at an unknown time"
	if allocation := claim.Status.Allocation; allocation != nil && allocation.AllocationTimestamp != nil {
		allocated = allocation.AllocationTimestamp.UTC().Format(time.RFC3339)
	}
	users := make([]string, len(claim.Status.ReservedFor))
	for i, user := range claim.Status.ReservedFor {
		users[i] = fmt.Sprintf("%s %s/%s", strings.TrimSuffix(user.Resource, "s"), claim.Namespace, user.Name)
	}
	if len(users) == 0 {
		users = []string{"nobody"}
	}
	return fmt.Sprintf("claim %s (allocated %s, resourceVersion %s, reserved for %s)", klog.KObj(claim), allocated, claim.ResourceVersion, strings.Join(users, ", "))
}

// maxEventNote is the API's limit for the text of an event.
const maxEventNote = 1024

func (a *auditor) event(logger klog.Logger, claim *resourceapi.ResourceClaim, reason, format string, args ...any) {
	note := fmt.Sprintf(format, args...)
	if len(note) > maxEventNote {
		note = strings.ToValidUTF8(note[:maxEventNote-3], "") + "..."
	}
	a.events.WithLogger(logger).Eventf(claim, nil, v1.EventTypeWarning, reason, "Auditing", "%s", note)
}

// reportStale tells of allocations that are in flight for nobody.
func (a *auditor) reportStale(logger klog.Logger, inFlight []tracker.InFlight) {
	stale := a.ages.Look(a.clock.Now(), inFlight, a.inFlightLimit, func(pod types.UID) bool {
		return a.handle.GetWaitingPod(pod) != nil || a.handle.GetPodInPreBind(pod) != nil
	})
	staleInFlight.Set(float64(len(stale)))
	for i, s := range stale {
		if i >= maxAuditReports {
			break
		}
		logger.Error(nil, "An allocation is in flight and no pod is being bound with it", "claim", klog.KRef(s.Claim.Namespace, s.Claim.Name), "claimUID", s.Claim.UID,
			"devices", decisions.DeviceNames(s.Allocation), "pods", s.Owners, "since", s.Since.UTC().Format(time.RFC3339))
		a.event(logger, a.claim(s.Claim), "AllocationStale", "devices %s are kept for the claim since %s, and no pod is being bound with them",
			strings.Join(decisions.DeviceNames(s.Allocation), ", "), s.Since.UTC().Format(time.RFC3339))
	}
	if more := len(stale) - maxAuditReports; more > 0 {
		logger.Error(nil, "Further allocations are in flight and no pods are being bound with them", "allocations", more)
	}
}
