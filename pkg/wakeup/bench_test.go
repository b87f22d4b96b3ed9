// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

// manyWaiters is 5,000 nodes of 8 devices, all of which are held, and 1,000 pods that wait for one or, with kinds, for as many
// different numbers of devices.
func manyWaiters(b *testing.B, kinds int) (*cluster, map[string]*resourceapi.ResourceClaim) {
	c := newCluster(b, Options{})
	holders := map[string]*resourceapi.ResourceClaim{}
	var names []string
	for i := range 5000 {
		name := fmt.Sprintf("node-%d", i)
		names = append(names, name)
		c.addNode(name)
		c.setSlice(nil, slice(name, 8, 0))
		for device := range 8 {
			holders[fmt.Sprint(name, "/", device)] = c.holdOn(name, fmt.Sprint(device))
		}
	}
	byName := map[string]*v1.Node{}
	for _, node := range c.nodes {
		byName[node.Name] = node
	}
	c.nodeOf = func(name string) *v1.Node { return byName[name] }
	for i := range 1000 {
		pod := c.addPod(fmt.Sprintf("p%d", i), int32(1000-i), "gpu", int64(1+i%kinds))
		c.begin(pod)
		c.room.Refused(pod.UID, Refusal{Nodes: slices.Values(names)}, c.now)
	}
	c.pass()
	return c, holders
}

func freedOn(node string) []usage.DeviceID {
	return []usage.DeviceID{{Driver: testDriver, Pool: node, Device: "0"}}
}

// BenchmarkPass is the cost of one look at what has changed, with 1,000 waiting pods and 5,000 nodes.
func BenchmarkPass(b *testing.B) {
	tests := []struct {
		name  string
		kinds int
		// change makes the news of one round.
		change func(c *cluster, holders map[string]*resourceapi.ResourceClaim, i int)
	}{
		{"nothing", 1, func(*cluster, map[string]*resourceapi.ResourceClaim, int) {}},
		{"one device freed that nobody can use", 1, func(c *cluster, h map[string]*resourceapi.ResourceClaim, i int) {
			c.revision++
			c.room.Freed(freedOn(fmt.Sprintf("node-%d", i%5000)), c.revision)
		}},
		{"one device freed that nobody can use, 8 kinds of pods", 8, func(c *cluster, h map[string]*resourceapi.ResourceClaim, i int) {
			c.revision++
			c.room.Freed(freedOn(fmt.Sprintf("node-%d", i%5000)), c.revision)
		}},
		{"one device freed and taken by the first", 1, func(c *cluster, h map[string]*resourceapi.ResourceClaim, i int) {
			holder := h[fmt.Sprintf("node-%d/0", i%5000)]
			c.release(holder)()
			for _, name := range c.pass() {
				pod := c.pods[types.UID(name)]
				c.room.Note(pod, claimNamesOf(pod), nil)
				c.room.Judged(pod.UID, c.look(pod, c.store.View()), Seen{Usage: c.revision, Inventory: c.store.View().Generation()})
				c.room.Refused(pod.UID, Refusal{}, c.now)
			}
			c.holdOn(fmt.Sprintf("node-%d", i%5000), "0")
		}},
		{"every slice changed", 1, func(c *cluster, _ map[string]*resourceapi.ResourceClaim, _ int) {
			for n := range 5000 {
				name := fmt.Sprintf("node-%d", n)
				c.room.SliceChanged(nil, slice(name, 0, 0), c.store.View().Generation()+1)
			}
		}},
		{"the class changed", 1, func(c *cluster, _ map[string]*resourceapi.ResourceClaim, i int) { c.setClass(class("gpu", "true"))() }},
		{"the class changed, 8 kinds of pods", 8, func(c *cluster, _ map[string]*resourceapi.ResourceClaim, i int) {
			c.setClass(class("gpu", "true"))()
		}},
	}
	for _, tc := range tests {
		b.Run(tc.name, func(b *testing.B) {
			c, holders := manyWaiters(b, tc.kinds)
			i := 0
			for b.Loop() {
				tc.change(c, holders, i)
				c.pass()
				i++
			}
		})
	}
}

// BenchmarkPassOverSharedPools is a look at devices that were freed in 500 pools, each of which all 5,000 nodes see, and how long
// somebody waits meanwhile who tells the room something: the scheduling loop does, for each pod.
func BenchmarkPassOverSharedPools(b *testing.B) {
	c, _ := manyWaiters(b, 1)
	for _, node := range c.nodes {
		node.Labels = map[string]string{"zone": "a", "kubernetes.io/hostname": node.Name}
	}
	var freed []usage.DeviceID
	for i := range 500 {
		shared := slice(fmt.Sprintf("shared-%d", i), 1, 1)
		shared.Spec.NodeName = nil
		shared.Spec.NodeSelector = &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{
			{Key: "zone", Operator: v1.NodeSelectorOpIn, Values: []string{"a", "b"}},
		}}}}
		c.setSlice(nil, shared)
		freed = append(freed, usage.DeviceID{Driver: testDriver, Pool: shared.Name, Device: "0"})
	}
	var longest, waits atomic.Int64
	stop := make(chan struct{})
	var caller sync.WaitGroup
	caller.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				start := time.Now()
				c.room.IsWaiting("p0")
				longest.Store(max(longest.Load(), int64(time.Since(start))))
				runtime.Gosched()
			}
		}
	})
	n := 0
	for b.Loop() {
		longest.Store(0)
		c.revision++
		c.room.Freed(freed, c.revision)
		c.pass()
		waits.Add(longest.Load())
		n++
	}
	close(stop)
	caller.Wait()
	b.ReportMetric(float64(waits.Load())/float64(n)/1e6, "ms-longest-wait/op")
}
