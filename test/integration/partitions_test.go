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
	"k8s.io/utils/ptr"
)

// partitions are the devices of one GPU that can be used as a whole, in halves or in quarters, as far as its
// memory slices reach. They draw on the counter set of the same name.
func partitions(gpu string) []resourceapi.Device {
	part := func(kind string, i, size int) resourceapi.Device {
		counters := map[string]resourceapi.Counter{"memory": {Value: *resource.NewQuantity(int64(size)*20<<30, resource.BinarySI)}}
		for slice := i * size; slice < (i+1)*size; slice++ {
			counters[fmt.Sprintf("memory-slice-%d", slice)] = resourceapi.Counter{Value: resource.MustParse("1")}
		}
		return resourceapi.Device{
			Name:             fmt.Sprintf("%s-%s-%d", gpu, kind, i),
			Attributes:       map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": text(kind)},
			ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: gpu, Counters: counters}},
		}
	}
	devices := []resourceapi.Device{part("whole", 0, 4)}
	for i := range 2 {
		devices = append(devices, part("half", i, 2))
	}
	for i := range 4 {
		devices = append(devices, part("quarter", i, 1))
	}
	return devices
}

// countersOf is what the partitions of one GPU share.
func countersOf(gpu string) resourceapi.CounterSet {
	set := resourceapi.CounterSet{Name: gpu, Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("80Gi")}}}
	for slice := range 4 {
		set.Counters[fmt.Sprintf("memory-slice-%d", slice)] = resourceapi.Counter{Value: resource.MustParse("1")}
	}
	return set
}

// addPartitionedNode makes a node with GPUs that can be partitioned. Counter sets are in a slice of their own.
func (w *world) addPartitionedNode(suffix string, gpus ...string) {
	w.t.Helper()
	w.addNode(suffix)
	devices, counters := w.slice(suffix), w.slice(suffix)
	counters.Name += "-counters"
	for _, slice := range []*resourceapi.ResourceSlice{devices, counters} {
		slice.Spec.Pool.ResourceSliceCount = 2
	}
	for _, gpu := range gpus {
		devices.Spec.Devices = append(devices.Spec.Devices, partitions(gpu)...)
		counters.Spec.SharedCounters = append(counters.Spec.SharedCounters, countersOf(gpu))
	}
	w.addSlice(devices)
	w.addSlice(counters)
}

func (w *world) partition(kind string) resourceapi.ResourceClaimSpec {
	return spec(w.exactly("part", 1, `device.attributes["$DRIVER"].type == "`+kind+`"`))
}

// Partitions of one GPU share its counters: they fit beside each other, the whole does not fit beside them.
func TestPartitionsShareCounters(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addPartitionedNode("a", "gpu-0")
	startScheduler(t, w.name, schedulerSetup{})
	for _, kind := range []string{"whole", "half", "quarter"} {
		w.addTemplate(kind, w.partition(kind))
	}
	want := func(pod, kind, device string) {
		t.Helper()
		w.addPod(pod, withTemplate(kind))
		bound := w.awaitBoundTo(pod, "a")
		if diff := cmp.Diff([]string{device}, devices(w.claim(claimName(bound, kind)))); diff != "" {
			t.Errorf("devices of %s (-want +got):\n%s", pod, diff)
		}
	}
	want("first-half", "half", "gpu-0-half-0")
	// Its two memory slices are gone, so the first quarter that fits is the third one.
	want("quarter", "quarter", "gpu-0-quarter-2")

	// Neither is one of the devices held that are still missing.
	w.addPod("second-half", withTemplate("half"))
	w.awaitUnschedulable("second-half", "part")
	w.addPod("whole", withTemplate("whole"))
	w.awaitUnschedulable("whole", "part", "would fit on node")

	w.deletePod("quarter")
	second := w.awaitBoundTo("second-half", "a")
	if diff := cmp.Diff([]string{"gpu-0-half-1"}, devices(w.claim(claimName(second, "half")))); diff != "" {
		t.Errorf("devices of second-half (-want +got):\n%s", diff)
	}
	w.deletePod("first-half")
	w.deletePod("second-half")
	w.awaitBoundTo("whole", "a")
}

// One claim gets partitions that fit together, though the first ones that match do not.
func TestPartitionsOfOneClaimFitTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addPartitionedNode("a", "gpu-0", "gpu-1")
	startScheduler(t, w.name, schedulerSetup{})
	w.addClaim("wanted", spec(
		w.exactly("whole", 1, `device.attributes["$DRIVER"].type == "whole"`),
		w.exactly("halves", 2, `device.attributes["$DRIVER"].type == "half"`),
	))
	w.addPod("pod", withClaim("wanted"))
	w.awaitBoundTo("pod", "a")
	want := []result{{Request: "whole", Device: "gpu-0-whole-0"}, {Request: "halves", Device: "gpu-1-half-0"}, {Request: "halves", Device: "gpu-1-half-1"}}
	if diff := cmp.Diff(want, results(w.claim("wanted"))); diff != "" {
		t.Errorf("allocated devices (-want +got):\n%s", diff)
	}
}

// Devices of one slice say themselves which nodes may use them.
func TestDevicesChooseTheirNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a")
	w.addNode("b")
	pool := w.slice("shared", resourceapi.Device{Name: "of-a", NodeName: ptr.To(w.nodeName("a"))},
		resourceapi.Device{Name: "of-b", NodeSelector: labelled(v1.LabelHostname, w.nodeName("b"))},
		resourceapi.Device{Name: "of-all", AllNodes: ptr.To(true)})
	pool.Spec.NodeName, pool.Spec.PerDeviceNodeSelection = nil, ptr.To(true)
	w.addSlice(pool)
	startScheduler(t, w.name, schedulerSetup{})

	steps := []struct {
		pod, node, device string
		selector          *v1.NodeSelector
	}{
		{"on-b", "b", "of-b", labelled(v1.LabelHostname, w.nodeName("b"))},
		{"on-a", "a", "of-a", onlyNode(w.nodeName("a"))},
		{"on-b-too", "b", "of-all", nil},
	}
	for _, step := range steps {
		w.addClaim(step.pod, spec(w.exactly("device", 1)))
		w.addPod(step.pod, withClaim(step.pod), w.onNode(step.node))
		w.awaitBoundTo(step.pod, step.node)
		claim := w.claim(step.pod)
		if diff := cmp.Diff([]string{step.device}, devices(claim)); diff != "" {
			t.Errorf("devices of %s (-want +got):\n%s", step.pod, diff)
		}
		if diff := cmp.Diff(step.selector, claim.Status.Allocation.NodeSelector); diff != "" {
			t.Errorf("node selector of %s (-want +got):\n%s", step.pod, diff)
		}
	}
	w.addClaim("late", spec(w.exactly("device", 1)))
	w.addPod("late", withClaim("late"), w.onNode("a"))
	w.awaitUnschedulable("late", "2 of 2", "held")
}

// labelled selects the nodes with a label.
func labelled(key, value string) *v1.NodeSelector {
	return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
		MatchExpressions: []v1.NodeSelectorRequirement{{Key: key, Operator: v1.NodeSelectorOpIn, Values: []string{value}}},
	}}}
}
