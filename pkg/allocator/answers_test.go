// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/allocator/internal/search"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// copies adds nodes that have what the first one has, until there are n. Devices of each have an address of their own.
func (w *world) copies(n int) *world {
	first := w.slices
	for i := 1; i < n; i++ {
		name := fmt.Sprintf("copy-%d", i)
		w.nodes = append(w.nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		for _, slice := range first {
			slice = slice.DeepCopy()
			slice.Name, slice.Spec.Pool.Name, slice.Spec.NodeName = name+"-"+slice.Name, name+"-"+slice.Spec.Pool.Name, &name
			for j := range slice.Spec.Devices {
				device := &slice.Spec.Devices[j]
				device.Name = fmt.Sprintf("%s-of-%s", device.Name, name)
				device.Attributes["uuid"] = resourceapi.DeviceAttribute{StringValue: ptr.To(fmt.Sprintf("%s-%d", name, j))}
			}
			w.slices = append(w.slices, slice)
		}
	}
	return w
}

// looks counts how often searches look whether their time is over: once at the start, then at every 16th step.
type looks struct {
	context.Context
	mu sync.Mutex
	n  int
}

func (l *looks) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n++
	return nil
}

// searches is how many answers were searched for that others may share.
func (r *Requests) searches() int { return r.answers.Len() }

// TestNodesThatAreAlikeAreSearchedOnce judges nodes that have the same, by many goroutines: all have one answer, which is
// searched for once, though each node's failure is about its own pool.
func TestNodesThatAreAlikeAreSearchedOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		world *world
		nodes int
		fits  bool
	}{
		"a choice of 8 for each of 9 requests": {hardChoice(9), 500, false},
		"partitions":                           {hardMixed(7, 9, 1, 1, 10), 20, true},
		"a way that is found late":             {hardLate(), 20, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := tc.world.copies(tc.nodes)
			_, in := w.compile(t)
			one := &looks{Context: context.Background()}
			in.Node = w.nodes[0]
			alone := Check(one, in)

			_, in = w.compile(t) // requests for which nothing is known
			all := &looks{Context: context.Background()}
			var group sync.WaitGroup
			for start := range 16 {
				group.Go(func() {
					for i := start; i < len(w.nodes); i += 16 {
						in := in
						in.Node = w.nodes[i]
						result := Check(all, in)
						if result.Fits() != tc.fits || result.Score != alone.Score {
							t.Errorf("%s: fits %v, score %d; want %v and %d", in.Node.Name, result.Fits(), result.Score, tc.fits, alone.Score)
							return
						}
						if tc.fits {
							continue
						}
						if pool := result.Failure.Requests[0].Pool; pool != in.Inventory.ForNode(in.Node).Pools[0] {
							t.Errorf("%s: the failure is about pool %s", in.Node.Name, pool.ID())
						}
					}
				})
			}
			group.Wait()
			if n := in.Requests.searches(); n != 1 {
				t.Errorf("%d searches", n)
			}
			// The greedy attempt is made on each node.
			if all.n > one.n*len(w.nodes)*3/4 {
				t.Errorf("searches looked at the time %d times for %d nodes, %d times for one", all.n, len(w.nodes), one.n)
			}
		})
	}
}

// TestNodesThatDifferAreSearchedEach changes one thing on the second of two nodes: each has its own answer. What requests
// do not look at may differ.
func TestNodesThatDifferAreSearchedEach(t *testing.T) {
	second := func(w *world) []resourceapi.Device { return w.slices[1].Spec.Devices }
	partitions := func() *world { return hardMixed(7, 9, 1, 1, 10) }
	choice := func() *world { return hardChoice(9) }
	for name, tc := range map[string]struct {
		world  func() *world
		change func(w *world)
		want   int
	}{
		"nothing": {choice, func(*world) {}, 1},
		"an attribute that nobody asks for": {choice, func(w *world) {
			second(w)[0].Attributes["other"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}
		}, 1},
		"one held device": {choice, func(w *world) { w.hold("copy-1-n1/device-3-of-copy-1") }, 2},
		"the same held device": {choice, func(w *world) {
			w.hold("n1/device-3", "copy-1-n1/device-3-of-copy-1")
		}, 1},
		"one attribute that selectors see": {choice, func(w *world) {
			second(w)[0].Attributes["kind"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(1))}
		}, 2},
		"one attribute that a constraint sees": {hardTwins, func(w *world) {
			second(w)[0].Attributes["rack"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(47))}
		}, 2},
		"other values of an attribute that a constraint sees": {hardTwins, func(w *world) {
			for i, device := range second(w) {
				device.Attributes["rack"] = resourceapi.DeviceAttribute{StringValue: ptr.To(fmt.Sprint("rack-", *w.slices[0].Spec.Devices[i].Attributes["rack"].IntValue))}
			}
		}, 1},
		"a taint": {choice, func(w *world) {
			second(w)[0].Taints = []resourceapi.DeviceTaint{{Key: "lost", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		}, 2},
		"one partition's use of a counter": {partitions, func(w *world) {
			for name := range w.slices[2].Spec.Devices[0].ConsumesCounters[0].Counters {
				w.slices[2].Spec.Devices[0].ConsumesCounters[0].Counters[name] = resourceapi.Counter{Value: resource.MustParse("500m")}
			}
		}, 2},
		"a held partition": {partitions, func(w *world) { w.hold("copy-1-n1/" + w.slices[2].Spec.Devices[0].Name) }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			w := tc.world().copies(2)
			tc.change(w)
			_, in := w.compile(t)
			for _, node := range w.nodes {
				in.Node = node
				if failure := Check(context.Background(), in).Failure; failure != nil && failure.Reason == explain.ReasonPool {
					t.Fatal(failure)
				}
			}
			if n := in.Requests.searches(); n != tc.want {
				t.Errorf("%d searches, want %d", n, tc.want)
			}
		})
	}
}

// looksLeft is an attempt in which searches may look so many times whether their time is over.
type looksLeft struct{ each, looked int }

func (a *looksLeft) Begin() int64 { return int64(a.looked + a.each) }

func (*looksLeft) End() {}

func (a *looksLeft) IsOver(end int64) bool {
	a.looked++
	return int64(a.looked) >= end
}

// TestWhatTimeDidNotSufficeForIsSharedWithinAnAttempt lets the time for a node end in the search.
func TestWhatTimeDidNotSufficeForIsSharedWithinAnAttempt(t *testing.T) {
	w := hardChoice(9).copies(3)
	_, in := w.compile(t)
	check := func(node int, attempt *looksLeft) (looked int, failure *Failure) {
		before := attempt.looked
		in.Node, in.Attempt = w.nodes[node], attempt
		failure = Check(context.Background(), in).Failure
		return attempt.looked - before, failure
	}
	attempt := &looksLeft{each: 10}
	looked, failure := check(0, attempt)
	if looked != 10 || failure.Reason != explain.ReasonUndecided || !errors.Is(failure.Err, context.DeadlineExceeded) {
		t.Fatalf("%d looks at the time, %v", looked, failure)
	}
	// The greedy attempt is made on each node.
	if looked, failure := check(1, attempt); looked > 3 || failure.Reason != explain.ReasonUndecided {
		t.Errorf("a node like it: %d looks at the time, %v", looked, failure)
	}
	if looked, failure := check(2, &looksLeft{each: 10_000}); looked < 20 || failure.Reason == explain.ReasonUndecided {
		t.Errorf("in an attempt with more time: %d looks at the time, %v", looked, failure)
	}
	if looked, failure := check(1, attempt); looked > 3 || failure.Reason != explain.ReasonUndecided {
		t.Errorf("again in the first attempt: %d looks at the time, %v", looked, failure)
	}
}

func (*looksLeft) Evaluate(ctx context.Context) (context.Context, context.CancelFunc) {
	return ctx, func() {}
}

// halted is an attempt whose search stands still, some time after the greedy attempt, until goAhead is closed.
type halted struct {
	looked          int
	stands, goAhead chan struct{}
}

func (h *halted) Begin() int64 { return 0 }

func (*halted) End() {}

func (h *halted) IsOver(int64) bool {
	if h.looked++; h.looked == 6 {
		close(h.stands)
		<-h.goAhead
	}
	return false
}

func (*halted) Evaluate(ctx context.Context) (context.Context, context.CancelFunc) {
	return ctx, func() {}
}

// TestNobodyWaitsForTheSearchOfAnotherAttempt: who judges a node beside the attempt, such as to find out who is to be woken, has less
// time than that has, and need not even be told when it is over (Done), because searches ask.
func TestNobodyWaitsForTheSearchOfAnotherAttempt(t *testing.T) {
	w := hardChoice(9).copies(2)
	_, in := w.compile(t)
	attempt := &halted{stands: make(chan struct{}), goAhead: make(chan struct{})}
	first := in
	first.Node, first.Attempt = w.nodes[0], attempt
	var group sync.WaitGroup
	group.Go(func() { Check(context.Background(), first) })
	<-attempt.stands
	in.Node = w.nodes[1]
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second) // to end if it hangs
	defer cancel()
	if failure := Check(ctx, in).Failure; failure == nil || failure.Reason != explain.ReasonConstraints {
		t.Errorf("%v, want %q", failure, explain.ReasonConstraints)
	}
	close(attempt.goAhead)
	group.Wait()
}

// TestSharedAnswersAreThoseOfEachNode draws worlds, and changes of them, and compares the answer that nodes share with what
// a search of each by itself finds.
func TestSharedAnswersAreThoseOfEachNode(t *testing.T) {
	for name, draw := range map[string]func(*rapid.T) *world{
		"any devices": drawWorld, "scarce devices": drawTightWorld, "admin access": drawAdminWorld, "devices that share": drawSharingWorld,
	} {
		t.Run(name, func(t *testing.T) {
			shared, searched := 0, 0
			rapid.Check(t, func(t *rapid.T) {
				w := draw(t)
				store := w.store()
				requests, err := Compile(w.claims, store.View(), DefaultFeatures())
				if err != nil {
					return
				}
				policy := rapid.SampledFrom([]Policy{FirstFit, SmallestFit}).Draw(t, "policy")
				for range 6 {
					for _, node := range w.nodes {
						before := requests.searches()
						in := Input{Requests: requests, Node: node, Inventory: store.View(), Usage: w.usage(), Policy: policy, Scoring: MostAllocated, variant: search.Variant{ShareAll: true, Hurried: true}}
						got, want := Check(context.Background(), in), Allocate(context.Background(), in)
						want.Allocations = nil
						if diff := cmp.Diff(want, got, samePool, sameText); diff != "" {
							t.Fatalf("alone and shared (-alone +shared):\n%s\n%s", diff, w.dump(node))
						}
						if made := requests.searches() - before; made > 0 {
							searched++
						} else if got.Fits() {
							shared++
						}
					}
					w.change(t, store)
				}
			})
			t.Logf("%d searched, %d shared with another node", searched, shared)
			if (searched == 0 || shared == 0) && !testing.Short() {
				t.Error("there is nothing to compare")
			}
		})
	}
}

var (
	samePool = cmp.Comparer(func(a, b *inventory.NodePool) bool { return a == b })
	sameText = cmp.Comparer(func(a, b error) bool { return fmt.Sprint(a) == fmt.Sprint(b) })
)

// change changes one thing about one device: who holds it, or what it is like.
func (w *world) change(t *rapid.T, store *inventory.Store) {
	var of []int
	for i, slice := range w.slices {
		if len(slice.Spec.Devices) > 0 {
			of = append(of, i)
		}
	}
	if len(of) == 0 {
		return
	}
	at := rapid.SampledFrom(of).Draw(t, "slice to change")
	slice := w.slices[at].DeepCopy()
	w.slices[at] = slice
	device := &slice.Spec.Devices[rapid.IntRange(0, len(slice.Spec.Devices)-1).Draw(t, "device to change")]
	amounts := rapid.SampledFrom([]string{"1", "2", "3", "4", "500m", "40Gi"})
	switch rapid.IntRange(0, 6).Draw(t, "change") {
	case 0:
		id := usage.DeviceID{Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name, Device: device.Name}
		if i := slices.Index(w.held, id); i >= 0 {
			w.held = slices.Delete(slices.Clone(w.held), i, i+1)
		} else {
			w.held = append(slices.Clone(w.held), id)
		}
	case 1:
		if len(w.shares) > 0 {
			i := rapid.IntRange(0, len(w.shares)-1).Draw(t, "share")
			w.shares = slices.Delete(slices.Clone(w.shares), i, i+1)
		}
	case 2:
		for name := range device.Capacity {
			capacity := device.Capacity[name]
			capacity.Value = resource.MustParse(amounts.Draw(t, "capacity"))
			device.Capacity[name] = capacity
		}
	case 3:
		for i := range device.ConsumesCounters {
			for name := range device.ConsumesCounters[i].Counters {
				device.ConsumesCounters[i].Counters[name] = resourceapi.Counter{Value: resource.MustParse(amounts.Draw(t, "use"))}
			}
		}
	case 4:
		name := rapid.SampledFrom([]resourceapi.QualifiedName{"example.com/numa", "example.com/gpu"}).Draw(t, "attribute")
		device.Attributes[name] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(rapid.IntRange(0, 2).Draw(t, "value")))}
	case 5:
		device.Attributes["example.com/link"] = resourceapi.DeviceAttribute{StringValue: ptr.To(rapid.SampledFrom([]string{"a", "b"}).Draw(t, "link"))}
	case 6:
		device.Name += "-renamed"
	}
	store.SetSlice(slice)
}
