// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// holding is what somebody has, and when.
type holding struct {
	claim string
	has   results
	when  tracker.Precedence
}

func TestJudge(t *testing.T) {
	gpus := []*resourceapi.ResourceSlice{slice("a", whole("gpu-0"), whole("gpu-1"), shareable("big", "80Gi"))}
	mig := append(withCounters("a", map[string]string{"memory": "80Gi"},
		partition("one", "40Gi"), partition("two", "40Gi"), partition("three", "40Gi"), partition("all", "80Gi"), whole("plain")),
		slice("b", whole("gpu-0")))
	grouped := func(name string, groups ...string) resourceapi.Device {
		d := partition(name, "1Gi")
		d.ConsumesCounters[0].CompatibilityGroups = groups
		return d
	}
	groups := withCounters("a", map[string]string{"memory": "80Gi"},
		grouped("red-1", "red"), grouped("red-2", "red"), grouped("blue", "blue"), grouped("both", "blue", "red"), grouped("bare-1"), grouped("bare-2"), whole("plain"))
	engines := func(name, memory, engines string, groups ...string) resourceapi.Device {
		d := grouped(name, groups...)
		d.ConsumesCounters[0].Counters = map[string]resourceapi.Counter{}
		for counter, value := range map[string]string{"memory": memory, "engines": engines} {
			if value != "" {
				d.ConsumesCounters[0].Counters[counter] = resourceapi.Counter{Value: resource.MustParse(value)}
			}
		}
		return d
	}
	two := withCounters("a", map[string]string{"memory": "80Gi", "engines": "8"},
		engines("one", "20Gi", "2"), engines("two", "20Gi", "2"), engines("half", "40Gi", "4"), engines("more", "41Gi", "4"),
		engines("memory", "1Gi", "", "red"), engines("engine", "", "1", "blue"))
	ofGroups := "its compatibility groups in counter set gpu do not go with those of what is held"
	incomplete := slice("a", whole("gpu-0"), whole("gpu-1"))
	incomplete.Spec.Pool.ResourceSliceCount = 2
	var none results

	fits := tracker.Verdict{Outcome: tracker.Fits}
	tests := map[string]struct {
		slices    []*resourceapi.ResourceSlice
		others    []holding
		decidedOn []holding
		wants     results
		want      tracker.Verdict
	}{
		"nobody else is there": {
			slices: gpus, wants: none.device("a", "gpu-0"), want: fits,
		},
		"another device of the pool is held": {
			slices: gpus, others: []holding{{"y", none.device("a", "gpu-1"), tracker.Earlier}},
			wants: none.device("a", "gpu-0"), want: fits,
		},
		"the device was taken earlier": {
			slices: gpus, others: []holding{{"y", none.device("a", "gpu-0"), tracker.Earlier}},
			wants: none.device("a", "gpu-0"), want: verdict(tracker.Lost, id("a", "gpu-0"), ref("y"), ""),
		},
		"the device was taken later": {
			slices: gpus, others: []holding{{"y", none.device("a", "gpu-0"), tracker.Later}},
			wants: none.device("a", "gpu-0"), want: fits,
		},
		"the device was taken earlier or later": {
			slices: gpus, others: []holding{{"y", none.device("a", "gpu-0"), tracker.EitherWay}},
			wants: none.device("a", "gpu-0"), want: verdict(tracker.Undecided, id("a", "gpu-0"), ref("y"), ""),
		},
		"one device was taken earlier, another one perhaps": {
			slices: gpus, others: []holding{{"x", none.device("a", "gpu-0"), tracker.EitherWay}, {"y", none.device("a", "gpu-1"), tracker.Earlier}},
			wants: none.device("a", "gpu-0").device("a", "gpu-1"), want: verdict(tracker.Lost, id("a", "gpu-1"), ref("y"), ""),
		},
		"the device was taken earlier, as was known": {
			slices: gpus, others: []holding{{"y", none.device("a", "gpu-0"), tracker.Earlier}},
			decidedOn: []holding{{"y", none.device("a", "gpu-0"), ""}},
			wants:     none.device("a", "gpu-0"), want: verdict(tracker.Lost, id("a", "gpu-0"), ref("y"), ""),
		},
		"admin access takes nothing": {
			slices: gpus, others: []holding{{"y", none.device("a", "gpu-0"), tracker.Earlier}},
			wants: none.admin("a", "gpu-0"), want: fits,
		},
		"a device is taken although its slice is not known": {
			others: []holding{{"y", none.device("a", "gpu-0"), tracker.Earlier}},
			wants:  none.device("a", "gpu-0"), want: verdict(tracker.Lost, id("a", "gpu-0"), ref("y"), ""),
		},

		"shares that fit": {
			slices: gpus, others: []holding{{"y", none.share("a", "big", "s1", "40Gi"), tracker.Earlier}},
			wants: none.share("a", "big", "s2", "40Gi"), want: fits,
		},
		"shares that do not": {
			slices: gpus, others: []holding{{"y", none.share("a", "big", "s1", "41Gi"), tracker.Earlier}},
			wants: none.share("a", "big", "s2", "40Gi"), want: verdict(tracker.Lost, id("a", "big"), ref("y"), "too little is left of capacity memory"),
		},
		"shares of several claims that together do not": {
			slices: gpus, others: []holding{{"x", none.share("a", "big", "s0", "30Gi"), tracker.Earlier}, {"y", none.share("a", "big", "s1", "30Gi"), tracker.Earlier}},
			wants: none.share("a", "big", "s2", "30Gi"), want: verdict(tracker.Lost, id("a", "big"), ref("x"), "too little is left of capacity memory"),
		},
		"two shares of the claim that together do not": {
			slices: gpus, others: []holding{{"y", none.share("a", "big", "s1", "30Gi"), tracker.Earlier}},
			wants: none.share("a", "big", "s2", "30Gi").share("a", "big", "s3", "30Gi"),
			want:  verdict(tracker.Lost, id("a", "big"), ref("y"), "too little is left of capacity memory"),
		},
		"shares that do not fit if one came earlier": {
			slices: gpus, others: []holding{{"x", none.share("a", "big", "s0", "30Gi"), tracker.Earlier}, {"y", none.share("a", "big", "s1", "30Gi"), tracker.EitherWay}},
			wants: none.share("a", "big", "s2", "30Gi"), want: verdict(tracker.Undecided, id("a", "big"), ref("x"), "too little is left of capacity memory"),
		},
		"shares of the claim alone that do not, which nobody else made so": {
			slices: gpus, others: []holding{{"y", none.share("a", "big", "s1", "80Gi"), tracker.Later}},
			wants: none.share("a", "big", "s2", "81Gi"), want: fits,
		},
		"a share of a device that somebody has alone": {
			slices: gpus, others: []holding{{"y", none.device("a", "big"), tracker.Earlier}},
			wants: none.share("a", "big", "s2", "1Gi"), want: verdict(tracker.Lost, id("a", "big"), ref("y"), ""),
		},
		"all of a device of which somebody has a share": {
			slices: gpus, others: []holding{{"y", none.share("a", "big", "s1", "1Gi"), tracker.Earlier}},
			wants: none.device("a", "big"), want: verdict(tracker.Lost, id("a", "big"), ref("y"), ""),
		},
		"shares of a device that is not known": {
			others: []holding{{"y", none.share("a", "big", "s1", "1Gi"), tracker.Earlier}},
			wants:  none.share("a", "big", "s2", "1Gi"), want: verdict(tracker.Undecided, id("a", "big"), ref("y"), "the device's capacity is not known"),
		},
		"shares of a device that was known when the claim was decided": {
			others:    []holding{{"y", none.share("a", "big", "s1", "1Gi"), tracker.Earlier}},
			decidedOn: []holding{{"y", none.share("a", "big", "s1", "1Gi"), ""}},
			wants:     none.share("a", "big", "s2", "1Gi"), want: fits,
		},
		"a share of a device that is not known and has another holder than then": {
			others:    []holding{{"y", none.share("a", "big", "s1", "1Gi"), tracker.Earlier}},
			decidedOn: []holding{{"x", none.share("a", "big", "s1", "1Gi"), ""}},
			wants:     none.share("a", "big", "s2", "1Gi"), want: verdict(tracker.Undecided, id("a", "big"), ref("y"), "the device's capacity is not known"),
		},

		"counters that suffice": {
			slices: mig, others: []holding{{"y", none.device("a", "one"), tracker.Earlier}},
			wants: none.device("a", "two"), want: fits,
		},
		"counters that do not": {
			slices: mig, others: []holding{{"y", none.device("a", "one"), tracker.Earlier}},
			wants: none.device("a", "all"), want: verdict(tracker.Lost, id("a", "all"), ref("y"), "too little is left of counter memory of set gpu"),
		},
		"counters that do not suffice for all devices of the claim": {
			slices: mig, others: []holding{{"y", none.device("a", "one"), tracker.Earlier}},
			wants: none.device("a", "two").device("a", "three"), want: verdict(tracker.Lost, id("a", "three"), ref("y"), "too little is left of counter memory of set gpu"),
		},
		"counters that do not suffice for the claim alone, which nobody else made so": {
			slices: mig, others: []holding{{"y", none.device("a", "plain"), tracker.Earlier}},
			wants: none.device("a", "two").device("a", "all"), want: fits,
		},
		"counters that were taken later": {
			slices: mig, others: []holding{{"y", none.device("a", "one"), tracker.Later}},
			wants: none.device("a", "all"), want: fits,
		},
		"counters that may have been taken earlier": {
			slices: mig, others: []holding{{"y", none.device("a", "one"), tracker.EitherWay}},
			wants: none.device("a", "all"), want: verdict(tracker.Undecided, id("a", "all"), ref("y"), "too little is left of counter memory of set gpu"),
		},
		"a device without counters where others have taken them": {
			slices: mig, others: []holding{{"y", none.device("a", "all"), tracker.Earlier}},
			wants: none.device("a", "plain"), want: fits,
		},
		"a partition of a pool in which an unknown device is held": {
			slices: mig, others: []holding{{"y", none.device("a", "new"), tracker.Earlier}},
			wants: none.device("a", "one"), want: verdict(tracker.Undecided, id("a", "one"), ref("y"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"a partition of a pool in which an unknown device was held when it was decided": {
			slices: mig, others: []holding{{"y", none.device("a", "gone"), tracker.Earlier}},
			decidedOn: []holding{{"y", none.device("a", "gone"), ""}},
			wants:     none.device("a", "one"), want: fits,
		},
		"a partition of a pool in which one unknown device was held then, and another one is new": {
			slices: mig, others: []holding{{"x", none.device("a", "new-1"), tracker.Earlier}, {"y", none.device("a", "new-2"), tracker.Earlier}},
			decidedOn: []holding{{"y", none.device("a", "new-2"), ""}},
			wants:     none.device("a", "one"), want: verdict(tracker.Undecided, id("a", "one"), ref("x"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"a partition of a pool in which one unknown device is new, and another one was held then": {
			slices: mig, others: []holding{{"x", none.device("a", "new-1"), tracker.Earlier}, {"y", none.device("a", "new-2"), tracker.Earlier}},
			decidedOn: []holding{{"x", none.device("a", "new-1"), ""}},
			wants:     none.device("a", "one"), want: verdict(tracker.Undecided, id("a", "one"), ref("y"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"a device without counters of a pool in which an unknown device is held": {
			slices: mig, others: []holding{{"y", none.device("a", "new"), tracker.Earlier}},
			wants: none.device("a", "plain"), want: verdict(tracker.Undecided, id("a", "plain"), ref("y"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"a device without counters of a pool in which an unknown device was held when it was decided": {
			slices: mig, others: []holding{{"y", none.device("a", "gone"), tracker.Earlier}},
			decidedOn: []holding{{"y", none.device("a", "gone"), ""}},
			wants:     none.device("a", "plain"), want: fits,
		},
		"a device without counters of a pool in which an unknown device was taken later": {
			slices: mig, others: []holding{{"y", none.device("a", "new"), tracker.Later}},
			wants: none.device("a", "plain"), want: fits,
		},
		"a device of a pool without counters in which an unknown device is held": {
			slices: gpus, others: []holding{{"y", none.device("a", "gpu-0-mig"), tracker.Earlier}},
			wants: none.device("a", "gpu-0"), want: verdict(tracker.Undecided, id("a", "gpu-0"), ref("y"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"a share of a device, which has other shares, of a pool in which an unknown device is held": {
			slices: gpus, others: []holding{{"x", none.share("a", "big", "s1", "1Gi"), tracker.Earlier}, {"y", none.device("a", "new"), tracker.Earlier}},
			wants: none.share("a", "big", "s2", "1Gi"), want: verdict(tracker.Undecided, id("a", "big"), ref("y"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"an unknown device of a pool in which a partition is held": {
			slices: mig, others: []holding{{"y", none.device("a", "one"), tracker.Earlier}},
			wants: none.device("a", "new"), want: verdict(tracker.Undecided, id("a", "new"), ref("y"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"an unknown device of a pool in which a device without counters is held": {
			slices: mig, others: []holding{{"y", none.device("a", "plain"), tracker.Earlier}},
			wants: none.device("a", "new"), want: verdict(tracker.Undecided, id("a", "new"), ref("y"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"an unknown device of a pool without counters": {
			slices: gpus, others: []holding{{"y", none.device("a", "gpu-1"), tracker.Earlier}},
			wants: none.device("a", "new"), want: verdict(tracker.Undecided, id("a", "new"), ref("y"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"an unknown device of a pool without counters, in which nothing was taken since it was decided": {
			slices: gpus, others: []holding{{"y", none.device("a", "gpu-1"), tracker.Earlier}},
			decidedOn: []holding{{"y", none.device("a", "gpu-1"), ""}},
			wants:     none.device("a", "new"), want: fits,
		},
		"a device with the name of a partition in another pool": {
			slices: append([]*resourceapi.ResourceSlice{slice("c", whole("all"))}, mig...), others: []holding{{"y", none.device("a", "one"), tracker.Earlier}},
			wants: none.device("a", "two").device("c", "all"), want: fits,
		},
		"an unknown device and a share of a device of which another claim has the other": {
			slices: gpus, others: []holding{{"y", none.share("a", "big", "s1", "1Gi"), tracker.Earlier}},
			wants: none.share("a", "big", "s2", "1Gi").device("a", "new"), want: fits,
		},
		"an unknown device of a pool in which nothing is held": {
			slices: mig, wants: none.device("a", "new"), want: fits,
		},
		"a device of a pool that is not complete": {
			slices: []*resourceapi.ResourceSlice{incomplete}, others: []holding{{"y", none.device("a", "gpu-1"), tracker.Earlier}},
			wants: none.device("a", "gpu-0"), want: verdict(tracker.Undecided, id("a", "gpu-0"), ref("y"), "it is not known what devices of pool gpu.example.com/a take of shared counters"),
		},
		"a device of a pool that is not complete, beside one that was held before": {
			slices: []*resourceapi.ResourceSlice{incomplete}, others: []holding{{"y", none.device("a", "gpu-1"), tracker.Earlier}},
			decidedOn: []holding{{"y", none.device("a", "gpu-1"), ""}},
			wants:     none.device("a", "gpu-0"), want: fits,
		},
		"devices that take of two counters, each once": {
			slices: two, others: []holding{{"x", none.device("a", "one"), tracker.Earlier}, {"y", none.device("a", "two"), tracker.Earlier}},
			wants: none.device("a", "half"), want: fits,
		},
		"devices that take of two counters, of which one does not suffice": {
			slices: two, others: []holding{{"x", none.device("a", "one"), tracker.Earlier}, {"y", none.device("a", "two"), tracker.Earlier}},
			wants: none.device("a", "more"), want: verdict(tracker.Lost, id("a", "more"), ref("y"), "too little is left of counter memory of set gpu"),
		},
		"devices of different compatibility groups that take of different counters": {
			slices: two, others: []holding{{"y", none.device("a", "memory"), tracker.Earlier}},
			wants: none.device("a", "engine"), want: verdict(tracker.Lost, id("a", "engine"), ref("y"), ofGroups),
		},
		"devices of one compatibility group": {
			slices: groups, others: []holding{{"y", none.device("a", "red-1"), tracker.Earlier}}, wants: none.device("a", "red-2").device("a", "both"), want: fits,
		},
		"devices of different compatibility groups": {
			slices: groups, others: []holding{{"y", none.device("a", "red-1"), tracker.Earlier}},
			wants: none.device("a", "plain").device("a", "blue"), want: verdict(tracker.Lost, id("a", "blue"), ref("y"), ofGroups),
		},
		"devices of different compatibility groups, the other one later": {
			slices: groups, others: []holding{{"y", none.device("a", "red-1"), tracker.Later}}, wants: none.device("a", "blue"), want: fits,
		},
		"devices of different compatibility groups, the other one perhaps earlier": {
			slices: groups, others: []holding{{"y", none.device("a", "red-1"), tracker.EitherWay}},
			wants: none.device("a", "blue"), want: verdict(tracker.Undecided, id("a", "blue"), ref("y"), ofGroups),
		},
		"two devices that each have a group in common with a third, and not with each other": {
			slices: groups, others: []holding{{"x", none.device("a", "both"), tracker.Earlier}, {"y", none.device("a", "red-1"), tracker.Earlier}},
			wants: none.device("a", "blue"), want: verdict(tracker.Lost, id("a", "blue"), ref("y"), ofGroups),
		},
		"a second device of the claim that does not go with the held one and the first": {
			slices: groups, others: []holding{{"y", none.device("a", "both"), tracker.Earlier}},
			wants: none.device("a", "red-1").device("a", "blue"), want: verdict(tracker.Lost, id("a", "blue"), ref("y"), ofGroups),
		},
		"devices of the claim alone that do not go together, which nobody else made so": {
			slices: groups, others: []holding{{"y", none.device("a", "plain"), tracker.Earlier}}, wants: none.device("a", "red-1").device("a", "blue"), want: fits,
		},
		"devices without groups": {
			slices: groups, others: []holding{{"y", none.device("a", "bare-1"), tracker.Earlier}}, wants: none.device("a", "bare-2"), want: fits,
		},
		"a device without groups beside one that has some": {
			slices: groups, others: []holding{{"y", none.device("a", "red-1"), tracker.Earlier}},
			wants: none.device("a", "bare-1"), want: verdict(tracker.Lost, id("a", "bare-1"), ref("y"), ofGroups),
		},
		"a device with groups beside one that has none": {
			slices: groups, others: []holding{{"y", none.device("a", "bare-1"), tracker.Earlier}},
			wants: none.device("a", "red-1"), want: verdict(tracker.Lost, id("a", "red-1"), ref("y"), ofGroups),
		},
		"certain conflict goes before what is not known": {
			slices: mig, others: []holding{{"x", none.device("a", "new"), tracker.Earlier}, {"y", none.device("a", "one"), tracker.Earlier}},
			wants: none.device("a", "all"), want: verdict(tracker.Lost, id("a", "all"), ref("y"), "too little is left of counter memory of set gpu"),
		},
		"conflict in the second pool": {
			slices: mig, others: []holding{{"y", none.device("b", "gpu-0"), tracker.Earlier}},
			wants: none.device("a", "one").device("b", "gpu-0"), want: verdict(tracker.Lost, id("b", "gpu-0"), ref("y"), ""),
		},
		"counters of the second pool": {
			slices: mig, others: []holding{{"y", none.device("a", "one"), tracker.Earlier}},
			wants: none.device("b", "gpu-0").device("a", "all"), want: verdict(tracker.Lost, id("a", "all"), ref("y"), "too little is left of counter memory of set gpu"),
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			index := usage.NewIndex()
			when := map[types.UID]tracker.Precedence{}
			for _, h := range tc.others {
				index.Set(ref(h.claim), h.has.allocation(), nil)
				when[ref(h.claim).UID] = h.when
			}
			index.Set(ref("x-itself"), tc.wants.allocation(), nil)
			decided := usage.NewIndex()
			for _, h := range tc.decidedOn {
				decided.Set(ref(h.claim), nil, h.has.allocation())
			}
			got := NewJudge(inventoryOf(tc.slices...).View).Judge(tracker.Case{
				Claim: ref("x-itself"), Allocation: tc.wants.allocation(), Usage: index.View(), DecidedOn: decided.View(),
				Precedence: func(_ usage.DeviceID, h usage.Holder) tracker.Precedence { return when[h.Claim.UID] },
			})
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("verdict differs (-want +got):\n%s", diff)
			}
		})
	}
}

// A device that is shared takes its counters once, whoever came first.
func TestJudgeCountsCountersOfASharedDeviceOnce(t *testing.T) {
	shared := partition("shared", "80Gi")
	shared.AllowMultipleAllocations = ptr.To(true)
	shared.Capacity = shareable("", "80Gi").Capacity
	s := newScheduler(withCounters("a", map[string]string{"memory": "80Gi"}, shared)...)
	var none results
	x, y := claim("x", 11, none.share("a", "shared", "s1", "40Gi")), claim("y", 12, none.share("a", "shared", "s2", "40Gi"))
	s.list(10)
	s.watch(x)
	s.watch(y)
	s.wantVerdict(t, x, usage.View{}, tracker.Fits, "")
	s.wantVerdict(t, y, usage.View{}, tracker.Fits, "")
}

func id(pool, device string) usage.DeviceID {
	return usage.DeviceID{Driver: driver, Pool: pool, Device: device}
}

func ref(name string) usage.ClaimRef {
	return usage.ClaimRef{UID: types.UID(name), Namespace: "default", Name: name}
}

// Where shares of a GPU are one namespace's, the later one of two namespaces gives way.
func TestTheLaterOfTwoNamespacesGivesWay(t *testing.T) {
	own := func(r results) results {
		for i := range r {
			r[i].Driver = "gpu.nvidia.com"
		}
		return r
	}
	apart := func(driver, attribute string) *resourceapi.ResourceSlice {
		s := slice("a", shareable("gpu-0", "80Gi"))
		s.Spec.Driver = driver
		s.Spec.Devices[0].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{resourceapi.QualifiedName(attribute): {BoolValue: ptr.To(true)}}
		return s
	}
	var none results
	share := func(id string) results { return own(none.share("a", "gpu-0", id, "10Gi")) }
	tests := map[string]struct {
		slice     *resourceapi.ResourceSlice
		namespace string // of the other claim
		theirs    results
		ours      results
		first     bool // ours came first
		inUse     bool // a pod that has a node uses ours
		known     bool // theirs was there when ours was decided
		want      tracker.Outcome
	}{
		"another namespace's was earlier":          {namespace: "other", want: tracker.Lost},
		"another namespace's was earlier, in full": {slice: apart("gpu.nvidia.com", "gpu.nvidia.com/sharedByNamespace"), namespace: "other", want: tracker.Lost},
		"another namespace's was later":            {namespace: "other", first: true, want: tracker.Fits},
		"the namespace's own":                      {namespace: "default", want: tracker.Fits},
		"the node allows it":                       {slice: apart("gpu.nvidia.com", "something"), namespace: "other", want: tracker.Fits},
		"a pod that has a node uses ours":          {namespace: "other", inUse: true, want: tracker.Fits},
		"theirs was known, and ours is not in use": {namespace: "other", known: true, want: tracker.Lost},
		"another one looks at it":                  {namespace: "other", theirs: own(none.admin("a", "gpu-0")), want: tracker.Fits},
		"ours looks at it":                         {namespace: "other", ours: own(none.admin("a", "gpu-0")), want: tracker.Fits},
		"the pool is not known":                    {slice: slice("b"), namespace: "other", want: tracker.Undecided},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.slice == nil {
				tc.slice = apart("gpu.nvidia.com", "sharedByNamespace")
			}
			if tc.theirs == nil {
				tc.theirs = share("theirs")
			}
			if tc.ours == nil {
				tc.ours = share("ours")
			}
			s := newScheduler(tc.slice)
			s.list(10)
			theirs, ours := claim("theirs", 11, tc.theirs), claim("ours", 12, tc.ours)
			theirs.Namespace = tc.namespace
			var decidedOn usage.View
			if tc.first {
				theirs.ResourceVersion, ours.ResourceVersion = ours.ResourceVersion, theirs.ResourceVersion
				s.watch(ours)
				s.watch(theirs)
			} else {
				s.watch(theirs)
				if tc.known {
					decidedOn = s.tracker.Snapshot().Usage
				}
				s.watch(ours)
			}
			other := ""
			if tc.want != tracker.Fits {
				other = "theirs"
			}
			if tc.inUse {
				decidedOn = s.tracker.Snapshot().Usage
			}
			s.wantVerdict(t, ours, decidedOn, tc.want, other)
		})
	}
}
