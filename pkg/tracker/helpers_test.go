// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/usage"
)

const podA, podB = types.UID("pod-a"), types.UID("pod-b")

var (
	gpu0 = device("node-a", "gpu-0")
	gpu1 = device("node-a", "gpu-1")
	gpu2 = device("node-b", "gpu-0")
)

func device(pool, name string) usage.DeviceID {
	return usage.DeviceID{Driver: "gpu.nvidia.com", Pool: pool, Device: name}
}

// claim returns the claim default/<name> with a UID at a revision, holding devices
// if there are any.
func claim(name string, uid types.UID, revision int, devices ...usage.DeviceID) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace:       "default",
		Name:            name,
		UID:             uid,
		ResourceVersion: strconv.Itoa(revision),
	}}
	if len(devices) > 0 {
		c.Status.Allocation = allocation(devices...)
	}
	return c
}

func allocation(devices ...usage.DeviceID) *resourceapi.AllocationResult {
	a := &resourceapi.AllocationResult{}
	for _, d := range devices {
		a.Devices.Results = append(a.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: "gpu", Driver: d.Driver, Pool: d.Pool, Device: d.Device,
		})
	}
	return a
}

// shared returns an allocation of a share of a device.
func shared(d usage.DeviceID, share types.UID) *resourceapi.AllocationResult {
	a := allocation(d)
	a.Devices.Results[0].ShareID = ptr.To(share)
	return a
}

// failer is the part of testing.TB that a rapid.T has, too.
type failer interface {
	Helper()
	Fatal(args ...any)
}

func newTracker(tb testing.TB) *Tracker {
	return New(ktesting.NewLogger(tb, ktesting.NewConfig(ktesting.Verbosity(0))))
}

// quiet returns a tracker that logs nothing, for tests with very many steps.
func quiet() *Tracker { return New(klog.Logger{}) }

// listed returns a tracker that has seen a list.
func listed(tb testing.TB, revision int, claims ...*resourceapi.ResourceClaim) *Tracker {
	tb.Helper()
	tr := newTracker(tb)
	relist(tb, tr, revision, claims...)
	return tr
}

func relist(tb testing.TB, tr *Tracker, revision int, claims ...*resourceapi.ResourceClaim) {
	tb.Helper()
	objs := make([]any, 0, len(claims))
	for _, c := range claims {
		objs = append(objs, c)
	}
	must(tb, tr.Store().Replace(objs, strconv.Itoa(revision)))
}

func must(tb failer, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// reserve puts an allocation in flight on the present usage.
func reserve(tb testing.TB, tr *Tracker, owner types.UID, c *resourceapi.ResourceClaim, devices ...usage.DeviceID) {
	tb.Helper()
	must(tb, tr.Reserve(tr.Snapshot().Usage, owner, []Reservation{{Claim: c, Allocation: allocation(devices...)}}))
}

// held spells out the usage: by device the UIDs of its holders, with a * for
// those in flight, and with their shares and what these take.
func held(tr *Tracker) map[string][]string { return heldOf(tr.Snapshot().Usage) }

func heldOf(view usage.View) map[string][]string {
	found := map[string][]string{}
	for id, d := range view.All() {
		for _, h := range d.Holders() {
			found[id.String()] = append(found[id.String()], holderName(h.Claim.UID, h.InFlight, ptr.Deref(h.ShareID, ""))+amounts(h.ConsumedCapacity))
		}
		slices.Sort(found[id.String()])
	}
	return found
}

// wantHeld compares the usage with what is expected, and in any case with layers
// 1 and 2 (invariant I1).
func wantHeld(tb testing.TB, tr *Tracker, step string, want map[usage.DeviceID][]string) {
	tb.Helper()
	byName := map[string][]string{}
	for id, holders := range want {
		byName[id.String()] = holders
	}
	if diff := cmp.Diff(byName, held(tr)); diff != "" {
		tb.Errorf("%s: usage (-want +got):\n%s", step, diff)
	}
	if diff := cmp.Diff(recomputed(tr), held(tr)); diff != "" {
		tb.Errorf("%s: usage is not the fold of layers 1 and 2 (-recomputed +got):\n%s", step, diff)
	}
}

// recomputed counts the usage from scratch, by the text of invariant I1: for each
// claim the devices of layer 1, and those of layer 2 that layer 1 does not have.
func recomputed(tr *Tracker) map[string][]string {
	tr.mutex.Lock()
	defer tr.mutex.Unlock()
	found := map[string][]string{}
	spell := func(r *resourceapi.DeviceRequestAllocationResult) string {
		return usage.DeviceOf(r).String() + "/" + string(ptr.Deref(r.ShareID, "")) + amounts(r.ConsumedCapacity)
	}
	count := func(uid types.UID, allocation *resourceapi.AllocationResult, inFlight bool, except sets.Set[string]) {
		if allocation == nil {
			return
		}
		for i := range allocation.Devices.Results {
			r := &allocation.Devices.Results[i]
			if id := usage.DeviceOf(r).String(); !ptr.Deref(r.AdminAccess, false) && !except.Has(spell(r)) {
				found[id] = append(found[id], holderName(uid, inFlight, ptr.Deref(r.ShareID, ""))+amounts(r.ConsumedCapacity))
			}
		}
	}
	for _, known := range tr.claims.byName {
		count(known.UID, known.Status.Allocation, false, nil)
	}
	for uid, pending := range tr.inFlight {
		confirmed := sets.New[string]()
		for _, known := range tr.claims.byName {
			if known.UID == uid && known.Status.Allocation != nil {
				for i := range known.Status.Allocation.Devices.Results {
					confirmed.Insert(spell(&known.Status.Allocation.Devices.Results[i]))
				}
			}
		}
		count(uid, pending.allocation, true, confirmed)
	}
	for _, holders := range found {
		slices.Sort(holders)
	}
	return found
}

// amounts spells out what a share takes, and nothing if it takes nothing.
func amounts(capacity map[resourceapi.QualifiedName]resource.Quantity) string {
	var all []string
	for name, amount := range capacity {
		all = append(all, string(name)+"="+amount.String())
	}
	if len(all) == 0 {
		return ""
	}
	slices.Sort(all)
	return "{" + strings.Join(all, " ") + "}"
}
