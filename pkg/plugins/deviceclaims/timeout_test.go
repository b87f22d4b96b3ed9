// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/searchtime"
	"stowage.dev/stowage/pkg/twopaths"
	"stowage.dev/stowage/pkg/wakeup"
)

// nearlyFull asks for 30 shares that have more than enough room together on 10 devices of 1,000, and do not go into them: three fit into one
// device, all sizes are one more than a multiple of three, so at least one is left of each, and less than 10 is left in all. No search
// is known that finds that out in time.
func nearlyFull(c *resourceapi.ResourceClaim) {
	c.Spec.Devices.Requests = nil
	for i := range 30 {
		size := int64(334 + 3*(i-15))
		if i == 29 {
			size += 18
		}
		c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: fmt.Sprintf("share-%d", i), Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: testClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
			Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": *resource.NewQuantity(size, resource.DecimalSI)}},
		}})
	}
}

// divisible makes devices of 1,000 that can be shared.
func divisible(n int) []resourceapi.Device {
	var devices []resourceapi.Device
	for i := range n {
		devices = append(devices, device(fmt.Sprintf("gpu-%d", i), func(d *resourceapi.Device) {
			d.AllowMultipleAllocations = ptr.To(true)
			d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("1000")}}
		}))
	}
	return devices
}

// A node on which the search comes to no end is given up when its time is over. The pod goes to another one; if there is none, it is
// tried again without anything having changed.
func TestNodeThatTakesTooLongIsGivenUp(t *testing.T) {
	for name, others := range map[string][]string{"another node fits": {"node-b"}, "that was all": nil} {
		t.Run(name, func(t *testing.T) {
			w := world{
				nodes:   []*v1.Node{node("node-a")},
				objects: []runtime.Object{class(testClass), slice("node-a", divisible(10)...)},
				claims:  []*resourceapi.ResourceClaim{claim("c", nearlyFull)},
				pods:    []*v1.Pod{pod("p", "c")},
				room:    wakeup.Options{RetryAfter: time.Millisecond},
			}
			for _, name := range others {
				w.nodes = append(w.nodes, node(name))
				w.objects = append(w.objects, slice(name, divisible(30)...))
			}
			h := newHarness(t, w)
			h.plugin.time.FilterTimeout = time.Second // of which node-b takes a thousandth
			ctx, cancel := context.WithTimeout(h.ctx, patience)
			defer cancel()
			h.ctx = ctx // so that the test ends, and fails, even so
			a := h.filterAll(w.pods[0])
			if !a.preFilter.IsSuccess() {
				t.Fatal(a.preFilter)
			}
			want := map[string]string{"node-a": explain.ReasonUndecided.OfNodes()}
			for _, name := range others {
				want[name] = ""
			}
			if diff := cmp.Diff(want, a.filter); diff != "" {
				t.Fatalf("reasons of Filter (-want +got):\n%s", diff)
			}
			if len(others) > 0 {
				a.bind(others[0])
				return
			}
			if status := a.postFilter(); status.Code() != fwk.Unschedulable {
				t.Errorf("PostFilter: %v, want the plugins after it to be asked", status)
			}
			h.eventually("the pod is tried again", func() bool { return len(h.activator.taken()) > 0 })
		})
	}
}

// Without the devices that pods may have from a device plugin the search comes to no end: the pod is tried again without anything having changed.
func TestNodeThatTakesTooLongBesideADevicePluginIsGivenUp(t *testing.T) {
	ours, other, either := slice("node-a", divisible(30)...), slice("node-a", divisible(10)...), class(testClass)
	twopaths.Mark(ours.Spec.Devices, 0)
	other.Name, other.Spec.Driver = "other-slice", "gpu.example.org"
	either.Spec.Selectors = nil
	has := extendedPod("old", gpuResource)
	has.Spec.NodeName = "node-a"
	w := world{
		nodes:   []*v1.Node{node("node-a")},
		objects: []runtime.Object{either, ours, other},
		claims:  []*resourceapi.ResourceClaim{claim("c", nearlyFull)},
		pods:    []*v1.Pod{has, pod("p", "c")},
		room:    wakeup.Options{RetryAfter: time.Millisecond},
	}
	w.nodes[0].Status.Allocatable = v1.ResourceList{gpuResource: resource.MustParse("1")}
	h := newHarness(t, w)
	h.plugin.time.FilterTimeout = time.Second
	a := h.filterAll(w.pods[1])
	if got, want := a.filter["node-a"], explain.ReasonUndecided.OfNodes(); got != want {
		t.Fatalf("reason %q, want %q", got, want)
	}
	a.postFilter()
	h.eventually("the pod is tried again", func() bool { return len(h.activator.taken()) > 0 })
}

// What Filter has found may take a search without end in Reserve, where devices are left to pods that are nominated to the node, or others
// have taken some meanwhile. It must not keep the scheduler from all other pods.
func TestReserveIsGivenUpInTime(t *testing.T) {
	one := func(c *resourceapi.ResourceClaim) {
		nearlyFull(c)
		c.Spec.Devices.Requests = c.Spec.Devices.Requests[:1]
	}
	for name, tc := range map[string]struct {
		wants, nominee func(*resourceapi.ResourceClaim)
		devices        int
		fits           bool
	}{
		"the pod's own devices":                          {wants: nearlyFull, nominee: counted(20), devices: 30},
		"those of the nominated pod, which does not fit": {wants: one, nominee: nearlyFull, devices: 10, fits: true},
	} {
		for how, inGroup := range map[string]bool{"alone": false, "in a group": true} {
			t.Run(name+", "+how, func(t *testing.T) {
				nominee := pending("nominee", 5, "kept")
				h := newHarness(t, world{
					pods:    []*v1.Pod{nominee},
					nodes:   []*v1.Node{node("node-a")},
					objects: []runtime.Object{class(testClass), slice("node-a", divisible(tc.devices)...)},
					claims:  []*resourceapi.ResourceClaim{claim("c", tc.wants), claim("kept", tc.nominee)},
				})
				h.nominator.nominate("node-a", nominee)
				h.plugin.time.FilterTimeout = 500 * time.Millisecond
				ctx, cancel := context.WithTimeout(h.ctx, patience)
				defer cancel()
				h.ctx = ctx // so that the test ends, and fails, even so
				state := framework.NewCycleState()
				if inGroup {
					state.SetPodGroupSchedulingCycle(framework.NewCycleState())
				}
				a := h.filterAllIn(state, pending("p", 5, "c"))
				if len(a.fits()) == 0 {
					t.Fatal(a.preFilter, a.filter)
				}
				status := h.plugin.Reserve(h.ctx, a.state, a.pod, "node-a")
				if ctx.Err() != nil {
					t.Fatalf("still searching after %s", patience)
				}
				if status.IsSuccess() != tc.fits || !tc.fits && status.Message() != string(explain.ReasonUndecided) {
					t.Errorf("Reserve: %v", status)
				}
			})
		}
	}
}

// paceByLooks lets the time of searches pass by looks at the clock, of which twenty take [searchtime.FreeTime], so that it does not depend on the machine. The
// selectors of the classes are compiled before, for a pod that asks for little. Time that has passed beside may be added.
func (h *harness) paceByLooks(easy *v1.Pod) (passed *atomic.Int64) {
	h.t.Helper()
	passed = new(atomic.Int64)
	start := time.Now()
	h.plugin.time.Shares = searchtime.NewShares(func() time.Time { return start.Add(time.Duration(passed.Add(int64(searchtime.FreeTime / 20)))) }, demand.EvaluationTime)
	if a := h.filterAll(easy); !a.preFilter.IsSuccess() {
		h.t.Fatal(a.preFilter)
	}
	return passed
}

// saves has the pod's namespace have saved so much.
func (h *harness) saves(pod *v1.Pod, saved time.Duration) {
	shares := h.plugin.time.Shares
	shares.Spend(pod, shares.Saved(pod)-saved)
}

// manySelectors takes some hundred milliseconds to compile.
func manySelectors(c *resourceapi.ResourceClaim) {
	for i := range resourceapi.DeviceSelectorsMaxSize {
		c.Spec.Devices.Requests[0].Exactly.Selectors = append(c.Spec.Devices.Requests[0].Exactly.Selectors, resourceapi.DeviceSelector{
			CEL: &resourceapi.CELDeviceSelector{Expression: strings.Repeat(`device.driver == "a" || `, 100) + fmt.Sprintf(`device.driver != "%d"`, i)},
		})
	}
}

// Where a namespace has used up its time, pods that need no long search and few expressions are placed as ever. Others are put off, and told so,
// until there is time again.
func TestAPodWhoseNamespaceHasNoTimeIsPutOff(t *testing.T) {
	const told = "namespace team-a has used its share of the scheduler's time for long searches and CEL expressions: more in "
	for name, tc := range map[string]struct {
		wants func(*resourceapi.ResourceClaim)
		// where it is told, and whether it fits when there is time
		preFilter, fits bool
	}{
		"a long search":  {wants: nearlyFull},
		"many selectors": {wants: manySelectors, preFilter: true, fits: true},
	} {
		t.Run(name, func(t *testing.T) {
			hard, easy := pod("hard", "hard"), pod("easy", "easy")
			h := newHarness(t, world{
				nodes:   []*v1.Node{node("node-a")},
				objects: []runtime.Object{class(testClass), slice("node-a", divisible(10)...)},
				claims:  []*resourceapi.ResourceClaim{claim("hard", tc.wants), claim("easy", counted(1))},
				pods:    []*v1.Pod{hard, easy},
				room:    wakeup.Options{RetryAfter: time.Millisecond},
			})
			ctx, cancel := context.WithTimeout(h.ctx, patience)
			defer cancel()
			h.ctx, h.plugin.time.FilterTimeout = ctx, 0 // so that the namespace's time alone ends a search
			passed := h.paceByLooks(easy)
			h.saves(hard, -time.Second)
			for round := range 2 {
				a := h.filterAll(hard) // does not come back where nothing ends the search
				text := a.postFilter().Message()
				if tc.preFilter {
					text = a.preFilter.Message()
				}
				if len(a.fits()) > 0 || !strings.Contains(text, told) {
					t.Errorf("round %d: %v, %v, %q", round, a.preFilter, a.filter, text)
				}
			}
			if a := h.filterAll(easy); len(a.fits()) != 1 {
				t.Errorf("an easy pod: %v, %v", a.preFilter, a.filter)
			}
			if woken := h.activator.taken(); len(woken) > 0 {
				t.Errorf("%v are woken", woken)
			}
			passed.Add(int64(time.Hour))
			h.plugin.time.FilterTimeout = 10 * searchtime.FreeTime
			a := h.filterAll(hard)
			for tc.fits && len(a.fits()) == 0 && h.ctx.Err() == nil { // what is compiled is kept, on a slow machine
				a = h.filterAll(hard)
				h.saves(hard, 20*time.Second)
			}
			text := a.preFilter.Message()
			if a.preFilter.IsSuccess() && !tc.fits {
				text = a.postFilter().Message()
			}
			if fits := len(a.fits()) > 0; fits != tc.fits || strings.Contains(text, told) {
				t.Errorf("with time: %v, %v, %q", a.preFilter, a.filter, text)
			}
		})
	}
}

// The class that stands for an extended resource is compiled in the time of the pod's namespace, too. Nodes for which that is not enough are
// undecided, and decided later.
func TestAnExtendedResourceIsCompiledInTheNamespacesTime(t *testing.T) {
	p := extendedPod("pod", gpuResource)
	w := extendedWorld(p)
	for _, object := range w.objects {
		if c, ok := object.(*resourceapi.DeviceClass); ok {
			for i := range resourceapi.DeviceSelectorsMaxSize { // some hundred milliseconds
				c.Spec.Selectors = append(c.Spec.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{
					Expression: strings.Repeat(`device.driver == "a" || `, 100) + fmt.Sprintf(`device.driver != "%d"`, i),
				}})
			}
		}
	}
	h := newHarness(t, w)
	h.saves(p, -time.Hour)
	a := h.filterAll(p)
	if text := a.postFilter().Message(); len(a.fits()) > 0 || !strings.Contains(text, "has used its share of the scheduler's time") {
		t.Errorf("without time: %v, %v, %q", a.preFilter, a.filter, text)
	}
	if n := h.plugin.shared.account.Store.Stats().Selectors.Entries; n >= resourceapi.DeviceSelectorsMaxSize {
		t.Errorf("without time all %d selectors were compiled", n)
	}
	ctx, cancel := context.WithTimeout(h.ctx, patience)
	defer cancel()
	for len(a.fits()) == 0 && ctx.Err() == nil { // what is compiled is kept, on a slow machine
		h.saves(p, time.Hour) // more than any attempt wants
		a = h.filterAll(p)
	}
	if len(a.fits()) == 0 {
		t.Errorf("with time: %v, %v", a.preFilter, a.filter)
	}
}

// tight asks for shares that go into n devices of 1,000, with slack left in sum. With 8, 3, 10 and 1 the search takes some tens of milliseconds.
func tight(n, per int, slack int64, seed uint64) func(c *resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) {
		random := rand.New(rand.NewPCG(seed, 1))
		var sizes []int64
		for range n {
			left := int64(1000) - slack
			for i := range per {
				size := left
				if i < per-1 {
					size = left/int64(per-i) + random.Int64N(120) - 60
				}
				left -= size
				sizes = append(sizes, size)
			}
		}
		random.Shuffle(len(sizes), func(i, j int) { sizes[i], sizes[j] = sizes[j], sizes[i] })
		c.Spec.Devices.Requests = nil
		for i, size := range sizes {
			c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: fmt.Sprintf("share-%d", i), Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: testClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
				Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": *resource.NewQuantity(size, resource.DecimalSI)}},
			}})
		}
	}
}

// Filter has found a node and used up what the namespace had saved. Reserve, which decides once more, has as much again.
func TestReserveHasWhatTheAttemptWasGranted(t *testing.T) {
	p := pod("p", "c")
	h := newHarness(t, world{
		nodes:   []*v1.Node{node("node-a")},
		objects: []runtime.Object{class(testClass), slice("node-a", divisible(8)...)},
		claims:  []*resourceapi.ResourceClaim{claim("c", tight(8, 3, 10, 1)), claim("easy", counted(1))},
		pods:    []*v1.Pod{p},
	})
	h.plugin.time.FilterTimeout = time.Minute
	h.paceByLooks(pod("easy", "easy"))
	a := h.filterAll(p)
	if len(a.fits()) == 0 {
		t.Fatal("the pod fits nowhere")
	}
	h.saves(p, 0)
	if status := h.plugin.Reserve(h.ctx, a.state, p, "node-a"); !status.IsSuccess() {
		t.Errorf("Reserve: %v", status)
	}
	if saved := h.plugin.time.Shares.Saved(p); saved >= 0 {
		t.Errorf("%v are saved, though there was nothing left and Reserve took some", saved)
	}
	if granted := h.plugin.time.Budget(p).Granted(); granted != searchtime.FreeTime {
		t.Errorf("the next attempt is granted %v", granted)
	}
}

// times notes what has been begun.
type times struct {
	contention.Time
	begun []*searchtime.Budget
}

func (t *times) Attempt(pod *v1.Pod) allocator.Attempt {
	attempt := t.Time.Attempt(pod)
	if b, ok := attempt.(*searchtime.Budget); ok {
		t.begun = append(t.begun, b)
	}
	return attempt
}

// What a nominated pod is going to get is looked for in the time of its own namespace. Without any it keeps nobody out.
func TestANomineeIsChargedToItsNamespace(t *testing.T) {
	for name, tc := range map[string]struct{ saved time.Duration }{
		"with time":    {saved: time.Second},
		"without time": {saved: 0},
	} {
		t.Run(name, func(t *testing.T) {
			nominee, p := pending("nominee", 5, "kept"), pending("p", 5, "c")
			h := newHarness(t, world{
				pods:    []*v1.Pod{nominee, p},
				nodes:   []*v1.Node{node("node-a")},
				objects: []runtime.Object{class(testClass), slice("node-a", divisible(10)...)},
				claims:  []*resourceapi.ResourceClaim{claim("c", counted(1)), claim("kept", nearlyFull)},
			})
			h.plugin.time.FilterTimeout = 10 * searchtime.FreeTime
			h.paceByLooks(p)
			h.nominator.nominate("node-a", nominee)
			h.saves(nominee, tc.saved)
			times := &times{Time: h.plugin.time}
			h.plugin.rivals.Search.Time = times
			stakes := h.plugin.rivals.NewHolders()
			inv, view := h.plugin.shared.account.Store.View(), h.plugin.shared.account.Tracker.Snapshot().Usage
			stakes.WithNominees(h.ctx, []*v1.Pod{nominee}, node("node-a"), inv, view)
			want := searchtime.FreeTime
			if tc.saved > 0 {
				want += tc.saved
			}
			if len(times.begun) != 1 {
				t.Fatalf("%d times have begun", len(times.begun))
			}
			b := times.begun[0]
			granted, used, saved := b.Granted(), b.Used(), h.plugin.time.Shares.Saved(nominee)
			if granted < want || granted > want+40*time.Millisecond || used == 0 {
				t.Errorf("granted %v, used %v, want %v granted and some of it used", granted, used, want)
			}
			if used > searchtime.FreeTime && saved >= tc.saved {
				t.Errorf("%v used, and %v saved before, %v now", used, tc.saved, saved)
			}
		})
	}
}

// What a nominated pod asks for is compiled in the time of its own namespace: pods that are tried beside it do not compile without an end.
func TestANomineesClaimsAreCompiledInItsNamespacesTime(t *testing.T) {
	nominee, p := pending("nominee", 5, "kept"), pending("p", 5, "c")
	h := newHarness(t, world{
		pods:    []*v1.Pod{nominee, p},
		nodes:   []*v1.Node{node("node-a")},
		objects: []runtime.Object{class(testClass), slice("node-a", divisible(10)...)},
		claims:  []*resourceapi.ResourceClaim{claim("c", counted(1)), claim("kept", counted(1), manySelectors)},
	})
	h.saves(nominee, -time.Hour)
	times := &times{Time: h.plugin.time}
	h.plugin.rivals.Search.Time = times
	h.nominator.nominate("node-a", nominee)
	inv, view := h.plugin.shared.account.Store.View(), h.plugin.shared.account.Tracker.Snapshot().Usage
	h.plugin.rivals.NewHolders().WithNominees(h.ctx, []*v1.Pod{nominee}, node("node-a"), inv, view)
	if n := h.plugin.shared.account.Store.Stats().Selectors.Entries; n >= resourceapi.DeviceSelectorsMaxSize {
		t.Errorf("without time all %d selectors were compiled", n)
	}
	if len(times.begun) != 1 || times.begun[0].Used() == 0 {
		t.Error("nobody was charged")
	}
}

// Whether others can be evicted for the pod takes longer to find out than its namespace has left. It is told so, or tried again by time.
func TestAPodWithoutTimeToFindVictimsIsUndecided(t *testing.T) {
	for name, tc := range map[string]struct {
		saved     time.Duration
		undecided bool
	}{
		"with time":    {saved: 20 * time.Second},
		"without time": {saved: 0, undecided: true},
	} {
		t.Run(name, func(t *testing.T) {
			high, low := pending("high", 9, "c"), running("low", "node-a", 1, "held")
			var gpus []string
			for i := range 8 {
				gpus = append(gpus, fmt.Sprint("gpu-", i))
			}
			h := newHarness(t, world{
				nodes:   []*v1.Node{node("node-a")},
				objects: []runtime.Object{class(testClass), slice("node-a", divisible(8)...)},
				claims: []*resourceapi.ResourceClaim{
					claim("c", tight(8, 3, 10, 1)), claim("held", counted(8), allocated("node-a", gpus...), reservedFor("low")),
					claim("easy", counted(1)),
				},
				pods: []*v1.Pod{high, low},
			})
			h.plugin.time.FilterTimeout = time.Minute
			h.paceByLooks(pod("easy", "easy"))
			h.saves(high, tc.saved)
			a := h.filterAll(high)
			text := a.postFilter().Message()
			if got := a.statuses.Get("node-a").Code() == fwk.Unschedulable; got == tc.undecided {
				t.Errorf("preemption is offered the node: %t", got)
			}
			if got := strings.Contains(text, "has used its share"); got != tc.undecided {
				t.Errorf("told: %q", text)
			}
		})
	}
}

// A class of extended resources that is wrong is no matter of time, also if there is none left when that is found: it is told, and the pod is
// woken when the class has been put right.
func TestAnErrorOfAClassIsNoMatterOfTime(t *testing.T) {
	long := strings.Repeat(`device.driver == "a" || `, 400) + `device.driver != "1"`
	for name, expression := range map[string]string{"no selector": "", "a selector that takes long": long[:len(long)-3] + "1"} {
		t.Run(name, func(t *testing.T) {
			p := extendedPod("waiting", gpuResource)
			p.Spec.ResourceClaims = pod("waiting", "wanted").Spec.ResourceClaims
			w := extendedWorld(p)
			w.resolver = map[v1.ResourceName]string{gpuResource: "late"}
			w.claims = []*resourceapi.ResourceClaim{claim("wanted", withSelector(long))}
			late := class("late")
			broken := late.DeepCopy()
			broken.Spec.Selectors[0].CEL = nil
			if expression != "" {
				broken.Spec.Selectors[0].CEL = &resourceapi.CELDeviceSelector{Expression: expression}
				p.Spec.ResourceClaims, w.claims = nil, nil
			}
			w.objects = append(w.objects, broken)
			h := newHarness(t, w)
			h.saves(p, -time.Second)
			a := h.filterAll(p)
			a.postFilter()
			if text := fmt.Sprint(a.filter["node-a"]); !strings.Contains(text, `class "late"`) {
				t.Errorf("told: %s", text)
			}
			h.activator.taken()
			if _, err := h.client.ResourceV1().DeviceClasses().Update(h.ctx, late, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			h.eventually("the pod is woken", func() bool { return slices.Contains(h.activator.taken(), "waiting") })
		})
	}
}
