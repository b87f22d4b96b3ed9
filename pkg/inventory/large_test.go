// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/internal/hostile"
)

// largePools are pools as large as they may be, of each kind that the hostile generator has.
func largePools() map[string][]*resourceapi.ResourceSlice {
	pools := make(map[string][]*resourceapi.ResourceSlice)
	g := hostile.New(1, "ns", "a", "b")
	// Four by whose they are. Counters are a node's or none's; slices have one device, or as many as may be.
	for in, kinds := range []int{hostile.LargeInDevices: 4, hostile.LargeInCounters: 3, hostile.LargeInSlices: 8} {
		for before := len(pools); len(pools) < before+kinds; {
			pool := g.LargePool(hostile.Large(in))
			first, last := pool[0].Spec, pool[len(pool)-1].Spec
			whose := "nodes of a selector"
			switch {
			case first.AllNodes != nil:
				whose = "all nodes"
			case first.NodeName != nil && *first.NodeName == *last.NodeName:
				whose = "one node"
			case first.NodeName != nil:
				whose = "a node each"
			}
			pools[fmt.Sprintf("%d slices for %s, %d devices in each", len(pool), whose, len(last.Devices))] = pool
		}
	}
	return pools
}

// storeOf has all slices but for the last, which the caller adds.
func storeOf(pool []*resourceapi.ResourceSlice) *Store {
	store := newStore()
	id := poolOf(pool[0])
	store.members[id] = &sliceSet{ofNode: make(map[string]map[string]*Slice)}
	for _, s := range pool[:len(pool)-1] {
		store.slices[s.Name] = newSlice(s, store.features)
		store.members[id].add(store.slices[s.Name])
	}
	return store
}

// What one slice of a pool that is as large as may be costs, while all others wait: allocations, of which there are about as many as there is work.
// In time it is some milliseconds, see BenchmarkAChangeOfALargePool.
func TestAChangeOfALargePoolCostsABoundedAmountOfWork(t *testing.T) {
	for name, pool := range largePools() {
		t.Run(name, func(t *testing.T) {
			const most = 15_000 // most of them for counters beyond 64 bits
			last, store := pool[len(pool)-1], storeOf(pool)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			store.SetSlice(last)
			runtime.ReadMemStats(&after)
			if problem := store.View().Pool(poolOf(last)).Problem; problem != nil {
				t.Error(problem)
			}
			n, bytes := after.Mallocs-before.Mallocs, after.TotalAlloc-before.TotalAlloc
			t.Logf("%d allocations, %d KiB", n, bytes>>10)
			const room = 16 << 20 // with the race detector twice as much as without
			if n > most || bytes > room {
				t.Errorf("%d allocations, %d bytes, want at most %d and %d", n, bytes, most, room)
			}
		})
	}
}

func BenchmarkAChangeOfALargePool(b *testing.B) {
	pools := largePools()
	pools["more slices than are looked at"] = manyNodes(2*maxMembers - 1)
	for name, pool := range pools {
		b.Run(name, func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			last, store := pool[len(pool)-1], storeOf(pool)
			b.ReportAllocs()
			busy, most := time.Duration(0), time.Duration(0)
			for range b.N {
				began := threadTime(b)
				store.SetSlice(last)
				took := threadTime(b) - began
				busy, most = busy+took, max(most, took)
				store.DeleteSlice(last.Name)
			}
			b.ReportMetric(float64(busy.Microseconds())/float64(b.N)/1000, "cpu-ms/change")
			b.ReportMetric(float64(most.Microseconds())/1000, "cpu-ms-at-most")
		})
	}
}

// BenchmarkCountersOfDevices compares devices of one name, each in a slice of its own, with others: what those take of counters is added up once.
func BenchmarkCountersOfDevices(b *testing.B) {
	const sets, counters, each = 240, 32, 7
	for name, nameOf := range map[string]func(i int) string{
		"names differ": func(i int) string { return fmt.Sprint("d", i) }, "one name": func(int) string { return "d" },
	} {
		rng := rand.New(rand.NewPCG(1, 2))
		var pool []*Slice
		for i := range sets {
			s := slice(fmt.Sprint("sets-", i), "evil", devices())
			s.Spec.SharedCounters = []resourceapi.CounterSet{{Name: fmt.Sprint("x", i), Counters: map[string]resourceapi.Counter{}}}
			for j := range counters {
				s.Spec.SharedCounters[0].Counters[fmt.Sprint("c", j)] = resourceapi.Counter{Value: resource.MustParse("1")}
			}
			pool = append(pool, newSlice(s, DefaultFeatures()))
		}
		for i := range maxSlices - sets {
			s := slice(fmt.Sprint("devices-", i), "evil", devices(nameOf(i)))
			taken := map[string]resourceapi.Counter{}
			for len(taken) < each {
				taken[fmt.Sprint("c", rng.IntN(counters))] = resourceapi.Counter{Value: resource.MustParse("1")}
			}
			s.Spec.Devices[0].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: fmt.Sprint("x", rng.IntN(sets)), Counters: taken}}
			pool = append(pool, newSlice(s, DefaultFeatures()))
		}
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, problem := newCounters(pool, DefaultFeatures(), false); problem != "" {
					b.Fatal(problem)
				}
			}
		})
	}
}

// BenchmarkConnect compares counters that devices connect one by one, from the last to the first, with others: a way that was gone is shorter the next
// time.
func BenchmarkConnect(b *testing.B) {
	for name, pairOf := range map[string]func(i int) (a, b int){
		"a short way": func(i int) (a, b int) { return 0, i + 1 },
		"a long way":  func(i int) (a, b int) { return maxParticulars - 2 - i, maxParticulars - 1 - i },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				parts := connect(maxParticulars, func(yield func(a, b int)) {
					for i := range maxParticulars - 1 {
						yield(pairOf(i))
					}
					for range maxParticulars {
						yield(maxParticulars-1, maxParticulars-2)
					}
				})
				if slices.Max(parts) != 0 {
					b.Fatal("they are not one part")
				}
			}
		})
	}
}

// manyNodes have one slice each of a pool, more than are looked at: those of some nodes have to be chosen.
func manyNodes(n int) []*resourceapi.ResourceSlice {
	var all []*resourceapi.ResourceSlice
	for i := range n {
		all = append(all, slice(fmt.Sprint("s", i), fmt.Sprint("n", i), pool("gpus", 1, 1)))
	}
	return all
}

func threadTime(b *testing.B) time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return time.Duration(t.Nano())
}
