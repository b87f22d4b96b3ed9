// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"

	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
)

// lateWatch holds back what the API server sends on the watches of ResourceClaims of one scheduler.
type lateWatch struct {
	mutex sync.Mutex
	late  chan struct{} // closed when nothing is held back; nil for never having held back anything
}

// hold begins to hold back events.
func (l *lateWatch) hold() {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.late = make(chan struct{})
}

// release lets all events through.
func (l *lateWatch) release() {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.late != nil {
		close(l.late)
		l.late = nil
	}
}

func (l *lateWatch) wait(request *http.Request) {
	l.mutex.Lock()
	late := l.late
	l.mutex.Unlock()
	if late == nil {
		return
	}
	select {
	case <-late:
	case <-request.Context().Done():
	}
}

func (l *lateWatch) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(request)
		if err == nil && strings.HasSuffix(request.URL.Path, "/resourceclaims") && request.URL.Query().Get("watch") != "" {
			response.Body = lateBody{response.Body, l, request}
		}
		return response, err
	})
}

type lateBody struct {
	io.ReadCloser
	watch   *lateWatch
	request *http.Request
}

// Read holds back what it has read.
func (b lateBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.watch.wait(b.request)
	return n, err
}

// choice is what bothChoose leaves: two schedulers, the second one with a late watch.
type choice struct {
	*lateWatch
	schedulers [2]*scheduler
}

// bothChoose makes two schedulers of ours choose the only GPU of node a for the pods "first" and "second", because the
// watch of the second one is late. When it returns, the first pod is bound, and both claims have the GPU. The options are
// for the second pod.
func bothChoose(w *world, second schedulerSetup, options ...podOption) choice {
	w.t.Helper()
	watch := &lateWatch{}
	w.t.Cleanup(watch.release)
	second.wrap = watch.wrap
	schedulers := [2]*scheduler{startScheduler(w.t, w.name+"-1", schedulerSetup{}), startScheduler(w.t, w.name+"-2", second)}
	w.addNode("a", gpus(h100, 1)...)
	w.addNode("b", gpus(h100, 1)...)
	w.addClaim("first", spec(w.exactly("gpu", 1)))
	w.addClaim("second", spec(w.exactly("gpu", 1)))
	w.addClaim("third", spec(w.exactly("gpu", 1)))

	// When this pod is bound, its scheduler knows the claims that were made before.
	w.addPod("third", withClaim("third"), w.onNode("b"), withScheduler(w.name+"-2"))
	w.awaitBound("third")
	watch.hold()
	w.addPod("first", withClaim("first"), w.onNode("a"), withScheduler(w.name+"-1"))
	w.awaitBound("first")
	w.addPod("second", append(options, withClaim("second"), w.onNode("a"), withScheduler(w.name+"-2"))...)
	w.awaitClaim("second", "allocated", func(c *resourceapi.ResourceClaim) bool { return len(devices(c)) == 1 })
	return choice{watch, schedulers}
}

// Two schedulers of ours choose the same GPU. One pod is bound; the other one gives the GPU back, says why, and is bound
// when it is free.
func TestFenceBetweenTwoSchedulers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	watch := bothChoose(w, schedulerSetup{})
	if pod := w.awaitPod("second", "there", func(*v1.Pod) bool { return true }); pod.Spec.NodeName != "" {
		t.Fatalf("the second pod was bound to a GPU that the first one has: %s", describe(pod))
	}
	// Who waits at the fence holds up nobody.
	w.addPod("without-claims", w.onNode("a"), withScheduler(w.name+"-2"))
	w.awaitBoundTo("without-claims", "a")
	if pod := w.awaitPod("second", "there", func(*v1.Pod) bool { return true }); pod.Spec.NodeName != "" {
		t.Fatalf("the second pod was bound to a GPU that the first one has: %s", describe(pod))
	}
	watch.release()
	pod := w.awaitUnschedulable("second", "claim "+w.name+"/first", "was allocated earlier", w.nodeName("a")+"/gpu-0")
	event := w.awaitEvent(pod, "was allocated earlier")
	if event.Type != v1.EventTypeNormal || event.Reason != "LostRaceForDevices" || event.Series != nil && event.Series.Count > 1 {
		t.Errorf("want one Normal event with the reason LostRaceForDevices, got %s", describe(event))
	}
	w.awaitClaim("second", "given back", func(c *resourceapi.ResourceClaim) bool {
		return c.Status.Allocation == nil && len(c.Status.ReservedFor) == 0
	})
	if first := w.claim("first"); len(devices(first)) != 1 {
		t.Errorf("the first claim has lost its GPU: %s", describe(first))
	}

	w.endPod(w.awaitBound("first"))
	w.awaitBoundTo("second", "a")

	// A race that is lost is nobody's mistake.
	for _, s := range watch.schedulers {
		s.wantNoErrors(t)
	}
	events, err := w.client.CoreV1().Events(w.name).List(w.ctx, metav1.ListOptions{})
	w.must(err, "listing events")
	told := slices.DeleteFunc(events.Items, func(e v1.Event) bool { return !strings.Contains(e.Message, "was allocated earlier") })
	if len(told) != 1 {
		t.Errorf("%d events tell of the race, want one", len(told))
	}
}

// The same without fence shows that the test can fail, and what the fence is for.
func TestWithoutFenceTwoSchedulersBindToOneGPU(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	bothChoose(w, schedulerSetup{edit: withFence(func(f *config.FenceArgs) { *f.Enabled = false })})
	w.awaitBoundTo("second", "a")
	if first, second := w.claim("first"), w.claim("second"); len(devices(first)) != 1 || len(devices(second)) != 1 {
		t.Errorf("want both to have the GPU, got: %s; %s", describe(first), describe(second))
	}
}

// A watch that stays silent: the pod is not bound, and the GPU is given back.
func TestFenceTimeout(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	watch := bothChoose(w, schedulerSetup{edit: withFence(func(f *config.FenceArgs) { f.Timeout.Duration = config.DefaultFenceTimeout / 10 })})
	pod := w.awaitUnschedulable("second", "timed out after 3s", "the watch of ResourceClaims is at resourceVersion")
	w.awaitEvent(pod, "cannot be told whether other schedulers use its devices")
	w.awaitClaim("second", "given back", func(c *resourceapi.ResourceClaim) bool { return c.Status.Allocation == nil })
	watch.release()
	w.endPod(w.awaitBound("first"))
	w.awaitBoundTo("second", "a")
}

// Three schedulers of ours and one pool, with more pods than GPUs: they meet often, every pod runs in the end, and no two
// pods that run have one GPU.
func TestFenceBurstOfThreeSchedulers(t *testing.T) {
	t.Parallel()
	const pods, schedulers, nodes, perNode = 60, 3, 2, 4
	w := newWorld(t)
	for i := range schedulers {
		startScheduler(t, fmt.Sprintf("%s-%d", w.name, i), schedulerSetup{})
	}
	for i := range nodes {
		w.addNode(fmt.Sprint(i), gpus(h100, perNode)...)
	}
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	for i := range pods {
		w.addPod(fmt.Sprintf("pod-%02d", i), withTemplate("one"), withScheduler(fmt.Sprintf("%s-%d", w.name, i%schedulers)))
	}
	bound := sets.New[string]()
	var running []*v1.Pod        // ended together, when there are as many as GPUs
	users := map[string]string{} // of those, by GPU
	w.awaitPods("bound", pods, 3*patience, func(p *v1.Pod) bool {
		if p.Spec.NodeName == "" || bound.Has(p.Name) {
			return p.Spec.NodeName != ""
		}
		bound.Insert(p.Name)
		running = append(running, p)
		got := devices(w.claim(claimName(p, "one")))
		if len(got) != 1 {
			t.Fatalf("pod %s is bound with the devices %q, want one", p.Name, got)
		}
		gpu := p.Spec.NodeName + "/" + got[0]
		if other := users[gpu]; other != "" {
			t.Errorf("pods %s and %s both run with %s", other, p.Name, gpu)
		}
		users[gpu] = p.Name
		if len(running) == nodes*perNode {
			for _, p := range running {
				w.endPod(p)
			}
			running = nil
			clear(users)
		}
		return true
	})
}

// withFence changes the arguments of the fence.
func withFence(change func(*config.FenceArgs)) func(*schedulerconfig.KubeSchedulerConfiguration) {
	return func(c *schedulerconfig.KubeSchedulerConfiguration) {
		for i := range c.Profiles {
			for _, plugin := range c.Profiles[i].PluginConfig {
				if plugin.Name == deviceclaims.Name {
					change(plugin.Args.(*config.DeviceClaimsArgs).Fence)
				}
			}
		}
	}
}
