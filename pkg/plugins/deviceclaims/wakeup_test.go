// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
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
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/wakeup"
)

// wakes waits until exactly the given pods have been activated.
func (h *harness) wakes(want ...string) {
	h.t.Helper()
	var got []string
	h.eventually("pods are woken", func() bool {
		got = append(got, h.activator.taken()...)
		return len(got) >= len(want)
	})
	if diff := cmp.Diff(want, got); diff != "" {
		h.t.Errorf("woken pods differ (-want +got):\n%s", diff)
	}
}

// wakesIf waits until pod p has been activated, or sees that nobody is: because of why.
func (h *harness) wakesIf(woken bool, why string) {
	h.t.Helper()
	if woken {
		h.wakes("p")
	} else if got := h.lookedAt(); len(got) > 0 {
		h.t.Errorf("woken: %v, and %s", got, why)
	}
}

func TestWakeUp(t *testing.T) {
	waiting := pod("waiting", "wanted")
	tests := map[string]struct {
		claims []*resourceapi.ResourceClaim
		// try refuses the pod; by default that is PreFilter or Filter on all nodes.
		try    func(h *harness) *fwk.Status
		change func(h *harness)
	}{
		"a pod held up by other claims is woken when one of them gives up its devices": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted"),
				claim("holder-a", allocated("node-a", "gpu-0")),
				claim("holder-b", allocated("node-b", "gpu-0", "gpu-1")),
			},
			change: func(h *harness) {
				h.api.change("holder-b", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			},
		},
		"a pod held up by another claim is woken when that is deleted": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted"),
				claim("holder-a", allocated("node-a", "gpu-0")),
				claim("holder-b", allocated("node-b", "gpu-0", "gpu-1")),
			},
			change: func(h *harness) { h.api.delete("holder-a") },
		},
		"a pod is woken when a node has devices for its claims if it gives up what it has elsewhere": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted"), claim("mine", allocated("node-a", "gpu-0"), reservedFor("waiting")),
				claim("holder-b", allocated("node-b", "gpu-0")),
			},
			try: func(h *harness) *fwk.Status {
				a := h.filterAll(pod("waiting", "wanted", "mine"))
				if len(a.fits()) > 0 {
					h.t.Fatalf("the pod fits %v", a.fits())
				}
				return a.postFilter()
			},
			change: func(h *harness) {
				h.api.change("holder-b", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			},
		},
		"a pod for which no device exists is woken by a new slice": {
			claims: []*resourceapi.ResourceClaim{claim("wanted", withSelector(`device.attributes["gpu.example.com"].model == "B200"`))},
			change: func(h *harness) {
				s := slice("node-a", device("gpu-0", withModel("B200")))
				s.Name = "newer"
				s.Spec.Pool.Generation = 2
				if _, err := h.client.ResourceV1().ResourceSlices().Create(h.ctx, s, metav1.CreateOptions{}); err != nil {
					h.t.Fatal(err)
				}
			},
		},
		"a pod whose class does not exist is woken by the class": {
			claims: []*resourceapi.ResourceClaim{claim("wanted", withClass("late"))},
			change: func(h *harness) {
				if _, err := h.client.ResourceV1().DeviceClasses().Create(h.ctx, class("late"), metav1.CreateOptions{}); err != nil {
					h.t.Fatal(err)
				}
			},
		},
		"a pod that PreEnqueue kept out is woken when its claim appears": {
			try:    func(h *harness) *fwk.Status { return h.plugin.PreEnqueue(h.ctx, waiting) },
			change: func(h *harness) { h.api.create(claim("wanted")) },
		},
		"a pod whose claim is being allocated for another pod is woken when that pod gives up": {
			claims: []*resourceapi.ResourceClaim{claim("wanted")},
			try: func(h *harness) *fwk.Status {
				other := h.filterAll(pod("other", "wanted")).reserve("node-a")
				status := h.filterAll(waiting).preFilter
				other.unreserve("node-a")
				return status
			},
			change: func(*harness) {},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.pods, w.claims = []*v1.Pod{waiting}, tc.claims
			h := newHarness(t, w)
			if tc.try != nil {
				if status := tc.try(h); status.IsSuccess() {
					t.Fatal("the pod was accepted")
				}
			} else {
				if a := h.filterAll(waiting); len(a.fits()) > 0 {
					t.Fatalf("the pod fits %v", a.fits())
				}
				if got := h.activator.taken(); len(got) > 0 {
					t.Fatalf("%v woken before anything has changed", got)
				}
			}
			tc.change(h)
			h.wakes("waiting")
		})
	}
}

// What becomes possible because a pod's own claim changes in the hands of others is looked at on all nodes, then and from then on: before,
// the claim kept the pod on one node, and nothing of the others concerned it.
func TestWakeUpWhenTheOwnClaimMayMove(t *testing.T) {
	release := func(name string) func(h *harness) {
		return func(h *harness) {
			h.api.change(name, func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			h.caughtUp(name)
		}
	}
	leave := func(h *harness) {
		h.api.change("mine", func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil })
		h.caughtUp("mine")
	}
	for name, tc := range map[string]struct {
		wants   []string
		changes []func(h *harness) // the last one wakes the pod
	}{
		"the other user of the claim goes": {
			wants: []string{"mine", "wanted"}, changes: []func(*harness){release("holder-b"), leave},
		},
		"and what would do is freed later": {
			wants: []string{"mine", "wanted"}, changes: []func(*harness){leave, release("holder-b")},
		},
		"its allocation is taken back, and what would do is freed later": {
			wants: []string{"mine", "wanted"}, changes: []func(*harness){release("mine"), release("holder-b")},
		},
	} {
		t.Run(name, func(t *testing.T) {
			waiting := pod("waiting", tc.wants...)
			w := twoNodes()
			w.pods = []*v1.Pod{waiting, running("other", "node-a", 1, "mine")}
			w.claims = []*resourceapi.ResourceClaim{
				claim("wanted"), claim("mine", allocated("node-a", "gpu-0"), reservedFor("other")), claim("holder-b", allocated("node-b", "gpu-0", "gpu-1")),
			}
			h := newHarness(t, w)
			a := h.filterAll(waiting)
			if len(a.fits()) > 0 {
				t.Fatalf("the pod fits %v", a.fits())
			}
			a.postFilter()
			for i, change := range tc.changes {
				if woken := h.lookedAt(); i > 0 && len(woken) > 0 {
					t.Fatalf("woken before it may run: %v", woken)
				}
				change(h)
			}
			h.wakes("waiting")
		})
	}
}

// lookedAt waits until what has happened has been looked at, and returns whom that woke.
func (h *harness) lookedAt() []string {
	h.t.Helper()
	h.probes++
	probe := pod(fmt.Sprintf("probe-%d", h.probes))
	if err := h.client.Tracker().Add(probe); err != nil {
		h.t.Fatal(err)
	}
	h.eventually("what has happened has been looked at", func() bool {
		h.plugin.shared.waiting.Room.Note(probe, nil, h.plugin.waits)
		h.plugin.shared.waiting.Judged(probe.UID, &wakeup.Question{Claims: "as they were"}, wakeup.Seen{})
		h.plugin.shared.waiting.NotRefused(probe.UID, time.Now())
		h.plugin.shared.waiting.PodChanged(probe.UID)
		return h.activator.probed(probe.Name)
	})
	h.plugin.shared.waiting.Gone(probe.UID, false)
	if err := h.client.Tracker().Delete(v1.SchemeGroupVersion.WithResource("pods"), probe.Namespace, probe.Name); err != nil {
		h.t.Fatal(err)
	}
	return h.activator.taken()
}

// The framework's informers may tell of a change before the tracker has seen it. A pod retried because of
// that looks at the old state, fails again, and must be woken once more.
func TestWakeUpAfterTheFrameworkWasFaster(t *testing.T) {
	waiting := pod("waiting", "wanted")
	w := twoNodes()
	w.pods = []*v1.Pod{waiting}
	w.claims = []*resourceapi.ResourceClaim{
		claim("wanted"),
		claim("holder-a", allocated("node-a", "gpu-0")),
		claim("holder-b", allocated("node-b", "gpu-0", "gpu-1")),
	}
	h := newHarness(t, w)
	if a := h.filterAll(waiting); len(a.fits()) > 0 {
		t.Fatalf("the pod fits %v", a.fits())
	}
	h.api.hold()
	h.api.change("holder-a", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
	// The retry: with the tracker's watch held back, this one looks at the old state.
	if a := h.filterAll(waiting); len(a.fits()) > 0 {
		t.Fatalf("the pod fits %v although the tracker cannot know", a.fits())
	}
	h.api.release()
	h.wakes("waiting")
	if diff := cmp.Diff([]string{"node-a"}, h.filterAll(waiting).fits()); diff != "" {
		t.Errorf("nodes differ (-want +got):\n%s", diff)
	}
}

// The resolver of NodeResourcesFit may know the class behind an extended resource before the inventory does, and its repair. A pod retried because of
// that is refused once more, and must be woken when the inventory has the class as it is to be, whatever else it asks for.
func TestWakeUpByTheClassOfAnExtendedResource(t *testing.T) {
	second := v1.ResourceName("example.com/second")
	withSecond := extendedPod("waiting", gpuResource)
	withSecond.Spec.Containers[0].Resources.Requests[second] = resource.MustParse("1")
	withClaim := extendedPod("waiting", gpuResource)
	withClaim.Spec.ResourceClaims = pod("waiting", "wanted").Spec.ResourceClaims
	tests := map[string]struct {
		pod      *v1.Pod
		resolver map[v1.ResourceName]string
	}{
		"which is all that the pod asks for": {extendedPod("waiting", gpuResource), map[v1.ResourceName]string{gpuResource: "late"}},
		"beside another one":                 {withSecond, map[v1.ResourceName]string{gpuResource: "late", second: testClass}},
		"after another one":                  {withSecond, map[v1.ResourceName]string{gpuResource: testClass, second: "late"}},
		"beside a claim":                     {withClaim, map[v1.ResourceName]string{gpuResource: "late"}},
	}
	before := map[string]string{"is not there": "", "selects by no expression": "device.", "selects by an attribute that no device has": `device.attributes["gpu.example.com"].none == "x"`, "selects nothing": "false"}
	for name, tc := range tests {
		for as, expression := range before {
			t.Run(name+", and "+as, func(t *testing.T) {
				late := class("late")
				w := extendedWorld(tc.pod)
				w.resolver = tc.resolver
				w.claims = []*resourceapi.ResourceClaim{claim("wanted")}
				if expression != "" {
					broken := late.DeepCopy()
					broken.Spec.Selectors[0].CEL.Expression = expression
					w.objects = append(w.objects, broken)
				}
				h := newHarness(t, w)
				a := h.filterAll(tc.pod)
				if len(a.fits()) > 0 {
					t.Fatalf("the pod fits %v without the class", a.fits())
				}
				a.postFilter()
				h.lookedAt()
				apply := h.client.ResourceV1().DeviceClasses().Create
				if expression != "" {
					apply = func(ctx context.Context, c *resourceapi.DeviceClass, _ metav1.CreateOptions) (*resourceapi.DeviceClass, error) {
						return h.client.ResourceV1().DeviceClasses().Update(ctx, c, metav1.UpdateOptions{})
					}
				}
				if _, err := apply(h.ctx, late, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
				h.wakes("waiting")
				if got := h.filterAll(tc.pod).fits(); !slices.Contains(got, "node-b") {
					t.Errorf("with the class the pod fits %v, not node-b, which has two devices", got)
				}
			})
		}
	}
}

// A change between the moment at which the pod looks and the moment at which it is noted as waiting would be
// lost. So it is noted first, and sees the change.
func TestPodIsNotedBeforeItLooks(t *testing.T) {
	waiting := pod("waiting", "wanted")
	w := twoNodes()
	w.pods = []*v1.Pod{waiting}
	w.claims = []*resourceapi.ResourceClaim{
		claim("wanted"),
		claim("holder-a", allocated("node-a", "gpu-0")),
		claim("holder-b", allocated("node-b", "gpu-0", "gpu-1")),
	}
	noted, goOn := make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() {
		close(noted)
		<-goOn
	})
	w.room.OnSize = func(waiting int) {
		if waiting == 1 {
			once()
		}
	}
	h := newHarness(t, w)

	attempts := make(chan *attempt)
	go func() { attempts <- h.filterAll(waiting) }()
	<-noted
	h.api.change("holder-a", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
	h.caughtUp("holder-a")
	close(goOn)

	if diff := cmp.Diff([]string{"node-a"}, (<-attempts).fits()); diff != "" {
		t.Errorf("nodes differ (-want +got):\n%s", diff)
	}
}

func TestPodsThatDoNotWaitAreForgotten(t *testing.T) {
	w := twoNodes()
	w.pods = []*v1.Pod{pod("placed", "one")}
	w.claims = []*resourceapi.ResourceClaim{claim("one"), claim("two"), claim("other", allocated("node-a", "gpu-0"))}
	h := newHarness(t, w)

	placed := w.pods[0]
	h.filterAll(placed).reserve("node-b")
	if h.isWaiting(placed) {
		t.Error("a pod with a node is still waiting")
	}

	gone := pod("gone", "two") // not known to the API server
	h.filterAll(gone)
	h.api.change("other", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
	h.eventually("the pod that is gone is forgotten", func() bool { return !h.isWaiting(gone) })
	if got := h.activator.taken(); len(got) > 0 {
		t.Errorf("woken: %v", got)
	}
}

func (h *harness) isWaiting(p *v1.Pod) bool {
	return h.plugin.shared.waiting.IsWaiting(p.UID)
}

// A pod sleeps with a claim whose devices are not ready. When they have taken too long the claim may be given up, and no event tells.
func TestBindingDeadlineOfASleepingPod(t *testing.T) {
	at := metav1.NewTime(time.Now().Add(-time.Minute).Truncate(time.Second))
	since := func(at *metav1.Time, conditions ...string) func(*resourceapi.ResourceClaim) {
		return func(c *resourceapi.ResourceClaim) {
			reservedFor("p")(c)
			c.Status.Allocation.AllocationTimestamp = at
			c.Status.Allocation.Devices.Results[0].BindingConditions = conditions
		}
	}
	deadline := at.Add(config.DefaultBindingTimeout + 1)
	long := metav1.NewTime(at.Add(-config.DefaultBindingTimeout))
	adoptedBy := func(by string) func(*resourceapi.ResourceClaim) {
		return func(c *resourceapi.ResourceClaim) {
			metav1.SetMetaDataAnnotation(&c.ObjectMeta, binding.AdoptionKey("p-uid"), binding.Adoption{By: by, At: at.Time}.String())
		}
	}
	tests := map[string]struct {
		claims []*resourceapi.ResourceClaim
		want   time.Time
	}{
		"a claim that another scheduler has adopted": {
			claims: []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), since(&at), adoptedBy("another"))},
			want:   at.Add(config.DefaultBindingTimeout + binding.AdoptionRenewal),
		},
		"devices that are ready":                {claims: []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), since(&at))}},
		"devices that are not":                  {claims: []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), since(&at, "Attached"))}, want: deadline},
		"devices that have taken too long":      {claims: []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), since(&long, "Attached"))}},
		"devices that were allocated some time": {claims: []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), since(nil, "Attached"))}},
		"of two claims the first": {claims: []*resourceapi.ResourceClaim{
			claim("c", allocated("node-b", "gpu-0"), since(ptr.To(metav1.NewTime(at.Add(time.Second))), "Attached")),
			claim("d", allocated("node-b", "gpu-1"), since(&at, "Attached")),
		}, want: deadline},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = tc.claims
			h := newHarness(t, w)
			var names []string
			for _, c := range tc.claims {
				names = append(names, c.Name)
			}
			if got := h.changesAt(pod("p", names...)); !got.Equal(tc.want) {
				t.Errorf("to be looked at again at %v, want %v", got, tc.want)
			}
		})
	}
}

// changesAt is when what the pod asks for changes by itself.
func (h *harness) changesAt(p *v1.Pod) time.Time {
	h.t.Helper()
	claims, err := podclaims.NamesOf(p)
	if err != nil {
		h.t.Fatal(err)
	}
	inv := h.plugin.shared.account.Store.View()
	asked, err := h.plugin.demand.Of(h.ctx, p, claims, inv, nil)
	return h.plugin.waits.Question(h.ctx, p, asked, inv, err).ChangesAt
}
