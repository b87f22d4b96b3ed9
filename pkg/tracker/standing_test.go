// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

// storeStep is something that the store is told, or that we tell the tracker.
type storeStep func(testing.TB, *Tracker)

func sees(c *resourceapi.ResourceClaim) storeStep {
	return func(tb testing.TB, tr *Tracker) { must(tb, tr.Store().Update(c)) }
}

func seesDeletion(c *resourceapi.ResourceClaim) storeStep {
	return func(tb testing.TB, tr *Tracker) { must(tb, tr.Store().Delete(c)) }
}

func seesList(revision int, claims ...*resourceapi.ResourceClaim) storeStep {
	return func(tb testing.TB, tr *Tracker) { relist(tb, tr, revision, claims...) }
}

func assumes(c *resourceapi.ResourceClaim) storeStep {
	return func(tb testing.TB, tr *Tracker) { must(tb, tr.Assume(c)) }
}

func TestAllocatedAt(t *testing.T) {
	none := Order{}
	tests := map[string]struct {
		steps []storeStep
		want  Order
	}{
		"a watch tells exactly": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5)), sees(claim("a", "ua", 12, gpu0))},
			want:  Order{"12", "12"},
		},
		"a reservation later does not change it": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), sees(claim("a", "ua", 15, gpu0))},
			want:  Order{"12", "12"},
		},
		"nor does a list with the very object": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), sees(claim("a", "ua", 15, gpu0)), seesList(20, claim("a", "ua", 15, gpu0))},
			want:  Order{"12", "12"},
		},
		"the first list tells only that it was before": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5, gpu0))},
			want:  Order{"", "5"},
		},
		"and a later event of the claim no more": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5, gpu0)), sees(claim("a", "ua", 12, gpu0))},
			want:  Order{"", "5"},
		},
		"a list over a gap tells that it was after what was seen": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5)), sees(claim("b", "ub", 12)), seesList(20, claim("a", "ua", 17, gpu0))},
			want:  Order{"12", "17"},
		},
		"bookmarks count as seen": {
			steps: []storeStep{
				seesList(10, claim("a", "ua", 5)),
				func(tb testing.TB, tr *Tracker) { must(tb, tr.Store().(store).Bookmark("14")) },
				seesList(20, claim("a", "ua", 17, gpu0)),
			},
			want: Order{"14", "17"},
		},
		"a list that moves an allocation tells the same": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), seesList(20, claim("a", "ua", 17, gpu1))},
			want:  Order{"12", "17"},
		},
		"and nothing about what it was before": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), sees(claim("b", "ub", 14)), seesList(20, claim("a", "ua", 17, gpu1))},
			want:  Order{"14", "17"},
		},
		"the same allocation after a gap may be the old one or written anew": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), sees(claim("b", "ub", 15)), seesList(20, claim("a", "ua", 17, gpu0))},
			want:  Order{"12", "17"},
		},
		"deallocated": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), sees(claim("a", "ua", 13))},
			want:  none,
		},
		"deallocated and allocated again": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), sees(claim("a", "ua", 13)), sees(claim("a", "ua", 14, gpu0))},
			want:  Order{"14", "14"},
		},
		"allocated anew without a step between": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), sees(claim("a", "ua", 13, gpu1))},
			want:  Order{"13", "13"},
		},
		"deallocated in a gap": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), seesList(20, claim("a", "ua", 13))},
			want:  none,
		},
		"deleted": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), seesDeletion(claim("a", "ua", 13, gpu0))},
			want:  none,
		},
		"deleted in a gap": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), seesList(20)},
			want:  none,
		},
		"another claim under the name inherits nothing": {
			steps: []storeStep{seesList(10), sees(claim("a", "u0", 11, gpu0)), seesDeletion(claim("a", "u0", 12, gpu0)), sees(claim("a", "ua", 13)), sees(claim("a", "ua", 14, gpu0))},
			want:  Order{"14", "14"},
		},
		"nor after a gap": {
			steps: []storeStep{seesList(10), sees(claim("a", "u0", 11, gpu0)), seesList(20, claim("a", "ua", 17, gpu0))},
			want:  Order{"11", "17"},
		},
		"the answer to a write tells nothing": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5)), assumes(claim("a", "ua", 12, gpu0))},
			want:  none,
		},
		"the watch tells after the answer": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5)), assumes(claim("a", "ua", 12, gpu0)), sees(claim("a", "ua", 12, gpu0))},
			want:  Order{"12", "12"},
		},
		"an event is seen although a later answer is known": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5)), assumes(claim("a", "ua", 15, gpu0)), sees(claim("a", "ua", 12, gpu0))},
			want:  Order{"12", "12"},
		},
		"a list is seen although a later answer is known": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5)), assumes(claim("a", "ua", 25, gpu0)), seesList(20, claim("a", "ua", 12, gpu0))},
			want:  Order{"10", "12"},
		},
		"an event that is brought again changes nothing": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12)), sees(claim("a", "ua", 13, gpu0)), sees(claim("a", "ua", 12))},
			want:  Order{"13", "13"},
		},
		"a list that goes back in time tells nothing": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0)), sees(claim("b", "ub", 30)), seesList(20, claim("a", "ua", 12, gpu0))},
			want:  Order{"", "12"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			tr := newTracker(t)
			for _, step := range tc.steps {
				step(t, tr)
			}
			got, ok := tr.AllocatedAt("ua")
			if ok != (tc.want != none) {
				t.Errorf("allocated: %t, want %t", ok, tc.want != none)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("order differs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOrder(t *testing.T) {
	tests := map[string]struct {
		order, other Order
		want         Precedence
	}{
		"both exact":                         {Order{"9", "9"}, Order{"10", "10"}, Earlier},
		"before a gap":                       {Order{"9", "9"}, Order{"9", "12"}, Earlier},
		"in a gap that something came after": {Order{"9", "12"}, Order{"13", "13"}, Earlier},
		"in the same gap":                    {Order{"9", "12"}, Order{"9", "15"}, EitherWay},
		"in the first list":                  {Order{"", "12"}, Order{"", "15"}, EitherWay},
		"in the first list and after it":     {Order{"", "12"}, Order{"15", "15"}, Earlier},
		"exact, and perhaps older":           {Order{"12", "12"}, Order{"10", "15"}, EitherWay},
		"versions that cannot be compared":   {Order{"x", "x"}, Order{"y", "y"}, EitherWay},
	}
	opposite := map[Precedence]Precedence{Earlier: Later, Later: Earlier, EitherWay: EitherWay}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := tc.order.to(tc.other); got != tc.want {
				t.Errorf("%v to %v: %s, want %s", tc.order, tc.other, got, tc.want)
			}
			if got := tc.other.to(tc.order); got != opposite[tc.want] {
				t.Errorf("%v to %v: %s, want %s", tc.other, tc.order, got, opposite[tc.want])
			}
		})
	}
}

// exclusive is a Judge for devices that share nothing. It counts how often it is
// asked, and answers Fits from then on if it is told to.
type exclusive struct {
	asked int
	last  Case
	blind bool
	taken map[usage.DeviceID]bool
}

func (j *exclusive) Taken(allocation *resourceapi.AllocationResult) {
	if j.taken == nil {
		j.taken = map[usage.DeviceID]bool{}
	}
	for _, hold := range takingsOf(allocation) {
		j.taken[hold.device] = true
	}
}

func (j *exclusive) Judge(c Case) Verdict {
	j.asked++
	j.last = c
	v := Verdict{Outcome: Fits}
	for i := range c.Allocation.Devices.Results {
		device := usage.DeviceOf(&c.Allocation.Devices.Results[i])
		for _, h := range c.Usage.Device(device).Holders() {
			switch p := c.Precedence(device, h); {
			case j.blind || h.Claim.UID == c.Claim.UID || p == Later:
			case p == Earlier:
				return Verdict{Outcome: Lost, Device: device, Other: h.Claim}
			default:
				v = Verdict{Outcome: Undecided, Device: device, Other: h.Claim}
			}
		}
	}
	return v
}

func TestVerdict(t *testing.T) {
	// "a" is asked about, with gpu0.
	a := func(revision int) *resourceapi.ResourceClaim { return claim("a", "ua", revision, gpu0) }
	b := func(revision int) *resourceapi.ResourceClaim { return claim("b", "ub", revision, gpu0) }
	reserves := func(name string, uid types.UID, devices ...usage.DeviceID) storeStep {
		return func(tb testing.TB, tr *Tracker) { reserve(tb, tr, podA, claim(name, uid, 5), devices...) }
	}
	tests := map[string]struct {
		steps   []storeStep
		want    Outcome
		wantErr error
	}{
		"alone": {
			steps: []storeStep{seesList(10), sees(a(12))}, want: Fits,
		},
		"first of two": {
			steps: []storeStep{seesList(10), sees(a(12)), sees(b(13))}, want: Fits,
		},
		"second of two": {
			steps: []storeStep{seesList(10), sees(b(12)), sees(a(13))}, want: Lost,
		},
		"second, and the first has gone": {
			steps: []storeStep{seesList(10), sees(b(12)), sees(a(13)), sees(claim("b", "ub", 14))}, want: Fits,
		},
		"second, and the first was deleted": {
			steps: []storeStep{seesList(10), sees(b(12)), sees(a(13)), seesDeletion(b(14))}, want: Fits,
		},
		"second, and the first one came again": {
			steps: []storeStep{seesList(10), sees(b(12)), sees(a(13)), sees(claim("b", "ub", 14)), sees(b(15))}, want: Fits,
		},
		"first, gone, and come again": {
			steps: []storeStep{seesList(10), sees(a(12)), sees(b(13)), sees(claim("a", "ua", 14)), sees(a(15))}, want: Lost,
		},
		"first in a gap": {
			steps: []storeStep{seesList(10), seesList(20, a(15)), sees(b(22))}, want: Fits,
		},
		"second in a gap": {
			steps: []storeStep{seesList(10), sees(b(12)), seesList(20, a(15), b(12))}, want: Lost,
		},
		"in the same gap": {
			steps: []storeStep{seesList(10), seesList(20, a(15), b(12))}, want: Undecided,
		},
		"in the first list": {
			steps: []storeStep{seesList(10, a(7), b(5))}, want: Undecided,
		},
		"in the first list, and the other one has gone": {
			steps: []storeStep{seesList(10, a(7), b(5)), sees(claim("b", "ub", 12))}, want: Fits,
		},
		"perhaps written anew in a gap, after the other one": {
			steps: []storeStep{seesList(10), sees(a(12)), seesList(20, a(18), b(15))}, want: Undecided,
		},
		"untouched in a gap in which the other one came": {
			steps: []storeStep{seesList(10), sees(a(12)), seesList(20, a(12), b(15))}, want: Fits,
		},
		"the other one is only in flight": {
			steps: []storeStep{seesList(10, claim("b", "ub", 5)), reserves("b", "ub", gpu0), sees(a(12))}, want: Fits,
		},
		"the other one is only known from an answer": {
			steps: []storeStep{seesList(10, claim("b", "ub", 5)), assumes(b(15)), sees(a(12))}, want: Fits,
		},
		"the other one is known from an answer, and then seen first": {
			steps: []storeStep{seesList(10, claim("b", "ub", 5)), assumes(b(12)), sees(b(12)), sees(a(13))}, want: Lost,
		},
		"the other one is known to have gone": {
			steps: []storeStep{seesList(10), sees(b(12)), assumes(claim("b", "ub", 14)), sees(a(13))}, want: Fits,
		},
		"the other one moved to our device, which is only known from an answer": {
			steps: []storeStep{seesList(10), sees(claim("b", "ub", 12, gpu1)), assumes(b(15)), sees(a(13))}, want: Fits,
		},
		"in flight here": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5), claim("b", "ub", 5)), reserves("a", "ua", gpu0), sees(b(12)), sees(a(13))}, want: Lost,
		},
		"only known from an answer": {
			steps: []storeStep{seesList(10, claim("a", "ua", 5)), assumes(a(12))}, wantErr: ErrDeallocated,
		},
		"deallocated": {
			steps: []storeStep{seesList(10), sees(a(12)), sees(claim("a", "ua", 13))}, wantErr: ErrDeallocated,
		},
		"with another allocation": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu1))}, wantErr: ErrDeallocated,
		},
		"with one device more": {
			steps: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0, gpu1))}, wantErr: ErrDeallocated,
		},
		"deleted": {
			steps: []storeStep{seesList(10), sees(a(12)), seesDeletion(a(13))}, wantErr: ErrClaimGone,
		},
		"deleted and created again": {
			steps: []storeStep{seesList(10), sees(a(12)), seesDeletion(a(13)), sees(claim("a", "u2", 14, gpu0))}, wantErr: ErrClaimGone,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			tr := New(newTracker(t).logger, WithJudge(&exclusive{}))
			for _, step := range tc.steps {
				step(t, tr)
			}
			got, err := tr.Verdict(usage.RefOf(a(1)), allocation(gpu0), usage.View{})
			if !errors.Is(err, tc.wantErr) || got.Outcome != tc.want {
				t.Errorf("Verdict() = %v, %v; want %s, %v", got, err, tc.want, tc.wantErr)
			}
			if want := tc.want == Lost || tc.want == Undecided; want != (got.Other.UID == "ub") {
				t.Errorf("the verdict names claim %s", got.Other.UID)
			}
		})
	}
}

// What fitted when the watch brought it fits for good, whatever becomes known of
// the devices.
func TestVerdictIsFinalOnceItFits(t *testing.T) {
	judge := &exclusive{blind: true}
	tr := New(newTracker(t).logger, WithJudge(judge))
	relist(t, tr, 10)
	must(t, tr.Store().Update(claim("b", "ub", 12, gpu0)))
	must(t, tr.Store().Update(claim("a", "ua", 13, gpu0)))
	if judge.last.Claim != usage.RefOf(claim("a", "ua", 0)) {
		t.Errorf("the watch brought claim a, and the judge was asked about %+v", judge.last.Claim)
	}
	judge.blind = false
	asked := judge.asked
	for range 2 {
		got, err := tr.Verdict(usage.ClaimRef{UID: "ua"}, allocation(gpu0), usage.View{})
		if err != nil || got.Outcome != Fits {
			t.Errorf("Verdict() = %v, %v", got, err)
		}
	}
	if judge.asked != asked {
		t.Errorf("the judge was asked again")
	}
}

// The judge learns on what the claim was decided.
func TestVerdictPassesOnWhatWasDecidedOn(t *testing.T) {
	judge := &exclusive{}
	tr := New(newTracker(t).logger, WithJudge(judge))
	relist(t, tr, 10, claim("b", "ub", 5, gpu0))
	decidedOn := tr.Snapshot().Usage
	must(t, tr.Store().Update(claim("a", "ua", 12, gpu0)))
	if _, err := tr.Verdict(usage.ClaimRef{UID: "ua"}, allocation(gpu0), decidedOn); err != nil {
		t.Error(err)
	}
	if got := judge.last.DecidedOn; got.Device(gpu0).Count() != 1 {
		t.Errorf("decided on usage with %d holders of the device, want one", got.Device(gpu0).Count())
	}
}

// The judge may keep in mind what is held: it is told of all that comes.
func TestTheJudgeIsToldOfAllThatIsTaken(t *testing.T) {
	for name, step := range map[string]func(tr *Tracker){
		"an event":                func(tr *Tracker) { must(t, tr.Store().Update(claim("a", "ua", 12, gpu0))) },
		"a list":                  func(tr *Tracker) { relist(t, tr, 20, claim("a", "ua", 12, gpu0)) },
		"an answer":               func(tr *Tracker) { must(t, tr.Assume(claim("a", "ua", 12, gpu0))) },
		"what is in flight":       func(tr *Tracker) { reserve(t, tr, "p", claim("a", "ua", 5), gpu0) },
		"another device than had": func(tr *Tracker) { must(t, tr.Store().Update(claim("b", "ub", 12, gpu0))) },
	} {
		t.Run(name, func(t *testing.T) {
			judge := &exclusive{}
			tr := New(newTracker(t).logger, WithJudge(judge))
			relist(t, tr, 10, claim("a", "ua", 5), claim("b", "ub", 6, gpu1))
			if judge.taken[gpu0] {
				t.Fatal("it is taken already")
			}
			if step(tr); !judge.taken[gpu0] || tr.Snapshot().Usage.Device(gpu0).Count() != 1 {
				t.Error("the judge was not told")
			}
		})
	}
}

// An answer tells that the claim was made anew, which the watch does not know yet.
func TestVerdictOnAClaimThatIsKnownToBeGone(t *testing.T) {
	tr := New(newTracker(t).logger, WithJudge(&exclusive{}))
	relist(t, tr, 10)
	must(t, tr.Store().Update(claim("a", "ua", 12, gpu0)))
	must(t, tr.Assume(claim("a", "u2", 15)))
	if _, err := tr.Verdict(usage.ClaimRef{UID: "ua"}, allocation(gpu0), usage.View{}); !errors.Is(err, ErrClaimGone) {
		t.Errorf("got %v, want %v", err, ErrClaimGone)
	}
}

func TestVerdictInWords(t *testing.T) {
	other := usage.ClaimRef{UID: "ub", Namespace: "default", Name: "b"}
	for want, verdict := range map[string]Verdict{
		"fits": {Outcome: Fits},
		"claim default/b (UID ub) was allocated earlier: device gpu.nvidia.com/node-a/gpu-0":                            {Outcome: Lost, Device: gpu0, Other: other},
		"claim default/b (UID ub) was allocated earlier: device gpu.nvidia.com/node-a/gpu-0: too little is left":        {Outcome: Lost, Device: gpu0, Other: other, Detail: "too little is left"},
		"claim default/b (UID ub) may have been allocated earlier: device gpu.nvidia.com/node-a/gpu-0":                  {Outcome: Undecided, Device: gpu0, Other: other},
		"claim default/b (UID ub) may have been allocated earlier: device gpu.nvidia.com/node-a/gpu-0: it is not known": {Outcome: Undecided, Device: gpu0, Other: other, Detail: "it is not known"},
	} {
		if got := verdict.String(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// What is judged is kept as long as lists bring the very same object.
func TestVerdictOutlivesListsThatBringTheSame(t *testing.T) {
	for name, first := range map[string]storeStep{"event": sees(claim("a", "ua", 12, gpu0)), "list": seesList(12, claim("a", "ua", 12, gpu0))} {
		t.Run(name, func(t *testing.T) {
			judge := &exclusive{}
			tr := New(newTracker(t).logger, WithJudge(judge))
			relist(t, tr, 10)
			first(t, tr)
			ask := func() {
				t.Helper()
				if got, err := tr.Verdict(usage.ClaimRef{UID: "ua"}, allocation(gpu0), usage.View{}); err != nil || got.Outcome != Fits {
					t.Errorf("Verdict() = %v, %v", got, err)
				}
			}
			ask()
			relist(t, tr, 20, claim("a", "ua", 12, gpu0))
			ask()
			if judge.asked != 1 {
				t.Errorf("the judge was asked %d times", judge.asked)
			}
			relist(t, tr, 30, claim("a", "ua", 25, gpu0))
			ask()
			if judge.asked != 2 {
				t.Errorf("the judge was asked %d times, but the claim has changed in a gap", judge.asked)
			}
			if want := usage.RefOf(claim("a", "ua", 0)); judge.last.Claim != want || len(judge.last.Allocation.Devices.Results) != 1 {
				t.Errorf("the judge was asked about %v", judge.last.Claim)
			}
		})
	}
}

// Another share of the same device is another allocation.
func TestVerdictIsAboutShares(t *testing.T) {
	tr := New(newTracker(t).logger, WithJudge(&exclusive{}))
	c := claim("a", "ua", 12)
	c.Status.Allocation = shared(gpu0, "s1")
	relist(t, tr, 20, c)
	if _, err := tr.Verdict(usage.RefOf(c), shared(gpu0, "s1"), usage.View{}); err != nil {
		t.Error(err)
	}
	if _, err := tr.Verdict(usage.RefOf(c), shared(gpu0, "s2"), usage.View{}); !errors.Is(err, ErrDeallocated) {
		t.Errorf("another share: %v", err)
	}
}

func TestVerdictNeedsAJudge(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5, gpu0))
	if got, err := tr.Verdict(usage.ClaimRef{UID: "ua"}, allocation(gpu0), usage.View{}); !errors.Is(err, errNoJudge) {
		t.Errorf("Verdict() = %v, %v", got, err)
	}
}
