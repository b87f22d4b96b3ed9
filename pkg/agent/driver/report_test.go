// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// desk is a reporter with one claim, which has two devices of ours and one of another driver's.
type desk struct {
	t        *testing.T
	client   *fake.Clientset
	reporter *reporter
	events   *record.FakeRecorder
	verdicts map[string]health.Verdict
	claim    *resourceapi.ResourceClaim
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "train", UID: "train-uid"}}
	result := func(driver, pool, device string) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{Request: "r-" + device, Driver: driver, Pool: pool, Device: device}
	}
	claim.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			result(Name, "node-1", "gpu-0"), result(Name, "node-1", "gpu-1"), result("nic.example.com", "node-1", "nic-0"), result(Name, "other", "gpu-0"),
		}}},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "pod-uid"}, {APIGroup: "x", Resource: "podgroups", Name: "group", UID: "group-uid"}},
		Devices:     []resourceapi.AllocatedDeviceStatus{{Driver: "nic.example.com", Pool: "node-1", Device: "nic-0", Conditions: []metav1.Condition{}}},
	}
	records, err := ledger.Open(durable.OS{}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d := &desk{
		t: t, client: fake.NewClientset(claim), events: record.NewFakeRecorder(100), claim: claim,
		verdicts: map[string]health.Verdict{"gpu-0": {Status: health.Healthy}, "gpu-1": {Status: health.Healthy}},
	}
	d.reporter = newReporter(Options{NodeName: "node-1", Client: d.client, Hardware: NewHardware(HardwareOptions{})}, records)
	d.reporter.recorder = d.events
	d.reporter.health = func(device string) health.Verdict { return d.verdicts[device] }
	t.Cleanup(d.reporter.queue.ShutDown)
	return d
}

func (d *desk) prepared() {
	d.t.Helper()
	d.record()
	d.reporter.prepared(d.claim, nil)
}

// record is what an agent of the node writes that prepares the claim.
func (d *desk) record() {
	d.t.Helper()
	entry := &ledger.Entry{Claim: ledger.Claim{UID: "train-uid", Namespace: "default", Name: "train"}, State: ledger.PrepareCompleted, Completed: time.Now()}
	for _, device := range []string{"gpu-0", "gpu-1"} {
		entry.Devices = append(entry.Devices, ledger.Device{Pool: "node-1", Device: device, GPU: device, UUID: "GPU-of-" + device, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=" + device}})
	}
	if err := d.reporter.ledger.Put(entry); err != nil {
		d.t.Fatal(err)
	}
}

// work does what is in the queue, and returns the number of writes.
func (d *desk) work() (writes int) {
	d.t.Helper()
	_, ctx := ktesting.NewTestContext(d.t)
	d.client.ClearActions()
	for d.reporter.queue.Len() > 0 {
		claim, _ := d.reporter.queue.Get()
		d.reporter.process(ctx, claim)
	}
	for _, action := range d.client.Actions() {
		if action.GetVerb() == "patch" {
			writes++
		}
	}
	return writes
}

// told is what the claim's status says of our devices: "device Ready=... Healthy=... data".
func (d *desk) told() []string {
	d.t.Helper()
	claim, err := d.client.ResourceV1().ResourceClaims("default").Get(d.t.Context(), "train", metav1.GetOptions{})
	if err != nil {
		d.t.Fatal(err)
	}
	var list []string
	for _, device := range claim.Status.Devices {
		text := device.Driver + "/" + device.Device
		for _, kind := range []string{ConditionReady, ConditionHealthy} {
			if c := meta.FindStatusCondition(device.Conditions, kind); c != nil {
				text += fmt.Sprintf(" %s=%s:%s", c.Type, c.Status, c.Reason)
			}
		}
		if device.Data != nil {
			text += " " + string(device.Data.Raw)
		}
		list = append(list, text)
	}
	return list
}

func (d *desk) wantTold(want ...string) {
	d.t.Helper()
	want = append(want, "nic.example.com/nic-0")
	if diff := cmp.Diff(want, d.told(), cmpopts.SortSlices(func(a, b string) bool { return a < b })); diff != "" {
		d.t.Errorf("the claim's status (-want +got):\n%s", diff)
	}
}

// wantEvents compares the beginnings of the events since the last time.
func (d *desk) wantEvents(want ...string) {
	d.t.Helper()
	for _, w := range want {
		select {
		case got := <-d.events.Events:
			if !strings.HasPrefix(got, w) {
				d.t.Errorf("event %q, want %q", got, w)
			}
		default:
			d.t.Errorf("no event %q", w)
		}
	}
	select {
	case got := <-d.events.Events:
		d.t.Errorf("another event: %q", got)
	default:
	}
}

func TestTheClaimsStatusTellsOfItsDevices(t *testing.T) {
	d := newDesk(t)
	well := func(device string) string {
		return fmt.Sprintf(`gpu.nvidia.com/%s Ready=True:Prepared Healthy=True:Healthy {"uuid":"GPU-of-%s"}`, device, device)
	}
	d.prepared()
	if n := d.work(); n != 1 {
		t.Errorf("%d writes for a claim, want 1", n)
	}
	d.wantTold(well("gpu-0"), well("gpu-1"))
	d.wantEvents()
	d.prepared() // the kubelet calls again
	if n := d.work(); n != 0 {
		t.Errorf("%d writes although nothing has changed", n)
	}

	ill := health.Verdict{Status: health.Unhealthy, Faults: []health.Fault{{Reason: health.XID, Value: "74", Message: "XID 74: an NVLink has failed"}}}
	d.verdicts["gpu-1"] = ill
	d.reporter.healthChanged(t.Context(), "gpu-1", health.Verdict{Status: health.Healthy}, ill)
	d.work()
	d.wantTold(well("gpu-0"), `gpu.nvidia.com/gpu-1 Ready=True:Prepared Healthy=False:Unhealthy {"uuid":"GPU-of-gpu-1"}`)
	d.wantEvents("Warning GPUUnhealthy Device gpu-1: XID 74", "Warning DeviceUnhealthy Device gpu-1 of claim train: XID 74")

	d.verdicts["gpu-1"] = health.Verdict{Status: health.Healthy}
	d.reporter.healthChanged(t.Context(), "gpu-1", ill, d.verdicts["gpu-1"])
	d.work()
	d.wantTold(well("gpu-0"), well("gpu-1"))
	d.wantEvents("Normal GPUHealthy Device gpu-1 is healthy again", "Normal DeviceHealthy Device gpu-1 of claim train is healthy again")

	// A GPU that no claim of the ledger has concerns no claim.
	d.reporter.healthChanged(t.Context(), "gpu-7", d.verdicts["gpu-0"], ill)
	if n := d.reporter.queue.Len(); n != 0 {
		t.Errorf("%d claims are told of a GPU that they do not have", n)
	}
	d.wantEvents("Warning GPUUnhealthy Device gpu-7")
}

func TestFailuresThatLastAreToldApart(t *testing.T) {
	held := &prepare.HeldError{Claim: ledger.Claim{UID: "train-uid", Namespace: "default", Name: "train"}, Request: "r", Device: "gpu-0", Holder: ledger.Claim{UID: "x", Namespace: "default", Name: "other"}}
	tests := map[string]struct {
		err    error
		reason string // empty for a failure that passes
		said   string
	}{
		"a lost GPU":                {err: fmt.Errorf("claim: %w", nvml.ErrGPULost), reason: "GPULost", said: ", and that will not pass by itself: "},
		"a GPU that is not there":   {err: fmt.Errorf("claim: %w", nvml.ErrNotFound), reason: "GPULost", said: ", and that will not pass by itself: "},
		"held by another claim":     {err: errors.Join(errors.New("x"), held), reason: "DeviceHeld", said: " before others have left its GPU: "},
		"a share that does not fit": {err: fmt.Errorf("x: %w", &prepare.ShareError{Device: "gpu-0", Wants: "MPS", Setup: "Exclusive"}), reason: "ShareRefused", said: " before others have left its GPU: "},
		"a lock that is not free":   {err: fmt.Errorf("lock: %w", context.DeadlineExceeded)},
		"a driver that is not here": {err: nvml.ErrDriverNotLoaded},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			d := newDesk(t)
			d.reporter.prepared(d.claim, tc.err)
			writes := d.work()
			if tc.reason == "" {
				if writes != 0 {
					t.Errorf("%d writes for a failure that passes", writes)
				}
				d.wantTold()
				d.wantEvents()
				return
			}
			d.wantTold("gpu.nvidia.com/gpu-0 Ready=False:"+tc.reason+" Healthy=True:Healthy", "gpu.nvidia.com/gpu-1 Ready=False:"+tc.reason+" Healthy=True:Healthy")
			d.wantEvents("Warning "+tc.reason+" Device gpu-0 of claim train cannot be prepared"+tc.said, "Warning "+tc.reason+" Device gpu-1")
			// The kubelet tries on: that is said once.
			d.reporter.prepared(d.claim, tc.err)
			if n := d.work(); n != 0 {
				t.Errorf("%d writes for the same failure", n)
			}
			d.wantEvents()
			d.prepared()
			d.work()
			d.wantTold(`gpu.nvidia.com/gpu-0 Ready=True:Prepared Healthy=True:Healthy {"uuid":"GPU-of-gpu-0"}`, `gpu.nvidia.com/gpu-1 Ready=True:Prepared Healthy=True:Healthy {"uuid":"GPU-of-gpu-1"}`)
		})
	}
}

// What a claim waited for is over once it fails for a reason that only the kubelet tells. What lasts is not: such a failure may come between.
func TestAWaitIsNotToldOnceSomethingElseFails(t *testing.T) {
	other := ledger.Claim{UID: "x", Namespace: "default", Name: "other"}
	for name, tc := range map[string]struct {
		use  prepare.Use
		want string
	}{
		"a wait":               {prepare.Use{Ends: true, Text: "which is being released"}, "NotPrepared"},
		"a failure that stays": {prepare.Use{Text: "used by pod default/p, which runs"}, "DeviceHeld"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDesk(t)
			d.reporter.prepared(d.claim, &prepare.HeldError{Request: "r", Device: "gpu-0", Holder: other, Use: tc.use})
			d.work()
			d.reporter.prepared(d.claim, errors.New("no MPS daemon can be started"))
			d.reporter.review(nil)
			d.work()
			for _, told := range d.told() {
				if strings.HasPrefix(told, "gpu.nvidia.com/") && !strings.Contains(told, ":"+tc.want+" ") {
					t.Errorf("%s, want the reason %s", told, tc.want)
				}
			}
		})
	}
}

// TestWhatPassesWhenAnotherClaimIsReleasedIsTold, once, and not as a failure that stays.
func TestWhatPassesWhenAnotherClaimIsReleasedIsTold(t *testing.T) {
	ends := prepare.Use{Ends: true, Text: "which is being released: pod default/p has ended, and the kubelet has not unprepared it yet"}
	train := ledger.Claim{UID: "train-uid", Namespace: "default", Name: "train"}
	for name, err := range map[string]error{
		"a device": &prepare.HeldError{Claim: train, Request: "r", Device: "gpu-0", Holder: ledger.Claim{UID: "x", Namespace: "default", Name: "other"}, Use: ends},
		"a share":  &prepare.ShareError{Claim: train, Request: "r", Device: "gpu-0", Wants: "MPS", Setup: "Exclusive", Holder: ledger.Claim{UID: "x", Namespace: "default", Name: "other"}, Use: ends},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDesk(t)
			d.reporter.prepared(d.claim, err)
			if d.work() != 1 {
				t.Error("it is not written once")
			}
			d.wantTold("gpu.nvidia.com/gpu-0 Ready=False:DeviceNotReleased Healthy=True:Healthy", "gpu.nvidia.com/gpu-1 Ready=False:DeviceNotReleased Healthy=True:Healthy")
			d.wantEvents("Normal DeviceNotReleased Device gpu-0 of claim train is prepared as soon as it is released: "+err.Error(), "Normal DeviceNotReleased Device gpu-1")
			d.reporter.prepared(d.claim, fmt.Errorf("%w; waited 37s, and the kubelet tries again", err))
			if n := d.work(); n != 0 {
				t.Errorf("%d writes for the same wait", n)
			}
			d.prepared()
			d.work()
			d.wantTold(`gpu.nvidia.com/gpu-0 Ready=True:Prepared Healthy=True:Healthy {"uuid":"GPU-of-gpu-0"}`, `gpu.nvidia.com/gpu-1 Ready=True:Prepared Healthy=True:Healthy {"uuid":"GPU-of-gpu-1"}`)
		})
	}
}

func TestWhatIsNobodysBusinessIsNotTold(t *testing.T) {
	for name, change := range map[string]func(*resourceapi.ResourceClaim){
		"another claim of that name": func(c *resourceapi.ResourceClaim) { c.UID = "other-uid" },
		"a claim that is gone":       func(c *resourceapi.ResourceClaim) { c.Name = "gone" },
	} {
		t.Run(name, func(t *testing.T) {
			d := newDesk(t)
			claim := d.claim.DeepCopy()
			change(claim)
			d.reporter.prepared(claim, nvml.ErrGPULost)
			if n := d.work(); n != 0 {
				t.Errorf("%d writes", n)
			}
			if again := d.reporter.queue.NumRequeues(ledger.Claim{UID: claim.UID, Namespace: "default", Name: claim.Name}); again != 0 {
				t.Errorf("tried again %d times", again)
			}
		})
	}
}

func TestWhatCannotBeToldIsToldLater(t *testing.T) {
	d := newDesk(t)
	away := true
	d.client.PrependReactor("patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return away, nil, errors.New("the API server is away")
	})
	d.prepared()
	d.work()
	d.wantTold()
	away = false
	deadline := time.Now().Add(30 * time.Second)
	for d.reporter.queue.Len() == 0 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	d.work()
	if told := d.told(); len(told) != 3 {
		t.Errorf("the claim's status %q, want both devices", told)
	}
}

// TestWhatAnotherAgentHasPreparedHasNotFailed: in an update the kubelet calls the other one, and this one still looks at what it has told. What
// fails later is told.
func TestWhatAnotherAgentHasPreparedHasNotFailed(t *testing.T) {
	d := newDesk(t)
	held := &prepare.HeldError{Holder: ledger.Claim{UID: "other-uid"}}
	failed := []string{"gpu.nvidia.com/gpu-0 Ready=False:DeviceHeld Healthy=True:Healthy", "gpu.nvidia.com/gpu-1 Ready=False:DeviceHeld Healthy=True:Healthy"}
	d.reporter.prepared(d.claim, held)
	d.work()
	d.wantTold(failed...)
	d.record()
	d.reporter.review(nil)
	d.work()
	d.wantTold(`gpu.nvidia.com/gpu-0 Ready=True:Prepared Healthy=True:Healthy {"uuid":"GPU-of-gpu-0"}`, `gpu.nvidia.com/gpu-1 Ready=True:Prepared Healthy=True:Healthy {"uuid":"GPU-of-gpu-1"}`)
	d.reporter.prepared(d.claim, held)
	d.work()
	d.wantTold(failed...)
}
