// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

var (
	restHistories = flag.Int("histories", 2, "random histories of TestWhatIsPublishedAtRest")
	restSeed      = flag.Uint64("seed", 1, "of the first of them")
)

// life is a random history of a node with four GPUs, of its agents, its kubelet and the API server.
type life struct {
	*rig
	ctx  context.Context
	rand *rand.Rand
	api  *apiServer
	seed uint64

	agent *Agent
	stop  func()
	// claims that the kubelet has prepared, and the GPU of each.
	claims map[types.UID]string
	nodes  int // that there have been
	made   int // claims
	pid    uint32
	// drops: the API server keeps no taints. dropped: it has not, and what it has then is written again in part.
	drops, dropped atomic.Bool

	// mu guards what is used while the agent writes.
	mu  sync.Mutex
	log []string
	// started is when the agent was.
	started time.Time
	// left are claims that are gone from the API server and were not unprepared.
	left map[types.UID]leftClaim
}

type leftClaim struct {
	gpu   string
	since time.Time
}

var lifeGPUs = []string{"gpu-0000-00-1b-0", "gpu-0000-00-1c-0", "gpu-0000-00-1d-0", "gpu-0000-00-1e-0"}

func (l *life) say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.log = append(l.log, time.Now().Format("15:04:05 ")+fmt.Sprintf(format, args...))
}

func (l *life) errorf(format string, args ...any) {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.t.Errorf("seed %d: "+format+"\n  %s", slices.Concat([]any{l.seed}, args, []any{strings.Join(l.log, "\n  ")})...)
}

// start is a new agent, as Run starts it, without what waits for the kernel: time would stand still.
func (l *life) start() {
	l.agent = l.blindAgent(l.ctx, l.api)
	l.mu.Lock()
	l.started = time.Now()
	l.mu.Unlock()
	l.agent.registered.Store(time.Now().Add(-time.Hour).UnixNano())
	recovery, err := l.agent.claims.Recover(l.ctx)
	l.say("an agent starts: %+v, %v", recovery, err)
	watching := background(l.ctx, l.agent.watch)
	time.Sleep(3700 * time.Millisecond) // or else polls and looks, whose intervals fit, are at one instant for ever
	stops := []func(){watching, l.agent.publishing(l.ctx)}
	l.stop = func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// makeNode replaces the Node.
func (l *life) makeNode() {
	l.nodes++
	if err := l.api.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("nodes"), "", "node-1"); err != nil {
		l.t.Fatal(err)
	}
	if err := l.api.Tracker().Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: types.UID(fmt.Sprint("node-", l.nodes))}}); err != nil {
		l.t.Fatal(err)
	}
}

// next is one thing that happens.
func (l *life) next() {
	i := l.rand.IntN(len(lifeGPUs))
	gpu := fmt.Sprint(i)
	do := func(what string, c nvmlsim.Command) {
		_, err := l.machine.Do(c)
		l.say("GPU %d %s: %v", i, what, err)
	}
	switch l.rand.IntN(15) {
	case 0, 1, 2:
		l.prepare(lifeGPUs[i])
	case 3, 4, 5:
		if len(l.claims) > 0 {
			claims := slices.Sorted(maps.Keys(l.claims))
			l.unprepare(claims[l.rand.IntN(len(claims))])
		}
	case 6:
		do("is lost", &nvmlsim.LoseGPU{GPU: gpu})
	case 7:
		do("is back", &nvmlsim.RestoreGPU{GPU: gpu})
	case 8:
		// All at once.
		for i = range len(lifeGPUs) {
			action := nvmlsim.RecoveryNone
			if l.rand.IntN(2) == 0 {
				action = nvmlsim.RecoveryReset
			}
			do("has to be "+string(action), &nvmlsim.SetRecovery{GPU: fmt.Sprint(i), Action: action})
		}
	case 9:
		l.pid++
		do("has a process that stays", &nvmlsim.AddProcess{GPU: gpu, Process: nvmlsim.Process{
			PID: l.pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 64, Pod: "pod-of-" + lifeGPUs[i], Stuck: true,
		}})
	case 10:
		for _, p := range l.machine.State().GPUs[i].Processes {
			do("loses a process", &nvmlsim.RemoveProcess{GPU: gpu, PID: p.PID})
		}
	case 11:
		l.api.away.Store(!l.api.away.Load())
		l.say("the API server is away: %v", l.api.away.Load())
	case 12:
		l.makeNode()
		l.say("node %d", l.nodes)
	case 13:
		l.stop()
		if l.rand.IntN(3) == 0 {
			l.forgetAll()
		}
		time.Sleep(time.Second)
		if l.rand.IntN(3) == 0 {
			l.api.away.Store(true)
			l.say("the API server is away")
		}
		l.start()
	case 14:
		if l.rand.IntN(2) == 0 {
			l.drops.Store(!l.drops.Load())
			l.dropped.Store(true)
			l.say("the API server drops taints: %v", l.drops.Load())
			break
		}
		l.forgetAll()
	}
}

// forgetAll: the kubelet has lost its checkpoint.
func (l *life) forgetAll() {
	l.say("the kubelet forgets %v", slices.Sorted(maps.Keys(l.claims)))
	for uid, gpu := range l.claims {
		l.mu.Lock()
		l.left[uid] = leftClaim{gpu, time.Now()}
		l.mu.Unlock()
		l.forget(uid)
	}
}

func (l *life) prepare(gpu string) {
	l.made++
	claim := allocatedClaim(fmt.Sprint("claim-", l.made), gpu)
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: types.UID("pod-of-" + gpu)}}
	if err := l.api.Tracker().Add(claim); err != nil {
		l.t.Fatal(err)
	}
	results, err := l.agent.newPlugin(func(error) {}).PrepareResourceClaims(l.ctx, []*resourceapi.ResourceClaim{claim})
	l.say("prepare %s for %s: %v, %v", gpu, claim.Name, results[claim.UID].Err, err)
	l.claims[claim.UID] = gpu
	if results[claim.UID].Err != nil {
		l.unprepare(claim.UID) // the pod is deleted
	}
}

// unprepare lets a pod go. When the kubelet is answered the scheduler may give the GPU to another one.
func (l *life) unprepare(uid types.UID) {
	gpu := l.claims[uid]
	sure := !l.api.away.Load() && !l.drops.Load()
	results, err := l.agent.newPlugin(func(error) {}).UnprepareResourceClaims(l.ctx, []kubeletplugin.NamespacedObject{{UID: uid}})
	l.say("unprepare %s: %v, %v", uid, results[uid], err)
	if results[uid] != nil {
		return
	}
	taints, is := l.published()[gpu]
	if sure && prepare.InQuarantine(l.state, gpu) && is && taints == "" {
		l.errorf("the kubelet hears that claim %s is unprepared, its GPU is in quarantine, and the API server does not know", uid)
	}
	l.forget(uid)
}

// forget lets the claim go without the agent.
func (l *life) forget(uid types.UID) {
	delete(l.claims, uid)
	if err := l.api.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), "default", strings.TrimSuffix(string(uid), "-uid")); err != nil {
		l.t.Fatal(err)
	}
}

// slices of the node in the API server.
func (l *life) slices() []resourceapi.ResourceSlice {
	list, err := l.api.Tracker().List(resourceapi.SchemeGroupVersion.WithResource("resourceslices"), resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"), "")
	if err != nil {
		l.t.Fatal(err)
	}
	return list.(*resourceapi.ResourceSliceList).Items
}

// written looks at a slice that the agent writes: what a claim has left that it knows to be gone, or cannot know to be there, is never offered. It
// knows that after two looks, and before the first one nothing is written.
func (l *life) written(slice *resourceapi.ResourceSlice) {
	recorded := l.recorded()
	l.mu.Lock()
	started, gone := l.started, maps.Clone(l.left)
	l.mu.Unlock()
	for _, device := range slice.Spec.Devices {
		for uid, left := range gone {
			known := started.After(left.since)
			if left.gpu == device.Name && known && !l.dropped.Load() && slices.Contains(recorded, uid) && len(device.Taints) == 0 {
				l.errorf("GPU %s is offered, and claim %s, which is gone, has it", left.gpu, uid)
			}
		}
	}
}

// published are the devices, each with the keys and effects of its taints.
func (l *life) published() map[string]string {
	devices := map[string]string{}
	for _, slice := range l.slices() {
		for _, device := range slice.Spec.Devices {
			var taints []string
			for _, taint := range device.Taints {
				taints = append(taints, strings.TrimPrefix(taint.Key, Name+"/")+":"+string(taint.Effect))
			}
			devices[device.Name] = strings.Join(taints, " ")
		}
	}
	return devices
}

// rest brings back what is not there, but for GPUs, some of which stay ill.
func (l *life) rest() (ill map[string]bool) {
	l.api.away.Store(false)
	dropped := l.drops.Load()
	if dropped {
		l.api.ClearActions()
		time.Sleep(time.Hour)
		// After pauses that double, and what may have changed just before.
		if each := len(writes(l.api)) / max(1, len(l.slices())); each > 15 {
			l.errorf("where the API server drops taints each slice is written %d times in an hour", each)
		}
	}
	l.drops.Store(false)
	ill = map[string]bool{}
	for i, gpu := range lifeGPUs {
		for _, p := range l.machine.State().GPUs[i].Processes {
			l.do(&nvmlsim.RemoveProcess{GPU: fmt.Sprint(i), PID: p.PID})
		}
		if ill[gpu] = l.rand.IntN(3) == 0; ill[gpu] && l.rand.IntN(2) == 0 {
			_, _ = l.machine.Do(&nvmlsim.LoseGPU{GPU: fmt.Sprint(i)})
			continue
		}
		_, _ = l.machine.Do(&nvmlsim.RestoreGPU{GPU: fmt.Sprint(i)})
		action := nvmlsim.RecoveryNone
		if ill[gpu] {
			action = nvmlsim.RecoveryReset
		}
		l.do(&nvmlsim.SetRecovery{GPU: fmt.Sprint(i), Action: action})
	}
	l.say("at rest, ill: %v", ill)
	if time.Sleep(10 * time.Minute); dropped {
		time.Sleep(lastAnew)
	}
	return ill
}

// judge compares what is published with the machine and with what the kubelet has.
func (l *life) judge(ill map[string]bool) {
	l.t.Helper()
	for _, slice := range l.slices() {
		if owner := slice.OwnerReferences[0].UID; owner != types.UID(fmt.Sprint("node-", l.nodes)) {
			l.errorf("slice %s is owned by %s, and the Node is node-%d", slice.Name, owner, l.nodes)
		}
	}
	published := l.published()
	for _, gpu := range lifeGPUs {
		taints, is := published[gpu]
		delete(published, gpu)
		// One that was lost before the first agent saw it is not known.
		if !ill[gpu] && (!is || taints != "") || ill[gpu] && is && !strings.Contains(taints, ":No") {
			l.errorf("GPU %s is offered: %v, with the taints %q, and it is ill: %v", gpu, is, taints, ill[gpu])
		}
	}
	if len(published) > 0 {
		l.errorf("nobody knows the devices %v", published)
	}
	// Who was on a GPU that is lost cannot be told, so what is left on it stays until it is back, or the node has been rebooted.
	recorded := slices.DeleteFunc(l.recorded(), func(uid types.UID) bool { return l.isLost(l.left[uid].gpu) })
	if diff := cmp.Diff(slices.Sorted(maps.Keys(l.claims)), recorded, cmpopts.EquateEmpty()); diff != "" {
		l.errorf("claims in the ledger (-the kubelet's +recorded):\n%s", diff)
	}
}

// isLost tells whether NVML does not find a GPU.
func (l *life) isLost(gpu string) bool {
	i := slices.Index(lifeGPUs, gpu)
	return i >= 0 && l.machine.State().GPUs[i].Lost
}

// recorded are the claims in the ledger.
func (l *life) recorded() (claims []types.UID) {
	records, err := ledger.At(durable.OS{}, prepare.LedgerDir(l.state)).Records()
	if err != nil {
		l.errorf("ledger: %v", err)
	}
	for _, record := range records {
		claims = append(claims, record.UID)
	}
	return claims
}

// TestWhatIsPublishedAtRest: after any history the API server has exactly the node's GPUs, those that are ill have a taint that keeps pods away and the
// others none, and neither the agent nor a new one has anything to write.
func TestWhatIsPublishedAtRest(t *testing.T) {
	registerMetrics()
	for i := range *restHistories {
		seed := *restSeed + uint64(i)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				l := &life{
					rig: newRig(t, "t4"), ctx: ctx, rand: rand.New(rand.NewPCG(seed, 1)), api: namingServer(), seed: seed,
					claims: map[types.UID]string{}, left: map[types.UID]leftClaim{},
				}
				l.api.PrependReactor("*", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
					write, ok := action.(clienttesting.CreateAction) // updates have the same methods
					if !ok {
						return false, nil, nil
					}
					slice, ok := write.GetObject().(*resourceapi.ResourceSlice) // of the oldest version while the API server is away
					if !ok {
						return false, nil, nil
					}
					l.written(slice)
					slice.Spec.Devices = slices.Clone(slice.Spec.Devices) // they are those of the next write, too
					for i := range slice.Spec.Devices {
						if l.drops.Load() {
							slice.Spec.Devices[i].Taints = nil
						}
					}
					return false, nil, nil
				})
				l.makeNode()
				l.api.away.Store(l.rand.IntN(4) == 0)
				l.start()
				defer background(ctx, collector(t, l.api, time.Second))()
				for range 15 {
					l.next()
					time.Sleep(time.Duration(l.rand.IntN(90)) * time.Second)
				}
				ill := l.rest()
				l.judge(ill)
				for _, what := range []string{"the agent", "a new agent"} {
					l.api.ClearActions()
					time.Sleep(5 * time.Minute)
					if n := len(writes(l.api)); n > 0 {
						l.errorf("%s writes %d slices at rest", what, n)
					}
					l.judge(ill)
					l.stop()
					if what == "the agent" {
						l.start()
					}
				}
			})
		})
	}
}
