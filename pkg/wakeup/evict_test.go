// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// A pod for which others can be evicted goes before one of lower priority to which the freed device would be enough: it is expected to take
// what was freed and what it has others evicted from. If it does not, the other one is next.
func TestWhoMayEvictGoesBeforeWhoFits(t *testing.T) {
	c, holders := full(t, Options{})
	c.evicts = func(pod *v1.Pod) string {
		if *pod.Spec.Priority < 100 {
			return ""
		}
		return "some"
	}
	c.evicted = func(node *v1.Node, inUse usage.View) func(usage.View) usage.View {
		if node.Name != "a" {
			return nil
		}
		gone := func(claim usage.ClaimRef) bool { return claim.UID == holders["a1"].UID }
		return func(view usage.View) usage.View {
			return view.Without([]usage.PoolID{{Driver: testDriver, Pool: "a"}}, gone)
		}
	}
	big, small := c.addPod("big", 100, "gpu", 2), c.addPod("small", 50, "gpu", 1)
	for _, pod := range []*v1.Pod{big, small} {
		if node := c.try(pod); node != "" {
			t.Fatalf("pod %s fits %s", pod.Name, node)
		}
	}
	c.wakes("nothing has changed")
	c.release(holders["b0"])()
	c.wakes("a device is freed where nobody can be evicted", "small")
	if c.try(small) != "b" {
		t.Fatal("the woken pod does not fit")
	}
	c.room.Gone(small.UID, true)
	smaller := c.addPod("smaller", 40, "gpu", 1)
	c.try(smaller)
	c.release(holders["a0"])()
	c.wakes("a device is freed where the other one can be had", "big")
	c.evictable = []string{"a"}
	if node := c.try(big); node != "" {
		t.Fatalf("the pod fits %s though nobody has been evicted yet", node)
	}
	c.wakes("the other pod's turn", "smaller")
	c.room.Gone(smaller.UID, false)
	free := func() {
		c.hold(holders["a0"], &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "r", Driver: testDriver, Pool: "a", Device: "0"},
		}}})
		c.release(holders["a0"])()
	}
	free()
	c.wakes("who could be evicted in the last attempt is no news")
	c.room.NominationEnded("b")
	c.wakes("devices were kept where nobody can be evicted")
	c.room.NominationEnded("a")
	c.wakes("for whom devices were kept there, the pod could not take the place of", "big")
	c.try(big)
	free()
	c.wakes("who could be evicted in this attempt is no news")
	c.room.NodeRelieved(big.UID, "b")
	c.wakes("there is more where nobody can be evicted")
	c.room.NodeRelieved(big.UID, "a")
	c.wakes("there may be more of what kept the pod from evicting others", "big")

	c.try(big)
	free()
	c.wakes("who could be evicted in the last attempt is no news again")
	c.room.Nominated(big.UID, "b")
	c.wakes("others are evicted where nothing has changed")
	c.room.Nominated(big.UID, "a")
	c.wakes("others are evicted for the pod, and what they had was freed before that was known", "big")
	c.try(big)
	c.room.Nominated(big.UID, "a")
	c.wakes("others are evicted for the pod, and have what they had")
	free()
	c.wakes("what they had is freed", "big")
}

// A pod waits for those that are being evicted for it, and its node does not do any more even without them: it may have others evicted elsewhere.
func TestAPodThatWaitsForTheEvictedInVainIsTriedElsewhere(t *testing.T) {
	for name, nominate := range map[string]func(c *cluster, pod *v1.Pod, node string){
		"the API does not show the nomination": func(c *cluster, pod *v1.Pod, node string) { c.room.Nominated(pod.UID, node) },
		"a scheduler before nominated it":      func(c *cluster, pod *v1.Pod, node string) { pod.Status.NominatedNodeName = node },
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := full(t, Options{})
			c.evicts = func(pod *v1.Pod) string { return "some" }
			c.evicted = func(node *v1.Node, _ usage.View) func(usage.View) usage.View {
				return func(view usage.View) usage.View {
					return view.Without([]usage.PoolID{{Driver: testDriver, Pool: node.Name}}, func(usage.ClaimRef) bool { return true })
				}
			}
			pod := c.addPod("pod", 100, "gpu", 2)
			refuse := func(node string, evictable ...string) {
				t.Helper()
				c.evictable = evictable
				if found := c.try(pod); found != "" {
					t.Fatalf("the pod fits %s though nobody has been evicted yet", found)
				}
				nominate(c, pod, node)
			}
			taint := func(node string, before, after int) { c.setSlice(slice(node, 2, before), slice(node, 2, after))() }

			refuse("a", "b")
			c.wakes("others are being evicted")
			taint("b", 0, 1)
			c.wakes("the other node has become worse")
			taint("a", 0, 1)
			c.wakes("its node does not do any more, and the other one does not, either")
			taint("b", 1, 0)
			c.wakes("others can be evicted from the other node", "pod")
			taint("a", 1, 0)
			refuse("a", "b")
			c.wakes("others are being evicted again")
			taint("a", 0, 1)
			c.wakes("its node does not do any more", "pod")
			refuse("b")
			taint("a", 1, 2)
			c.wakes("it waits for another node by now")
			taint("b", 0, 2)
			c.wakes("no node does any more")
		})
	}
}

// Devices of a node are not kept any more for a nominated pod. Two pods could have others evicted there: when the first one, which was woken, takes
// nothing, it is the other one's turn. Other changes of the node, such as a pod that is bound to it, do not tell that more can be evicted.
func TestWhenANominationEndsEachIsAskedWhoCanBeEvicted(t *testing.T) {
	c, holders := full(t, Options{})
	isHeld := func(claim usage.ClaimRef) bool {
		return claim.UID == holders["a0"].UID || claim.UID == holders["a1"].UID
	}
	c.evicts = func(*v1.Pod) string { return "some" }
	c.evicted = func(node *v1.Node, _ usage.View) func(usage.View) usage.View {
		return func(view usage.View) usage.View {
			return view.Without([]usage.PoolID{{Driver: testDriver, Pool: node.Name}}, isHeld)
		}
	}
	c.evictable = []string{"a"}
	one, two := c.addPod("one", 100, "gpu", 2), c.addPod("two", 90, "gpu", 2)
	for _, pod := range []*v1.Pod{one, two} {
		if node := c.try(pod); node != "" {
			t.Fatalf("pod %s fits %s", pod.Name, node)
		}
	}
	c.room.NodeChanged(one.UID, "a")
	c.wakes("the node has changed, and who could be evicted is no news")
	c.room.NominationEnded("a")
	c.wakes("devices are not kept any more", "one")
	c.room.Gone(one.UID, false)
	c.wakes("the first one takes nothing", "two")
}

// evictedOn is [World.Evicted].
func (c *cluster) evictedOn(_ *v1.Pod, _ any, node *v1.Node, _ *inventory.View, inUse usage.View) func(usage.View) usage.View {
	return c.evicted(node, inUse)
}
