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
	"strings"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/pluginpath"
)

// owner is who serves a resource.
type owner string

const (
	ours   owner = "our device plugin"
	theirs owner = "the device plugin"
)

// kubeletResource is one of the kubelet's device manager. It asks the plugin that was registered last, and of several its list is
// the one that was sent last. When one goes another one takes its place, and the list stays. (PluginConnected, PluginDisconnected
// and genericDeviceUpdateCallback in pkg/kubelet/cm/devicemanager/manager.go.)
type kubeletResource struct {
	plugins []owner
	// devices are healthy or not, by ID.
	devices map[string]bool
	from    owner
}

// own is how the agent is told to offer GPUs.
type own struct {
	gpus []string // names, in order
	node *corev1.Node
	mig  pluginpath.MIGStrategy
	// idle counts the looks at which nobody had a device of our plugin.
	idle map[ledger.PluginDevice]int
	// sent is what the kubelet was sent last of each resource.
	sent map[string]map[string]bool
	// replaced is when the kubelet had less devices of our plugin than before.
	replaced time.Time
	ends     bool
}

// double is a GPU that another device plugin has given to later, while earlier had it.
type double struct {
	gpu            int
	earlier, later *workload
}

func (w *twoPlugins) choosePaths(profile string, r *rand.Rand) {
	w.own.idle, w.own.sent = map[ledger.PluginDevice]int{}, map[string]map[string]bool{}
	w.own.node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid", Annotations: map[string]string{}}}
	w.own.mig = []pluginpath.MIGStrategy{pluginpath.MIGNone, pluginpath.MIGMixed}[r.IntN(2)]
	if profile == twoGPUs && r.IntN(3) == 0 {
		w.rig.shares = discovery.Shares{GPUs: []string{"0"}, MemoryStep: 1 << 30, Replicas: 2}
		w.rig.sharing = config.Rules{Shares: config.TimeSlicing, AcrossNamespaces: true}
	}
	if r.IntN(2) == 0 {
		w.after(between(r, time.Second, 10*time.Second), func() {
			if !w.own.ends {
				w.move(w.anyPaths(r), r)
			}
		})
	}
}

// anyPaths are some paths of the node's GPUs.
func (w *twoPlugins) anyPaths(r *rand.Rand) string {
	list := []string{string(advertise.DRA)}
	for _, gpu := range w.own.gpus {
		list = append(list, gpu+"="+string([]advertise.Path{advertise.DRA, advertise.DevicePlugin, advertise.DevicePlugin}[r.IntN(3)]))
	}
	return strings.Join(list, ",")
}

// move changes the Node's annotation. The agent reads it once a minute, and when it starts.
func (w *twoPlugins) move(paths string, r *rand.Rand) {
	w.moves++
	w.logf("paths: %s", paths)
	w.own.node = w.own.node.DeepCopy()
	w.own.node.Annotations[pluginpath.Annotation] = paths
	w.after(between(r, 100*time.Millisecond, time.Minute), w.readNode)
}

func (w *twoPlugins) readNode() {
	if agent := w.agent.Agent; agent != nil && agent.plugins.NodeRead(quiet(), w.own.node) {
		agent.publisher.refresh()
	}
}

func quiet() context.Context { return klog.NewContext(context.Background(), logr.Discard()) }

// listSlices are those that the API server has.
func (w *twoPlugins) listSlices(clienttesting.Action) (bool, runtime.Object, error) {
	list := &resourceapi.ResourceSliceList{}
	if w.slices != nil {
		list.Items = []resourceapi.ResourceSlice{{Spec: resourceapi.ResourceSliceSpec{Driver: Name, Devices: w.slices}}}
	}
	return true, list, nil
}

// claim is that of the pod, as it was allocated. Of a GPU that is shared it has a share.
func (w *twoPlugins) claim(pod *workload) *resourceapi.ResourceClaim {
	claim := allocatedClaim(pod.name, pod.device)
	if at := w.pools[pod.device]; at.gpu == 0 && len(w.rig.shares.GPUs) > 0 {
		result := &claim.Status.Allocation.Devices.Results[0]
		id := types.UID(fmt.Sprintf("5ba7e000-0000-4000-8000-%012x", at.gpu))
		result.ShareID = &id
		result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{discovery.CapacityMemory: resource.MustParse("4Gi")}
	}
	return claim
}

// advertise tells an agent that starts what its flags say. It reads the Node first of all.
func (w *twoPlugins) advertise(agent *Agent) {
	paths, err := advertise.Parse(string(advertise.DRA))
	if err != nil {
		w.t.Fatal(err)
	}
	agent.Advertise(pluginpath.Advertised{Paths: paths, Strategies: []deviceplugin.Strategy{deviceplugin.CDIByCRI}, MIG: w.own.mig})
	agent.plugins.NodeRead(quiet(), w.own.node)
}

// serve takes GPUs on their way every two seconds, and keeps the kubelet told, as long as that agent runs.
func (w *twoPlugins) serve(ctx context.Context, agent *Agent, number int, look func()) {
	_, offered := agent.plugins.Resources()
	var step func()
	step = func() {
		if w.agent.number != number || w.agent.Agent == nil {
			return
		}
		if agent.plugins.Step(ctx) {
			agent.publisher.refresh()
		}
		select {
		case <-offered:
			_, offered = agent.plugins.Resources()
			w.after(listedAfter, look)
		default:
		}
		resources, _ := agent.plugins.Resources()
		for _, resource := range resources {
			if known := w.kubelet.resources[resource.Name]; known == nil || !slices.Contains(known.plugins, ours) {
				w.registerOurs(number)
			}
			w.lists(ours, resource.Name)
		}
		w.after(2*time.Second, step)
	}
	step()
}

// registerOurs lets the kubelet know what it does not know of ours, if both are still there then.
func (w *twoPlugins) registerOurs(number int) {
	kubelet := w.kubelet.number
	w.after(between(w.r, 100*time.Millisecond, 3*time.Second), func() {
		if w.agent.Agent != nil && w.agent.number == number && w.kubelet.up && w.kubelet.number == kubelet {
			w.connect(ours)
		}
	})
}

// devicesOf are those of each resource that a plugin offers, healthy or not.
func (w *twoPlugins) offers(who owner) map[string]map[string]bool {
	offers := map[string]map[string]bool{}
	add := func(resource, id string, healthy bool) {
		if offers[resource] == nil {
			offers[resource] = map[string]bool{}
		}
		if id != "" {
			offers[resource][id] = healthy
		}
	}
	switch {
	case who == theirs && w.plugin.runs:
		for device, healthy := range w.plugin.devices {
			add(device.Resource, device.ID, healthy)
		}
	case who == ours && w.agent.Agent != nil:
		resources, _ := w.agent.plugins.Resources()
		for _, resource := range resources {
			add(resource.Name, "", false)
			for _, device := range resource.Devices {
				add(resource.Name, device.ID, device.Healthy)
				w.ids[device.ID] = w.pools[device.Name]
			}
		}
	}
	return offers
}

// connect registers the plugin's resources with the kubelet.
func (w *twoPlugins) connect(who owner) {
	for name := range w.offers(who) {
		known := w.kubelet.resources[name]
		if known == nil {
			known = &kubeletResource{}
			w.kubelet.resources[name] = known
		}
		if !slices.Contains(known.plugins, who) {
			known.plugins = append(known.plugins, who)
			w.send(who, name)
			w.logf("%s is registered for %s", who, name)
		}
		if _, known := w.allocatable[name]; !known {
			w.allocatable[name] = 0
		}
	}
}

// lists takes the plugin's list if it has another one than the last that it sent.
func (w *twoPlugins) lists(who owner, resource string) {
	known := w.kubelet.resources[resource]
	if known != nil && slices.Contains(known.plugins, who) && (who == theirs || !maps.Equal(w.own.sent[resource], w.offers(who)[resource])) {
		w.send(who, resource)
	}
}

// send gives the kubelet the plugin's list.
func (w *twoPlugins) send(who owner, resource string) {
	known := w.kubelet.resources[resource]
	if known.from == ours && who == theirs {
		w.own.replaced = time.Now()
	}
	known.devices, known.from = w.offers(who)[resource], who
	if who == ours {
		w.own.sent[resource] = known.devices
	}
}

// disconnect is the end of the plugin's sockets.
func (w *twoPlugins) disconnect(who owner) {
	for _, known := range w.kubelet.resources {
		if !slices.Contains(known.plugins, who) {
			continue
		}
		known.plugins = slices.DeleteFunc(known.plugins, func(o owner) bool { return o == who })
		if who == ours {
			w.own.replaced = time.Now()
		}
		if len(known.plugins) == 0 {
			known.devices = maps.Clone(known.devices)
			for id := range known.devices {
				known.devices[id] = false
			}
		}
	}
}

// asked is the plugin that the kubelet asks, empty if there is none.
func (w *twoPlugins) asked(resource string) owner {
	if known := w.kubelet.resources[resource]; known != nil && len(known.plugins) > 0 {
		return known.plugins[len(known.plugins)-1]
	}
	return ""
}

// offersOfOurs is how many devices of our plugin the kubelet has.
func (w *twoPlugins) offersOfOurs() (n int) {
	for _, known := range w.kubelet.resources {
		if known.from == ours && slices.Contains(known.plugins, ours) {
			n += len(known.devices)
		}
	}
	return n
}

// admit gives devices to the pod as the device manager does, one pod after the other. NVIDIA's plugin agrees to all that it has.
func (w *twoPlugins) admit(pod *workload) {
	if slices.ContainsFunc(w.pods, func(p *workload) bool { return p.admitting }) {
		w.later(pod)
		return
	}
	var free []string
	if known := w.kubelet.resources[pod.resource]; known != nil {
		for id, healthy := range known.devices {
			device := ledger.PluginDevice{Resource: pod.resource, ID: id}
			if healthy && !slices.ContainsFunc(w.pods, func(p *workload) bool { return slices.Contains(p.given, device) }) {
				free = append(free, id)
			}
		}
	}
	who := w.asked(pod.resource)
	if len(free) < pod.n || who == "" {
		w.refuses(pod, "not as many devices")
		return
	}
	slices.Sort(free)
	pod.r.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	ids := free[:pod.n]
	if who == theirs {
		if slices.ContainsFunc(ids, func(id string) bool { return !hasKey(w.offers(theirs)[pod.resource], id) }) {
			w.refuses(pod, "the plugin does not know them")
			return
		}
		w.give(pod, theirs, ids)
		w.starts(pod)
		return
	}
	devices, err := w.devicesOfOurs(pod.resource, ids)
	if err != nil {
		w.refuses(pod, err.Error())
		return
	}
	agent := w.agent.Agent
	pod.admitting, pod.asked = true, time.Now()
	w.call(func() {
		ctx, cancel := context.WithTimeout(quiet(), 5*time.Second)
		defer cancel()
		err = agent.plugins.Allocated(ctx, pod.resource, devices)
	}, func() {
		pod.admitting = false
		if errors.Is(err, deviceplugin.ErrRefused) {
			w.ownRefused++
			w.refuses(pod, err.Error())
			return
		}
		w.give(pod, ours, ids)
		w.later(pod)
	})
}

func hasKey(m map[string]bool, key string) bool { _, ok := m[key]; return ok }

// devicesOfOurs are those of our plugin, in its order.
func (w *twoPlugins) devicesOfOurs(resource string, ids []string) (devices []deviceplugin.Device, err error) {
	resources, _ := w.agent.plugins.Resources()
	for _, r := range resources {
		for _, device := range r.Devices {
			if r.Name == resource && slices.Contains(ids, device.ID) {
				devices = append(devices, device)
			}
		}
	}
	if len(devices) < len(ids) {
		return nil, fmt.Errorf("our plugin has %d of %v", len(devices), ids)
	}
	return devices, nil
}

func (w *twoPlugins) refuses(pod *workload, why string) {
	pod.admitting = false
	w.logf("%s: UnexpectedAdmissionError: %.200s", pod.name, why)
	w.gone(pod)
}

func (w *twoPlugins) give(pod *workload, who owner, ids []string) {
	pod.by, pod.givenAt = who, time.Now()
	for _, id := range ids {
		pod.given = append(pod.given, ledger.PluginDevice{Resource: pod.resource, ID: id})
	}
	w.logf("%s is given %v by %s", pod.name, ids, who)
}

// startOurs starts the container, or tries that. The kubelet asks whoever has the resource by now.
func (w *twoPlugins) startOurs(pod *workload) {
	switch w.asked(pod.resource) {
	case "":
		w.later(pod)
		return
	case theirs: // which does not want to be asked
		pod.by = theirs
		w.starts(pod)
		return
	case ours:
	}
	have := map[ledger.PluginDevice]types.UID{}
	for _, pod := range w.pods {
		for _, device := range pod.given {
			have[device] = types.UID(pod.name)
		}
	}
	w.rig.writeCheckpoint(have)
	ids := make([]string, 0, len(pod.given))
	for _, device := range pod.given {
		ids = append(ids, device.ID)
	}
	devices, err := w.devicesOfOurs(pod.resource, ids)
	if err != nil {
		w.logf("%s: %v", pod.name, err)
		w.later(pod)
		return
	}
	agent := w.agent.Agent
	pod.calling, pod.asked = true, time.Now()
	w.call(func() {
		ctx, cancel := context.WithTimeout(quiet(), (pluginapi.KubeletPreStartContainerRPCTimeoutInSecs-2)*time.Second)
		defer cancel()
		err = agent.plugins.Starting(ctx, pod.resource, devices)
	}, func() {
		pod.calling = false
		switch {
		case err != nil:
			w.ownRefused++
			w.logf("%s does not start: %.300s", pod.name, err)
			w.after(between(pod.r, time.Second, 15*time.Second), func() { w.sync(pod) })
		case pod.ending:
			w.later(pod)
		default:
			w.counts.ours++
			w.starts(pod)
		}
	})
}

func (w *twoPlugins) starts(pod *workload) {
	uses := make([]place, 0, len(pod.given))
	for _, device := range pod.given {
		uses = append(uses, w.ids[device.ID])
	}
	w.counts.pods++
	w.runs(pod, uses)
}

// release takes devices of our plugin back that nobody has, as the reconciler does after two looks.
func (w *twoPlugins) release() {
	agent := w.agent.Agent
	if agent == nil || slices.ContainsFunc(w.pods, func(p *workload) bool { return p.admitting }) {
		return
	}
	records, err := agent.reporter.ledger.Records()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, record := range records {
		if record.Entry == nil || record.Entry.Claim.Plugin == (ledger.PluginDevice{}) {
			continue
		}
		of := record.Entry.Claim.Plugin
		w.own.idle[of]++
		if slices.ContainsFunc(w.pods, func(p *workload) bool { return slices.Contains(p.given, of) }) {
			w.own.idle[of] = 0
		}
		if w.own.idle[of] < 3 {
			continue
		}
		delete(w.own.idle, of)
		if _, err := agent.claims.UnprepareUnused(quiet(), record.Entry); err != nil {
			w.logf("release of %s: %v", of, err)
		}
		if agent.plugins.HeldChanged() {
			agent.publisher.refresh()
		}
	}
}

// holeFor is why nobody can know, when the pod is bound, that its devices may be those of claims. The scheduler compares the number
// of devices that the slices count with what is allocatable. When another plugin's devices have taken the place of our own, there
// are not more of them. That is so until the agent looks.
func (w *twoPlugins) holeFor(pod *workload) string {
	known := w.kubelet.resources[pod.resource]
	switch {
	case pod.resource == "":
		return ""
	case w.marked > w.offersOfOurs() && (!w.canTell() || time.Since(w.own.replaced) < heededAfter):
		return "our devices are counted still, and have gone"
	case known != nil && (known.from == ours || w.asked(pod.resource) == ours):
		return "the pod was bound for our plugin's devices"
	}
	return ""
}

// canTell tells whether the agent has had the time to see what the kubelet says.
func (w *twoPlugins) canTell() bool {
	answers := w.kubelet.up && w.kubelet.deaf == 0 && time.Since(w.kubelet.answers) >= heededAfter
	return answers && w.agent.Agent != nil && time.Since(w.agent.since) >= heededAfter
}

// runs is where containers have their devices. Here it is judged.
func (w *twoPlugins) runs(pod *workload, uses []place) {
	pod.uses = uses
	w.logf("%s runs on %v %v %s", pod.name, uses, pod.given, pod.device)
	beside := false
	for _, other := range w.pods {
		if other == pod {
			continue
		}
		beside = beside || len(other.uses) > 0 && (other.resource == "") != (pod.resource == "")
		for _, at := range uses {
			if slices.ContainsFunc(other.uses, at.overlaps) {
				w.judge(pod, other, at.gpu)
			}
		}
	}
	if beside {
		w.both++
	}
}

// judge says whether pod, which starts, may have the GPU that other has.
func (w *twoPlugins) judge(pod, other *workload, gpu int) {
	unheeded := ""
	switch {
	case pod.by == theirs && other.by == theirs: // it shares as it likes
		return
	case pod.by == ours && other.by == ours && pod.resource == pluginpath.SharedResource && other.resource == pluginpath.SharedResource:
		return
	case pod.by == theirs && other.by == ours:
		unheeded = "the kubelet asks nobody but that plugin"
	case pod.by == theirs:
		unheeded = pod.hole
	case pod.by == ours && other.by == theirs && other.givenAt.After(pod.asked):
		unheeded = "the other one has got it since"
	}
	if unheeded == "" {
		w.wrong("GPU %d is handed out twice: to %s and %s", gpu, other.name, pod.name)
		return
	}
	w.unheeded++
	w.logf("GPU %d is handed out twice, which nobody can prevent: to %s and %s: %s", gpu, other.name, pod.name, unheeded)
	d := &double{gpu: gpu, earlier: other, later: pod}
	w.after(heededAfter, func() { w.isTold(d) })
}

// heededAfter is when the agent tells of a GPU that was given away although it was given, once it runs and the kubelet answers.
const heededAfter = foreignInterval + 10*time.Second

// isTold fails if the agent does not tell of it, as long as both run.
func (w *twoPlugins) isTold(d *double) {
	if len(d.earlier.uses) == 0 || len(d.later.uses) == 0 {
		return
	}
	if !w.canTell() {
		w.after(5*time.Second, func() { w.isTold(d) })
		return
	}
	use := w.agent.opts.Hardware.withheld.foreignUses()[w.own.gpus[d.gpu]]
	if use.plugin == "" {
		w.wrong("the agent does not tell that GPU %d, which %s has, was given to %s, too", d.gpu, d.earlier.name, d.later.name)
		return
	}
	w.noticed++
}

// rest is the end: the plugin goes, all pods end, and then each GPU can be had again: by a claim or, in some histories, by our plugin.
func (w *twoPlugins) rest() {
	w.logf("the end")
	w.own.ends = true
	w.plugin.runs = false
	w.disconnect(theirs)
	end := []advertise.Path{advertise.DRA, advertise.DRA, advertise.DevicePlugin}[w.r.IntN(3)]
	w.move(string(end), w.r)
	for _, pod := range slices.Clone(w.pods) {
		w.ends(pod)
	}
	w.runFor(10 * time.Minute)
	for _, pod := range w.pods {
		w.wrong("%s does not end", pod.name)
	}
	if end == advertise.DRA {
		w.restByClaims()
	} else {
		w.restByOurs()
	}
	w.runFor(time.Minute)
	for _, pod := range w.pods {
		if len(pod.uses) == 0 {
			w.wrong("%s does not get %s%s", pod.name, pod.device, pod.resource)
		}
	}
}

func (w *twoPlugins) restByClaims() {
	for gpu := range w.uuids {
		for device, at := range w.pools {
			if at.gpu == gpu && !slices.ContainsFunc(w.slices, func(d resourceapi.Device) bool { return d.Name == device && len(d.Taints) == 0 }) {
				w.wrong("claims do not get %s any more", device)
			}
		}
		device := ""
		for _, name := range slices.Sorted(maps.Keys(w.pools)) {
			if w.pools[name].gpu == gpu {
				device = cmp.Or(device, name)
			}
		}
		pod := &workload{name: fmt.Sprintf("last-%d", gpu), r: w.r, bound: true, device: device}
		w.pods = append(w.pods, pod)
		w.prepare(pod)
	}
}

func (w *twoPlugins) restByOurs() {
	if len(w.slices) > 0 {
		w.wrong("%d devices are in the slices of a node whose GPUs are all our plugin's", len(w.slices))
	}
	for resource, devices := range w.offers(ours) {
		for id, healthy := range devices {
			if !healthy {
				w.wrong("pods do not get %s of %s any more", id, resource)
			}
			pod := &workload{name: "last-" + id, r: w.r, bound: true, resource: resource, n: 1}
			w.pods = append(w.pods, pod)
			w.admit(pod)
		}
	}
}
