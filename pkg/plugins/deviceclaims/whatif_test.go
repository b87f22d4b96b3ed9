// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// However pods are removed and put back, in whichever clones of a state, and whatever the pods of the group are given meanwhile: a node's usage
// is what it is when made anew from the claims that somebody is left for.
func TestWhatIfIsTheUsageOfWhoIsLeft(t *testing.T) {
	withGroups(t)
	const netPool = "net"
	onNet := func(device string) func(*resourceapi.ResourceClaim) {
		return func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation = allocation(netPool, device)
			c.Status.Allocation.NodeSelector = nil
		}
	}
	net := slice(netPool, device("net-0"), device("net-1"), device("net-2"))
	net.Spec.NodeName, net.Spec.AllNodes = nil, ptr.To(true)
	w := twoNodes()
	w.objects = append(w.objects, net)
	w.claims = []*resourceapi.ResourceClaim{
		claim("preemptor"),
		claim("alone-a", allocated("node-a", "gpu-0"), reservedFor("a-0")),
		claim("two-a", allocated("node-a", "gpu-1", "gpu-2"), reservedFor("a-0", "a-1")),
		claim("alone-b", allocated("node-b", "gpu-0"), reservedFor("b-0")),
		claim("same-device-b", allocated("node-b", "gpu-0"), reservedFor("b-1")),
		claim("stays-b", allocated("node-b", "gpu-1"), reservedFor("b-0", "stays")),
		claim("two-nodes", onNet("net-0"), reservedFor("a-0", "b-0")),
		claim("of-group", allocated("node-b", "gpu-2"), forGroup),
		claim("of-group-and-pod", onNet("net-1"), reservedFor("a-1"), forGroup),
		claim("of-nobody", allocated("node-a", "gpu-3")),
		claim("preemptors-too", onNet("net-2"), reservedFor("a-1")),
		claim("given-0"), claim("given-1"), claim("given-2"),
	}
	w.pods = []*v1.Pod{
		running("a-0", "node-a", 1, "alone-a", "two-a", "two-nodes"), running("a-1", "node-a", 1, "two-a", "of-group-and-pod", "preemptors-too"),
		running("b-0", "node-b", 1, "alone-b", "stays-b", "two-nodes"), running("b-1", "node-b", 1, "same-device-b"), running("plain", "node-b", 1),
		running("stays", "node-b", 9, "stays-b"),
	}
	victims := w.pods[:5]
	h := newHarness(t, w)
	p := pending("p", 5, "preemptor", "preemptors-too")

	// attempt is a clone of the preemptor's state, and the pods that have been removed in it.
	type attempt struct {
		state   fwk.CycleState
		removed sets.Set[types.UID]
	}
	holders := func(view usage.View, pools []usage.PoolID) map[usage.DeviceID][]string {
		found := map[usage.DeviceID][]string{}
		for _, id := range pools {
			for name, device := range view.Pool(id).All() {
				for _, holder := range device.Holders() {
					id := usage.DeviceID{Driver: id.Driver, Pool: id.Pool, Device: name}
					found[id] = append(found[id], holder.Claim.Name)
				}
			}
		}
		return found
	}
	rapid.Check(t, func(rt *rapid.T) {
		state := framework.NewCycleState()
		state.SetPodGroupSchedulingCycle(framework.NewCycleState())
		if _, status := h.plugin.PreFilter(h.ctx, state, p, h.nodes); !status.IsSuccess() {
			rt.Fatal(status)
		}
		attempts := []attempt{{state, sets.New[types.UID]()}}
		given := map[string]*resourceapi.AllocationResult{}
		trial := h.plugin.shared.common.Trial
		defer func() {
			for name := range given {
				trial.TakeBack(types.UID(name))
			}
		}()

		anew := func(a attempt) usage.View {
			index := usage.NewIndex()
			for _, claim := range w.claims {
				isGone := func(ref resourceapi.ResourceClaimConsumerReference) bool {
					return ref.Resource == "pods" && a.removed.Has(ref.UID)
				}
				users := claim.Status.ReservedFor
				if claim.Name == "preemptors-too" || len(users) == 0 || !slices.ContainsFunc(users, isGone) || len(slices.DeleteFunc(slices.Clone(users), isGone)) > 0 {
					index.Set(usage.RefOf(claim), claim.Status.Allocation, given[claim.Name])
				}
			}
			return index.View()
		}
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			a := rapid.SampledFrom(attempts).Draw(rt, "attempt")
			switch rapid.SampledFrom([]string{"pod", "pod", "pod", "clone", "give"}).Draw(rt, "step") {
			case "pod":
				victim := rapid.SampledFrom(victims).Draw(rt, "victim")
				change := h.plugin.RemovePod
				if a.removed.Has(victim.UID) {
					change = h.plugin.AddPod
					a.removed.Delete(victim.UID)
				} else {
					a.removed.Insert(victim.UID)
				}
				if status := change(h.ctx, a.state, p, podInfo(victim), h.nodeOf(victim.Spec.NodeName)); !status.IsSuccess() {
					rt.Fatal(status)
				}
			case "clone":
				attempts = append(attempts, attempt{a.state.Clone(), a.removed.Clone()})
			case "give":
				name := rapid.SampledFrom([]string{"given-0", "given-1", "given-2"}).Draw(rt, "claim")
				if given[name] != nil {
					trial.TakeBack(types.UID(name))
					delete(given, name)
					break
				}
				given[name] = allocation(rapid.SampledFrom([]string{"node-a", "node-b", netPool}).Draw(rt, "pool"), "given")
				at := slices.IndexFunc(w.claims, func(c *resourceapi.ResourceClaim) bool { return c.Name == name })
				trial.Give(types.UID(name), []tracker.Reservation{{Claim: w.claims[at], Allocation: given[name]}})
			}
			nodes := rapid.Permutation(h.nodes).Draw(rt, "nodes")
			for i, a := range attempts {
				c, err := cycle.Read(a.state)
				if err != nil {
					rt.Fatal(err)
				}
				for _, info := range nodes {
					pools := contention.PoolsOf(info.Node(), c.Inventory)
					want, got := holders(anew(a), pools), holders(c.View(h.ctx, info.Node()), pools)
					if diff := cmp.Diff(want, got); diff != "" {
						rt.Fatalf("clone %d without %v: %s (-want +got):\n%s", i, sets.List(a.removed), info.Node().Name, diff)
					}
				}
			}
		}
	})
}

// To put back one of many victims, and to see whether the pod still fits its node, costs no more than to put back one of few.
func TestPuttingBackAVictimCostsTheSameAmongMany(t *testing.T) {
	withGroups(t)
	const perNode, few, many = 4, 20, 400
	cost := func(t *testing.T, nodes int, inGroup bool) float64 {
		w := twoNodes()
		w.nodes, w.objects = nil, w.objects[:1]
		for i := range nodes {
			name := fmt.Sprintf("node-%03d", i)
			w.nodes = append(w.nodes, node(name))
			var devices []resourceapi.Device
			for j := range perNode {
				d, user := fmt.Sprintf("gpu-%d", j), fmt.Sprintf("low-%d-%d", i, j)
				devices = append(devices, device(d))
				w.claims = append(w.claims, claim(user, allocated(name, d), reservedFor(user)))
				w.pods = append(w.pods, running(user, name, 1, user))
			}
			w.objects = append(w.objects, slice(name, devices...))
		}
		w.claims = append(w.claims, claim("wanted"))
		h := newHarness(t, w)
		state := framework.NewCycleState()
		if inGroup {
			state.SetPodGroupSchedulingCycle(framework.NewCycleState())
		}
		a := h.filterAllIn(state, pending("p", 5, "wanted"))
		place := map[string]fwk.NodeInfo{}
		for _, info := range h.nodes {
			place[info.Node().Name] = info
		}
		for _, victim := range w.pods {
			h.plugin.RemovePod(h.ctx, a.state, a.pod, podInfo(victim), place[victim.Spec.NodeName])
		}
		last := w.pods[len(w.pods)-1]
		info := podInfo(last)
		return testing.AllocsPerRun(20, func() {
			h.plugin.AddPod(h.ctx, a.state, a.pod, info, place[last.Spec.NodeName])
			if status := h.plugin.Filter(h.ctx, a.state, a.pod, place["node-000"]); !status.IsSuccess() {
				t.Fatal(status)
			}
			if inGroup {
				if status := h.plugin.Reserve(h.ctx, a.state, a.pod, "node-000"); !status.IsSuccess() {
					t.Fatal(status)
				}
				a.unreserve("node-000")
			}
			h.plugin.RemovePod(h.ctx, a.state, a.pod, info, place[last.Spec.NodeName])
		})
	}
	for name, inGroup := range map[string]bool{"a pod": false, "a pod of a group": true} {
		t.Run(name, func(t *testing.T) {
			amongFew, amongMany := cost(t, few/perNode, inGroup), cost(t, many/perNode, inGroup)
			if amongMany > 2*amongFew {
				t.Errorf("%v allocations among %d victims, %v among %d", amongFew, few, amongMany, many)
			}
			t.Logf("%v allocations among %d victims, %v among %d", amongFew, few, amongMany, many)
		})
	}
}
