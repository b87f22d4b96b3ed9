// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	fwk "k8s.io/kube-scheduler/framework"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/wakeup"
)

const (
	testNamespace = "team-a"
	testDriver    = "gpu.example.com"
	testClass     = "gpu"
	patience      = time.Minute
)

// unhurried are limits that a slow machine does not reach either, so that what is found is the same on each.
var unhurried = Limits{Holders: 30 * time.Second, Obstacle: 30 * time.Second, WakeUp: 30 * time.Second, Evaluation: demand.EvaluationTime}

// world is what exists before the plugin starts.
type world struct {
	nodes   []*v1.Node
	pods    []*v1.Pod
	claims  []*resourceapi.ResourceClaim
	groups  []*schedulingapi.PodGroup
	assumed []*v1.Pod        // on nodes for the scheduler, not in the API
	objects []runtime.Object // slices and classes
	// resolver maps extended resources to classes.
	resolver map[v1.ResourceName]string
	// fence says how the fence is set up. Without it there is none: what is written is looked at alone.
	fence *config.FenceArgs
	// room configures the waiting room.
	room wakeup.Options
	// limits are unhurried if they are not set.
	limits Limits
}

// harness is one plugin with everything around it.
type harness struct {
	t         testing.TB
	ctx       context.Context
	cancel    context.CancelFunc // ends the scheduler
	api       *claimAPI
	client    *fake.Clientset
	plugin    *Plugin
	nodes     []fwk.NodeInfo
	activator *activator
	nominator nominator
	recorder  *events.FakeRecorder
	// informed tells whether pods and nodes are known.
	informed  func() bool
	probes    int  // that lookedAt has made
	startTold bool // see settles
}

func newHarness(t testing.TB, w world) *harness {
	t.Helper()
	client, api := newAPI(t, w)
	return startHarness(t, w, client, api)
}

// newAPI has what exists in a world.
func newAPI(t testing.TB, w world) (*fake.Clientset, *claimAPI) {
	objects := slices.Clone(w.objects)
	for _, node := range w.nodes {
		objects = append(objects, node)
	}
	for _, pod := range w.pods {
		objects = append(objects, pod)
	}
	client := fake.NewSimpleClientset(objects...)
	api := newClaimAPI(t, client)
	for _, claim := range w.claims {
		api.create(claim)
	}
	return client, api
}

// startHarness starts a plugin on an API that is there already, as a scheduler that takes over from another one, and
// waits until it knows what there is.
func startHarness(t testing.TB, w world, client *fake.Clientset, api *claimAPI) *harness {
	t.Helper()
	h := launchHarness(t, w, client, api)
	h.eventually("claims, slices and classes are listed", h.plugin.shared.account.HasSynced) // an attempt does not wait as long
	h.eventually("pods and nodes are known", h.informed)
	return h
}

// settles waits, once, until the tracker has told its subscribers of the claims that were there at the start. It tells of them one by one, and
// later than it knows of them; the last one is a claim that is there for that alone.
func (h *harness) settles() {
	h.t.Helper()
	if h.startTold {
		return
	}
	h.startTold = true
	last := claim("last")
	var told atomic.Bool
	h.plugin.shared.account.Tracker.Subscribe(func(event tracker.Event) {
		if event.Claim.UID == last.UID && event.New == nil {
			told.Store(true)
		}
	})
	h.api.create(last)
	h.api.delete(last.Name)
	h.eventually("the tracker has told of the claims that were there", told.Load)
}

// launchHarness starts a plugin, which may not know anything yet.
func launchHarness(t testing.TB, w world, client *fake.Clientset, api *claimAPI) *harness {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	h := &harness{t: t, ctx: ctx, cancel: cancel, client: client, api: api, activator: &activator{}, recorder: events.NewFakeRecorder(100)}
	factory := informers.NewSharedInformerFactory(client, 0)
	onNodes := slices.DeleteFunc(slices.Clone(w.pods), func(p *v1.Pod) bool { return p.Spec.NodeName == "" })
	onNodes = append(onNodes, w.assumed...)
	snapshot := internalcache.NewTestSnapshotWithPodGroups(onNodes, w.nodes, w.groups)
	handle, err := frameworkruntime.NewFramework(ctx, nil, nil,
		frameworkruntime.WithClientSet(client),
		frameworkruntime.WithInformerFactory(factory),
		frameworkruntime.WithSnapshotSharedLister(snapshot),
		frameworkruntime.WithMutableSnapshotLister(snapshot),
		frameworkruntime.WithPodGroupManager(snapshot),
		frameworkruntime.WithSharedDRAManager(draManager{resolver: w.resolver}),
		frameworkruntime.WithPodActivator(h.activator),
		frameworkruntime.WithPodNominator(&h.nominator),
		frameworkruntime.WithEventRecorder(h.recorder),
		frameworkruntime.WithWaitingPods(frameworkruntime.NewWaitingPodsMap()),
		frameworkruntime.WithPodsInPreBind(frameworkruntime.NewPodsInPreBindMap()),
	)
	if err != nil {
		t.Fatal(err)
	}
	if w.fence == nil {
		w.fence = &config.FenceArgs{Enabled: ptr.To(false)}
	}
	shared := NewShared(cmp.Or(w.limits, unhurried))
	w.room.Budget = shared.room.Budget
	// Nobody is woken by time because the machine is slow.
	w.room.RetryAfter = cmp.Or(w.room.RetryAfter, time.Hour)
	shared.room = w.room
	if h.plugin, err = New(ctx, &config.DeviceClaimsArgs{Fence: w.fence}, handle, shared); err != nil {
		t.Fatal(err)
	}
	h.plugin.binder.Grace = 0
	h.plugin.shared.memory.Attempts.Pauses.Duration = 0
	h.plugin.binder.BindPauses.Duration = time.Millisecond / 10
	pods, nodes := factory.Core().V1().Pods().Informer(), factory.Core().V1().Nodes().Informer()
	factory.Start(ctx.Done())
	t.Cleanup(func() {
		cancel()
		if err := h.plugin.Close(); err != nil {
			t.Error(err)
		}
		factory.Shutdown()
		frameworkruntime.WaitForShutdown(handle)
	})
	h.informed = func() bool { return pods.HasSynced() && nodes.HasSynced() }
	for _, node := range w.nodes {
		info, err := snapshot.NodeInfos().Get(node.Name)
		if err != nil {
			t.Fatal(err)
		}
		h.nodes = append(h.nodes, info)
	}
	return h
}

// eventually waits for a condition that the plugin's goroutines bring about.
func (h *harness) eventually(what string, condition func() bool) {
	h.t.Helper()
	deadline := time.Now().Add(patience)
	for !condition() {
		if time.Now().After(deadline) {
			h.t.Fatalf("still waiting after %s until %s", patience, what)
		}
		time.Sleep(time.Millisecond)
	}
}

// attempt is one scheduling attempt of a pod.
type attempt struct {
	h         *harness
	pod       *v1.Pod
	state     fwk.CycleState
	preFilter *fwk.Status
	limit     *fwk.PreFilterResult
	// filter has the reason, or "", for each node, and statuses what was refused.
	filter   map[string]string
	statuses *framework.NodeToStatus
}

// filterAll runs PreFilter and, if that does not refuse the pod, Filter on all nodes.
func (h *harness) filterAll(pod *v1.Pod) *attempt {
	return h.filterAllIn(framework.NewCycleState(), pod)
}

func (h *harness) filterAllIn(state fwk.CycleState, pod *v1.Pod) *attempt {
	a := &attempt{h: h, pod: pod, state: state, filter: map[string]string{}, statuses: framework.NewDefaultNodeToStatus()}
	a.limit, a.preFilter = h.plugin.PreFilter(h.ctx, a.state, pod, h.nodes)
	if !a.preFilter.IsSuccess() {
		return a
	}
	for _, node := range h.nodes {
		if !a.limit.AllNodes() && !a.limit.NodeNames.Has(node.Node().Name) {
			continue
		}
		status := h.plugin.Filter(h.ctx, a.state, pod, node)
		a.filter[node.Node().Name] = status.Message()
		if !status.IsSuccess() {
			a.statuses.Set(node.Node().Name, status)
		}
	}
	return a
}

// fits returns the nodes that Filter accepted, ordered.
func (a *attempt) fits() []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(a.filter)) {
		if a.filter[name] == "" {
			names = append(names, name)
		}
	}
	return names
}

// reserve runs Reserve on a node on which the pod must fit.
func (a *attempt) reserve(node string) *attempt {
	a.h.t.Helper()
	if !a.preFilter.IsSuccess() || a.filter[node] != "" {
		a.h.t.Fatalf("pod %s does not fit node %s: PreFilter %v, Filter %q", a.pod.Name, node, a.preFilter, a.filter[node])
	}
	if status := a.h.plugin.Reserve(a.h.ctx, a.state, a.pod, node); !status.IsSuccess() {
		a.h.t.Fatalf("Reserve of pod %s on node %s: %v", a.pod.Name, node, status)
	}
	return a
}

func (a *attempt) preBind(node string) *fwk.Status {
	return a.h.plugin.PreBind(a.h.ctx, a.state, a.pod, node)
}

// bind runs everything from Reserve to PreBind, which must succeed.
func (a *attempt) bind(node string) {
	a.h.t.Helper()
	if status := a.reserve(node).preBind(node); !status.IsSuccess() {
		a.h.t.Fatalf("PreBind of pod %s on node %s: %v", a.pod.Name, node, status)
	}
}

func (a *attempt) unreserve(node string) {
	a.h.plugin.Unreserve(a.h.ctx, a.state, a.pod, node)
}

func (a *attempt) postFilter() *fwk.Status {
	_, status := a.h.plugin.PostFilter(a.h.ctx, a.state, a.pod, a.statuses)
	return status
}

// activator records which pods are activated.
type activator struct {
	mutex sync.Mutex
	names []string
	// probe is the last pod of lookedAt's that was activated. One may be activated once more later.
	probe string
}

func (a *activator) Activate(_ klog.Logger, pods map[string]*v1.Pod) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	for _, pod := range pods {
		if strings.HasPrefix(pod.Name, "probe-") {
			a.probe = pod.Name
			continue
		}
		a.names = append(a.names, pod.Name)
	}
}

func (a *activator) probed(name string) bool {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.probe == name
}

// taken returns the pods activated since the last call, ordered.
func (a *activator) taken() []string {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	names := a.names
	a.names = nil
	slices.Sort(names)
	return slices.Compact(names)
}

// nominator knows which pods are nominated to which nodes.
type nominator struct {
	fwk.PodNominator
	mutex sync.Mutex
	pods  map[string][]fwk.PodInfo
}

func (n *nominator) nominate(node string, pods ...*v1.Pod) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.pods = map[string][]fwk.PodInfo{}
	for _, p := range pods {
		n.pods[node] = append(n.pods[node], podInfo(p))
	}
}

// withdraw takes a pod's nomination back.
func (n *nominator) withdraw(p *v1.Pod) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	for node, pods := range n.pods {
		n.pods[node] = slices.DeleteFunc(slices.Clone(pods), func(info fwk.PodInfo) bool { return info.GetPod().UID == p.UID })
	}
}

func (n *nominator) NominatedPodsForNode(node string) []fwk.PodInfo {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return slices.Clone(n.pods[node])
}

func podInfo(p *v1.Pod) fwk.PodInfo {
	info, err := framework.NewPodInfo(p)
	if err != nil {
		panic(err)
	}
	return info
}

// draManager knows which class stands for which extended resource, and nothing else.
type draManager struct {
	fwk.SharedDRAManager
	resolver map[v1.ResourceName]string
}

func (m draManager) DeviceClassResolver() fwk.DeviceClassResolver { return m }

func (m draManager) GetDeviceClass(name v1.ResourceName) *resourceapi.DeviceClass {
	if class, ok := m.resolver[name]; ok {
		return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: class}}
	}
	return nil
}

// Builders. All objects are in one namespace, the UID of everything is its name with "-uid".

func meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: testNamespace, Name: name, UID: types.UID(name + "-uid")}
}

func node(name string, change ...func(*v1.Node)) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name + "-uid")}}
	for _, fn := range change {
		fn(n)
	}
	return n
}

// pod uses the named claims.
func pod(name string, claims ...string) *v1.Pod {
	p := &v1.Pod{ObjectMeta: meta(name)}
	for _, claim := range claims {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, v1.PodResourceClaim{Name: "use-" + claim, ResourceClaimName: ptr.To(claim)})
	}
	return p
}

// templatePod uses one claim made from a template. Without a name, it is still to be made.
func templatePod(name, claim string) *v1.Pod {
	p := &v1.Pod{ObjectMeta: meta(name)}
	p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("one-gpu")}}
	if claim != "" {
		p.Status.ResourceClaimStatuses = []v1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: ptr.To(claim)}}
	}
	return p
}

// extendedPod asks for an extended resource.
func extendedPod(name string, extended v1.ResourceName) *v1.Pod {
	p := &v1.Pod{ObjectMeta: meta(name)}
	requests := v1.ResourceList{extended: resource.MustParse("1")}
	p.Spec.Containers = []v1.Container{{Name: "main", Resources: v1.ResourceRequirements{Requests: requests, Limits: requests}}}
	return p
}

// recordedPod asks for an extended resource, and its status names a claim for it.
func recordedPod(name string, extended v1.ResourceName) *v1.Pod {
	p := extendedPod(name, extended)
	p.Status.ExtendedResourceClaimStatus = &v1.PodExtendedResourceClaimStatus{
		ResourceClaimName: name + "-extended-resources-xyz",
		RequestMappings:   []v1.ContainerExtendedResourceRequest{{ContainerName: "main", ResourceName: string(extended), RequestName: "container-0-request-0"}},
	}
	return p
}

// claim asks for devices of the class, one for each request.
func claim(name string, change ...func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: meta(name)}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: testClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
	}}}
	for _, fn := range change {
		fn(c)
	}
	return c
}

func withSelector(expression string) func(*resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) {
		c.Spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	}
}

func withClass(name string) func(*resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) { c.Spec.Devices.Requests[0].Exactly.DeviceClassName = name }
}

func ownedBy(p *v1.Pod) func(*resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) {
		c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: p.Name, UID: p.UID, Controller: ptr.To(true)}}
	}
}

// deleting marks a claim as being deleted.
func deleting(c *resourceapi.ResourceClaim) {
	c.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	c.Finalizers = []string{resourceapi.Finalizer}
}

// allocated gives a claim devices of a node's pool.
func allocated(nodeName string, devices ...string) func(*resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) {
		c.Finalizers = []string{resourceapi.Finalizer}
		c.Status.Allocation = allocation(nodeName, devices...)
	}
}

func allocation(nodeName string, devices ...string) *resourceapi.AllocationResult {
	a := &resourceapi.AllocationResult{NodeSelector: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
		MatchFields: []v1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: v1.NodeSelectorOpIn, Values: []string{nodeName}}},
	}}}}
	for _, device := range devices {
		a.Devices.Results = append(a.Devices.Results, resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: testDriver, Pool: nodeName, Device: device})
	}
	return a
}

func reservedFor(pods ...string) func(*resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) {
		for _, name := range pods {
			c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: types.UID(name + "-uid")})
		}
	}
}

// class selects all devices of the driver.
func class(name string) *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "` + testDriver + `"`}}},
	}}
}

// slice is the pool of a node, complete in one slice.
func slice(nodeName string, devices ...resourceapi.Device) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: nodeName + "-slice"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: testDriver, NodeName: ptr.To(nodeName), Devices: devices,
		Pool: resourceapi.ResourcePool{Name: nodeName, ResourceSliceCount: 1},
	}}
}

func device(name string, change ...func(*resourceapi.Device)) resourceapi.Device {
	d := resourceapi.Device{Name: name}
	for _, fn := range change {
		fn(&d)
	}
	return d
}

func withModel(model string) func(*resourceapi.Device) {
	return func(d *resourceapi.Device) {
		d.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"model": {StringValue: ptr.To(model)}}
	}
}

// devicesOf returns the names of the devices that a claim has.
func devicesOf(c *resourceapi.ResourceClaim) []string {
	if c.Status.Allocation == nil {
		return nil
	}
	names := []string{}
	for _, result := range c.Status.Allocation.Devices.Results {
		names = append(names, result.Device)
	}
	return names
}

// usersOf returns the names of the pods that a claim is reserved for.
func usersOf(c *resourceapi.ResourceClaim) []string {
	names := sets.New[string]()
	for _, user := range c.Status.ReservedFor {
		names.Insert(user.Name)
	}
	return sets.List(names)
}

// twoNodes has node-a with gpu-0, and node-b with gpu-0 and gpu-1.
func twoNodes() world {
	return world{
		nodes: []*v1.Node{node("node-a"), node("node-b")},
		objects: []runtime.Object{
			class(testClass),
			slice("node-a", device("gpu-0", withModel("A100"))),
			slice("node-b", device("gpu-0", withModel("H100")), device("gpu-1", withModel("H100"))),
		},
	}
}
