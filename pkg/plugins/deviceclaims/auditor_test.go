// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/auditing"
	"stowage.dev/stowage/pkg/tracker"
)

// testAuditor is an auditor of the harness's tracker that does what the test tells it to. The plugin has another one.
type testAuditor struct {
	*auditing.Auditor
	clock    *testingclock.FakeClock
	recorder *events.FakeRecorder
}

// fenceTimeout is how long pods may wait at the fence, and grace until a device that is held twice is told.
const fenceTimeout, grace = 30 * time.Second, fenceTimeout + auditing.DoubleHoldGrace

func newTestAuditor(h *harness, period time.Duration) testAuditor {
	clock, recorder := testingclock.NewFakeClock(time.Now()), events.NewFakeRecorder(100)
	a := auditing.New(h.plugin.shared.account.Tracker, h.plugin.shared.account.Store.View, h.plugin.handle, period, time.Minute, fenceTimeout, clock)
	a.Events = recorder
	h.plugin.shared.account.Tracker.Subscribe(a.OnClaimEvent)
	return testAuditor{a, clock, recorder}
}

// told returns the events since the last call.
func (a testAuditor) told() []string {
	var events []string
	for {
		select {
		case event := <-a.recorder.Events:
			events = append(events, event)
		default:
			slices.Sort(events)
			return events
		}
	}
}

func wantGauge(t *testing.T, name string, want float64, got func() (float64, error)) {
	t.Helper()
	if value, err := got(); err != nil || value != want {
		t.Errorf("%s is %v (%v), want %v", name, value, err, want)
	}
}

func TestAuditorTellsOfDoubleHolds(t *testing.T) {
	h := newHarness(t, twoNodes())
	a := newTestAuditor(h, 0)
	logger := klog.FromContext(h.ctx)
	look := func() { a.Look(logger) }

	timestamp := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	h.api.create(claim("one", allocated("node-a", "gpu-0"), reservedFor("p"), func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.AllocationTimestamp = &timestamp
	}))
	h.api.create(claim("two", allocated("node-a", "gpu-0")))
	h.eventually("the auditor has heard of both claims", func() bool {
		return holdersOf(h, "node-a", "gpu-0") == 2
	})
	h.eventually("the events have been delivered", func() bool { return a.Touched() == 1 })
	look()
	a.clock.Step(grace - 1)
	look()
	if events := a.told(); len(events) > 0 {
		t.Errorf("told within the grace period: %q", events)
	}
	a.clock.Step(1)
	look()
	events := strings.Join(a.told(), "\n")
	for _, want := range []string{
		"Warning DeviceHeldTwice device gpu.example.com/node-a/gpu-0 is also held by claim team-a/one (allocated 2026-01-02T03:04:05Z, resourceVersion 101, reserved for pod team-a/p)",
		"Warning DeviceHeldTwice device gpu.example.com/node-a/gpu-0 is also held by claim team-a/two (allocated at an unknown time, resourceVersion 102, reserved for nobody)",
	} {
		if !strings.Contains(events, want) {
			t.Errorf("no event %q in\n%s", want, events)
		}
	}
	wantGauge(t, "the number of devices held twice", 1, func() (float64, error) { return testutil.GetGaugeMetricValue(auditing.DoubleHeldDevices) })

	h.api.delete("two")
	h.eventually("one has let go", func() bool { return holdersOf(h, "node-a", "gpu-0") == 1 })
	look()
	wantGauge(t, "the number of devices held twice", 0, func() (float64, error) { return testutil.GetGaugeMetricValue(auditing.DoubleHeldDevices) })
	if events := a.told(); len(events) > 0 {
		t.Errorf("told although it is over: %q", events)
	}
}

func holdersOf(h *harness, pool, device string) int {
	n := 0
	for id, d := range h.plugin.shared.account.Tracker.Snapshot().Usage.All() {
		if id.Pool == pool && id.Device == device {
			n += d.Count()
		}
	}
	return n
}

func TestAuditorCompares(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("one", allocated("node-a", "gpu-0")), claim("two")}
	h := newHarness(t, w)
	a := newTestAuditor(h, time.Minute)
	difference := func(kind string) func() (float64, error) {
		return func() (float64, error) {
			return testutil.GetGaugeMetricValue(auditing.Differences.WithLabelValues(kind))
		}
	}

	a.Compare(h.ctx)
	if events := a.told(); len(events) > 0 {
		t.Errorf("a false alarm: %q", events)
	}
	// The fake API lists what it has now, so that what the tracker does not know yet seems to be missed.
	h.api.hold()
	h.api.change("one", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
	h.api.create(claim("three"))
	h.api.delete("two")
	a.Compare(h.ctx)
	events := strings.Join(a.told(), "\n")
	for kind, detail := range map[string]string{"outdated": "known in version 101, the API has 103", "missing": "the API has version 104", "gone": "known in version 102"} {
		wantGauge(t, kind, 1, difference(kind))
		if !strings.Contains(events, "Warning AccountDiffers what the scheduler knows of the claim differs from the API ("+kind+"): "+detail) {
			t.Errorf("no event of kind %s in\n%s", kind, events)
		}
	}
	h.api.release()
	h.caughtUp("two")
	h.caughtUp("three")
	a.Compare(h.ctx)
	for _, kind := range []string{"outdated", "missing", "gone", "usage"} {
		wantGauge(t, kind, 0, difference(kind))
	}

	// An allocation in flight for a pod that nobody binds.
	a.told()
	h.filterAll(pod("p", "three")).reserve("node-b")
	a.Compare(h.ctx)
	a.clock.Step(time.Minute + 1)
	a.Compare(h.ctx)
	if events := a.told(); len(events) != 1 || !strings.Contains(events[0], "AllocationStale devices gpu.example.com/node-b/gpu-0 are kept for the claim since") {
		t.Errorf("events %q", events)
	}
	wantGauge(t, "stale allocations", 1, func() (float64, error) { return testutil.GetGaugeMetricValue(auditing.StaleInFlight) })
}

// A list that the API server refuses is no finding.
func TestAuditorWithoutAList(t *testing.T) {
	h := newHarness(t, twoNodes())
	a := newTestAuditor(h, time.Minute)
	before, _ := testutil.GetCounterMetricValue(auditing.ComparisonsTotal.WithLabelValues("error"))
	h.api.onRequest(func(request string) error { return errServer })
	a.Compare(h.ctx)
	h.api.onRequest(nil)
	if got, _ := testutil.GetCounterMetricValue(auditing.ComparisonsTotal.WithLabelValues("error")); got != before+1 {
		t.Errorf("%v failed comparisons, want %v", got, before+1)
	}
	if events := a.told(); len(events) > 0 {
		t.Errorf("events %q", events)
	}
}

// The auditor finds by itself what is there at its start, and what comes later, and ends with its context.
func TestAuditorRuns(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("one", allocated("node-a", "gpu-0")), claim("two", allocated("node-a", "gpu-0"))}
	h := newHarness(t, w)
	a := newTestAuditor(h, time.Hour)
	ctx, cancel := context.WithCancel(h.ctx)
	done := make(chan struct{})
	go func() { defer close(done); a.Run(ctx) }()
	told := map[string]bool{}
	h.eventually("both are told of", func() bool {
		if a.clock.HasWaiters() {
			a.clock.Step(grace)
		}
		for _, event := range a.told() {
			told[event] = true
		}
		return len(told) == 2
	})
	for _, name := range []string{"three", "four"} {
		h.api.create(claim(name, allocated("node-b", "gpu-1")))
	}
	h.eventually("two more are told of", func() bool {
		if a.clock.HasWaiters() {
			a.clock.Step(grace)
		}
		for _, event := range a.told() {
			told[event] = true
		}
		return len(told) == 4
	})
	cancel()
	<-done
}

// A comparison may take minutes. Double holds are told of meanwhile.
func TestAuditorTellsOfDoubleHoldsDuringAComparison(t *testing.T) {
	h := newHarness(t, twoNodes())
	a := newTestAuditor(h, time.Minute)
	comparing, goOn := make(chan struct{}), make(chan struct{})
	h.client.PrependReactor("list", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		close(comparing)
		<-goOn
		return true, nil, errServer
	})
	ctx, cancel := context.WithCancel(h.ctx)
	done := make(chan struct{})
	go func() { defer close(done); a.Run(ctx) }()
	h.eventually("the auditor waits", func() bool { return a.clock.Waiters() == 2 })
	a.clock.Step(time.Minute)
	<-comparing
	for _, name := range []string{"one", "two"} {
		h.api.create(claim(name, allocated("node-b", "gpu-1")))
	}
	told := 0
	h.eventually("both are told of", func() bool {
		if a.clock.HasWaiters() {
			a.clock.Step(grace)
		}
		told += len(a.told())
		return told == 2
	})
	cancel()
	close(goOn)
	<-done
}

// Of several replicas, the one that leads tells of what is held twice, also since before it led.
func TestOnlyTheLeaderAudits(t *testing.T) {
	h := newHarness(t, twoNodes())
	s := h.plugin.shared
	clock := testingclock.NewFakeClock(time.Now())
	s.leader.auditor.Clock = clock
	for _, name := range []string{"one", "two"} {
		h.api.create(claim(name, allocated("node-a", "gpu-0")))
	}
	h.eventually("both claims are known", func() bool { return holdersOf(h, "node-a", "gpu-0") == 2 })
	heard := make(chan struct{}, 1)
	s.account.Tracker.Subscribe(func(event tracker.Event) {
		if event.Claim.Name == "three" {
			heard <- struct{}{}
		}
	})
	h.api.create(claim("three"))
	<-heard // and so of what was before
	if s.leader.auditor.Touched() > 0 || clock.HasWaiters() {
		t.Error("a replica audits")
	}
	s.Lead()
	h.eventually("the leader tells", func() bool {
		clock.Step(grace)
		select {
		case event := <-h.recorder.Events:
			return strings.Contains(event, "DeviceHeldTwice")
		default:
			return false
		}
	})
}
