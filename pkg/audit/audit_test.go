// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

const grace = 10 * time.Second

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func device(name string) usage.DeviceID {
	return usage.DeviceID{Driver: "gpu.example.com", Pool: "node-a", Device: name}
}

// claim has the named devices. "gpu-0/s1" is the share s1 of gpu-0, "gpu-0!" is admin access.
func claim(name string, version int, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "team-a", Name: name, UID: types.UID(name + "-uid"), ResourceVersion: strconv.Itoa(version),
	}}
	if len(devices) > 0 {
		c.Status.Allocation = allocation(devices...)
	}
	return c
}

func allocation(devices ...string) *resourceapi.AllocationResult {
	a := &resourceapi.AllocationResult{}
	for _, name := range devices {
		result := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: "gpu.example.com", Pool: "node-a", Device: name}
		if end := len(name) - 1; name[end] == '!' {
			result.Device, result.AdminAccess = name[:end], ptr.To(true)
		}
		if i := slices.Index([]byte(name), '/'); i >= 0 {
			result.Device, result.ShareID = name[:i], ptr.To(types.UID(name[i+1:]))
		}
		a.Devices.Results = append(a.Devices.Results, result)
	}
	return a
}

func viewOf(claims ...*resourceapi.ResourceClaim) usage.View {
	index := usage.NewIndex()
	for _, c := range claims {
		index.Set(usage.RefOf(c), c.Status.Allocation, nil)
	}
	return index.View()
}

func TestClaimants(t *testing.T) {
	inFlight := usage.NewIndex()
	inFlight.Set(usage.RefOf(claim("a", 1)), allocation("gpu-0"), nil)
	inFlight.Set(usage.RefOf(claim("b", 1)), nil, allocation("gpu-0"))
	for name, tc := range map[string]struct {
		view usage.View
		want []string
	}{
		"free":                               {view: viewOf()},
		"one claim":                          {view: viewOf(claim("a", 1, "gpu-0"))},
		"two claims":                         {view: viewOf(claim("a", 1, "gpu-0"), claim("b", 1, "gpu-0")), want: []string{"team-a/a", "team-a/b"}},
		"three claims":                       {view: viewOf(claim("a", 1, "gpu-0"), claim("b", 1, "gpu-0"), claim("c", 1, "gpu-0")), want: []string{"team-a/a", "team-a/b", "team-a/c"}},
		"shares of two claims":               {view: viewOf(claim("a", 1, "gpu-0/s1"), claim("b", 1, "gpu-0/s2"))},
		"shares of one claim":                {view: viewOf(claim("a", 1, "gpu-0/s1", "gpu-0/s2"))},
		"a share beside an exclusive holder": {view: viewOf(claim("a", 1, "gpu-0/s1"), claim("b", 1, "gpu-0")), want: []string{"team-a/a", "team-a/b"}},
		"admin access":                       {view: viewOf(claim("a", 1, "gpu-0!"), claim("b", 1, "gpu-0"))},
		"one of them in flight":              {view: inFlight.View()},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, names(Claimants(tc.view.Device(device("gpu-0"))))); diff != "" {
				t.Errorf("claims differ (-want +got):\n%s", diff)
			}
		})
	}
}

func names(claims []usage.ClaimRef) []string {
	var out []string
	for _, c := range claims {
		out = append(out, c.String())
	}
	return out
}

func TestDoubleHoldsAreToldOnceAfterTheGracePeriod(t *testing.T) {
	a, b, c := claim("a", 1, "gpu-0"), claim("b", 1, "gpu-0"), claim("c", 1, "gpu-0")
	one, two, three := viewOf(a), viewOf(a, b), viewOf(a, b, c)
	type step struct {
		after time.Duration
		view  usage.View
		look  bool // at the device
		found []string
		over  []string
		next  time.Duration // 0 for never
		len   int
	}
	for name, steps := range map[string][]step{
		"lasting": {
			{after: 0, view: two, look: true, next: grace},
			{after: grace - 1, view: two, next: grace},
			{after: grace, view: two, found: []string{"team-a/a", "team-a/b"}, len: 1},
			{after: 2 * grace, view: two, look: true, len: 1},
			{after: 3 * grace, view: one, over: []string{"team-a/a", "team-a/b"}},
			{after: 4 * grace, view: one, look: true},
		},
		"one of two schedulers gives way": {
			{after: 0, view: two, look: true, next: grace},
			{after: 1, view: one, look: true},
			{after: grace, view: one},
		},
		"comes back": {
			{after: 0, view: two, look: true, next: grace},
			{after: 1, view: one, look: true},
			{after: 2, view: two, look: true, next: grace + 2},
			{after: grace, view: two, next: grace + 2},
			{after: grace + 2, view: two, found: []string{"team-a/a", "team-a/b"}, len: 1},
		},
		"another claim on top": {
			{after: 0, view: two, look: true, next: grace},
			{after: grace, view: two, found: []string{"team-a/a", "team-a/b"}, len: 1},
			{after: grace + 1, view: three, look: true, next: 2*grace + 1},
			{after: 2*grace + 1, view: three, found: []string{"team-a/a", "team-a/b", "team-a/c"}, len: 1},
		},
		"not looked at": {{after: 0, view: two}},
	} {
		t.Run(name, func(t *testing.T) {
			d := NewDoubles(grace)
			for i, s := range steps {
				var devices []usage.DeviceID
				if s.look {
					devices = []usage.DeviceID{device("gpu-0")}
				}
				found, over := d.Look(start.Add(s.after), s.view, nothing, slices.Values(devices))
				if diff := cmp.Diff(s.found, claimsOf(found)); diff != "" {
					t.Errorf("step %d: found differs (-want +got):\n%s", i, diff)
				}
				if diff := cmp.Diff(s.over, claimsOf(over)); diff != "" {
					t.Errorf("step %d: over differs (-want +got):\n%s", i, diff)
				}
				next, ok := d.Next()
				if ok != (s.next > 0) || ok && !next.Equal(start.Add(s.next)) {
					t.Errorf("step %d: next look at %s, %t, want after %s", i, next, ok, s.next)
				}
				if d.Len() != s.len {
					t.Errorf("step %d: %d devices held twice, want %d", i, d.Len(), s.len)
				}
			}
		})
	}
}

func claimsOf(holds []DoubleHold) []string {
	var out []string
	for _, h := range holds {
		out = append(out, names(h.Claims)...)
	}
	return out
}

func TestCompare(t *testing.T) {
	const version = 100
	a, b := claim("a", 10, "gpu-0"), claim("b", 20)
	recreated := claim("a", 101, "gpu-1")
	recreated.UID = "another"
	flying := tracker.InFlight{Claim: usage.RefOf(b), Allocation: allocation("gpu-1"), Owners: []types.UID{"pod"}}
	withFlight := usage.NewIndex()
	withFlight.Set(usage.RefOf(a), a.Status.Allocation, nil)
	withFlight.Set(flying.Claim, nil, flying.Allocation)

	type claims = []*resourceapi.ResourceClaim
	for name, tc := range map[string]struct {
		known    claims
		inFlight []tracker.InFlight
		usage    usage.View
		listed   claims
		want     []string
	}{
		"nothing":                              {},
		"all as it is":                         {known: claims{a, b}, usage: viewOf(a, b), listed: claims{a, b}},
		"in flight":                            {known: claims{a, b}, inFlight: []tracker.InFlight{flying}, usage: withFlight.View(), listed: claims{a, b}},
		"in flight for a claim that has gone":  {known: claims{a}, inFlight: []tracker.InFlight{flying}, usage: withFlight.View(), listed: claims{a}},
		"in flight, and not said to be held":   {known: claims{a, b}, inFlight: []tracker.InFlight{flying}, usage: viewOf(a), listed: claims{a, b}, want: []string{"usage team-a/b"}},
		"a write of ours, later than the list": {known: claims{claim("a", 101, "gpu-1")}, usage: viewOf(claim("a", 101, "gpu-1")), listed: claims{a}},
		"created again after the list":         {known: claims{recreated}, usage: viewOf(recreated), listed: claims{a}},
		"created after the list":               {known: claims{a, claim("c", 101)}, usage: viewOf(a), listed: claims{a}},
		"a claim that is not known":            {known: claims{b}, listed: claims{a, b}, want: []string{"missing team-a/a"}},
		"a claim that is gone":                 {known: claims{a, b}, usage: viewOf(a), listed: claims{b}, want: []string{"gone team-a/a"}},
		"an old version of a claim":            {known: claims{claim("a", 9)}, listed: claims{a}, want: []string{"outdated team-a/a"}},
		"a hold that is left behind":           {known: claims{claim("a", 10)}, usage: viewOf(a), listed: claims{claim("a", 10)}, want: []string{"usage team-a/a"}},
		"a hold that is forgotten":             {known: claims{a}, listed: claims{a}, want: []string{"usage team-a/a"}},
		"a hold that has moved": {
			known: claims{a}, usage: viewOf(claim("a", 10, "gpu-1")), listed: claims{a},
			want: []string{"usage team-a/a", "usage team-a/a"},
		},
		"a share instead of the device": {known: claims{a}, usage: viewOf(claim("a", 10, "gpu-0/s1")), listed: claims{a}, want: []string{"usage team-a/a"}},
		"of two holders one is forgotten": {
			known: claims{a, claim("c", 11, "gpu-0")}, usage: viewOf(a), listed: claims{a, claim("c", 11, "gpu-0")},
			want: []string{"usage team-a/c"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, d := range Compare(tracker.Account{Version: fmt.Sprint(version), Claims: tc.known, InFlight: tc.inFlight, Usage: tc.usage}, tc.listed) {
				got = append(got, string(d.Kind)+" "+d.Claim.String())
				if d.Detail == "" {
					t.Errorf("%v has no detail", d)
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("differences differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestStaleAllocationsInFlight(t *testing.T) {
	const limit = time.Minute
	flying := []tracker.InFlight{{Claim: usage.RefOf(claim("a", 1)), Owners: []types.UID{"pod"}}, {Claim: usage.RefOf(claim("b", 1)), Owners: []types.UID{"other"}}}
	nobody := func(types.UID) bool { return false }
	ages := NewAges()
	look := func(after time.Duration, inFlight []tracker.InFlight, binding func(types.UID) bool) []string {
		var out []string
		for _, s := range ages.Look(start.Add(after), inFlight, limit, binding) {
			out = append(out, s.Claim.String())
		}
		return out
	}
	for _, step := range []struct {
		name     string
		after    time.Duration
		inFlight []tracker.InFlight
		binding  func(types.UID) bool
		want     []string
	}{
		{name: "first seen", inFlight: flying, binding: nobody},
		{name: "at the limit", after: limit, inFlight: flying, binding: nobody},
		{name: "after the limit", after: limit + 1, inFlight: flying, binding: nobody, want: []string{"team-a/a", "team-a/b"}},
		{name: "one is being bound", after: limit + 2, inFlight: flying, binding: func(pod types.UID) bool { return pod == "pod" }, want: []string{"team-a/b"}},
		{name: "one is released", after: limit + 3, inFlight: flying[1:], binding: nobody, want: []string{"team-a/b"}},
		{name: "and put in flight again", after: limit + 4, inFlight: flying, binding: nobody, want: []string{"team-a/b"}},
	} {
		if diff := cmp.Diff(step.want, look(step.after, step.inFlight, step.binding)); diff != "" {
			t.Errorf("%s: stale differs (-want +got):\n%s", step.name, diff)
		}
	}
}
