// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/usage"
)

const (
	// leastSample and mostSample are how long ours is repeated for one time: as long as upstream ran, within these. A single run
	// is too short for the clock, and the caches and the clock of a processor need longer than that to fall into step.
	leastSample, mostSample = 20 * time.Millisecond, 200 * time.Millisecond
	// upstreamLimit ends upstream's search where there is nothing to be found.
	upstreamLimit = time.Second
	// minRounds and maxRounds are how often the two take turns, and maxCPU is the time after which no further round
	// begins. Within these, rounds are added until the median is known to precision.
	minRounds, maxRounds = 9, 101
	maxCPU               = 4 * time.Second
	precision            = 0.02
)

// times are medians over all rounds.
type times struct {
	upstream, ours time.Duration
	// ratio is the median of what upstream took by what ours took right after it: what slows down both for a while,
	// as another process on the machine does, cancels out.
	ratio float64
	// rounds is how many it took, and spread by which part of itself the ratio may be off.
	rounds int
	spread float64
	// timedOut tells that upstream was stopped, so that its time is a lower bound.
	timedOut bool
	// fit and upstreamFit are the numbers of nodes that the pod fits on.
	fit, upstreamFit int
}

// compare lets the two take turns, and makes sure that they give the same answer. Where upstream finds no end it has one turn.
func compare(c comparison) (times, error) {
	w := c.world()
	w.informed()
	w.alike = c.alike
	fit, err := w.filterOurs() // slices have been seen
	if err != nil {
		return times{}, fmt.Errorf("ours: %w", err)
	}
	out := times{fit: fit, upstreamFit: fit}
	limit := time.Minute
	if c.limit > 0 {
		limit = upstreamLimit
	}
	var upstream, ours []time.Duration
	var ratios []float64
	for began := cpuTime(); !enough(ratios, cpuTime()-began); {
		if c.limit == 0 || len(upstream) == 0 {
			runtime.GC()
			before := cpuTime()
			n, err := w.filterUpstream(limit)
			upstream = append(upstream, cpuTime()-before)
			switch {
			case errors.Is(err, context.DeadlineExceeded):
				out.timedOut = true
			case err != nil:
				return out, fmt.Errorf("upstream: %w", err)
			default:
				out.upstreamFit = n
			}
		}
		runtime.GC()
		sample := min(max(upstream[len(upstream)-1], leastSample), mostSample)
		ours = append(ours, perRun(sample, func() { _, err = w.filterOurs() }))
		if err != nil {
			return out, fmt.Errorf("ours: %w", err)
		}
		ratios = append(ratios, float64(upstream[len(upstream)-1])/float64(ours[len(ours)-1]))
	}
	out.upstream, out.ours, out.ratio = median(upstream), median(ours), median(ratios)
	out.rounds, out.spread = len(ratios), spread(ratios)
	return out, nil
}

// enough tells whether no further round is needed, or none may begin.
func enough(ratios []float64, used time.Duration) bool {
	if len(ratios) < minRounds {
		return false
	}
	return len(ratios) >= maxRounds || used > maxCPU || spread(ratios) <= precision
}

// spread is by which part of itself the median may be off: half the distance between the quartiles, by the root of the
// number of values.
func spread(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[n*3/4] - sorted[n/4]) / 2 / math.Sqrt(float64(n)) / sorted[n/2]
}

// perRun repeats run for at least that long, after once to warm up, and returns the CPU time of one.
func perRun(sample time.Duration, run func()) time.Duration {
	run()
	began, n := cpuTime(), 0
	for n == 0 || cpuTime()-began < sample {
		run()
		n++
	}
	return (cpuTime() - began) / time.Duration(n)
}

// cpuTime is what this process has used so far. Unlike the time on the wall it does not grow while another process has
// the CPU, and it contains the work of the garbage collector on other CPUs.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err) // cannot fail with these arguments
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

func median[T time.Duration | float64](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// allocationsPerNode counts the heap allocations of Check where all nodes fit.
func allocationsPerNode() (float64, error) {
	w := newWorld()
	for range 1000 {
		w.hold(w.addGPUs(gpus(8, 4)), "gpu-0", nil)
	}
	w.request(1)
	view := w.inventory().View()
	requests, err := allocator.Compile([]*resourceapi.ResourceClaim{w.claim}, view, allocator.DefaultFeatures())
	if err != nil {
		return 0, err
	}
	filter := func() error {
		for _, node := range w.nodes {
			result := allocator.Check(context.Background(), allocator.Input{
				Requests: requests, Node: node, Inventory: view, Usage: w.index.View(), Policy: allocator.SmallestFit, Scoring: allocator.MostAllocated,
			})
			if !result.Fits() {
				return fmt.Errorf("node %s: %v", node.Name, result.Failure)
			}
		}
		return nil
	}
	if err := filter(); err != nil { // slices have been seen
		return 0, err
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err = filter()
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(len(w.nodes)), err
}

// indexMemory is what inventory and usage of 5,000 nodes × 8 devices take beyond the objects themselves, after pods of as many kinds
// were filtered as fill the caches, with the selectors of each other than those of all others.
func indexMemory() (bytes int64, err error) {
	w := plain(5000)
	var claims []usage.ClaimRef
	var allocations []*resourceapi.AllocationResult
	for id := range w.index.View().All() {
		claims = append(claims, holder(len(claims)))
		allocations = append(allocations, allocation(resourceapi.DeviceRequestAllocationResult{
			Request: "r", Driver: id.Driver, Pool: id.Pool, Device: id.Device,
		}))
	}
	w.index, w.alike = nil, true
	before := liveHeap()
	w.index = usage.NewIndex()
	for i := range claims {
		w.index.Set(claims[i], allocations[i], nil)
	}
	full := w.inventory().Stats()
	// Each kind has selectors of its own, besides the class's.
	most := full.Selectors.Limit - 1
	own := (most + full.Matchers.Limit - 1) / full.Matchers.Limit
	for kind := range full.Matchers.Limit {
		var expressions []string
		for n := kind * own; n < min((kind+1)*own, most); n++ {
			// Of the 8 devices of a node some match, and which these are depends on the kind.
			expressions = append(expressions,
				fmt.Sprintf(`device.attributes["resource.kubernetes.io"].pciBusID < "0000:%02x:00.0" || %d < 0`, 2+n%7, n))
		}
		w.claim.Spec.Devices.Requests = nil
		w.request(2, expressions...)
		if _, err := w.filterOurs(); err != nil {
			return 0, err
		}
	}
	after := liveHeap()
	if full = w.inventory().Stats(); full.Matchers.Entries < full.Matchers.Limit || full.Selectors.Entries < full.Selectors.Limit {
		return 0, fmt.Errorf("the caches are not full: %+v", full)
	}
	runtime.KeepAlive(w)
	runtime.KeepAlive(claims)
	runtime.KeepAlive(allocations)
	return after - before, nil
}

func holder(i int) usage.ClaimRef {
	return usage.ClaimRef{UID: types.UID(fmt.Sprintf("holder-%d", i)), Namespace: "default", Name: fmt.Sprintf("holder-%d", i)}
}

func liveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// claimEvents is the time, at each number of nodes, of one claim's allocation or release applied to the index, and the view taken
// from it. Growth is how much longer that takes than at the first number. All take turns.
func claimEvents(nodes []int) (took []time.Duration, growth []float64) {
	claim := usage.ClaimRef{UID: "claim", Namespace: "default", Name: "claim"}
	var view usage.View
	var indexes []*usage.Index
	// Events are about nodes from all over the index, for not all of it is in the processor's cache.
	allocations := make([][]*resourceapi.AllocationResult, len(nodes))
	for i, n := range nodes {
		for event := range 500 {
			allocations[i] = append(allocations[i], allocation(resourceapi.DeviceRequestAllocationResult{
				Request: "r", Driver: driver, Pool: fmt.Sprintf("node-%05d", event*n/500), Device: "gpu-1",
			}))
		}
		index := usage.NewIndex()
		for i := range n {
			index.Set(holder(i), allocation(resourceapi.DeviceRequestAllocationResult{
				Request: "r", Driver: driver, Pool: fmt.Sprintf("node-%05d", i), Device: "gpu-0",
			}), nil)
		}
		indexes = append(indexes, index)
	}
	times, ratios := make([][]time.Duration, len(nodes)), make([][]float64, len(nodes))
	began := cpuTime()
	for {
		for i, index := range indexes {
			event := 0
			times[i] = append(times[i], perRun(leastSample, func() {
				event = (event + 1) % len(allocations[i])
				index.Set(claim, allocations[i][event], nil)
				view = index.View()
				index.Set(claim, nil, nil)
				view = index.View()
			})/2)
			ratios[i] = append(ratios[i], float64(times[i][len(times[i])-1])/float64(times[0][len(times[0])-1]))
		}
		if enough(ratios[len(nodes)-1], cpuTime()-began) {
			break
		}
	}
	runtime.KeepAlive(view)
	for i := range nodes {
		took, growth = append(took, median(times[i])), append(growth, median(ratios[i]))
	}
	return took, growth
}
