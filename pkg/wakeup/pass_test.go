// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
)

func TestAPodThatKeepsLosingItsNodeIsTriedLessOften(t *testing.T) {
	c, _ := full(t, Options{RetryAfter: 32 * time.Second})
	pods := c.sleepers(2)
	fail := func(pod *v1.Pod) {
		c.begin(pod)
		c.room.Failed(pod.UID, c.now)
	}
	for round := range 2 {
		fail(pods[0])
		c.wakes(fmt.Sprintf("round %d: after the first failure", round), "p0")
		for _, after := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024} {
			fail(pods[0])
			c.now = c.now.Add(after*time.Second - 1)
			c.wakes(fmt.Sprintf("round %d: less than %d s after the next one", round, after))
			c.now = c.now.Add(1)
			c.wakes(fmt.Sprintf("round %d: %d s after the next one", round, after), "p0")
		}
		fail(pods[1])
		c.wakes("another pod's first failure", "p1")
		for _, pod := range pods { // an answer, which makes the failures to come the first ones
			c.try(pod)
		}
		c.wakes("refused")
	}
}

// A pod that loses its node once has done nothing to wait for, however often it had no answer before; and the other way round.
func TestLostNodesAndMissingAnswersAreCountedApart(t *testing.T) {
	c, _ := full(t, Options{RetryAfter: 32 * time.Second})
	pod := c.sleepers(1)[0]
	undecided := func() {
		c.begin(pod)
		c.room.Refused(pod.UID, Refusal{Undecided: true}, c.now)
	}
	lost := func() {
		c.begin(pod)
		c.room.Failed(pod.UID, c.now)
	}
	for range 8 {
		undecided()
		c.now = c.now.Add(time.Hour)
		c.wakes("no answer", "p0")
	}
	lost()
	c.wakes("the first node that it lost", "p0")
	for range 8 {
		lost()
		c.now = c.now.Add(time.Hour)
		c.wakes("another one", "p0")
	}
	undecided()
	c.now = c.now.Add(32*time.Second - 1)
	c.wakes("too early")
	c.now = c.now.Add(1)
	c.wakes("in time", "p0")
}

func TestTimeThatPassesIsAChange(t *testing.T) {
	c := newCluster(t, Options{})
	c.addNode("a")
	start := c.now
	c.deadline = start.Add(time.Minute)
	pods := []*v1.Pod{c.addPod("p0", 2, "gpu", 1), c.addPod("p1", 1, "gpu", 1)}
	for _, pod := range pods {
		c.begin(pod)
		c.room.NotRefused(pod.UID, c.now)
	}
	_, due := passOf(t.Context(), c.room, c.world())
	if !due.Equal(c.deadline) {
		t.Errorf("the next pass is due %v after the start, want a minute", due.Sub(start))
	}
	c.now = c.deadline.Add(-1)
	c.wakes("too early")
	c.room.ClaimChanged(claimNamesOf(pods[1])[0])
	c.wakes("too early, and of no matter")
	c.now = c.deadline
	c.wakes("at the deadline", "p0", "p1")
	for _, pod := range pods {
		c.begin(pod)
		c.room.NotRefused(pod.UID, c.now)
	}
	c.now = c.now.Add(time.Hour)
	c.wakes("that has been looked at")
}

// Which nodes see a shared pool takes long to tell, for many pools on many nodes. Nobody who tells the room something waits for that: nodes are
// listed once for all pools, and compared, with the mutex free.
func TestTheWorldIsAskedWhileTheRoomIsOpen(t *testing.T) {
	shared := func(i int) *resourceapi.ResourceSlice {
		s := slice(fmt.Sprint("shared-", i), 1, 0)
		s.Spec.NodeName, s.Spec.AllNodes = nil, ptr.To(true)
		return s
	}
	for name, changes := range map[string]func(c *cluster) (tell []func()){
		"pools come": func(c *cluster) (tell []func()) {
			for i := range 3 {
				tell = append(tell, func() { c.setSlice(nil, shared(i))() })
			}
			return tell
		},
		"devices of pools are freed": func(c *cluster) (tell []func()) {
			for i := range 3 {
				c.setSlice(nil, shared(i))
				held := c.holdOn(fmt.Sprint("shared-", i), "0")
				tell = append(tell, func() { c.release(held)() })
			}
			return tell
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := full(t, Options{})
			tell := changes(c)
			c.sleepers(4)
			world := c.world()
			asked := 0
			world.Nodes = func() []*v1.Node {
				asked++
				if !c.room.mutex.TryLock() {
					t.Error("nodes are listed with the mutex held")
				} else {
					c.room.mutex.Unlock()
				}
				return c.nodes
			}
			for _, change := range tell {
				change()
			}
			var woken []string
			wakes, _ := passOf(t.Context(), c.room, world)
			for _, wake := range wakes {
				woken = append(woken, wake.Pod.Name)
			}
			if diff := cmp.Diff([]string{"p0", "p1", "p2"}, woken); diff != "" || asked != 1 {
				t.Errorf("nodes were listed %d times, want once; woken pods (-want +got):\n%s", asked, diff)
			}
		})
	}
}

func TestAChangeWhileNodesAreComparedIsNotLost(t *testing.T) {
	c, _ := full(t, Options{})
	pod := c.addPod("late", 0, "late", 1)
	c.try(pod)
	c.wakes("there is no class")
	world := c.world()
	world.Nodes = func() []*v1.Node {
		c.setClass(class("late", "true"))()
		return c.nodes
	}
	network := slice("network", 1, 0)
	network.Spec.NodeName, network.Spec.AllNodes = nil, ptr.To(true)
	c.setSlice(nil, network)()
	wakes, _ := passOf(t.Context(), c.room, world)
	if len(wakes) == 0 {
		c.wakes("in the next pass", "late")
	}
}

// undecidedly lets the check of every pod take so long that there is no answer, and returns how often it is asked.
func (c *cluster) undecidedly(world *World[any, int32], takes time.Duration) (asked *int) {
	asked = new(int)
	suitable := world.Suitable
	world.Suitable = func(pod *v1.Pod, tag any) func(*v1.Node) bool {
		fits := suitable(pod, tag)
		return func(node *v1.Node) bool {
			*asked++
			c.now = c.now.Add(takes)
			return fits(node)
		}
	}
	return asked
}

// TestAPodWithoutAnAnswerIsTriedByTime frees devices for two pods about which there is no answer: one whose last attempt had none either,
// and one that was refused.
func TestAPodWithoutAnAnswerIsTriedByTime(t *testing.T) {
	c, holders := full(t, Options{RetryAfter: time.Minute, Budget: time.Second})
	pods := c.sleepers(2)
	undecided := func(until time.Time) {
		c.begin(pods[0])
		c.room.Refused(pods[0].UID, Refusal{Nodes: c.allNodes, Undecided: true, NotBefore: until}, c.now)
	}
	undecided(c.now.Add(time.Second)) // sooner than it is tried anyway
	end := c.now.Add(time.Minute)
	for i, holder := range []string{"a0", "b0"} {
		c.release(holders[holder])()
		world := c.world()
		asked := c.undecidedly(&world, 2*time.Second)
		var woken []string
		wakes, _ := passOf(t.Context(), c.room, world)
		for _, wake := range wakes {
			woken = append(woken, wake.Pod.Name)
		}
		want := []string{"p1"}
		if i > 0 {
			want = nil // it has not been tried since
		}
		if diff := cmp.Diff(want, woken); diff != "" || *asked == 0 {
			t.Errorf("asked %d times; woken (-want +got):\n%s", *asked, diff)
		}
	}
	c.now = end
	c.wakes("in time", "p1", "p0") // p1 once more: it has not been tried for long
	undecided(c.now.Add(time.Hour))
	c.try(pods[1])
	c.now = c.now.Add(time.Hour - 1)
	c.wakes("it is put off")
	c.now = c.now.Add(1)
	c.wakes("after that", "p0")
	c.try(pods[0])
	c.now = c.now.Add(time.Hour)
	c.wakes("it has an answer by now")
}

// A pod whose last attempt had an answer is woken by what cannot be decided, also if it is going to be tried again by time; and is looked at for as
// long as any other.
func TestAPodWithAnAnswerThatIsTriedAgainIsWokenByAnyChange(t *testing.T) {
	for name, tc := range map[string]struct {
		refusal Refusal
		want    []string
	}{
		"no answer":        {refusal: Refusal{Undecided: true}},
		"an answer":        {Refusal{Again: true}, []string{"p0"}},
		"no answer before": {Refusal{}, []string{"p0"}},
	} {
		t.Run(name, func(t *testing.T) {
			c, holders := full(t, Options{RetryAfter: time.Minute, Budget: time.Second})
			pod := c.sleepers(1)[0]
			for _, refusal := range []Refusal{{Undecided: true}, tc.refusal} {
				refusal.Nodes = c.allNodes
				c.begin(pod)
				c.room.Refused(pod.UID, refusal, c.now)
			}
			c.release(holders["a0"])()
			world := c.world()
			asked := c.undecidedly(&world, 2*time.Second)
			var woken []string
			wakes, _ := passOf(t.Context(), c.room, world)
			for _, wake := range wakes {
				woken = append(woken, wake.Pod.Name)
			}
			if diff := cmp.Diff(tc.want, woken); diff != "" || *asked == 0 {
				t.Errorf("asked %d times; woken (-want +got):\n%s", *asked, diff)
			}
		})
	}
}

// A pod that only pauses is tried when that is over. It has not been looked at, so that counts for nothing.
func TestAPauseIsNoAttemptWithoutAnAnswer(t *testing.T) {
	c, _ := full(t, Options{RetryAfter: time.Second})
	pod := c.sleepers(1)[0]
	for _, again := range []time.Duration{1, 2, 4} {
		for range 3 {
			c.begin(pod)
			c.room.Refused(pod.UID, Refusal{NotBefore: c.now.Add(time.Millisecond)}, c.now)
			c.wakes("it pauses")
			c.now = c.now.Add(time.Millisecond)
			c.wakes("the pause is over", "p0")
		}
		c.begin(pod)
		c.room.Refused(pod.UID, Refusal{Again: true}, c.now)
		c.now = c.now.Add(again*time.Second - 1)
		c.wakes("too early")
		c.now = c.now.Add(1)
		c.wakes("in time", "p0")
	}
}

// TestPodsOfOneNamespaceDoNotKeepOthersFromBeingWoken has ten pods of one namespace for which nothing can be decided, before one of another
// namespace, which is woken as soon as it is looked at.
func TestPodsOfOneNamespaceDoNotKeepOthersFromBeingWoken(t *testing.T) {
	c, holders := full(t, Options{Budget: time.Second})
	pods := c.sleepers(11)
	pods[10].Namespace = "another"
	for _, holder := range holders {
		c.release(holder)()
	}
	world := c.world()
	slow := c.undecidedly(&world, 2*time.Second)
	began := c.now
	var woken []string
	c.room.Pass(t.Context(), world, func(wake Wake[any]) {
		woken = append(woken, wake.Pod.Name)
		if wake.Pod.Name == "p0" && *slow > 1 {
			t.Errorf("the first pod is woken after %d questions", *slow)
		}
	})
	if len(woken) != 11 || *slow != 3 || c.now.Sub(began) > 3*2*time.Second {
		t.Errorf("%v are woken after %v and %d questions, want all 11 after 3: two of the first namespace, one of the other", woken, c.now.Sub(began), *slow)
	}
}

// Four pods without an answer in their last attempt take all the time that they get. Twenty others fit nowhere.
func TestPodsWithoutAnAnswerDoNotHaveOthersWokenForNothing(t *testing.T) {
	for name, hardOnes := range map[string]int{"none hard": 0, "four hard": 4} {
		t.Run(name, func(t *testing.T) {
			c, _ := full(t, Options{RetryAfter: 24 * time.Hour, Budget: 50 * time.Millisecond})
			pods := c.sleepers(4)
			hard := map[string]bool{}
			for _, pod := range pods[:hardOnes] {
				hard[pod.Name] = true
				c.begin(pod)
				c.room.Refused(pod.UID, Refusal{Nodes: c.allNodes, Undecided: true}, c.now)
			}
			for i := range 20 {
				pod := c.addPod(fmt.Sprintf("easy%d", i), int32(100-i), "gpu", int64(100+i)) // fits nowhere
				c.try(pod)
			}
			c.pass()
			total := 0
			for round := range 5 {
				old := slice("a", 2, 0)
				changed := slice("a", 2, 1+round%2)
				c.setSlice(old, changed)()
				world := c.world()
				suitable := world.Suitable
				world.Suitable = func(pod *v1.Pod, tag any) func(*v1.Node) bool {
					fits := suitable(pod, tag)
					return func(node *v1.Node) bool {
						if hard[pod.Name] {
							c.now = c.now.Add(51 * time.Millisecond)
						}
						return fits(node)
					}
				}
				wakes, _ := passOf(t.Context(), c.room, world)
				total += len(wakes)
				for _, w := range wakes {
					c.try(w.Pod)
				}
			}
			if total > 0 {
				t.Errorf("%d wake-ups in 5 changes", total)
			}
		})
	}
}

// TestAnAttemptThatHasEndedIsNotEndedAgain lets PostFilter say that the claims had nothing to do with it, when PreFilter has said that the
// time was not enough.
func TestAnAttemptThatHasEndedIsNotEndedAgain(t *testing.T) {
	c, _ := full(t, Options{RetryAfter: time.Minute})
	for _, pod := range c.sleepers(2) {
		c.begin(pod)
		c.room.Refused(pod.UID, Refusal{Undecided: true}, c.now)
		c.room.NotRefused(pod.UID, c.now)
	}
	c.now = c.now.Add(time.Minute)
	c.wakes("in time", "p0", "p1")
}

// TestClaimsThatAreNotCompiledInTimeWakeThePod changes the claims of two pods, one of which has had no answer in its last attempt.
func TestClaimsThatAreNotCompiledInTimeWakeThePod(t *testing.T) {
	c, _ := full(t, Options{RetryAfter: time.Minute})
	pods := c.sleepers(2)
	c.begin(pods[0])
	c.room.Refused(pods[0].UID, Refusal{Undecided: true}, c.now)
	for _, pod := range pods {
		c.room.ClaimChanged(claimNamesOf(pod)[0])
	}
	world := c.world()
	world.Look = func(*v1.Pod, any, *inventory.View) *Question {
		return &Question{Err: errors.New("no time"), Undecided: true}
	}
	wakes, _ := passOf(t.Context(), c.room, world)
	if len(wakes) != 1 || wakes[0].Pod.Name != "p1" || wakes[0].Cause != CauseRetry {
		t.Errorf("woken: %v, want p1 to be tried", wakes)
	}
}
