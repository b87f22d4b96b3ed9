// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

func TestWithIsTheUsageThatIsLeftWhenAClaimHasTaken(t *testing.T) {
	devices := func(names ...string) *resourceapi.AllocationResult {
		a := &resourceapi.AllocationResult{}
		for _, d := range names {
			a.Devices.Results = append(a.Devices.Results, resourceapi.DeviceRequestAllocationResult{Driver: "d", Pool: d[:1], Device: d[1:]})
		}
		return a
	}
	index := NewIndex()
	index.Set(ClaimRef{UID: "one", Name: "one"}, devices("a0", "b0"), nil)
	view := index.View()
	before := holdersIn(view)
	two := ClaimRef{UID: "two", Name: "two"}

	with := view.With(two, devices("a0", "a1", "c0"))
	want := map[string][]string{"d/a/0": {"one", "two"}, "d/a/1": {"two"}, "d/b/0": {"one"}, "d/c/0": {"two"}}
	if diff := cmp.Diff(want, holdersIn(with)); diff != "" {
		t.Errorf("held (-want +got):\n%s", diff)
	}
	if with.Len() != 4 {
		t.Errorf("Len is %d, want 4", with.Len())
	}
	if h := with.Device(DeviceID{"d", "c", "0"}).Holders(); !h[0].InFlight {
		t.Error("what is only expected is not in flight")
	}
	b, a := PoolID{"d", "b"}, PoolID{"d", "a"}
	if with.Pool(b) != view.Pool(b) || with.Pool(a) == view.Pool(a) {
		t.Error("a pool keeps its identity exactly if the allocation does not name it")
	}
	if with.Revision() == view.Revision() || with.Revision() == view.With(two, devices("a1")).Revision() {
		t.Error("the revision is also that of another view")
	}
	if diff := cmp.Diff(before, holdersIn(view)); diff != "" {
		t.Errorf("the view itself changed (-before +after):\n%s", diff)
	}

	looking := devices("a1")
	looking.Devices.Results[0].AdminAccess = ptr.To(true)
	if got := view.With(two, looking); got.Revision() != view.Revision() {
		t.Error("an allocation with admin access holds something")
	}
}
