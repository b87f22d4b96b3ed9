// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// The tracker waits for the judge. So a pool of which ten times as much is held costs no more.
func TestJudgingLooksOnlyAtWhatTheClaimTouches(t *testing.T) {
	looks := map[int]int{}
	for _, held := range []int{50, 500} { // GPUs with 8 partitions each
		store, claims := rack(t, held)
		for _, beside := range []string{"gpu-free-0", "gpu-free-1"} {
			claims = append(claims, claim("held-"+beside, len(claims)+1, results{}.device("rack", beside)))
		}
		judge := NewJudge(store.View)
		pair := eventsOn(t, tracker.New(klog.Logger{}, tracker.WithJudge(judge)), claims)
		pair() // looks at all of the pool, once
		before := judge.looks
		pair()
		looks[held] = judge.looks - before
	}
	if looks[500] != looks[50] || looks[500] == 0 || looks[500] > 20 {
		t.Errorf("held devices looked at: %v, by how many GPUs of the pool are held", looks)
	}
}

// forgetful asks a judge, and one that remembers nothing.
type forgetful struct {
	remembers *Judge
	t         testing.TB
}

func (f forgetful) Taken(a *resourceapi.AllocationResult) { f.remembers.Taken(a) }

func (f forgetful) Judge(c tracker.Case) tracker.Verdict {
	got := f.remembers.Judge(c)
	if diff := cmp.Diff(NewJudge(f.remembers.devices).Judge(c), got); diff != "" {
		f.t.Fatalf("claim %s, what the judge remembers makes a difference (-without +with):\n%s", c.Claim.Name, diff)
	}
	return got
}

// What a judge remembers of devices that are held and that the slices do not have makes no difference, whatever comes and goes.
func TestWhatAJudgeRemembersMakesNoDifference(t *testing.T) {
	for seed := range uint64(200) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			store := inventoryOf()
			tr := tracker.New(klog.Logger{}, tracker.WithJudge(forgetful{NewJudge(store.View), t}))
			revision := 1
			now := make([]*resourceapi.ResourceClaim, 6)
			pools := []string{"a", "b"}
			change := func(i int) {
				revision++
				var has results
				if random.IntN(3) > 0 {
					has = has.device(pools[random.IntN(2)], fmt.Sprint("gpu-", random.IntN(5)))
				}
				now[i] = claim(fmt.Sprint("c-", i), revision, has)
			}
			list := func() {
				all := []any{}
				for _, c := range now {
					all = append(all, c)
				}
				if err := tr.Store().Replace(all, strconv.Itoa(revision)); err != nil {
					t.Fatal(err)
				}
			}
			for i := range now {
				change(i)
			}
			list()
			for range 60 {
				switch i := random.IntN(len(now)); random.IntN(8) {
				case 0: // the pool's slice comes, changes, or goes
					var devices []resourceapi.Device
					for d := range 5 {
						if random.IntN(3) > 0 {
							devices = append(devices, whole(fmt.Sprint("gpu-", d)))
						}
					}
					if s := slice(pools[random.IntN(2)], devices...); random.IntN(4) > 0 {
						store.SetSlice(s)
					} else {
						store.DeleteSlice(s.Name)
					}
				case 1:
					change(i)
					list()
				case 2:
					change(i)
					if err := tr.Assume(now[i]); err != nil {
						t.Fatal(err)
					}
				default:
					change(i)
					if err := tr.Store().Update(now[i]); err != nil {
						t.Fatal(err)
					}
				}
				for _, c := range now {
					if c.Status.Allocation != nil {
						_, _ = tr.Verdict(usage.RefOf(c), c.Status.Allocation, usage.View{}) // what has only been answered is not there yet
					}
				}
			}
		})
	}
}

// A judge remembers the pools that are there, and not those that have gone.
func TestAJudgeRemembersThePoolsThatAreThere(t *testing.T) {
	store := inventoryOf()
	judge := NewJudge(store.View)
	tr := tracker.New(klog.Logger{}, tracker.WithJudge(judge))
	if err := tr.Store().Replace(nil, "1"); err != nil {
		t.Fatal(err)
	}
	revision := 1
	var none results
	use := func(pool string) {
		revision++
		if err := tr.Store().Update(claim("c-"+pool, revision, none.device(pool, "gpu-0"))); err != nil {
			t.Fatal(err)
		}
	}
	const stay = 10
	for i := range 100 {
		pool := fmt.Sprint("pool-", i)
		s := slice(pool, whole("gpu-0"))
		store.SetSlice(s)
		use(pool)
		if i >= stay {
			store.DeleteSlice(s.Name)
		}
	}
	remembered := judge.strangers.pools
	for i := range stay {
		if id := (usage.PoolID{Driver: driver, Pool: fmt.Sprint("pool-", i)}); remembered[id] == nil {
			t.Errorf("pool %s is not remembered", id)
		}
	}
	if n := len(remembered); n > 2*stay+1 {
		t.Errorf("%d pools are remembered, of which %d are there", n, stay)
	}
}

// A judge remembers an unknown device once, and only as long as it is held.
func TestAJudgeRemembersADeviceAsLongAsItIsHeld(t *testing.T) {
	judge := NewJudge(inventoryOf(slice("a", whole("gpu-0"), whole("gpu-1"))).View)
	tr := tracker.New(klog.Logger{}, tracker.WithJudge(judge))
	if err := tr.Store().Replace(nil, "1"); err != nil {
		t.Fatal(err)
	}
	revision := 1
	var none results
	now := func(name string, allocation results) {
		revision++
		if err := tr.Store().Update(claim(name, revision, allocation)); err != nil {
			t.Fatal(err)
		}
	}
	remembered := func(want ...string) {
		t.Helper()
		now("judged", none.device("a", "gpu-0"))
		now("judged", nil)
		got := judge.strangers.pools[usage.PoolID{Driver: driver, Pool: "a"}].names
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("unknown devices (-want +got):\n%s", diff)
		}
	}
	remembered()
	for range 3 { // the claims change in other things
		now("x", none.device("a", "new-1"))
		now("y", none.device("a", "new-2"))
	}
	remembered("new-1", "new-2")
	now("x", nil)
	remembered("new-2")
	now("x", none.device("a", "new-3"))
	now("y", nil)
	remembered("new-3")
}
