package deviceclaims

import (
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	fwk "k8s.io/kube-scheduler/framework"
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
