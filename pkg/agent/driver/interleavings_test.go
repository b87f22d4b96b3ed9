// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// interleavings is how many histories TestNoGPUIsHandedOutTwice plays; each has its number as seed. CI plays 500, see the Makefile.
var interleavings = flag.Int("interleavings", 20, "how many histories TestNoGPUIsHandedOutTwice plays")

// event is one step of a history: what happens, how long after the event before, and where its choices begin. So an event does what it
// did when others are left out.
type event struct {
	After time.Duration
	What  happening
	Seed  uint64
}

type happening string

// What happens on the node.
const (
	aClaimComes      happening = "a pod with a claim comes"
	aPodComes        happening = "a pod of the device plugin comes"
	aPodEnds         happening = "a pod ends"
	thePluginComes   happening = "the device plugin comes"
	thePluginGoes    happening = "the device plugin goes"
	thePluginCrashes happening = "the device plugin crashes"
	aDeviceChanges   happening = "a device's health changes"
	theKubeletStarts happening = "the kubelet starts anew"
	theKubeletIsDeaf happening = "PodResources is away"
	theAgentStarts   happening = "the agent starts anew"
	theAgentIsKilled happening = "the agent is killed"
	theGPUsAreMoved  happening = "GPUs are moved to another path"
)

// randomHistory is the one of that seed. Of what happens seldom each history has some kinds more often, and some not at all: what has to
// come together is then close together.
func randomHistory(seed uint64) []event {
	r := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // not for secrets
	kinds := []happening{aClaimComes, aPodComes, aPodComes, aPodEnds}
	for _, kind := range []happening{
		thePluginComes, thePluginGoes, thePluginCrashes, aDeviceChanges, theKubeletStarts, theKubeletIsDeaf, theAgentStarts, theAgentIsKilled, theGPUsAreMoved,
	} {
		for range []int{0, 0, 1, 2}[r.IntN(4)] {
			kinds = append(kinds, kind)
		}
	}
	events := make([]event, 15+r.IntN(35))
	for i := range events {
		// Most follow at once, and some when all is quiet again.
		longest := []time.Duration{500 * time.Millisecond, 5 * time.Second, 40 * time.Second, 150 * time.Second}[r.IntN(4)]
		events[i] = event{After: time.Duration(r.Int64N(int64(longest))), What: kinds[r.IntN(len(kinds))], Seed: r.Uint64()}
	}
	return events
}

// literal is the history as it can be pasted.
func literal(seed uint64, events []event) string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d:\n", seed)
	for _, e := range events {
		fmt.Fprintf(&b, "\t{%d, %q, %d}, // after %s\n", e.After, e.What, e.Seed, e.After.Round(time.Millisecond))
	}
	return b.String()
}

// outcome is what a history has shown.
type outcome struct {
	// problem is empty if all was right.
	problem string
	log     []string
	counts
}

// counts say that something was at stake.
type counts struct {
	claims, pods, ours   int // that have got devices; ours of these pods by our own plugin
	both                 int // claims and pods that got theirs beside one of the other kind
	claimsKept, podsKept int // attempts that the scheduler's rule refused
	refused              int // prepares that the agent refused
	restarts             int // of kubelet and agent
	moves, ownRefused    int // of GPUs between paths, and what our own plugin has refused
	unheeded, noticed    int // GPUs that another plugin gave away although they were given, which nobody could know; and that were told
}

func (c *counts) add(d *counts) {
	c.claims, c.pods, c.both = c.claims+d.claims, c.pods+d.pods, c.both+d.both
	c.ours, c.moves, c.ownRefused = c.ours+d.ours, c.moves+d.moves, c.ownRefused+d.ownRefused
	c.unheeded, c.noticed = c.unheeded+d.unheeded, c.noticed+d.noticed
	c.claimsKept, c.podsKept, c.refused, c.restarts = c.claimsKept+d.claimsKept, c.podsKept+d.podsKept, c.refused+d.refused, c.restarts+d.restarts
}

// playTwoPlugins plays the history of that seed in a time of its own.
func playTwoPlugins(t *testing.T, seed uint64, events []event, without walls) (o outcome) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newTwoPlugins(t, seed, without)
		defer w.end()
		for _, e := range events {
			w.runFor(e.After)
			if w.problem == "" {
				w.happen(e)
			}
		}
		w.rest()
		o = outcome{problem: w.problem, log: w.log, counts: w.counts}
	})
	return o
}

// shrunk is a history of fewer events that still goes wrong.
func shrunk(t *testing.T, seed uint64, events []event, without walls) []event {
	t.Helper()
	for size := len(events) / 2; size > 0; size /= 2 {
		for i := 0; i+size <= len(events); {
			if fewer := slices.Delete(slices.Clone(events), i, i+size); playTwoPlugins(t, seed, fewer, without).problem != "" {
				events = fewer
			} else {
				i += size
			}
		}
	}
	return events
}

// TestNoGPUIsHandedOutTwice: NVIDIA's device plugin is on the same node, and gives away GPUs that are in the slices. Neither asks the
// other one, nor does the kubelet. Who came first, what has failed and who has started anew is random. The judge knows only which
// containers run on which GPUs.
func TestNoGPUIsHandedOutTwice(t *testing.T) {
	histories := *interleavings
	if testing.Short() {
		histories = min(histories, 10)
	}
	var (
		all  counts
		mu   sync.Mutex
		next atomic.Uint64
	)
	t.Run("histories", func(t *testing.T) {
		for range 4 {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				for seed := next.Add(1); seed <= uint64(histories); seed = next.Add(1) {
					events := randomHistory(seed)
					o := playTwoPlugins(t, seed, events, walls{})
					mu.Lock()
					all.add(&o.counts)
					mu.Unlock()
					if o.problem != "" {
						events = shrunk(t, seed, events, walls{})
						o = playTwoPlugins(t, seed, events, walls{})
						t.Errorf("%s\n%s\n%s", o.problem, literal(seed, events), strings.Join(o.log, "\n"))
					}
				}
			})
		}
	})
	t.Logf("%d histories: %+v", histories, all)
	// Otherwise nothing was at stake.
	for what, n := range map[string]int{
		"claims with a GPU": all.claims, "pods with a GPU of the plugin": all.pods, "one beside the other": all.both, "restarts": all.restarts,
		"pods with a GPU of our own plugin": all.ours, "moves": all.moves, "containers that our own plugin has refused": all.ownRefused,
		"claims that the scheduler has kept off": all.claimsKept, "pods that it has kept off": all.podsKept, "prepares that the agent has refused": all.refused,
	} {
		if n < max(1, histories/20) {
			t.Errorf("%s: %d in %d histories", what, n, histories)
		}
	}
	// Which is seldom.
	if histories >= 300 && (all.unheeded == 0 || all.noticed == 0) {
		t.Errorf("GPUs given away unheeded: %d in %d histories, and %d of them told of", all.unheeded, histories, all.noticed)
	}
}

// TestAMissingWallIsSeen: without one of them a GPU is handed out twice in the history that showed it when the test was written, or else in one of
// the first 300.
func TestAMissingWallIsSeen(t *testing.T) {
	for name, tc := range map[string]struct {
		without walls
		shownBy uint64 // seed
	}{
		"pods of the device plugin come to claims":                {without: walls{noRuleForPods: true}, shownBy: 8},
		"claims come to pods of the device plugin, by both walls": {without: walls{noRuleForClaims: true, noRefusal: true}, shownBy: 55},
		"what the device plugin offers is taken for a NIC":        {without: walls{otherResource: true}, shownBy: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(301) {
				if seed == 0 {
					seed = tc.shownBy
				}
				if o := playTwoPlugins(t, seed, randomHistory(seed), tc.without); strings.Contains(o.problem, "handed out twice") {
					t.Logf("seen with seed %d", seed)
					return
				}
			}
			t.Error("not seen in 300 histories")
		})
	}
}
