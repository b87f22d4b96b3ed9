// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/snapshot"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// After each of many random changes, the nodes of the map have the GPUs of clusterview.GPUs, in its order.
func TestChangesLeadToTheSameGPUs(t *testing.T) {
	for seed := range uint64(30) {
		w := &world{random: rand.New(rand.NewPCG(seed, 1)), cluster: NewCluster()}
		shown := map[string]Value{}
		for step := range 60 {
			for range 1 + w.random.IntN(3) {
				w.change()
			}
			values, err := w.cluster.Changes()
			if err != nil {
				t.Fatal(err)
			}
			for key, v := range values {
				if key.Kind != Node {
					continue
				}
				if shown[key.Name] = v; len(v) == 0 {
					delete(shown, key.Name)
				}
			}
			want := map[string]Value{}
			for _, g := range clusterview.GPUs(snapshot.New(w.objects.Clone())) {
				part, err := json.Marshal(g)
				if err != nil {
					t.Fatal(err)
				}
				want[g.Node] = append(want[g.Node], part)
			}
			if diff := cmp.Diff(texts(want), texts(shown)); diff != "" {
				t.Fatalf("seed %d, step %d: %s", seed, step, diff)
			}
		}
		if len(w.cluster.pools) > 12 || len(w.cluster.drivers) > 3 {
			t.Errorf("seed %d: %d pools are kept", seed, len(w.cluster.pools))
		}
	}
}

func texts(values map[string]Value) map[string][]string {
	all := map[string][]string{}
	for name, v := range values {
		for _, part := range v {
			all[name] = append(all[name], string(part))
		}
	}
	return all
}

// world changes objects of all kinds, in ways that pools, nodes and claims overlap.
type world struct {
	random  *rand.Rand
	cluster *Cluster
	objects snapshot.Objects
}

func (w *world) change() {
	n := w.random.IntN
	switch n(6) {
	case 0, 1:
		slice := &resourceapi.ResourceSlice{}
		slice.Name = fmt.Sprintf("slice-%d", n(8))
		spec := &slice.Spec
		spec.Driver, spec.Pool.Name, spec.Pool.Generation = fmt.Sprintf("driver-%d", n(3)), fmt.Sprintf("pool-%d", n(4)), int64(n(2))
		if n(3) > 0 {
			spec.NodeName = ptr.To(fmt.Sprintf("node-%d", n(3)))
		} else {
			spec.PerDeviceNodeSelection = ptr.To(true)
		}
		for range n(4) {
			text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
			d := resourceapi.Device{Name: fmt.Sprintf("gpu-%d", n(4)), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}}
			if spec.NodeName == nil && n(2) == 0 {
				d.NodeName = ptr.To(fmt.Sprintf("node-%d", n(3)))
			}
			if n(2) == 0 {
				d.Attributes["parentUUID"], d.Attributes["profile"] = text(fmt.Sprintf("uuid-%d", n(3))), text("1g.10gb")
			} else {
				d.Attributes["uuid"] = text(fmt.Sprintf("uuid-%d", n(3)))
			}
			if n(2) == 0 {
				d.Attributes["resource.kubernetes.io/pciBusID"] = text(fmt.Sprintf("0000:%02d:00.0", n(4)))
			}
			if spec.Driver == "driver-2" && n(3) > 0 { // of which some or all devices are no GPUs
				d.Attributes["type"] = text("nic")
			}
			if n(3) == 0 {
				d.AllowMultipleAllocations = ptr.To(true)
			}
			spec.Devices = append(spec.Devices, d)
		}
		put(w, &w.objects.ResourceSlices, slice)
	case 2, 3:
		claim := &resourceapi.ResourceClaim{}
		claim.Namespace, claim.Name, claim.UID = "ns", fmt.Sprintf("claim-%d", n(6)), types.UID(fmt.Sprint(n(1000)))
		if n(4) > 0 {
			claim.Status.Allocation = &resourceapi.AllocationResult{}
			for range 1 + n(3) {
				claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
					Driver: fmt.Sprintf("driver-%d", n(3)), Pool: fmt.Sprintf("pool-%d", n(4)), Device: fmt.Sprintf("gpu-%d", n(4)),
				})
			}
		}
		put(w, &w.objects.ResourceClaims, claim)
	case 4:
		rule := &resourceapi.DeviceTaintRule{}
		rule.Name = fmt.Sprintf("rule-%d", n(2))
		rule.Spec.Taint = resourceapi.DeviceTaint{Key: "k", Effect: resourceapi.DeviceTaintEffectNoSchedule}
		if n(3) > 0 {
			rule.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{Pool: ptr.To(fmt.Sprintf("pool-%d", n(4)))}
		}
		put(w, &w.objects.DeviceTaintRules, rule)
	case 5:
		switch n(3) {
		case 0:
			remove(w, &w.objects.ResourceSlices)
		case 1:
			remove(w, &w.objects.ResourceClaims)
		case 2:
			remove(w, &w.objects.DeviceTaintRules)
		}
	}
}

func put[T metav1.Object](w *world, list *[]T, object T) {
	*list = append(slices.DeleteFunc(slices.Clone(*list), func(o T) bool { return snapshot.Reference(o) == snapshot.Reference(object) }), object)
	w.cluster.Put(object)
}

func remove[T metav1.Object](w *world, list *[]T) {
	if len(*list) == 0 {
		return
	}
	i := w.random.IntN(len(*list))
	w.cluster.Delete((*list)[i])
	*list = slices.Delete(slices.Clone(*list), i, i+1)
}

// A pod is told while it waits for devices, with what its claims ask for, and follows its claims.
func TestWaitingPods(t *testing.T) {
	c := snapshottest.New(1, 2)
	two, claim := c.Pod("team-a", "two", 2, 5)
	two.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: "Unschedulable", Message: "0/1 nodes"}}
	extended, _ := c.Pod("team-a", "extended", 1, 0)
	extended.Spec.ResourceClaims = nil
	extended.Spec.Containers[0].Resources.Requests["example.com/gpu"] = resource.MustParse("3")
	absurd, _ := c.Pod("team-a", "absurd", 1, 0)
	absurd.Spec.ResourceClaims = nil
	absurd.Spec.Containers = append(absurd.Spec.Containers, *absurd.Spec.Containers[0].DeepCopy())
	for i := range absurd.Spec.Containers {
		absurd.Spec.Containers[i].Resources.Requests["example.com/gpu"] = resource.MustParse("9223372036854775807")
	}
	plain, _ := c.Pod("team-a", "plain", 1, 0)
	plain.Spec.ResourceClaims = nil
	early, later := c.Pod("team-a", "early", 1, 0)
	running, _ := c.Run("team-a", "running", 0, 0, 1)
	preparing, _ := c.Run("team-a", "preparing", 0, 0, 0)
	preparing.Status.Phase = v1.PodPending

	cluster := NewCluster()
	for _, pod := range []*v1.Pod{two, extended, absurd, plain, early, running, preparing} {
		cluster.Put(pod)
	}
	for _, o := range c.ResourceClaims {
		if o != later {
			cluster.Put(o)
		}
	}
	pods := map[string]string{}
	look := func() map[string]string {
		t.Helper()
		values, err := cluster.Changes()
		if err != nil {
			t.Fatal(err)
		}
		for key, v := range values {
			if key.Kind != Pod {
				continue
			}
			if len(v) == 0 {
				delete(pods, key.Name)
				continue
			}
			var w Waiting
			if err := json.Unmarshal(v[0], &w); err != nil {
				t.Fatal(err)
			}
			pods[key.Name] = fmt.Sprint(w.Asks, " ", w.Node, " ", w.Priority, " ", w.Reason, " ", w.Message)
		}
		return pods
	}
	want := map[string]string{
		"team-a/two":       "[2×gpu.nvidia.com]  5 Unschedulable 0/1 nodes",
		"team-a/extended":  "[3×example.com/gpu]  0  ",
		"team-a/absurd":    "[9223372036854775807×example.com/gpu]  0  ",
		"team-a/early":     "[1×claim that is not there]  0  ",
		"team-a/preparing": "[1×gpu.nvidia.com] worker-0 0  ",
	}
	if diff := cmp.Diff(want, look()); diff != "" {
		t.Error(diff)
	}
	cluster.Put(later)
	cluster.Delete(claim)
	started := preparing.DeepCopy()
	started.Status.Phase = v1.PodRunning
	cluster.Put(started)
	cluster.Delete(extended)
	cluster.Delete(absurd)
	want = map[string]string{
		"team-a/two":   "[1×claim that is not there]  5 Unschedulable 0/1 nodes",
		"team-a/early": "[1×gpu.nvidia.com]  0  ",
	}
	if diff := cmp.Diff(want, look()); diff != "" {
		t.Error(diff)
	}
}

// Messages are cut between characters.
func TestLongMessagesAreCut(t *testing.T) {
	c := snapshottest.New(1, 1)
	pod, _ := c.Pod("a", "b", 1, 0)
	pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse, Message: "x" + string(slices.Repeat([]byte("é"), 2000))}}
	cluster := NewCluster()
	cluster.Put(pod)
	values, err := cluster.Changes()
	var w Waiting
	if err == nil {
		err = json.Unmarshal(values[Key{Pod, "a/b"}][0], &w)
	}
	if err != nil || len(w.Message) != maxMessage-1 {
		t.Errorf("%d bytes, %v", len(w.Message), err)
	}
}
