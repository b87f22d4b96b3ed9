// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// gate keeps what is behind it waiting while it is closed.
type gate struct {
	mutex sync.Mutex
	open  chan struct{} // closed while the gate is open
}

func newGate() *gate {
	g := &gate{open: make(chan struct{})}
	close(g.open)
	return g
}

func (g *gate) close() {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.open = make(chan struct{})
}

func (g *gate) reopen() {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	select {
	case <-g.open:
	default:
		close(g.open)
	}
}

func (g *gate) opened() <-chan struct{} {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.open
}

// delayClaims lets the scheduler hear of claims only while the gate is open. Then it knows of pods that are gone and
// not of what has become of their claims.
func (g *gate) delayClaims(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(r)
		if err == nil && strings.HasSuffix(r.URL.Path, "/resourceclaims") && r.URL.Query().Get("watch") != "" {
			response.Body = &gatedBody{ReadCloser: response.Body, gate: g, request: r}
		}
		return response, err
	})
}

type gatedBody struct {
	io.ReadCloser
	gate    *gate
	request *http.Request
}

func (b *gatedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	select {
	case <-b.gate.opened():
	case <-b.request.Context().Done():
	}
	return n, err
}

// withGrace makes the pod take its time when it is deleted.
func withGrace(p *v1.Pod) { p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](3600) }

func (w *world) awaitPodGone(name string) {
	w.t.Helper()
	w.eventually("pod "+name+" is gone", func() bool {
		_, err := w.client.CoreV1().Pods(w.name).Get(w.ctx, name, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
}

func (w *world) awaitDeletion(name string) {
	w.t.Helper()
	w.awaitPod(name, "deleted", func(p *v1.Pod) bool { return p.DeletionTimestamp != nil })
}

func (w *world) awaitNominated(name, nodeSuffix string) *v1.Pod {
	w.t.Helper()
	return w.awaitPod(name, "nominated", func(p *v1.Pod) bool { return p.Status.NominatedNodeName == w.nodeName(nodeSuffix) })
}

// tryAgain has the scheduler try a waiting pod once more.
func (w *world) tryAgain(s *scheduler, name string) {
	w.t.Helper()
	before := s.probe.of(name).attempts
	w.eventually("pod "+name+" is tried again", func() bool {
		pod, err := w.client.CoreV1().Pods(w.name).Get(w.ctx, name, metav1.GetOptions{})
		if err != nil {
			return false
		}
		s.probe.handle.Activate(klog.Background(), map[string]*v1.Pod{pod.Namespace + "/" + pod.Name: pod})
		return s.probe.of(name).attempts > before
	})
}

// addGPUs makes nodes a and b, each with the given number of GPUs, and templates for claims of one and two.
func (w *world) addGPUs(n int) {
	w.t.Helper()
	w.addPriorities()
	w.addNode("a", gpus(h100, n)...)
	w.addNode("b", gpus(h100, n)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.addTemplate("two", spec(w.exactly("gpu", 2)))
}

// The preemptor is tried while its victim is gone and the victim's claim still has the device: nobody else is evicted.
func TestPreemptorIsTriedBeforeTheClaimIsReleased(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	claims := newGate()
	t.Cleanup(claims.reopen)
	s := startScheduler(t, w.name, schedulerSetup{wrap: claims.delayClaims})
	w.addGPUs(1)
	w.run("victim", low, "a", withTemplate("one"))
	w.run("bystander", middle, "b", withTemplate("one"))

	// The scheduler knows the preemptor's claim before it hears no more of claims.
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	w.addPod("scout", withClaim("wanted"), w.withPriority(low))
	w.awaitUnschedulable("scout", "held")
	w.deletePod("scout")
	claims.close()
	w.addPod("preemptor", withClaim("wanted"), w.withPriority(high))
	w.awaitPodGone("victim")
	w.awaitNominated("preemptor", "a")
	for range 3 {
		w.tryAgain(s, "preemptor")
	}
	w.awaitUnschedulable("preemptor", "node "+w.nodeName("a")+": claim", "released, waiting for its deallocation")
	if diff := cmp.Diff([]string{"bystander", "preemptor"}, w.podNames()); diff != "" {
		t.Errorf("pods that are left (-want +got):\n%s", diff)
	}
	w.awaitNominated("preemptor", "a")
	claims.reopen()
	w.awaitBoundTo("preemptor", "a")
	if diff := cmp.Diff([]string{"bystander", "preemptor"}, w.podNames()); diff != "" {
		t.Errorf("pods that are left (-want +got):\n%s", diff)
	}
}

// nominateOverASlowVictim leaves pod "preemptor" nominated to node a, for both GPUs of which it waits: its victim "fast" is
// gone, "slow" is being deleted and goes when the test deletes it. Before that other nodes may be set up.
func (w *world) nominateOverASlowVictim(setUp ...func()) {
	w.t.Helper()
	w.addPriorities()
	w.addNode("a", gpus(h100, 2)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.addTemplate("two", spec(w.exactly("gpu", 2)))
	for _, others := range setUp {
		others()
	}
	w.run("fast", low, "a", withTemplate("one"))
	w.run("slow", low, "a", withTemplate("one"), withGrace)
	free := claimName(w.awaitBound("fast"), "one")
	w.addPod("preemptor", withTemplate("two"), w.withPriority(high))
	w.awaitNominated("preemptor", "a")
	w.awaitDeletion("slow")
	w.awaitPodGone("fast")
	w.awaitClaimGone(free)
}

// One of two victims is gone already, the other one takes its time. Nobody takes the free device meanwhile.
func TestNominatedPodKeepsItsDevices(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, rival string }{{"a rival of lower priority", low}, {"a rival of equal priority", high}} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			s := startScheduler(t, w.name, schedulerSetup{})
			w.nominateOverASlowVictim()
			w.addPod("rival", withTemplate("one"), w.withPriority(tc.rival))
			w.awaitUnschedulable("rival", "held")
			w.tryAgain(s, "rival")
			w.tryAgain(s, "preemptor")
			w.awaitUnschedulable("preemptor", "released, waiting for its deallocation")
			w.deletePod("slow")
			w.awaitBoundTo("preemptor", "a")
			w.tryAgain(s, "rival")
			w.awaitUnschedulable("rival", "held")

			w.deletePod("preemptor")
			w.awaitBoundTo("rival", "a")
		})
	}
}

// The same for a pod with an extended resource: its devices are kept though it has no claim yet, and it gets them when its victim goes.
func TestNominatedPodKeepsTheDevicesOfItsExtendedResource(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := startScheduler(t, w.name, schedulerSetup{})
	w.addPriorities()
	extended := w.standsFor(w.class, "gpu")
	w.addNode("a", gpus(h100, 2)...)
	w.run("slow", low, "a", asks(extended, "main=1"), withGrace)
	w.addPod("preemptor", asks(extended, "main=2"), w.withPriority(high))
	w.awaitNominated("preemptor", "a")
	w.awaitDeletion("slow")
	w.addPod("rival", asks(extended, "main=1"), w.withPriority(high))
	w.awaitUnschedulable("rival", "held")
	w.tryAgain(s, "rival")
	w.tryAgain(s, "preemptor")
	w.awaitUnschedulable("preemptor", "released, waiting for its deallocation")
	w.deletePod("slow")
	if claim := w.extendedClaim(w.awaitBoundTo("preemptor", "a")); len(devices(claim)) != 2 {
		t.Errorf("want 2 devices: %s", describe(claim))
	}
	w.awaitUnschedulable("rival", "held")
	w.deletePod("preemptor")
	w.extendedClaim(w.awaitBoundTo("rival", "a"))
}

// A nominated pod is deleted before it got its devices. Who was kept from them gets them at once.
func TestNominatedPodIsDeleted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.nominateOverASlowVictim()
	w.addPod("rival", withTemplate("one"), w.withPriority(low))
	w.awaitUnschedulable("rival", "held")

	w.deletePod("preemptor")
	w.awaitBoundTo("rival", "a") // slow still holds the other device
}

// A nominated pod gets its devices on another node. Who was kept from those of the first gets one at once.
func TestNominatedPodGoesElsewhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.nominateOverASlowVictim(func() {
		w.addNode("b", gpus(h100, 2)...)
		w.run("occupant", high, "b", withTemplate("two"))
	})
	w.addPod("rival", withTemplate("one"), w.withPriority(low), w.onNode("a"))
	w.awaitUnschedulable("rival", "held")
	w.deletePod("occupant")
	w.awaitBoundTo("preemptor", "b")
	w.awaitBoundTo("rival", "a") // slow still holds the other device
	w.awaitDeletion("slow")
}

// The victim is in PreBind, nothing of it has been written. Its binding is cancelled, it lives on, and while it gives
// its device back nobody else is evicted.
func TestVictimIsCancelledInPreBind(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	undo := newGate()
	t.Cleanup(undo.reopen)
	var writes atomic.Int32
	undone := make(chan struct{})
	p := &probe{unreserve: func(pod *v1.Pod) {
		if pod.Name == "victim" && pod.Namespace == w.name {
			close(undone)
			<-undo.opened()
		}
	}}
	hold := func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if writesClaim(r, w.name) && strings.Contains(r.URL.Path, "/resourceclaims/victims") && writes.Add(1) == 1 {
				<-r.Context().Done() // never reaches the API server
				return nil, r.Context().Err()
			}
			return next.RoundTrip(r)
		})
	}
	s := startScheduler(t, w.name, schedulerSetup{wrap: hold, probe: p})
	w.addGPUs(1)
	w.run("bystander", middle, "b", withTemplate("one"))
	w.addClaim("victims", spec(w.exactly("gpu", 1)))
	w.addPod("victim", withClaim("victims"), w.withPriority(low), w.onNode("a"))
	w.eventually("the victim is in PreBind", func() bool { return writes.Load() == 1 })

	undo.close()
	w.addPod("preemptor", withTemplate("one"), w.withPriority(high))
	w.awaitNominated("preemptor", "a")
	select {
	case <-undone:
	case <-time.After(patience):
		t.Fatal("the victim's binding is not undone")
	}
	for range 3 {
		w.tryAgain(s, "preemptor")
	}
	want := []string{"bystander", "preemptor", "victim"}
	if diff := cmp.Diff(want, w.podNames()); diff != "" {
		t.Errorf("pods that are left (-want +got):\n%s", diff)
	}
	undo.reopen()
	w.awaitBoundTo("preemptor", "a")
	if diff := cmp.Diff(want, w.podNames()); diff != "" {
		t.Errorf("pods that are left (-want +got):\n%s", diff)
	}
	w.awaitUnschedulable("victim", "held")
	if got := w.claim("victims"); got.Status.Allocation != nil || len(got.Status.ReservedFor) > 0 {
		t.Errorf("the victim's claim was written: %s", describe(got))
	}
	w.awaitClaim(claimName(w.awaitBound("preemptor"), "one"), "allocated", func(c *resourceapi.ResourceClaim) bool { return c.Status.Allocation != nil })
}
