// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
)

func (c *cluster) wakes(what string, want ...string) {
	c.t.Helper()
	if diff := cmp.Diff(want, c.pass()); diff != "" {
		c.t.Errorf("%s: woken pods differ (-want +got):\n%s", what, diff)
	}
}

// full is a cluster of nodes a and b with two devices each, all of which are held.
func full(t *testing.T, options Options) (*cluster, map[string]*resourceapi.ResourceClaim) {
	c := newCluster(t, options)
	holders := map[string]*resourceapi.ResourceClaim{}
	for _, node := range []string{"a", "b"} {
		c.addNode(node)
		c.setSlice(nil, slice(node, 2, 0))
		for _, device := range []string{"0", "1"} {
			holders[node+device] = c.holdOn(node, device)
		}
	}
	return c, holders
}

// A pod was told that there is no such class. It is woken when there is one, also if something else had it looked at between the class and its event.
func TestWhoWasToldThatAClassIsMissingIsWokenByIt(t *testing.T) {
	for name, between := range map[string]func(c *cluster, holders map[string]*resourceapi.ResourceClaim){
		"nothing in between":        func(*cluster, map[string]*resourceapi.ResourceClaim) {},
		"a device freed in between": func(c *cluster, holders map[string]*resourceapi.ResourceClaim) { c.release(holders["a0"])() },
	} {
		t.Run(name, func(t *testing.T) {
			c, holders := full(t, Options{})
			pod := c.addPod("pod", 0, "late", 5)
			c.room.Note(pod, claimNamesOf(pod), nil)
			// For an extended resource such a question is no error.
			c.room.Judged(pod.UID, &Question{Classes: map[string]*inventory.Class{"late": nil}}, Seen{Usage: c.revision, Inventory: c.store.View().Generation()})
			c.room.Refused(pod.UID, Refusal{Nodes: c.allNodes}, c.now)
			event := c.setClass(class("late", "false"))
			between(c, holders)
			first, _ := passOf(t.Context(), c.room, c.world())
			event()
			second, _ := passOf(t.Context(), c.room, c.world())
			if len(first)+len(second) != 1 {
				t.Errorf("woken %d and %d times, want once", len(first), len(second))
			}
		})
	}
}

func TestAsManyAreWokenAsTheFreedDevicesAdmit(t *testing.T) {
	c, holders := full(t, Options{})
	pods := c.sleepers(10)
	c.release(holders["a0"])()
	c.wakes("one device", "p0")
	c.wakes("nothing new")
	c.release(holders["b0"])()
	c.release(holders["b1"])()
	c.wakes("two more", "p1", "p2")
	for _, pod := range pods[:3] {
		if c.try(pod) == "" {
			t.Errorf("pod %s was woken and found no device", pod.Name)
		}
		c.room.Gone(pod.UID, true)
	}
	c.wakes("all that was freed is taken")
	if diff := cmp.Diff(map[string]int{"device true": 3}, c.outcomes); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s", diff)
	}
}

// Nothing is kept for a pod that need not be tried when it is woken, such as one of a group: the next one is woken with it.
func TestNothingIsKeptForAPodThatNeedNotBeTried(t *testing.T) {
	c, holders := full(t, Options{})
	c.uncertain = map[string]bool{"p0": true, "p1": true}
	c.sleepers(4)
	c.release(holders["a0"])()
	c.wakes("one device", "p0", "p1", "p2")
	c.now = c.now.Add(time.Minute)
	woken := c.pass()
	slices.Sort(woken) // those whose patience has ended come in any order
	if diff := cmp.Diff([]string{"p0", "p1", "p2", "p3"}, woken); diff != "" {
		t.Errorf("nobody is tried: woken pods differ (-want +got):\n%s", diff)
	}
}

// Pods that wait for a place among the users of one claim.
func TestAsManyAreWokenAsTheClaimHasPlaces(t *testing.T) {
	c := newCluster(t, Options{})
	c.addNode("a")
	left := 0
	c.left = &left
	pods := c.sleepers(6)
	change := func(n int) {
		left = n
		for _, pod := range pods {
			c.room.ClaimChanged(claimNamesOf(pod)[0])
		}
	}
	place := func(i int) {
		c.begin(pods[i])
		left--
		c.room.Placed(pods[i].UID)
	}
	change(2)
	c.wakes("two places", "p0", "p1")
	c.wakes("nothing new")
	change(2)
	c.wakes("the claim changes in another way")
	place(0)
	c.wakes("one is taken, the other one is for p1")
	c.begin(pods[1])
	c.room.NotRefused(pods[1].UID, c.now)
	c.wakes("p1 does not take its place", "p2")
	c.now = c.now.Add(time.Minute)
	c.wakes("p2 takes too long", "p2", "p3")
	place(3)
	place(2)
	c.wakes("all are taken")
	change(1)
	c.wakes("a place is freed; p1 sleeps for want of something else", "p4")
	c.room.Gone(pods[4].UID, false)
	delete(c.pods, pods[4].UID)
	c.wakes("p4 is gone", "p5")
}

func TestTheNextIsWokenWhenTheFirst(t *testing.T) {
	tests := map[string]struct {
		first func(c *cluster, first *v1.Pod, holders map[string]*resourceapi.ResourceClaim)
		want  []string
	}{
		"takes the device: nobody": {
			first: func(c *cluster, first *v1.Pod, _ map[string]*resourceapi.ResourceClaim) { c.try(first) },
		},
		"is refused by others": {
			first: func(c *cluster, first *v1.Pod, _ map[string]*resourceapi.ResourceClaim) { c.try(first, "a") },
			want:  []string{"p1"},
		},
		"goes elsewhere": {
			first: func(c *cluster, first *v1.Pod, holders map[string]*resourceapi.ResourceClaim) {
				c.release(holders["b0"]) // not heard of yet
				c.try(first, "a")
			},
			want: []string{"p1"},
		},
		"is deleted": {
			first: func(c *cluster, first *v1.Pod, _ map[string]*resourceapi.ResourceClaim) {
				delete(c.pods, first.UID)
				c.room.Gone(first.UID, false)
			},
			want: []string{"p1"},
		},
		"cannot use its claims any more": {
			first: func(c *cluster, first *v1.Pod, _ map[string]*resourceapi.ResourceClaim) {
				c.room.Note(first, claimNamesOf(first), nil)
				c.room.Judged(first.UID, &Question{Err: fmt.Errorf("claim is gone")}, Seen{})
			},
			want: []string{"p1"},
		},
		"is being tried: nobody yet": {
			first: func(c *cluster, first *v1.Pod, _ map[string]*resourceapi.ResourceClaim) { c.begin(first) },
		},
		"is not tried in time, and it is woken once more": {
			first: func(c *cluster, _ *v1.Pod, _ map[string]*resourceapi.ResourceClaim) { c.now = c.now.Add(time.Minute) },
			want:  []string{"p0", "p1"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			c, holders := full(t, Options{})
			pods := c.sleepers(3)
			c.release(holders["a0"])()
			c.wakes("the first", "p0")
			tc.first(c, pods[0], holders)
			c.wakes("the next", tc.want...)
			c.wakes("nobody after that")
		})
	}
}

// The first one fails in an attempt that began before it was woken. That says nothing about the device.
func TestThePresentAttemptIsNotTheOutcomeOfAWakeUp(t *testing.T) {
	c, holders := full(t, Options{})
	pods := c.sleepers(2)
	running := c.begin(pods[0])
	c.release(holders["a0"])()
	c.wakes("in the middle of the attempt", "p0")
	running.end(nil)
	c.wakes("its next attempt is still to come")
	if c.try(pods[0]) != "a" {
		t.Error("the woken pod does not fit")
	}
	c.wakes("the device is taken")
}

// What was freed while a pod was tried went to another one first. If that does not take it, the pod is next, although its own attempt,
// which had not seen the device, has ended meanwhile.
func TestTheNextIsWokenThoughItsOldAttemptEndedMeanwhile(t *testing.T) {
	tests := map[string]struct {
		others map[string]bool
		want   []string
	}{
		"for want of devices":             {want: []string{"p1"}},
		"for other reasons on that node":  {others: map[string]bool{"a": true}},
		"for other reasons on other ones": {others: map[string]bool{"b": true}, want: []string{"p1"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			c, holders := full(t, Options{})
			pods := c.sleepers(2)
			running := c.begin(pods[1])
			c.release(holders["a0"])()
			c.wakes("in the middle of the attempt", "p0")
			running.end(tc.others)
			c.wakes("the first has not been tried yet")
			delete(c.pods, pods[0].UID)
			c.room.Gone(pods[0].UID, false)
			c.wakes("the first is deleted", tc.want...)
		})
	}
}

func TestWhatAnAttemptHasSeenDoesNotWake(t *testing.T) {
	c, holders := full(t, Options{})
	pod := c.sleepers(1)[0]
	event := c.release(holders["a0"])
	c.try(pod, "a") // sees the free device on a node that will not do
	event()
	c.wakes("an event that comes after the attempt that saw the change")
}

func TestAChangeBetweenNoteAndJudgedIsLookedAt(t *testing.T) {
	c, holders := full(t, Options{})
	pod := c.sleepers(1)[0]
	c.room.Note(pod, claimNamesOf(pod), nil)
	seen := Seen{Usage: c.revision, Inventory: c.store.View().Generation()}
	question := c.look(pod, c.store.View())
	c.release(holders["a0"])()
	c.wakes("what the pod asks for is not known")
	c.room.Judged(pod.UID, question, seen)
	c.wakes("now it is", "p0")
}

// The attempt that a wake-up led to may have looked before something changes, and end after that was heard of.
func TestAChangeDuringTheAttemptOfAWakeUpIsLookedAt(t *testing.T) {
	tests := map[string]func(c *cluster, pod *v1.Pod, change func()){
		"after it has looked": func(c *cluster, pod *v1.Pod, change func()) {
			running := c.begin(pod)
			change()
			c.wakes("it is not known what the attempt comes to")
			running.end(map[string]bool{"a": true})
		},
		"while it looks": func(c *cluster, pod *v1.Pod, change func()) {
			c.room.Note(pod, claimNamesOf(pod), nil)
			running := &attempt{c: c, pod: pod, inv: c.store.View(), view: c.index.View(), nodes: c.nodes}
			seen := Seen{Usage: c.revision, Inventory: running.inv.Generation()}
			change()
			c.wakes("what the attempt has seen is not known")
			running.question = c.look(pod, running.inv)
			c.room.Judged(pod.UID, running.question, seen)
			running.end(map[string]bool{"a": true})
		},
	}
	for name, try := range tests {
		t.Run(name, func(t *testing.T) {
			c, holders := full(t, Options{})
			pod := c.sleepers(1)[0]
			c.release(holders["a0"])()
			c.wakes("a device on the node that others refuse", "p0")
			try(c, pod, func() { c.release(holders["b0"])() })
			c.wakes("a device that the attempt did not see", "p0")
		})
	}
}

func TestWhatWakes(t *testing.T) {
	tests := map[string]struct {
		// class and count of what the pod asks for; "gpu" and 1 by default.
		class  string
		count  int64
		change func(c *cluster, holders map[string]*resourceapi.ResourceClaim)
		want   []string
		cause  Cause
	}{
		"a freed device":                {change: func(c *cluster, h map[string]*resourceapi.ResourceClaim) { c.release(h["a0"])() }, want: []string{"pod"}},
		"too few freed devices: nobody": {count: 2, change: func(c *cluster, h map[string]*resourceapi.ResourceClaim) { c.release(h["a0"])(); c.release(h["b0"])() }},
		"enough freed devices":          {count: 2, change: func(c *cluster, h map[string]*resourceapi.ResourceClaim) { c.release(h["a0"])(); c.release(h["a1"])() }, want: []string{"pod"}},
		"a slice with more devices": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.setSlice(slice("a", 2, 0), slice("a", 3, 0))()
		}, want: []string{"pod"}},
		"more tainted devices: nobody": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.setSlice(slice("a", 2, 0), slice("a", 3, 3))()
		}},
		"a lifted taint": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.setSlice(slice("a", 2, 0), slice("a", 3, 3))()
			if woken := c.pass(); len(woken) > 0 {
				c.t.Errorf("%v woken by tainted devices", woken)
			}
			c.setSlice(slice("a", 3, 3), slice("a", 3, 0))()
		}, want: []string{"pod"}},
		"a class that does not concern it: nobody":                   {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) { c.setClass(class("other", "true"))() }},
		"a class of its own that is still missing something: nobody": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) { c.setClass(class("gpu", "true"))() }},
		"the class that was missing":                                 {class: "late", change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) { c.setClass(class("late", "true"))() }, want: []string{"pod"}},
		"a slice while the class is missing: nobody": {class: "late", change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.setSlice(slice("a", 2, 0), slice("a", 3, 0))()
		}},
		"a node after its slices": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.setSlice(nil, slice("new", 1, 0))()
			if woken := c.pass(); len(woken) > 0 {
				c.t.Errorf("%v woken without the node", woken)
			}
			c.addNode("new")
			c.room.NodeChanged("pod", "new")
		}, want: []string{"pod"}},
		"slices after their node": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.addNode("new")
			c.room.NodeChanged("pod", "new")
			if woken := c.pass(); len(woken) > 0 {
				c.t.Errorf("%v woken without devices", woken)
			}
			c.setSlice(nil, slice("new", 1, 0))()
		}, want: []string{"pod"}},
		"a tainted node with devices loses its taint": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.addNode("new")
			c.tainted["new"] = true
			c.room.NodeChanged("pod", "new")
			c.setSlice(nil, slice("new", 1, 0))()
			if woken := c.pass(); len(woken) > 0 {
				c.t.Errorf("%v woken for a tainted node", woken)
			}
			delete(c.tainted, "new")
			c.room.NodeChanged("pod", "new")
		}, want: []string{"pod"}},
		"a node of which devices were kept for another pod": {change: func(c *cluster, h map[string]*resourceapi.ResourceClaim) {
			c.release(h["a0"])
			c.try(c.pods["pod"], "a") // sees a free device that it must not have
			if woken := c.pass(); len(woken) > 0 {
				c.t.Errorf("%v woken for a node that is kept", woken)
			}
			c.room.NominationEnded("a")
		}, want: []string{"pod"}},
		"a node of which devices were kept, and are all held: nobody": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.room.NominationEnded("a")
		}},
		"the pod tolerates the node now": {change: func(c *cluster, h map[string]*resourceapi.ResourceClaim) {
			c.tainted["a"] = true
			c.release(h["a0"])()
			if woken := c.pass(); len(woken) > 0 {
				c.t.Errorf("%v woken for a tainted node", woken)
			}
			delete(c.tainted, "a")
			c.room.PodChanged("pod")
		}, want: []string{"pod"}},
		"an attempt that ended at Reserve": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.begin(c.pods["pod"])
			c.room.Failed("pod", c.now)
		}, want: []string{"pod"}},
		"a pool for all nodes": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			network := slice("network", 1, 0)
			network.Spec.NodeName, network.Spec.AllNodes = nil, ptr.To(true)
			c.setSlice(nil, network)()
		}, want: []string{"pod"}},
		"its claims, unchanged: nobody": {change: func(c *cluster, _ map[string]*resourceapi.ResourceClaim) {
			c.room.ClaimChanged(types.NamespacedName{Namespace: "default", Name: "pod"})
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			c, holders := full(t, Options{})
			if tc.class == "" {
				tc.class = "gpu"
			}
			pod := c.addPod("pod", 0, tc.class, max(1, tc.count))
			c.try(pod)
			c.wakes("before")
			tc.change(c, holders)
			c.wakes("after", tc.want...)
		})
	}
}

// Another plugin refused a node, so its devices do not matter, and that plugin wakes the pod.
func TestDevicesOfNodesRefusedByOthersDoNotWake(t *testing.T) {
	c, holders := full(t, Options{})
	pod := c.addPod("pod", 0, "gpu", 1)
	c.try(pod, "a")
	c.release(holders["a0"])()
	c.wakes("a device of the node that others refused")
	c.release(holders["b0"])()
	c.wakes("a device of the other node", "pod")
}

func TestAttemptsWithoutAnswerAreRepeated(t *testing.T) {
	c, _ := full(t, Options{RetryAfter: time.Second})
	pod := c.sleepers(1)[0]
	for _, after := range []time.Duration{1, 2, 4, 8, 16, 32, 32} {
		c.begin(pod)
		c.room.Refused(pod.UID, Refusal{Undecided: true}, c.now)
		c.now = c.now.Add(after*time.Second - 1)
		c.wakes("too early")
		c.now = c.now.Add(1)
		c.wakes("in time", "p0")
	}
	if diff := cmp.Diff(map[string]int{"retry false": 6}, c.outcomes); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s", diff)
	}
}

// An attempt that ended at Reserve is repeated at once, as the change that it lost to is known by then. A pod that goes on failing there is
// tried less and less often.
// The claims of sleeping pods come to be in another state though nothing happens. The pass that looks at them is due by itself.
// A pod that gives its devices back is tried again by whoever made it do so, not because they are free.
func TestAPodThatGivesItsDevicesBackDoesNotWait(t *testing.T) {
	c, holders := full(t, Options{})
	first := c.addPod("first", 2, "gpu", 1)
	c.release(holders["a0"])
	if c.try(first) != "a" {
		t.Fatal("the pod found no device")
	}
	event := c.release(c.claims[first.UID])
	c.room.Unplaced(first.UID)
	event()
	c.wakes("its own devices")
	if c.room.IsWaiting(first.UID) {
		t.Error("the pod still waits")
	}
}

func TestNumbersOfNodesThatAreGoneAreUsedAgain(t *testing.T) {
	c, _ := full(t, Options{})
	c.sleepers(1)
	for i := range 10 * minNodeNames {
		c.room.NodeChanged("p0", fmt.Sprintf("gone-%d", i))
		if i%100 == 0 {
			c.pass()
		}
	}
	c.pass()
	if n := len(c.room.nodes.names); n > 2*minNodeNames {
		t.Errorf("%d names of nodes are kept for two nodes", n)
	}
	c.setSlice(slice("b", 2, 0), slice("b", 3, 0))()
	c.wakes("after renumbering", "p0")
}

// Each of the pods that wait for the device is told of it in turn, though only the first one's refusal was seen by the second one.
func TestTheDeviceIsOfferedToOneAfterTheOther(t *testing.T) {
	c, holders := full(t, Options{})
	pods := c.sleepers(4)
	c.release(holders["a0"])()
	for i, pod := range pods {
		c.wakes("in turn", fmt.Sprintf("p%d", i))
		c.try(pod, "a")
	}
	c.wakes("all have been asked")
	if diff := cmp.Diff(map[string]int{"device false": 1, "next false": 3}, c.outcomes); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s", diff)
	}
}

// A pod whose next attempt began while it was being looked at sees everything itself.
func TestAnAttemptThatBeginsMeanwhileNeedsNoWakeUp(t *testing.T) {
	c, holders := full(t, Options{})
	pod := c.sleepers(1)[0]
	c.release(holders["a0"])()
	world := c.world()
	world.Suitable = func(*v1.Pod, any) func(*v1.Node) bool {
		c.begin(pod)
		return func(*v1.Node) bool { return true }
	}
	if wakes, _ := passOf(t.Context(), c.room, world); len(wakes) > 0 {
		t.Errorf("%s was woken while it is tried", wakes[0].Pod.Name)
	}
	c.wakes("nothing is left to do")
}

// An attempt may end before the plugin is asked at all.
func TestAWokenPodMayBeRefusedBeforeItLooks(t *testing.T) {
	c, holders := full(t, Options{})
	pods := c.sleepers(2)
	running := c.begin(pods[0])
	c.release(holders["a0"])()
	c.wakes("in the middle of the attempt", "p0")
	running.end(nil)
	c.room.NotRefused(pods[0].UID, c.now)
	c.wakes("the next", "p1")
}

// A pod whose allocation is on another node is woken for a node that would do if it gave that up.
func TestPodThatMayGiveUpItsAllocation(t *testing.T) {
	tests := map[string]struct {
		movable   bool
		elsewhere int64 // devices, 0 if that is not known
		free      []string
		requests  bool // it has claims without an allocation, too
		want      []string
	}{
		"a node that would do":                           {true, 1, []string{"b0"}, true, []string{"p"}},
		"a node that would do, and nothing else to find": {true, 1, []string{"b0"}, false, []string{"p"}},
		"a node with too few":                            {true, 2, []string{"b0"}, true, nil},
		"a node with too few, and nothing else to find":  {true, 2, []string{"b0"}, false, nil},
		"a node with enough":                             {true, 2, []string{"b0", "b1"}, true, []string{"p"}},
		"it is not known what it would need":             {true, 0, []string{"b0"}, true, []string{"p"}},
		"others use it, too":                             {false, 0, []string{"b0"}, true, nil},
		"others use it, too, and nothing else to find":   {false, 0, []string{"b0"}, false, nil},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			c, holders := full(t, Options{})
			p := c.addPod("p", 1, "gpu", 1)
			other := c.addPod("other", 0, "gpu", max(tc.elsewhere, 1))
			q := c.look(p, c.store.View())
			q.OnNode = func(n *v1.Node) bool { return n.Name == "a" }
			q.Movable = tc.movable
			if tc.elsewhere > 0 {
				q.Elsewhere = c.look(other, c.store.View()).Requests
			}
			if !tc.requests {
				q.Requests = nil
			}
			c.room.Note(p, nil, nil)
			c.room.Judged(p.UID, q, Seen{Usage: c.revision, Inventory: c.store.View().Generation()})
			c.room.Refused(p.UID, Refusal{Nodes: slices.Values([]string{"a", "b"})}, c.now)
			c.wakes("before anything has changed")
			for _, device := range tc.free {
				c.release(holders[device])()
			}
			c.wakes("what it waits for", tc.want...)
		})
	}
}

// A pod that was woken while it was tried is going to be tried again, even if that attempt ends without an answer. If that takes long, no
// pass is due in between: one that is due at a time in the past would be made again and again.
func TestNoPassIsDueBeforeAWokenPodIsTried(t *testing.T) {
	c, holders := full(t, Options{RetryAfter: time.Second})
	pod := c.sleepers(1)[0]
	c.begin(pod)
	c.release(holders["a0"])()
	c.wakes("in the middle of the attempt", "p0")
	c.room.Refused(pod.UID, Refusal{Nodes: slices.Values([]string{"a", "b"}), Undecided: true}, c.now)
	c.wakes("it is going to be tried")
	c.now = c.now.Add(2 * time.Second)
	c.wakes("it is going to be tried still")
}

// Who tells the room something, such as the scheduling loop, does not wait until all nodes have been listed and compared with all pools.
// A class that changes while the room works out which nodes its news touch is looked at as it is then, in this pass or the next one.

// A GPU whose shares are one namespace's is free for others when the last of its shares goes, and for its own namespace before. What one
// namespace is refused another one may have.
func TestAGPUOfAnotherNamespaceWakesWithItsLastShare(t *testing.T) {
	c := newCluster(t, Options{})
	c.setClass(class("own", `device.driver == "gpu.nvidia.com"`))
	c.addNode("a")
	s := slice("a", 1, 0)
	s.Spec.Driver = "gpu.nvidia.com"
	giveOutInShares(&s.Spec.Devices[0], true)
	c.setSlice(nil, s)()
	add := func(name, namespace string, priority int32) *v1.Pod {
		pod := c.addPod(name, priority, "own", 1)
		c.takesShare(pod, namespace)
		return pod
	}
	try := func(pod *v1.Pod, want string) {
		t.Helper()
		if got := c.try(pod); got != want {
			t.Fatalf("pod %s fits %q, want %q", pod.Name, got, want)
		}
	}
	first, second := add("a-1", "team-a", 9), add("a-2", "team-a", 8)
	b, third, others := add("b", "team-b", 7), add("a-3", "team-a", 6), add("c", "team-c", 5)
	try(first, "a")
	try(second, "a")
	for _, pod := range []*v1.Pod{b, third, others} {
		try(pod, "")
	}
	c.pass()

	gone := func(pod *v1.Pod) {
		c.release(c.claims[pod.UID])()
		c.room.Gone(pod.UID, true)
	}
	gone(first)
	c.wakes("one of two shares goes", "a-3") // b is asked first, and wants the same
	try(third, "a")
	gone(second)
	c.wakes("two of three have gone")
	gone(third)
	c.wakes("the last share goes", "b") // which then has it, and c must not
	try(b, "a")
	c.wakes("it is another namespace's")
	gone(b)
	c.wakes("and that goes", "c")
}
