// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/searchtime"
	"stowage.dev/stowage/pkg/wakeup"
)

func preempted(pod *v1.Pod, reason string) *v1.Pod {
	pod.Status.Conditions = append(pod.Status.Conditions, v1.PodCondition{Type: v1.DisruptionTarget, Status: v1.ConditionTrue, Reason: reason})
	return pod
}

// The pods with devices that are nominated to a node are woken when one is gone that was evicted from it, and for no
// other pod that goes.
func TestNominatedPodsAreWokenWhenAVictimIsGone(t *testing.T) {
	const low, high = 10, 100
	wants, other, plain := pending("wants", high, "wanted"), pending("other", high, "another"), pending("plain", high)
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("another")}
	w.pods = []*v1.Pod{
		wants, other, plain,
		running("ended", "node-a", low),
		preempted(running("evicted-by-another", "node-a", low), v1.PodReasonTerminationByKubelet),
		preempted(running("elsewhere", "node-b", low), v1.PodReasonPreemptionByScheduler),
		preempted(running("victim", "node-a", low), v1.PodReasonPreemptionByScheduler),
	}
	h := newHarness(t, w)
	remove := func(name string) {
		if err := h.client.CoreV1().Pods(testNamespace).Delete(h.ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		h.eventually("the deletion of "+name+" is known", func() bool { return h.plugin.shared.knowsNot(name) })
	}
	h.nominator.nominate("node-a", other)
	for _, name := range []string{"ended", "evicted-by-another", "elsewhere"} {
		remove(name)
	}
	h.nominator.nominate("node-a", wants, plain)
	remove("victim") // informers tell of deletions in order
	h.wakes("wants")
}

// A nominated pod is tried again by and by where it may be kept from a node by a pod that is gone, of whose end the scheduler has not
// heard. Its devices are free: something else is missing.
func TestANominatedPodIsTriedAgainBesidePodsThatAreGone(t *testing.T) {
	withGroups(t)
	const low, high = 10, 100
	for name, tc := range map[string]struct {
		there     *v1.Pod
		claims    []*resourceapi.ResourceClaim
		elsewhere bool // nominated to the other node
		assumed   bool // there is being bound
		want      bool
	}{
		"its claim is gone":              {there: running("there", "node-b", low, "its"), want: true},
		"its claim has no user any more": {there: running("there", "node-b", low, "its"), claims: []*resourceapi.ResourceClaim{claim("its")}, want: true},
		"its claim is used by others":    {there: running("there", "node-b", low, "its"), claims: []*resourceapi.ResourceClaim{claim("its", reservedFor("other"))}, want: true},
		"it has its claim":               {there: running("there", "node-b", low, "its"), claims: []*resourceapi.ResourceClaim{claim("its", reservedFor("there"))}},
		"it has one of its claims":       {there: running("there", "node-b", low, "its", "old"), claims: []*resourceapi.ResourceClaim{claim("its", reservedFor("there"))}},
		"its group has its claim":        {there: member(running("there", "node-b", low, "its")), claims: []*resourceapi.ResourceClaim{claim("its", forGroup)}},
		"its group has lost its claim":   {there: member(running("there", "node-b", low, "its")), claims: []*resourceapi.ResourceClaim{claim("its")}, want: true},
		"it never had one":               {there: running("there", "node-b", low)},
		"it is being bound":              {there: running("there", "node-b", low, "its"), claims: []*resourceapi.ResourceClaim{claim("its")}, assumed: true},
		"the pod is to get another node": {there: running("there", "node-b", low, "its"), elsewhere: true},
		"the node has too few devices":   {there: running("there", "node-b", low, "its"), claims: []*resourceapi.ResourceClaim{claim("holder", allocated("node-b", "gpu-0", "gpu-1"))}},
	} {
		t.Run(name, func(t *testing.T) {
			wants := pending("wants", high, "wanted")
			w := twoNodes()
			w.room.RetryAfter = time.Millisecond
			w.claims = append([]*resourceapi.ResourceClaim{claim("wanted")}, tc.claims...)
			w.pods = []*v1.Pod{wants, tc.there}
			binding := pending("there", low, "its")
			if tc.assumed {
				w.pods, w.assumed = []*v1.Pod{wants, binding}, []*v1.Pod{tc.there}
			}
			h := newHarness(t, w)
			if tc.assumed {
				h.filterAll(binding).reserve("node-b")
			}
			node := "node-b"
			if tc.elsewhere {
				node = "node-a"
			}
			h.nominator.nominate(node, wants)
			a := h.filterAll(wants)
			c, err := cycle.Read(a.state)
			if err != nil {
				t.Fatal(err)
			}
			if got := h.plugin.rivals.EvictsWhoIsGone(c.Results.Accepted(), wants); got != tc.want {
				t.Errorf("EvictsWhoIsGone() = %t, want %t", got, tc.want)
			}
			a.postFilter()
			if tc.want {
				h.wakes("wants")
			}
		})
	}
}

// knowsNot tells whether the lister does not have the pod.
func (s *Shared) knowsNot(pod string) bool {
	_, err := s.factory.Core().V1().Pods().Lister().Pods(testNamespace).Get(pod)
	return err != nil
}

// Nor is it put off because its namespace has no time for the search on another node.
func TestANominatedPodBesidePodsThatAreGoneIsNotPutOff(t *testing.T) {
	for name, nominated := range map[string]bool{"nominated to their node": true, "not nominated": false} {
		t.Run(name, func(t *testing.T) {
			wants, there := pending("wants", 100, "wanted"), running("there", "node-a", 10, "gone")
			h := newHarness(t, world{
				nodes:   []*v1.Node{node("node-a"), node("node-b")},
				objects: []runtime.Object{class(testClass), slice("node-a", divisible(30)...), slice("node-b", divisible(10)...)},
				claims:  []*resourceapi.ResourceClaim{claim("wanted", nearlyFull), claim("easy", counted(1))},
				pods:    []*v1.Pod{wants, there},
				room:    wakeup.Options{RetryAfter: time.Millisecond},
			})
			h.plugin.time.FilterTimeout = 10 * searchtime.FreeTime
			h.paceByLooks(pod("easy", "easy"))
			if nominated {
				h.nominator.nominate("node-a", wants)
			}
			a := h.filterAll(wants)
			if diff := cmp.Diff(map[string]string{"node-a": "", "node-b": explain.ReasonUndecided.OfNodes()}, a.filter); diff != "" {
				t.Fatalf("reasons of Filter (-want +got):\n%s", diff)
			}
			h.plugin.time.Shares.Spend(wants, time.Hour) // by others of its namespace
			a.postFilter()
			if nominated {
				h.wakes("wants")
			} else if woken := h.lookedAt(); len(woken) > 0 {
				t.Errorf("%v woken, though there is no time", woken)
			}
		})
	}
}
