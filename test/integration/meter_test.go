// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kuberuntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/informers/core"
	"k8s.io/client-go/informers/internalinterfaces"
	"k8s.io/client-go/informers/resource"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"

	"stowage.dev/stowage/pkg/plugins/deviceclaims"
)

// meter measures what our plugin takes of the processor: each event handler, each scheduling attempt. It reads the clock of the thread, which
// stands still while other threads have the processor. It does not stand still while the machine's host runs something else, or for the garbage
// collector's share of the work. How much that is shows in idle, which is always the same work, measured after each event.
type meter struct {
	limits deviceclaims.Limits

	mutex    sync.Mutex
	handlers map[string]*reading // by who handles what
	inside   map[int]*visit      // by thread: the event that a handler of kube-scheduler's has, which asks our plugin about each waiting pod
	attempts reading             // in the scheduling loop
	points   map[string]*reading // of those, by the framework's extension point
	idle     reading
	running  map[types.UID]*attempt
	spun     atomic.Uint32
}

// reading is how often something was done, what it took together, and at most.
type reading struct {
	times      int
	sum, most  time.Duration
	mostOfWhat string
}

func (r *reading) add(took time.Duration, of func() string) {
	r.times++
	r.sum += took
	if took > r.most {
		r.most, r.mostOfWhat = took, of()
	}
}

func (r *reading) String() string {
	return fmt.Sprintf("%d times, %s together, at most %s (%s)", r.times, r.sum.Round(time.Millisecond), r.most.Round(time.Microsecond), r.mostOfWhat)
}

// attempt is what an attempt of a pod has taken.
type attempt struct {
	pod  string
	took time.Duration
}

// visit is what our plugin has had of an event.
type visit struct {
	times int
	took  time.Duration
}

func newMeter(limits deviceclaims.Limits) *meter {
	return &meter{limits: limits, handlers: map[string]*reading{}, points: map[string]*reading{}, inside: map[int]*visit{}, running: map[types.UID]*attempt{}}
}

// threadTime is what the calling thread has had of the processor. The goroutine must be locked to it.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}

// measured runs fn and returns what it took.
func measured(fn func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := threadTime()
	fn()
	return threadTime() - before
}

func (m *meter) handled(who string, took time.Duration, object any) {
	idle := measured(func() {
		for i := range uint32(10_000) { // some ten microseconds
			m.spun.Store(i)
		}
	})
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.idle.add(idle, func() string { return "nothing" })
	if m.handlers[who] == nil {
		m.handlers[who] = &reading{}
	}
	m.handlers[who].add(took, func() string { return nameOf(object) })
}

func nameOf(object any) string {
	if gone, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = gone.Obj
	}
	if o, ok := object.(metav1.Object); ok {
		return o.GetName()
	}
	return fmt.Sprintf("%T", object)
}

// report logs what was measured, and fails if one event handler of ours took longer than handler, or one attempt longer than attempt. What the
// same work took at most is let pass. With the race detector, which makes some work sixty times longer and some none, it fails only if nothing
// was measured.
func (m *meter) report(t *testing.T, handler, attempt time.Duration) {
	t.Helper()
	m.mutex.Lock()
	defer m.mutex.Unlock()
	for _, a := range m.running {
		m.attempts.add(a.took, func() string { return a.pod })
	}
	for point, r := range m.points {
		t.Logf("%s: %s", point, r)
	}
	t.Logf("the same work: %s", &m.idle)
	handler, attempt = handler+m.idle.most, attempt+m.idle.most
	for who, r := range m.handlers {
		t.Logf("%s: %s", who, r)
		if !raceDetector && r.most > handler && !strings.Contains(who, "k8s.io/kubernetes/") { // what our plugin takes in those is measured by itself
			t.Errorf("%s took %s for %s, want at most %s", who, r.most, r.mostOfWhat, handler)
		}
	}
	t.Logf("attempts: %s", &m.attempts)
	if !raceDetector && m.attempts.most > attempt {
		t.Errorf("an attempt took %s for %s, want at most %s", m.attempts.most, m.attempts.mostOfWhat, attempt)
	}
	if len(m.handlers) == 0 || m.attempts.times == 0 {
		t.Error("nothing was measured")
	}
}

// factory measures the handlers of informers.
func (m *meter) factory(f informers.SharedInformerFactory) informers.SharedInformerFactory {
	return &meteredFactory{f, m}
}

type meteredFactory struct {
	informers.SharedInformerFactory
	meter *meter
}

func (f *meteredFactory) Core() core.Interface { return core.New(f, metav1.NamespaceAll, nil) }

func (f *meteredFactory) Resource() resource.Interface {
	return resource.New(f, metav1.NamespaceAll, nil)
}

func (f *meteredFactory) InformerFor(obj kuberuntime.Object, newFunc internalinterfaces.NewInformerFunc) cache.SharedIndexInformer {
	return meteredInformer{f.SharedInformerFactory.InformerFor(obj, newFunc), f.meter, fmt.Sprintf("%T", obj)}
}

type meteredInformer struct {
	cache.SharedIndexInformer
	meter *meter
	kind  string
}

func (i meteredInformer) wrap(handler cache.ResourceEventHandler) cache.ResourceEventHandler {
	return meteredHandler{handler, i.meter, i.kind + " in " + caller()}
}

func (i meteredInformer) AddEventHandler(handler cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return i.SharedIndexInformer.AddEventHandler(i.wrap(handler))
}

func (i meteredInformer) AddEventHandlerWithResyncPeriod(handler cache.ResourceEventHandler, resync time.Duration) (cache.ResourceEventHandlerRegistration, error) {
	return i.SharedIndexInformer.AddEventHandlerWithResyncPeriod(i.wrap(handler), resync)
}

func (i meteredInformer) AddEventHandlerWithOptions(handler cache.ResourceEventHandler, options cache.HandlerOptions) (cache.ResourceEventHandlerRegistration, error) {
	return i.SharedIndexInformer.AddEventHandlerWithOptions(i.wrap(handler), options)
}

// caller is the first function above that is of a scheduler, ours or kube-scheduler.
func caller() string {
	pcs := make([]uintptr, 50)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for {
		frame, more := frames.Next()
		if strings.HasPrefix(frame.Function, "stowage.dev/stowage/pkg/") || strings.HasPrefix(frame.Function, "k8s.io/kubernetes/") {
			return frame.Function
		}
		if !more {
			return "nobody"
		}
	}
}

type meteredHandler struct {
	cache.ResourceEventHandler
	meter *meter
	who   string
}

func (h meteredHandler) OnAdd(obj any, initial bool) {
	h.handle(obj, func() { h.ResourceEventHandler.OnAdd(obj, initial) })
}

func (h meteredHandler) OnUpdate(before, after any) {
	h.handle(after, func() { h.ResourceEventHandler.OnUpdate(before, after) })
}

func (h meteredHandler) OnDelete(obj any) {
	h.handle(obj, func() { h.ResourceEventHandler.OnDelete(obj) })
}

func (h meteredHandler) handle(object any, fn func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	m, thread, ours := h.meter, unix.Gettid(), &visit{}
	m.mutex.Lock()
	m.inside[thread] = ours
	m.mutex.Unlock()
	took := measured(fn)
	m.mutex.Lock()
	delete(m.inside, thread)
	m.mutex.Unlock()
	m.handled(h.who, took, object)
	if ours.times > 0 {
		forHundred := ours.took * 100 / time.Duration(max(100, ours.times))
		m.handled("our plugin, for each hundred pods that wait, in "+strings.ReplaceAll(h.who, "k8s.io/kubernetes/", ""), forHundred, object)
	}
}

// asked measures what our plugin takes to answer kube-scheduler's queue, for one pod.
func (m *meter) asked(what string, pod *v1.Pod, fn func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	took := measured(fn)
	m.handled(what, took, pod)
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if ours := m.inside[unix.Gettid()]; ours != nil {
		ours.times++
		ours.took += took
	}
}

// client measures what is done with the events of a watch on claims. The tracker has no informer: it takes them from the watch.
func (m *meter) client(c kubernetes.Interface) kubernetes.Interface { return meteredClient{c, m} }

type meteredClient struct {
	kubernetes.Interface
	meter *meter
}

func (c meteredClient) ResourceV1() resourceclient.ResourceV1Interface {
	return meteredResources{c.Interface.ResourceV1(), c.meter}
}

type meteredResources struct {
	resourceclient.ResourceV1Interface
	meter *meter
}

func (c meteredResources) ResourceClaims(namespace string) resourceclient.ResourceClaimInterface {
	return meteredClaims{c.ResourceV1Interface.ResourceClaims(namespace), c.meter}
}

type meteredClaims struct {
	resourceclient.ResourceClaimInterface
	meter *meter
}

func (c meteredClaims) Watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	w, err := c.ResourceClaimInterface.Watch(ctx, options)
	return &meteredWatch{Interface: w, meter: c.meter}, err
}

// meteredWatch measures from one look at the channel to the next: a Reflector looks anew for each event, in one goroutine, which is
// the watch's until it ends.
type meteredWatch struct {
	watch.Interface
	meter *meter
	began time.Duration
}

func (w *meteredWatch) ResultChan() <-chan watch.Event {
	if w.began == 0 {
		runtime.LockOSThread()
	} else {
		w.meter.handled("ResourceClaim in pkg/tracker", threadTime()-w.began, "a claim")
	}
	w.began = threadTime()
	return w.Interface.ResultChan()
}

// plugin measures what DeviceClaims takes of the scheduling loop.
func (m *meter) plugin(factory frameworkruntime.PluginFactory) frameworkruntime.PluginFactory {
	return func(ctx context.Context, args kuberuntime.Object, handle fwk.Handle) (fwk.Plugin, error) {
		made, err := factory(ctx, args, handle)
		if err != nil {
			return nil, err
		}
		return meteredPlugin{made.(*deviceclaims.Plugin), m}, nil
	}
}

// attempt adds to what the attempt of a pod has taken.
func (m *meter) attempt(point string, pod *v1.Pod, fn func()) {
	took := measured(fn)
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if m.running[pod.UID] == nil {
		m.running[pod.UID] = &attempt{pod: pod.Name}
	}
	m.running[pod.UID].took += took
	if m.points[point] == nil {
		m.points[point] = &reading{}
	}
	m.points[point].add(took, func() string { return pod.Name })
}

// end counts the attempt of a pod, if it has had one.
func (m *meter) end(pod *v1.Pod) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if a := m.running[pod.UID]; a != nil {
		m.attempts.add(a.took, func() string { return a.pod })
		delete(m.running, pod.UID)
	}
}

type meteredPlugin struct {
	*deviceclaims.Plugin
	meter *meter
}

func (p meteredPlugin) PreEnqueue(ctx context.Context, pod *v1.Pod) (status *fwk.Status) {
	p.meter.asked("PreEnqueue", pod, func() { status = p.Plugin.PreEnqueue(ctx, pod) })
	return status
}

func (p meteredPlugin) EventsToRegister(ctx context.Context) ([]fwk.ClusterEventWithHint, error) {
	events, err := p.Plugin.EventsToRegister(ctx)
	for i := range events {
		hint, what := events[i].QueueingHintFn, "the hint for "+events[i].Event.Label()
		if hint == nil {
			continue
		}
		events[i].QueueingHintFn = func(logger klog.Logger, pod *v1.Pod, before, after any) (answer fwk.QueueingHint, err error) {
			p.meter.asked(what, pod, func() { answer, err = hint(logger, pod, before, after) })
			return answer, err
		}
	}
	return events, err
}

func (p meteredPlugin) PreFilter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodes []fwk.NodeInfo) (result *fwk.PreFilterResult, status *fwk.Status) {
	p.meter.end(pod)
	p.meter.attempt("PreFilter", pod, func() { result, status = p.Plugin.PreFilter(ctx, state, pod, nodes) })
	return result, status
}

func (p meteredPlugin) Filter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, node fwk.NodeInfo) (status *fwk.Status) {
	p.meter.attempt("Filter", pod, func() { status = p.Plugin.Filter(ctx, state, pod, node) })
	return status
}

func (p meteredPlugin) PostFilter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, statuses fwk.NodeToStatusReader) (result *fwk.PostFilterResult, status *fwk.Status) {
	p.meter.attempt("PostFilter", pod, func() { result, status = p.Plugin.PostFilter(ctx, state, pod, statuses) })
	return result, status
}

func (p meteredPlugin) Score(ctx context.Context, state fwk.CycleState, pod *v1.Pod, node fwk.NodeInfo) (score int64, status *fwk.Status) {
	p.meter.attempt("Score", pod, func() { score, status = p.Plugin.Score(ctx, state, pod, node) })
	return score, status
}

func (p meteredPlugin) Reserve(ctx context.Context, state fwk.CycleState, pod *v1.Pod, node string) (status *fwk.Status) {
	p.meter.attempt("Reserve", pod, func() { status = p.Plugin.Reserve(ctx, state, pod, node) })
	return status
}
