// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/tracker"
)

// BenchmarkFence is what a bind costs that is observed already: an event that
// allocates a claim, the fence, and an event that takes the allocation back, on
// nodes of 8 GPUs of which half are held. "events" is the two events alone, in a
// tracker without judge.
func BenchmarkFence(b *testing.B) {
	for _, nodes := range []int{500, 5000} {
		for _, fenced := range []bool{false, true} {
			name := "events"
			if fenced {
				name = "fence"
			}
			b.Run(fmt.Sprintf("%s/nodes=%d", name, nodes), func(b *testing.B) {
				var slices []*resourceapi.ResourceSlice
				claims := []any{}
				for n := range nodes {
					pool := "node-" + strconv.Itoa(n)
					var devices []resourceapi.Device
					for d := range 8 {
						devices = append(devices, whole("gpu-"+strconv.Itoa(d)))
					}
					slices = append(slices, slice(pool, devices...))
					claims = append(claims, claim("held-"+strconv.Itoa(n), n+1,
						results{}.device(pool, "gpu-0").device(pool, "gpu-1").device(pool, "gpu-2").device(pool, "gpu-3")))
				}
				store := inventoryOf(slices...)
				var options []tracker.Option
				if fenced {
					options = append(options, tracker.WithJudge(NewJudge(store.View)))
				}
				t := tracker.New(klog.Logger{}, options...)
				if err := t.Store().Replace(claims, strconv.Itoa(nodes+1)); err != nil {
					b.Fatal(err)
				}
				fence := New(t, Options{Timeout: time.Minute})
				allocation := results{}.device("node-7", "gpu-5")
				revision := nodes + 1
				b.ReportAllocs()
				for b.Loop() {
					revision++
					c := claim("new", revision, allocation)
					if err := t.Store().Update(c); err != nil {
						b.Fatal(err)
					}
					if fenced {
						if err := fence.Pass(b.Context(), []*resourceapi.ResourceClaim{c}, decidedElsewhere); err != nil {
							b.Fatal(err)
						}
					}
					revision++
					if err := t.Store().Update(claim("new", revision, nil)); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkJudge is what two events cost, one that allocates a claim and one that takes the allocation back, in one pool of GPUs with 8
// partitions each of which 4,000 are held. TestJudgingLooksOnlyAtWhatTheClaimTouches counts what is looked at.
func BenchmarkJudge(b *testing.B) {
	for _, judged := range []bool{false, true} {
		b.Run(fmt.Sprintf("judged=%t", judged), func(b *testing.B) {
			var options []tracker.Option
			store, claims := rack(b, 500)
			if judged {
				options = append(options, tracker.WithJudge(NewJudge(store.View)))
			}
			pair := eventsOn(b, tracker.New(klog.Logger{}, options...), claims)
			b.ReportAllocs()
			for b.Loop() {
				pair()
			}
		})
	}
}

// rack is one pool of GPUs with 8 partitions each, all of them held but those of the last one, gpu-free.
func rack(t testing.TB, held int) (*inventory.Store, []any) {
	var none results
	list, sets := slice("rack"), slice("rack")
	list.Spec.Pool.ResourceSliceCount, sets.Spec.Pool.ResourceSliceCount = 2, 2
	sets.Name += "-counters"
	claims := []any{}
	for gpu := range held + 1 {
		set := fmt.Sprint("gpu-", gpu)
		if gpu == held {
			set = "gpu-free"
		}
		sets.Spec.SharedCounters = append(sets.Spec.SharedCounters, resourceapi.CounterSet{
			Name: set, Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("80Gi")}},
		})
		for part := range 8 {
			device := partition(fmt.Sprint(set, "-", part), "10Gi")
			device.ConsumesCounters[0].CounterSet = set
			list.Spec.Devices = append(list.Spec.Devices, device)
			if gpu < held {
				claims = append(claims, claim("held-"+device.Name, len(claims)+1, none.device("rack", device.Name)))
			}
		}
	}
	store := inventoryOf(list, sets)
	if problem := store.View().Pool(inventory.PoolID{Driver: driver, Pool: "rack"}).Problem; problem != nil {
		t.Fatal(problem)
	}
	return store, claims
}

// eventsOn returns the two events, on a tracker with the claims.
func eventsOn(t testing.TB, tr *tracker.Tracker, claims []any) (pair func()) {
	revision := len(claims) + 1
	if err := tr.Store().Replace(claims, strconv.Itoa(revision)); err != nil {
		t.Fatal(err)
	}
	var none results
	return func() {
		for _, allocation := range []results{none.device("rack", "gpu-free-3"), nil} {
			revision++
			if err := tr.Store().Update(claim("new", revision, allocation)); err != nil {
				t.Fatal(err)
			}
		}
	}
}
