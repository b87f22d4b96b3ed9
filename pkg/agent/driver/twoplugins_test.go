// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/twopaths"
)

// walls are left out to see whether that is noticed.
type walls struct {
	noRuleForPods, noRuleForClaims bool // of the scheduler
	noRefusal                      bool // of prepare
	otherResource                  bool // by which the agent would know that a device is a GPU
}

// place is a GPU by its number, or the MIG device of that UUID on it.
type place struct {
	gpu  int
	part string
}

func (p place) overlaps(q place) bool {
	return p.gpu == q.gpu && (p.part == "" || q.part == "" || p.part == q.part)
}

// workload is a pod, as scheduler and kubelet know it.
type workload struct {
	name string
	// resource and n are what it asks of the device plugin; a pod with a claim has none.
	resource string
	n        int
	r        *rand.Rand
	// bound to the node; device is what its claim has been allocated.
	bound  bool
	device string
	// given are the devices that the kubelet has given it, by which plugin, and since when. admitting: a plugin is being asked for them.
	given     []ledger.PluginDevice
	by        owner
	givenAt   time.Time
	admitting bool
	// asked is when the agent was asked for it last.
	asked time.Time
	// hole is why nobody could know that another device plugin gives it a GPU that a claim has; empty if somebody could.
	hole string
	// uses are where its containers run.
	uses []place
	// ending: its containers are to end. calling: the agent is being asked for it.
	ending, calling bool
}

// twoPlugins is a node with an agent, a stand-in for NVIDIA's device plugin, a kubelet and a scheduler. All but the agent's part is made
// here, and happens one after the other, at times that are random.
type twoPlugins struct {
	t       *testing.T
	r       *rand.Rand
	without walls
	rig     *rig
	api     *apiServer
	start   time.Time
	todo    []scheduled
	answers chan func()
	calls   int

	problem string
	log     []string
	counts

	// pools are the devices of slices by name, and ids those of device plugins: where they are.
	pools, ids map[string]place
	uuids      []string
	migs       []string // of the first GPU

	agent struct {
		*Agent
		plugin *plugin
		cancel func()
		stop   func()
		number int
		since  time.Time
	}
	plugin struct {
		runs    bool
		devices map[ledger.PluginDevice]bool // and whether they are healthy
		number  int
		gone    time.Time
	}
	own     own
	kubelet struct {
		up        bool
		resources map[string]*kubeletResource
		deaf      int // PodResources, to as many who have said so
		synced    time.Time
		number    int
		// answers is since when it does.
		answers time.Time
	}
	// listing is what PodResources says, of which offering are first, and the rest is what pods have. The agent asks at any time.
	mu         sync.Mutex
	listing    []ledger.PluginDevice
	offering   int
	listingErr error

	// What the API server has.
	allocatable, capacity map[string]int64
	slices                []resourceapi.Device
	marked                int // how many of our own devices are counted in the slices
	written               int // the last write of slices that has arrived
	writes                int
	pods                  []*workload
}

type scheduled struct {
	at time.Time
	do func()
}

const (
	twoGPUs = "t4"
	// migGPU has been partitioned by an administrator.
	migGPU = "dgx-h100"
)

func newTwoPlugins(t *testing.T, seed uint64, without walls) *twoPlugins {
	t.Helper()
	w := &twoPlugins{
		t: t, r: rand.New(rand.NewPCG(seed, 2)), without: without, start: time.Now(), answers: make(chan func(), 100), //nolint:gosec // not for secrets
		pools: map[string]place{}, ids: map[string]place{}, allocatable: map[string]int64{}, capacity: map[string]int64{},
	}
	profile := twoGPUs
	if w.r.IntN(4) == 0 {
		profile = migGPU
	}
	w.rig = newRig(t, profile)
	w.rig.devices = func(ofPods bool) ([]ledger.PluginDevice, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !ofPods {
			return w.listing[:w.offering], w.listingErr
		}
		return w.listing, w.listingErr
	}
	if profile == migGPU {
		w.rig.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		w.rig.partition("1g.10gb", 0)
		w.rig.partition("1g.10gb", 1)
	}
	w.api = newAPIServer(&corev1.Node{})
	w.api.PrependReactor("list", "resourceslices", w.listSlices)
	w.kubelet.up, w.kubelet.resources = true, map[string]*kubeletResource{}
	w.choosePaths(profile, rand.New(rand.NewPCG(seed, 4))) //nolint:gosec // not for secrets
	w.tell()
	w.startAgent()
	node := w.agent.opts.Hardware.Node()
	for i := range node.GPUs {
		w.uuids, w.own.gpus = append(w.uuids, node.GPUs[i].UUID), append(w.own.gpus, node.GPUs[i].Name)
		for _, offer := range node.GPUs[i].Offers {
			at := place{gpu: i}
			if offer.Partition != nil {
				at.part = offer.Partition.UUID
				w.migs = append(w.migs, offer.Partition.UUID)
			}
			w.pools[offer.Name] = at
		}
	}
	w.every(10*time.Second, w.postStatus)
	w.every(30*time.Second, w.release)
	w.every(3*time.Second, w.schedule)
	if w.r.IntN(3) > 0 {
		w.after(between(w.r, time.Second, time.Minute), func() { w.comes(w.r) })
	}
	return w
}

// end lets the agent end, so that the bubble can.
func (w *twoPlugins) end() {
	w.drain()
	w.agent.stop()
	time.Sleep(time.Minute)
}

func (w *twoPlugins) logf(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf("%9.3fs ", time.Since(w.start).Seconds())+fmt.Sprintf(format, args...))
}

func (w *twoPlugins) wrong(format string, args ...any) {
	if w.problem == "" {
		w.problem = fmt.Sprintf(format, args...)
		w.logf("%s", w.problem)
	}
}

// after does something later. No two things are at the same instant: their order would be another one each time.
func (w *twoPlugins) after(d time.Duration, do func()) {
	at := time.Now().Add(d).Truncate(time.Microsecond)
	for slices.ContainsFunc(w.todo, func(s scheduled) bool { return s.at.Equal(at) }) {
		at = at.Add(time.Nanosecond)
	}
	w.todo = append(w.todo, scheduled{at, do})
}

func (w *twoPlugins) every(d time.Duration, do func()) {
	w.after(d, func() {
		do()
		w.every(d, do)
	})
}

// between is a random time.
func between(r *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(r.Int64N(int64(most-least)))
}

// runFor lets that much time pass.
func (w *twoPlugins) runFor(d time.Duration) {
	until := time.Now().Add(d)
	for w.problem == "" {
		next := slices.MinFunc(w.todo, func(a, b scheduled) int { return a.at.Compare(b.at) })
		at := next.at
		if at.After(until) {
			at = until
		}
		select {
		case answer := <-w.answers:
			w.calls--
			answer()
		case <-time.After(time.Until(at)):
			if next.at.After(until) {
				return
			}
			w.todo = slices.DeleteFunc(w.todo, func(s scheduled) bool { return s.at.Equal(next.at) })
			next.do()
		}
		w.tell()
		w.publishChanges()
	}
}

// call asks the agent, which may take its time. then is done with the answer.
func (w *twoPlugins) call(ask, then func()) {
	w.calls++
	go func() {
		ask()
		w.answers <- then
	}()
}

// drain waits for the agent's answers. Nobody hears them.
func (w *twoPlugins) drain() {
	for ; w.calls > 0; w.calls-- {
		<-w.answers
	}
}

// tell says what PodResources would answer now.
func (w *twoPlugins) tell() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listing, w.offering, w.listingErr = nil, 0, nil
	if !w.kubelet.up || w.kubelet.deaf > 0 {
		w.listingErr = errors.New("connection refused")
		return
	}
	list := func(device ledger.PluginDevice) {
		if w.without.otherResource {
			device = ledger.PluginDevice{Resource: "nvidia.com/hostdev", ID: "nic-" + device.ID}
		}
		w.listing = append(w.listing, device)
	}
	for name, resource := range w.kubelet.resources {
		for id, healthy := range resource.devices {
			if healthy {
				list(ledger.PluginDevice{Resource: name, ID: id})
			}
		}
	}
	w.offering = len(w.listing)
	if time.Now().Before(w.kubelet.synced) {
		return
	}
	for _, pod := range w.pods {
		for _, device := range pod.given {
			list(device)
		}
	}
}

// The agent.

func (w *twoPlugins) startAgent() {
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logr.Discard()))
	a := &w.agent
	a.number++
	a.since = time.Now()
	agent := w.rig.agent(ctx, w.api)
	if _, err := agent.claims.Recover(ctx); err != nil {
		w.t.Fatal(err)
	}
	w.advertise(agent)
	agent.plugins.HeldChanged()
	agent.publisher.leading()
	agent.reporter.recorder = &record.FakeRecorder{}
	stop := background(ctx, agent.reporter.run)
	a.Agent, a.cancel = agent, cancel
	a.plugin = agent.newPlugin(func(error) {})
	a.plugin.told = func(context.Context, []string) {}
	if w.without.noRefusal {
		a.plugin.refuse = func(context.Context, []*resourceapi.ResourceClaim) map[types.UID]error { return nil }
	}
	a.stop = func() { cancel(); stop() }
	number := a.number
	look := func() {
		if w.agent.number == number && w.agent.Agent != nil {
			agent.lookForForeign(ctx)
		}
	}
	look()
	agent.publisher.refresh()
	w.every(foreignInterval, look)
	w.serve(ctx, agent, number, look)
}

// stopAgent ends it. A call that is under way is answered unless it is killed.
func (w *twoPlugins) stopAgent(killed bool) {
	if killed {
		w.agent.cancel()
		for ; w.calls > 0; w.calls-- {
			<-w.answers
		}
		for _, pod := range w.pods {
			if pod.calling {
				pod.calling = false
				w.later(pod)
			}
			if pod.admitting {
				w.refuses(pod, "the plugin has gone")
			}
		}
	}
	for w.calls > 0 {
		(<-w.answers)()
		w.calls--
	}
	w.agent.stop()
	w.agent.Agent, w.agent.plugin = nil, nil
	w.disconnect(ours)
}

// publishChanges writes the slices if the agent wants that, which arrives some time later.
func (w *twoPlugins) publishChanges() {
	if w.agent.Agent == nil {
		return
	}
	select {
	case <-w.agent.publisher.changed:
	default:
		return
	}
	var devices []resourceapi.Device
	for _, slice := range w.agent.publisher.wanted().Pools["node-1"].Slices {
		for i := range slice.Devices {
			devices = append(devices, *slice.Devices[i].DeepCopy())
		}
	}
	w.writes++
	n, marked := w.writes, w.offersOfOurs()
	w.after(between(w.r, 50*time.Millisecond, 2*time.Second), func() {
		if n < w.written {
			return
		}
		w.slices, w.written, w.marked = devices, n, marked
		tainted := 0
		for i := range devices {
			if twopaths.IsTainted(Name, &devices[i]) {
				tainted++
			}
		}
		w.logf("slices: %d devices, %d of device plugins", len(devices), tainted)
	})
}

// The stand-in for NVIDIA's device plugin.

// configure takes the resources and IDs of one of its configurations: whole GPUs, replicas, and MIG devices.
func (w *twoPlugins) configure(r *rand.Rand) {
	w.plugin.devices = map[ledger.PluginDevice]bool{}
	add := func(resource, id string, at place) {
		w.plugin.devices[ledger.PluginDevice{Resource: resource, ID: id}] = true
		w.ids[id] = at
	}
	replicas, resource := 0, "nvidia.com/gpu"
	switch r.IntN(4) {
	case 0:
		replicas = 2
	case 1:
		replicas, resource = 2, "nvidia.com/gpu.shared"
	}
	gpus := r.Perm(len(w.uuids))[:1+r.IntN(3)]
	oldMIG := r.IntN(3) == 0
	for _, gpu := range gpus {
		if gpu == 0 && len(w.migs) > 0 {
			continue
		}
		if replicas == 0 {
			add(resource, w.uuids[gpu], place{gpu: gpu})
		}
		for n := range replicas {
			add(resource, fmt.Sprintf("%s::%d", w.uuids[gpu], n), place{gpu: gpu})
		}
	}
	for i, mig := range w.migs {
		id := mig
		if oldMIG { // as with drivers before R470
			id = fmt.Sprintf("MIG-%s/%d/0", w.uuids[0], 7+i)
		}
		add("nvidia.com/mig-1g.10gb", id, place{gpu: 0, part: mig})
	}
}

// comes lets it start. It is configured anew only when it has been away for long enough that scheduler and agent have heard of that:
// nobody can tell two configurations with equally many devices apart.
func (w *twoPlugins) comes(r *rand.Rand) {
	if w.plugin.runs || w.own.ends {
		return
	}
	if w.plugin.devices == nil || time.Since(w.plugin.gone) > 3*time.Minute {
		w.configure(r)
	}
	for device := range w.plugin.devices {
		if _, known := w.allocatable[device.Resource]; !known {
			w.allocatable[device.Resource] = 0
		}
	}
	w.plugin.runs = true
	w.plugin.number++
	w.register(r, 3*time.Second)
}

// register lets the kubelet know the plugin soon, if both are still there then.
func (w *twoPlugins) register(r *rand.Rand, most time.Duration) {
	plugin, kubelet := w.plugin.number, w.kubelet.number
	w.after(between(r, 100*time.Millisecond, most), func() {
		if w.plugin.runs && w.plugin.number == plugin && w.kubelet.up && w.kubelet.number == kubelet {
			w.connect(theirs)
			w.logf("the device plugin is registered by nvidia-gpu.sock with %d devices", len(w.plugin.devices))
		}
	})
}

// The kubelet.

// postStatus tells the API server what can be allocated.
func (w *twoPlugins) postStatus() {
	if !w.kubelet.up {
		return
	}
	clear(w.capacity)
	for resource := range w.allocatable {
		w.allocatable[resource] = 0
	}
	for name, resource := range w.kubelet.resources {
		w.allocatable[name] = 0
		w.capacity[name] = int64(len(resource.devices))
		for _, healthy := range resource.devices {
			if healthy {
				w.allocatable[name]++
			}
		}
	}
}

// later lets the kubelet look at the pod soon.
func (w *twoPlugins) later(pod *workload) {
	w.after(between(pod.r, 200*time.Millisecond, 4*time.Second), func() { w.sync(pod) })
}

// sync does the next thing for a pod.
func (w *twoPlugins) sync(pod *workload) {
	switch {
	case !slices.Contains(w.pods, pod) || pod.calling || pod.admitting:
	case !w.kubelet.up:
		w.later(pod)
	case pod.ending:
		w.finish(pod)
	case len(pod.uses) > 0: // it runs
	case len(pod.given) > 0:
		w.startOurs(pod)
	case pod.resource != "":
		w.admit(pod)
	default:
		w.prepare(pod)
	}
}

// prepare asks the agent, again and again.
func (w *twoPlugins) prepare(pod *workload) {
	if w.agent.Agent == nil {
		w.later(pod)
		return
	}
	pod.calling = true
	pod.asked = time.Now()
	plugin, claim := w.agent.plugin, w.claim(pod)
	var err error
	w.call(func() {
		ctx, cancel := context.WithTimeout(klog.NewContext(context.Background(), logr.Discard()), 45*time.Second)
		defer cancel()
		var results map[types.UID]kubeletplugin.PrepareResult
		if results, err = plugin.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{claim}); err == nil {
			err = results[claim.UID].Err
		}
	}, func() {
		pod.calling = false
		if err != nil {
			w.refused++
			w.logf("%s: prepare: %.200s", pod.name, err)
			w.after(between(pod.r, time.Second, 15*time.Second), func() { w.sync(pod) })
			return
		}
		if pod.ending {
			w.later(pod)
			return
		}
		w.counts.claims++
		w.runs(pod, []place{w.pools[pod.device]})
	})
}

// again asks for a claim that is prepared, as a kubelet that has started does. That the device plugin offers its GPU by now harms it no
// more.
func (w *twoPlugins) again(pod *workload) {
	w.after(between(pod.r, time.Second, 5*time.Second), func() {
		if w.agent.Agent == nil || pod.calling || pod.ending || !w.kubelet.up {
			return
		}
		pod.calling = true
		plugin, claim := w.agent.plugin, w.claim(pod)
		var results map[types.UID]kubeletplugin.PrepareResult
		w.call(func() {
			results, _ = plugin.PrepareResourceClaims(klog.NewContext(context.Background(), logr.Discard()), []*resourceapi.ResourceClaim{claim})
		}, func() {
			pod.calling = false
			if err := results[claim.UID].Err; err != nil {
				w.wrong("%s, which runs, is not prepared again: %v", pod.name, err)
			}
		})
	})
}

// finish lets a pod whose containers have ended give back what it has.
func (w *twoPlugins) finish(pod *workload) {
	pod.uses, pod.given = nil, nil
	if pod.resource != "" || !pod.bound {
		w.gone(pod)
		return
	}
	if w.agent.Agent == nil {
		w.later(pod)
		return
	}
	pod.calling = true
	plugin, claim := w.agent.plugin, w.claim(pod)
	var err error
	w.call(func() {
		ctx := klog.NewContext(context.Background(), logr.Discard())
		var results map[types.UID]error
		results, err = plugin.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{NamespacedName: types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, UID: claim.UID}})
		err = errors.Join(err, results[claim.UID])
	}, func() {
		pod.calling = false
		if err != nil {
			w.logf("%s: unprepare: %.200s", pod.name, err)
			w.later(pod)
			return
		}
		w.gone(pod)
	})
}

// gone is known to the scheduler at once, and only when the kubelet has told it.
func (w *twoPlugins) gone(pod *workload) {
	w.pods = slices.DeleteFunc(w.pods, func(p *workload) bool { return p == pod })
	w.logf("%s is gone", pod.name)
}

// The scheduler, by what the API server has.

type devicesOf []resourceapi.Device

func (d devicesOf) Len() int                         { return len(d) }
func (d devicesOf) Device(i int) *resourceapi.Device { return &d[i] }

func (w *twoPlugins) counted() twopaths.Plugins {
	plugins := twopaths.Plugins{}
	for resource, n := range w.allocatable {
		count := twopaths.Offer(n, w.capacity[resource])
		for _, pod := range w.pods {
			if pod.bound && pod.resource == resource {
				count.Hold(int64(pod.n))
			}
		}
		plugins[corev1.ResourceName(resource)] = count
	}
	return plugins
}

func (w *twoPlugins) schedule() {
	for _, pod := range slices.Clone(w.pods) {
		if !pod.bound && !pod.ending {
			w.bind(pod)
		}
	}
}

func (w *twoPlugins) bind(pod *workload) {
	plugins := w.counted()
	claimed := func(device string) bool {
		at := w.pools[device]
		return slices.ContainsFunc(w.pods, func(p *workload) bool { return p.device != "" && w.pools[p.device].overlaps(at) })
	}
	if pod.resource != "" {
		count := plugins[corev1.ResourceName(pod.resource)]
		if w.allocatable[pod.resource]-count.Held < int64(pod.n) {
			return
		}
		untold := w.slices == nil && slices.ContainsFunc(w.pods, func(p *workload) bool { return p.device != "" })
		if (untold || plugins.KeepFromPods(Name, devicesOf(w.slices), claimed)) && !w.without.noRuleForPods {
			w.podsKept++
			return
		}
	} else {
		if plugins.KeepFromClaims(Name, devicesOf(w.slices)) && !w.without.noRuleForClaims {
			w.claimsKept++
			return
		}
		var free []string
		for i := range w.slices {
			if len(w.slices[i].Taints) == 0 && !claimed(w.slices[i].Name) {
				free = append(free, w.slices[i].Name)
			}
		}
		if len(free) == 0 {
			return
		}
		pod.device = free[pod.r.IntN(len(free))]
	}
	pod.bound, pod.hole = true, w.holeFor(pod)
	w.logf("%s is bound %s", pod.name, pod.device)
	w.later(pod)
}

// happen lets an event happen.
func (w *twoPlugins) happen(e event) {
	r := rand.New(rand.NewPCG(e.Seed, 3)) //nolint:gosec // not for secrets
	w.logf("%s", e.What)
	switch e.What {
	case aClaimComes:
		pod := &workload{name: fmt.Sprintf("claim-%d", e.Seed%10000), r: r}
		w.pods = append(w.pods, pod)
		w.bind(pod)
	case aPodComes:
		resources := slices.Sorted(maps.Keys(w.allocatable))
		if len(resources) == 0 {
			return
		}
		pod := &workload{name: fmt.Sprintf("pod-%d", e.Seed%10000), r: r, resource: resources[r.IntN(len(resources))], n: 1 + r.IntN(2)}
		w.pods = append(w.pods, pod)
		w.bind(pod)
	case aPodEnds:
		if len(w.pods) > 0 {
			w.ends(w.pods[r.IntN(len(w.pods))])
		}
	case thePluginComes:
		w.comes(r)
	case thePluginGoes:
		if w.plugin.runs {
			w.plugin.runs, w.plugin.gone = false, time.Now()
			w.disconnect(theirs)
		}
	case thePluginCrashes:
		if !w.plugin.runs {
			return
		}
		w.disconnect(theirs)
		w.plugin.number++
		w.register(r, 20*time.Second)
	case aDeviceChanges:
		devices := slices.SortedFunc(maps.Keys(w.plugin.devices), func(a, b ledger.PluginDevice) int { return cmp.Compare(a.ID, b.ID) })
		if len(devices) > 0 {
			device := devices[r.IntN(len(devices))]
			w.plugin.devices[device] = !w.plugin.devices[device]
			w.lists(theirs, device.Resource)
		}
	case theGPUsAreMoved:
		w.move(w.anyPaths(r), r)
	case theKubeletStarts:
		if !w.kubelet.up {
			return
		}
		w.restarts++
		w.kubelet.up, w.kubelet.resources = false, map[string]*kubeletResource{}
		w.after(between(r, time.Second, 100*time.Second), func() {
			w.logf("the kubelet is up")
			w.kubelet.up = true
			w.kubelet.number++
			w.kubelet.answers = time.Now()
			w.kubelet.synced = time.Now().Add(between(r, time.Second, 10*time.Second))
			w.slices, w.written = nil, w.writes+1 // it deletes them
			w.writes++
			w.after(between(r, time.Second, 3*time.Second), func() {
				if w.agent.Agent != nil {
					w.agent.publisher.writeAnew()
				}
			})
			w.register(r, 15*time.Second)
			for _, pod := range w.pods {
				if pod.resource == "" && len(pod.uses) > 0 {
					w.again(pod)
				}
			}
		})
	case theKubeletIsDeaf:
		w.kubelet.deaf++
		w.after(between(r, time.Second, 2*time.Minute), func() { w.kubelet.deaf--; w.kubelet.answers = time.Now() })
	case theAgentStarts, theAgentIsKilled:
		if w.agent.Agent == nil {
			return
		}
		w.restarts++
		w.stopAgent(e.What == theAgentIsKilled)
		w.after(between(r, time.Second, time.Minute), func() {
			w.startAgent()
			w.logf("the agent runs")
		})
	}
}

func (w *twoPlugins) ends(pod *workload) {
	if pod.ending {
		return
	}
	pod.ending = true
	if !pod.bound {
		w.gone(pod)
		return
	}
	w.later(pod)
}
