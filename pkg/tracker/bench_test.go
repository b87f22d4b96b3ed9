// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/usage"
)

// maxGrowth is how much dearer an event may be with a hundred times the devices
// held (I6).
const maxGrowth = 2

// BenchmarkSnapshotAndApply applies watch events that free the devices of a claim
// and allocate them again, and takes a snapshot after each, with many or few
// devices held. It fails if the cost is not flat.
func BenchmarkSnapshotAndApply(b *testing.B) {
	var clusters []*cluster
	for _, devices := range []int{1_000, 10_000, 100_000} {
		c := newCluster(b, devices)
		clusters = append(clusters, c)
		b.Run(fmt.Sprintf("held=%d", devices), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.freeAndAllocate(b)
			}
		})
	}

	// The cheapest of several turns, and processor time, say what the code costs
	// on a machine with other work. The turns alternate, so that all clusters
	// have the same luck.
	const turns, events = 15, 2000
	cheapest := slices.Repeat([]time.Duration{time.Hour}, len(clusters))
	for range turns {
		for i, c := range clusters {
			runtime.GC() // that of the others
			start := processorTime(b)
			for range events {
				c.freeAndAllocate(b)
			}
			cheapest[i] = min(cheapest[i], (processorTime(b)-start)/events)
		}
	}
	for i, c := range clusters {
		growth := float64(cheapest[i]) / float64(cheapest[0])
		b.Logf("%7d devices held by %6d claims: %v for two events and two snapshots, %.2f times that of the smallest", c.devices, len(c.claims), cheapest[i], growth)
		if growth > maxGrowth {
			b.Errorf("with %d devices held it takes %.2f times what it takes with %d, at most %d times is allowed", c.devices, growth, clusters[0].devices, maxGrowth)
		}
	}
}

// processorTime is what this process has used, its garbage collector included.
func processorTime(b *testing.B) time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// cluster has nodes of eight GPUs, all held, by claims for one to eight of a node.
type cluster struct {
	tracker  *Tracker
	devices  int
	claims   []*resourceapi.ResourceClaim
	revision int
	random   *rand.Rand
}

func newCluster(b *testing.B, devices int) *cluster {
	c := &cluster{tracker: New(klog.Logger{}, WithJudge(&exclusive{})), random: rand.New(rand.NewPCG(1, 2))}
	for node := 0; c.devices < devices; node++ {
		for gpu := 0; gpu < 8; {
			var held []usage.DeviceID
			for range min(1+c.random.IntN(8), 8-gpu, devices-c.devices) {
				held = append(held, device("node-"+strconv.Itoa(node), "gpu-"+strconv.Itoa(gpu)))
				gpu++
				c.devices++
			}
			if len(held) == 0 {
				break
			}
			c.revision++
			name := "claim-" + strconv.Itoa(c.revision)
			c.claims = append(c.claims, claim(name, types.UID(name), c.revision, held...))
		}
	}
	objs := make([]any, 0, len(c.claims))
	for _, held := range c.claims {
		objs = append(objs, held)
	}
	must(b, c.tracker.Store().Replace(objs, strconv.Itoa(c.revision)))
	if got := c.tracker.Snapshot().Usage.Len(); got != devices {
		b.Fatalf("%d devices are held, want %d", got, devices)
	}
	return c
}

// freeAndAllocate tells of a claim that loses its allocation and gets it back.
func (c *cluster) freeAndAllocate(b *testing.B) {
	i := c.random.IntN(len(c.claims))
	allocation := c.claims[i].Status.Allocation
	target := usage.DeviceOf(&allocation.Devices.Results[0])
	for _, now := range []*resourceapi.AllocationResult{nil, allocation} {
		c.revision++
		event := *c.claims[i]
		event.ResourceVersion = strconv.Itoa(c.revision)
		event.Status.Allocation = now
		must(b, c.tracker.Store().Update(&event))
		c.claims[i] = &event
		if held := c.tracker.Snapshot().Usage.Device(target) != nil; held != (now != nil) {
			b.Fatalf("%s held: %t, after an event that says otherwise", target, held)
		}
	}
}
