// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"

	"stowage.dev/stowage/pkg/plugins/config"
)

// withStrategy gives the plugin a scoring strategy, and leaves only its own score to decide, as others' opinions about
// nodes with pods on them are not what is tested.
func withStrategy(strategy config.ScoringStrategy) schedulerSetup {
	return schedulerSetup{edit: func(c *schedulerconfig.KubeSchedulerConfiguration) {
		p := &c.Profiles[len(c.Profiles)-1]
		p.Plugins.Score.Disabled = append(p.Plugins.Score.Disabled, schedulerconfig.Plugin{Name: "*"})
		p.Plugins.Score.Enabled = append(p.Plugins.Score.Enabled, schedulerconfig.Plugin{Name: "DeviceClaims", Weight: 1})
		for i := range p.PluginConfig {
			if args, ok := p.PluginConfig[i].Args.(*config.DeviceClaimsArgs); ok {
				args.ScoringStrategy = &strategy
			}
		}
	}}
}

// bindEach adds so many pods with one GPU each, one after the other, and returns how many are on each node.
func (w *world) bindEach(n int) map[string]int {
	w.t.Helper()
	w.addTemplate("gpu", spec(w.exactly("gpu", 1)))
	count := map[string]int{}
	for i := range n {
		name := fmt.Sprintf("pod-%d", i)
		w.addPod(name, withTemplate("gpu"))
		count[w.awaitBound(name).Spec.NodeName]++
	}
	return count
}

// MostAllocated fills one node before the next.
func TestPackFillsOneNodeBeforeTheNext(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, suffix := range []string{"a", "b", "c"} {
		w.addNode(suffix, gpus(h100, 4)...)
	}
	startScheduler(t, w.name, withStrategy(config.ScoringStrategy{Type: config.MostAllocated, Devices: config.SmallestFit}))
	count := w.bindEach(8)
	for node, n := range count {
		if n != 4 {
			t.Errorf("node %s has %d of 8 pods, want two nodes with 4 each: %v", node, n, count)
		}
	}
}

// LeastAllocated alternates.
func TestSpreadAlternates(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	suffixes := []string{"a", "b", "c", "d"}
	for _, suffix := range suffixes {
		w.addNode(suffix, gpus(h100, 4)...)
	}
	startScheduler(t, w.name, withStrategy(config.ScoringStrategy{Type: config.LeastAllocated, Devices: config.SmallestFit}))
	want := map[string]int{}
	for _, suffix := range suffixes {
		want[w.nodeName(suffix)] = 2
	}
	if diff := cmp.Diff(want, w.bindEach(8)); diff != "" {
		t.Errorf("pods by node (-want +got):\n%s", diff)
	}
}

// card is a device with so much memory.
func card(name, memory string) resourceapi.Device {
	return resourceapi.Device{Name: name, Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse(memory)}}}
}

// A request that a small card can serve does not take the large one; in FirstFit it takes the first.
func TestSmallestCardThatFits(t *testing.T) {
	t.Parallel()
	for order, want := range map[config.DeviceOrder][]string{
		config.SmallestFit: {"small", "large"},
		config.FirstFit:    {"large", "small"},
	} {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.addNode("n", card("large", "80Gi"), card("small", "16Gi"), card("tiny", "2Gi"))
			startScheduler(t, w.name, withStrategy(config.ScoringStrategy{Type: config.MostAllocated, Devices: order}))
			for i, device := range want {
				name := fmt.Sprintf("pod-%d", i)
				w.addClaim(name, spec(w.exactly("gpu", 1, `device.capacity["$DRIVER"].memory.compareTo(quantity("4Gi")) >= 0`)))
				w.addPod(name, withClaim(name))
				w.awaitPod(name, "is bound", func(p *v1.Pod) bool { return p.Spec.NodeName != "" })
				if diff := cmp.Diff([]string{device}, devices(w.claim(name))); diff != "" {
					t.Errorf("devices of %s (-want +got):\n%s", name, diff)
				}
			}
		})
	}
}

// Where each node has cards of one kind, a request that a small one can serve leaves a node of large ones alone, also if that is half
// full and the other one empty. In FirstFit what is held decides.
func TestSmallestCardThatFitsIsOnAnotherNode(t *testing.T) {
	t.Parallel()
	for order, want := range map[config.DeviceOrder]string{config.SmallestFit: "small", config.FirstFit: "large"} {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.addNode("large", card("gpu-0", "80Gi"), card("gpu-1", "80Gi"))
			w.addNode("small", card("gpu-0", "16Gi"), card("gpu-1", "16Gi"))
			w.addNode("tiny", card("gpu-0", "2Gi"), card("gpu-1", "2Gi"))
			startScheduler(t, w.name, withStrategy(config.ScoringStrategy{Type: config.MostAllocated, Devices: order}))
			w.addClaim("holder", spec(w.exactly("gpu", 1)))
			w.addPod("holder", withClaim("holder"), w.onNode("large"))
			w.awaitBoundTo("holder", "large")
			w.addClaim("wanted", spec(w.exactly("gpu", 1, `device.capacity["$DRIVER"].memory.compareTo(quantity("4Gi")) >= 0`)))
			w.addPod("pod", withClaim("wanted"))
			w.awaitBoundTo("pod", want)
		})
	}
}
