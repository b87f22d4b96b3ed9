package inventory

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/internal/hostile"
)

// largePools are pools as large as they may be, of each kind that the hostile generator has.
func largePools() map[string][]*resourceapi.ResourceSlice {
	pools := make(map[string][]*resourceapi.ResourceSlice)
	g := hostile.New(1, "ns", "a", "b")
	for in := range hostile.AllLarge {
		for range 20 {
			pool := g.LargePool(in)
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
	for name, pool := range largePools() {
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

func threadTime(b *testing.B) time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return time.Duration(t.Nano())
}
