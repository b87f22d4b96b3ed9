package main

import (
	"context"
	"errors"
	"fmt"
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
	// rounds is how often the two take turns.
	rounds = 7
	// sample is how long ours is repeated for one time, because a single run is too short for the clock.
	sample = 50 * time.Millisecond
	// upstreamLimit ends upstream's search where there is nothing to be found.
	upstreamLimit = 2 * time.Second
)

// times are medians.
type times struct {
	upstream, ours time.Duration
	// timedOut tells that upstream was stopped, so that its time is a lower bound.
	timedOut bool
	// fit and upstreamFit are the numbers of nodes that the pod fits on.
	fit, upstreamFit int
}

func (t times) ratio() float64 { return float64(t.upstream) / float64(t.ours) }

// compare lets the two take turns, and makes sure that they give the same answer.
func compare(c comparison) (times, error) {
	w := c.world()
	w.informed()
	fit, err := w.filterOurs() // slices have been seen
	if err != nil {
		return times{}, fmt.Errorf("ours: %w", err)
	}
	out := times{fit: fit, upstreamFit: fit}
	limit, turns := time.Minute, rounds
	if c.limit > 0 {
		limit, turns = upstreamLimit, 1
	}
	var upstream, ours []time.Duration
	for range turns {
		runtime.GC()
		began := cpuTime()
		n, err := w.filterUpstream(limit)
		upstream = append(upstream, cpuTime()-began)
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			out.timedOut = true
		case err != nil:
			return out, fmt.Errorf("upstream: %w", err)
		default:
			out.upstreamFit = n
		}
		runtime.GC()
		ours = append(ours, perRun(func() { _, err = w.filterOurs() }))
		if err != nil {
			return out, fmt.Errorf("ours: %w", err)
		}
	}
	for len(ours) < rounds {
		ours = append(ours, perRun(func() { _, _ = w.filterOurs() }))
	}
	out.upstream, out.ours = median(upstream), median(ours)
	return out, nil
}

// perRun repeats run for at least one sample, after once to warm up, and returns the CPU time of one.
func perRun(run func()) time.Duration {
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
			result := allocator.Check(context.Background(), allocator.Input{Requests: requests, Node: node, Inventory: view, Usage: w.index.View()})
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

// indexMemory is what inventory and usage of 5,000 nodes × 8 devices take beyond the objects themselves, after
// pods of three kinds were filtered.
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
	w.index = nil
	before := liveHeap()
	w.index = usage.NewIndex()
	for i := range claims {
		w.index.Set(claims[i], allocations[i], nil)
	}
	for _, expression := range []string{`true`, `device.attributes["gpu.nvidia.com"].brand == "Nvidia"`, `device.attributes["resource.kubernetes.io"].numaNode == 0`} {
		w.claim.Spec.Devices.Requests = nil
		w.request(2, expression)
		if _, err := w.filterOurs(); err != nil {
			return 0, err
		}
	}
	after := liveHeap()
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

// claimEvent is the time of one claim's allocation or release applied to the index, and the view taken from it.
func claimEvent(nodes int) time.Duration {
	index := usage.NewIndex()
	for i := range nodes {
		index.Set(holder(i), allocation(resourceapi.DeviceRequestAllocationResult{
			Request: "r", Driver: driver, Pool: fmt.Sprintf("node-%05d", i), Device: "gpu-0",
		}), nil)
	}
	claim := usage.ClaimRef{UID: "claim", Namespace: "default", Name: "claim"}
	taken := allocation(resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: driver, Pool: fmt.Sprintf("node-%05d", nodes/2), Device: "gpu-1"})
	var view usage.View
	var out []time.Duration
	for range rounds {
		out = append(out, perRun(func() {
			index.Set(claim, taken, nil)
			view = index.View()
			index.Set(claim, nil, nil)
			view = index.View()
		})/2)
	}
	runtime.KeepAlive(view)
	return median(out)
}
