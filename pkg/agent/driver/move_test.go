// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/twopaths"
)

// mover is a node with two GPUs that are moved, and two that are not.
type mover struct {
	t      *testing.T
	ctx    context.Context //nolint:containedctx // of the test
	r      *rig
	api    *apiServer
	node   *corev1.Node
	agent  *Agent
	stop   func()
	events *record.FakeRecorder
	told   []string
}

func newMover(ctx context.Context, t *testing.T) *mover {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}}
	m := &mover{t: t, ctx: ctx, r: newRig(t, "t4"), api: newAPIServer(node), node: node}
	m.start()
	return m
}

// start starts another agent, which reads the Node.
func (m *mover) start() {
	m.t.Helper()
	if m.stop != nil {
		m.stop()
	}
	m.agent, m.stop = m.r.pluginAgent(m.ctx, m.api, "dra", pluginpath.MIGNone)
	if _, err := m.agent.claims.Recover(m.ctx); err != nil {
		m.t.Fatal(err)
	}
	m.events = record.NewFakeRecorder(100)
	m.agent.reporter.recorder = m.events
	m.agent.plugins.HeldChanged()
	m.agent.plugins.NodeRead(m.ctx, m.node)
	m.step()
}

// step is one of the agent's, and what it wants in the slices is written.
func (m *mover) step() {
	m.t.Helper()
	m.agent.plugins.Step(m.ctx)
	m.publish()
	m.agent.plugins.Step(m.ctx)
	for len(m.events.Events) > 0 {
		m.told = append(m.told, <-m.events.Events)
	}
}

// publish writes what the agent wants in the slices.
func (m *mover) publish() {
	m.t.Helper()
	slices := m.api.ResourceV1().ResourceSlices()
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}, Spec: resourceapi.ResourceSliceSpec{Driver: Name, NodeName: new("node-1"), Pool: resourceapi.ResourcePool{Name: "node-1"}}}
	for _, s := range m.agent.publisher.wanted().Pools["node-1"].Slices {
		slice.Spec.Devices = append(slice.Spec.Devices, s.Devices...)
	}
	_ = slices.Delete(m.ctx, "slice", metav1.DeleteOptions{}) // there may be none
	if _, err := slices.Create(m.ctx, slice, metav1.CreateOptions{}); err != nil {
		m.t.Fatal(err)
	}
}

// inSlices and offered tell where a GPU can be had: in the API server's slices, and by the kubelet.
func (m *mover) inSlices(gpu string) bool {
	m.t.Helper()
	slice, err := m.api.ResourceV1().ResourceSlices().Get(m.ctx, "slice", metav1.GetOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	return slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool { return d.Name == gpu })
}

// onlyForItsClaim fails if another claim may be allocated the GPU.
func (m *mover) onlyForItsClaim(gpu string) {
	m.t.Helper()
	slice, err := m.api.ResourceV1().ResourceSlices().Get(m.ctx, "slice", metav1.GetOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	for _, device := range slice.Spec.Devices {
		is := slices.ContainsFunc(device.Taints, func(t resourceapi.DeviceTaint) bool {
			t.TimeAdded = nil
			return t == pluginpath.Taint(Name, advertise.DevicePlugin)
		})
		if is != (device.Name == gpu) {
			m.t.Errorf("%s has the taints %v", device.Name, device.Taints)
		}
	}
}

func (m *mover) offered(gpu string) bool {
	return slices.Contains(told(m.agent.plugins), gpu+" healthy")
}

// once fails if the GPU can be had in two ways.
func (m *mover) once(when, gpu string) {
	m.t.Helper()
	device := deviceplugin.Device{ID: m.uuid(gpu), UUID: m.uuid(gpu), Name: gpu}
	if m.inSlices(gpu) && (m.offered(gpu) || m.agent.plugins.Allocated(m.ctx, pluginpath.GPUResource, []deviceplugin.Device{device}) == nil) {
		m.t.Errorf("%s: %s is in a slice, and the kubelet gets it", when, gpu)
	}
}

func (m *mover) uuid(gpu string) string {
	for _, g := range m.agent.opts.Hardware.Node().GPUs {
		if g.Name == gpu {
			return g.UUID
		}
	}
	m.t.Fatalf("no GPU %s", gpu)
	return ""
}

func (m *mover) annotate(paths string) {
	m.node.Annotations = map[string]string{pluginpath.Annotation: paths}
	m.agent.plugins.NodeRead(m.ctx, m.node)
}

func (m *mover) prepare(name, gpu string) error {
	results, err := m.agent.newPlugin(func(error) {}).PrepareResourceClaims(m.ctx, []*resourceapi.ResourceClaim{allocatedClaim(name, gpu)})
	return errors.Join(err, results[types.UID(name+"-uid")].Err)
}

func (m *mover) allocate(gpu string) error {
	return m.agent.plugins.Allocated(m.ctx, pluginpath.GPUResource, []deviceplugin.Device{{ID: m.uuid(gpu), UUID: m.uuid(gpu), Name: gpu}})
}

// TestAGPUIsMovedWhileTheAgentRuns, to the device plugin and back, and waits each time for who has it. Before each step the agent may be
// killed: the next one goes on.
func TestAGPUIsMovedWhileTheAgentRuns(t *testing.T) {
	toPlugin := t4First + "=device-plugin," + t4Second + "=device-plugin"
	for killedBefore := range 10 {
		t.Run(fmt.Sprint(killedBefore), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				m := newMover(ctx, t)
				defer func() { m.stop() }()
				want := func(when string, inSlices, offered bool) {
					t.Helper()
					if got := [2]bool{m.inSlices(t4First), m.offered(t4First)}; got != [2]bool{inSlices, offered} {
						t.Errorf("%s: in a slice %t, offered %t; want %t, %t", when, got[0], got[1], inSlices, offered)
					}
					if !m.inSlices("gpu-0000-00-1d-0") || m.offered("gpu-0000-00-1d-0") {
						t.Errorf("%s: a GPU that is not moved has another path", when)
					}
				}
				steps := []struct {
					name string
					do   func()
				}{
					{"a claim has it", func() {
						if err := m.prepare("train", t4First); err != nil {
							t.Error(err)
						}
						want("by claims", true, false)
					}},
					{"it is moved", func() {
						m.annotate(toPlugin)
						m.step()
						want("moved, while a claim has it", true, false)
						m.onlyForItsClaim(t4First)
					}},
					{"the claim's pod runs on", func() {
						time.Sleep(time.Minute)
						m.step()
						want("while a claim has it", true, false)
						m.onlyForItsClaim(t4First)
						if !m.offered(t4Second) {
							t.Error("the one that nobody has waits, too")
						}
						if err := m.allocate(t4First); !errors.Is(err, deviceplugin.ErrRefused) {
							t.Errorf("a pod gets what a claim has: %v", err)
						}
					}},
					{"the claim ends", func() {
						results, err := m.agent.newPlugin(func(error) {}).UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{UID: "train-uid"}})
						if err := errors.Join(err, results["train-uid"]); err != nil {
							t.Error(err)
						}
						m.step()
						want("moved to the device plugin", false, true)
						if err := m.prepare("late", t4First); err == nil {
							t.Error("a claim gets it")
						}
					}},
					{"a pod has it", func() {
						if err := m.allocate(t4First); err != nil {
							t.Error(err)
						}
						for _, gpu := range []string{t4First, t4Second} {
							m.r.pluginDevices = append(m.r.pluginDevices, ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: m.uuid(gpu)})
						}
						time.Sleep(time.Minute)
					}},
					{"it is moved back", func() {
						m.annotate("dra")
						m.step()
						want("moved back, while a pod has it", false, false)
						if m.inSlices(t4Second) {
							t.Error("the other one is in a slice while the kubelet lists it")
						}
						if err := m.allocate(t4First); err != nil {
							t.Errorf("the pod's next container: %v", err)
						}
						if err := m.allocate(t4Second); !errors.Is(err, deviceplugin.ErrRefused) {
							t.Errorf("another pod gets one that has been moved: %v", err)
						}
					}},
					{"the pod runs on", func() { time.Sleep(2 * time.Minute); m.step(); want("while a pod has it", false, false) }},
					{"the pod ends", func() {
						if err := m.agent.claims.Unprepare(ctx, hold.UID(m.r.pluginDevices[0])); err != nil {
							t.Error(err)
						}
						m.step()
					}},
					{"the kubelet does not list it any more", func() {
						m.r.pluginDevices = nil
						for range 4 {
							time.Sleep(30 * time.Second)
							m.step()
						}
						want("moved back", true, false)
						if err := m.prepare("next", t4First); err != nil {
							t.Error(err)
						}
					}},
					{"it is moved again", func() {
						m.annotate(toPlugin)
						m.agent.plugins.Step(ctx) // before the slices are written
						if !m.inSlices(t4Second) || m.offered(t4Second) {
							t.Errorf("while a slice has it, offered are %v", told(m.agent.plugins))
						}
						m.step()
						if m.inSlices(t4Second) || !m.offered(t4Second) {
							t.Errorf("when none has it, offered are %v", told(m.agent.plugins))
						}
					}},
				}
				for i, step := range steps {
					if i == killedBefore {
						m.start()
					}
					step.do()
					for _, gpu := range []string{t4First, t4Second} {
						m.once(step.name, gpu)
					}
				}
				for _, text := range []string{"device " + t4First + " waits to be offered by device-plugin: claim default/train has it", "device " + t4First + " waits to be offered by dra: a pod, by nvidia.com/gpu, has it"} {
					if !slices.ContainsFunc(m.told, func(event string) bool { return strings.Contains(event, text) }) {
						t.Errorf("no event %q in %q", text, m.told)
					}
				}
			})
		})
	}
}

// TestNothingIsOfferedBeforeTheNodeIsRead: the flag may not count. Of two GPUs that are the device plugin's by the flag, one is for claims by
// the Node.
func TestNothingIsOfferedBeforeTheNodeIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		m := newMover(ctx, t)
		defer func() { m.stop() }()
		a := m.r.agent(ctx, m.api)
		defer background(ctx, a.reporter.run)()
		paths, err := advertise.Parse(t4First + "=device-plugin," + t4Second + "=device-plugin")
		if err != nil {
			t.Fatal(err)
		}
		a.Advertise(pluginpath.Advertised{Paths: paths})
		m.agent = a
		m.publish() // no slice has them
		a.plugins.Step(ctx)
		if devices := told(a.plugins); len(devices) > 0 {
			t.Errorf("the Node is not read, and the kubelet is told of %v", devices)
		}
		m.annotate(t4Second + "=device-plugin")
		m.step()
		if devices := told(a.plugins); !slices.Equal(devices, []string{t4Second + " healthy"}) || !m.inSlices(t4First) {
			t.Errorf("told of %v; the other one is in a slice: %t", devices, m.inSlices(t4First))
		}
	})
}

// TestAClaimOfAMomentAgo: a GPU that a claim has got since the ledger was read last is in the slices when the Node is read, before the ledger
// is read again. One that nobody has is there until then, too.
func TestAClaimOfAMomentAgo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		m := newMover(ctx, t)
		defer func() { m.stop() }()
		if err := m.prepare("train", t4First); err != nil {
			t.Fatal(err)
		}
		m.annotate(t4First + "=device-plugin," + t4Second + "=device-plugin")
		wanted := func(gpu string) bool {
			return slices.ContainsFunc(m.agent.publisher.wanted().Pools["node-1"].Slices, func(s resourceslice.Slice) bool {
				return slices.ContainsFunc(s.Devices, func(d resourceapi.Device) bool { return d.Name == gpu })
			})
		}
		if !wanted(t4First) {
			t.Error("the claim's GPU leaves the slices")
		}
		m.agent.plugins.HeldChanged()
		if !wanted(t4First) || wanted(t4Second) {
			t.Errorf("wanted in the slices: the claim's GPU %t, the other one %t; want true, false", wanted(t4First), wanted(t4Second))
		}
	})
}

// TestAClaimThatComesAtTheLastMoment: its GPU has left the slices when it is recorded, and comes back to them. When it ends the slices are
// looked at again before the kubelet gets the GPU.
func TestAClaimThatComesAtTheLastMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		m := newMover(ctx, t)
		defer func() { m.stop() }()
		m.annotate(t4First + "=device-plugin")
		m.step()
		if m.inSlices(t4First) || !m.offered(t4First) {
			t.Fatalf("moved: in a slice %t, offered %t", m.inSlices(t4First), m.offered(t4First))
		}
		entry := &ledger.Entry{
			Claim: ledger.Claim{UID: "late-uid", Namespace: "default", Name: "late"}, State: ledger.PrepareCompleted,
			Devices: []ledger.Device{{Pool: "node-1", Device: t4First, GPU: t4First}},
		}
		if err := m.agent.reporter.ledger.Put(entry); err != nil {
			t.Fatal(err)
		}
		m.agent.plugins.Step(ctx) // no slice has it yet, which proves nothing
		m.step()
		if !m.inSlices(t4First) || m.offered(t4First) {
			t.Errorf("a claim has it: in a slice %t, offered %t", m.inSlices(t4First), m.offered(t4First))
		}
		m.onlyForItsClaim(t4First)
		if err := m.agent.reporter.ledger.Remove("late-uid"); err != nil {
			t.Fatal(err)
		}
		m.agent.plugins.Step(ctx) // the API server has the slices of before
		if m.offered(t4First) {
			t.Error("the claim has ended: it is in a slice, and offered to the kubelet")
		}
		m.step()
		if m.inSlices(t4First) || !m.offered(t4First) {
			t.Errorf("in the end: in a slice %t, offered %t", m.inSlices(t4First), m.offered(t4First))
		}
	})
}

// whenRead is a disk that calls somebody when a folder is read.
type whenRead struct {
	durable.OS
	call func()
}

func (w whenRead) ReadDir(path string) ([]fs.DirEntry, error) {
	w.call()
	return w.OS.ReadDir(path)
}

// TestGPUsComeBackToClaimsDuringALook, while slices are read, which are those of before, or the ledger after them. Neither is a GPU of those
// offered to the kubelet, nor is it known for the next move that no slice has it.
func TestGPUsComeBackToClaimsDuringALook(t *testing.T) {
	toPlugin := t4First + "=device-plugin," + t4Second + "=device-plugin"
	for _, moment := range []string{"slices", "ledger"} {
		t.Run(moment, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				m := newMover(ctx, t)
				defer func() { m.stop() }()
				var slicesRead, ledgerRead func()
				a := m.agent
				a.plugins = pluginpath.New(pluginpath.Options{
					Driver: Name, Node: "node-1", KubeletRoot: t.TempDir(), Client: m.api, SlicesOfNode: slicesOf("node-1"),
					Devices: a.opts.Kubelet.Devices, Hardware: a.opts.Hardware, Claims: a.claims,
					Records: ledger.At(whenRead{call: func() { ledgerRead() }}, prepare.LedgerDir(m.r.state)),
					Failed:  (&failures{}).changed, Tell: func(string, string, string) {},
				})
				a.publisher.resources = a.plugins.ForClaims
				m.api.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
					slicesRead()
					return false, nil, nil
				})
				slicesRead, ledgerRead = func() {}, func() {}
				m.annotate(toPlugin)
				a.plugins.Step(ctx)
				m.publish()
				back := sync.OnceFunc(func() { m.annotate(t4Second + "=device-plugin") })
				slicesRead = back
				if moment == "ledger" {
					slicesRead = func() { ledgerRead = back }
				}
				a.plugins.Step(ctx)
				if m.offered(t4First) {
					t.Error("it is back on the path of claims, and offered to the kubelet")
				}
				m.step()
				if devices := told(a.plugins); !m.inSlices(t4First) || !slices.Equal(devices, []string{t4Second + " healthy"}) {
					t.Errorf("back: in a slice %t; the kubelet is told of %v, want the other one alone", m.inSlices(t4First), devices)
				}
				m.annotate(toPlugin)
				a.plugins.Step(ctx) // the slices are those of before
				if m.offered(t4First) {
					t.Error("it is in a slice, and offered to the kubelet")
				}
				m.step()
				if m.inSlices(t4First) || !m.offered(t4First) {
					t.Errorf("moved in the end: in a slice %t, offered %t", m.inSlices(t4First), m.offered(t4First))
				}
			})
		})
	}
}

// TestAnAnnotationThatIsNotValidChangesNothing, and is told by its name, once.
func TestAnAnnotationThatIsNotValidChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		m := newMover(ctx, t)
		defer func() { m.stop() }()
		m.annotate(t4First + "=device-plugin")
		m.step()
		m.annotate("device-plugins")
		m.annotate("device-plugins")
		m.step()
		if m.inSlices(t4First) || !m.inSlices(t4Second) {
			t.Error("GPUs have left the paths that they had")
		}
		m.node.Annotations = nil
		m.agent.plugins.NodeRead(ctx, m.node)
		for range 4 {
			time.Sleep(30 * time.Second)
			m.step()
		}
		if !m.inSlices(t4First) {
			t.Error("without the annotation, the GPU is not where the flag says")
		}
		var kinds []string
		for _, event := range m.told {
			kinds = append(kinds, strings.Join(strings.Fields(event)[:2], " "))
			if strings.Contains(event, "InvalidAdvertise") && !strings.Contains(event, `node node-1, annotation gpu.nvidia.com/advertise: "device-plugins"`) {
				t.Errorf("told %q", event)
			}
		}
		if diff := cmp.Diff([]string{"Normal AdvertiseChanged", "Warning InvalidAdvertise", "Normal AdvertiseChanged"}, kinds); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

// TestAGPUThatIsOfferedInNoReplicasIsToldOf, because nobody gets it.
func TestAGPUThatIsOfferedInNoReplicasIsToldOf(t *testing.T) {
	for name, tc := range map[string]struct {
		replicas int
		rules    config.Rules
		why      string
	}{
		"without a number":      {0, config.Rules{Shares: config.TimeSlicing}, "--share-replicas does not say as how many devices"},
		"on a host without MPS": {2, config.Rules{Shares: config.MPS, NoMPS: "the host has no systemd"}, "--share-strategy is one that this node cannot do: the host has no systemd"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				m := newMover(ctx, t)
				defer func() { m.stop() }()
				m.r.sharing = tc.rules
				m.start()
				m.agent.opts.Hardware.Offer(discovery.Policy{
					Ours: m.agent.claims.Made, Sharing: tc.rules, Shares: discovery.Shares{GPUs: []string{t4First}, MemoryStep: 1 << 30, Replicas: tc.replicas},
				})
				if _, err := m.agent.opts.Hardware.Discover(ctx); err != nil {
					t.Fatal(err)
				}
				m.annotate("device-plugin")
				m.step()
				m.step()
				want := "Warning GPUNotOffered device " + t4First + " is offered by nothing: it is shared, and on the path device-plugin, and " + tc.why
				var got []string
				for _, event := range m.told {
					if strings.Contains(event, "GPUNotOffered") {
						got = append(got, event)
					}
				}
				if diff := cmp.Diff([]string{want}, got); diff != "" {
					t.Errorf("events (-want +got):\n%s", diff)
				}
				if m.inSlices(t4First) || m.offered(t4First) || !m.offered(t4Second) {
					t.Errorf("offered: %v", told(m.agent.plugins))
				}
			})
		})
	}
}

// TestAGPUInReplicasIsMovedWhenNoPodHasOne. Meanwhile nobody gets another one of it, and what the kubelet lists of ours is not another plugin's.
func TestAGPUInReplicasIsMovedWhenNoPodHasOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		m := newMover(ctx, t)
		defer func() { m.stop() }()
		m.agent.opts.Hardware.Offer(discovery.Policy{Ours: m.agent.claims.Made, Shares: discovery.Shares{GPUs: []string{t4First, t4Second}, MemoryStep: 1 << 30, Replicas: 2}})
		if _, err := m.agent.opts.Hardware.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		m.annotate(t4First + "=device-plugin," + t4Second + "=device-plugin")
		m.step()
		m.step()
		if diff := cmp.Diff([]string{t4First + " healthy", t4First + " healthy", t4Second + " healthy", t4Second + " healthy"}, told(m.agent.plugins)); diff != "" {
			t.Fatalf("replicas (-want +got):\n%s", diff)
		}
		resources, _ := m.agent.plugins.Resources()
		replicas := resources[0].Devices
		allocate := func(n int) error { return m.agent.plugins.Allocated(ctx, pluginpath.SharedResource, replicas[n:n+1]) }
		if err := allocate(0); err != nil {
			t.Fatal(err)
		}
		if got := told(m.agent.plugins); m.agent.plugins.Look(ctx) != nil || got[1] != t4First+" healthy" {
			t.Errorf("while a pod has one: %v", got)
		}

		listed := func(ids ...string) {
			m.r.pluginDevices = nil
			for _, id := range ids {
				m.r.pluginDevices = append(m.r.pluginDevices, ledger.PluginDevice{Resource: pluginpath.SharedResource, ID: id})
			}
			// What is not listed any more counts for a minute.
			time.Sleep(time.Minute)
			if _, _, err := m.agent.plugins.OfOthers(ctx); err != nil {
				t.Error(err)
			}
			time.Sleep(2 * time.Minute)
		}
		ofOthers := func(when string, n int, want map[string]string) {
			t.Helper()
			others, listed, err := m.agent.plugins.OfOthers(ctx)
			if diff := cmp.Diff(want, others); err != nil || diff != "" || listed != n {
				t.Errorf("%s: %d devices are known, want %d; %v (-want +got):\n%s", when, listed, n, err, diff)
			}
		}
		third := m.uuid("gpu-0000-00-1d-0") + "::0"
		listed(replicas[0].ID, replicas[1].ID, replicas[2].ID, replicas[3].ID, third)
		ofOthers("all are well", 5, map[string]string{"gpu-0000-00-1d-0": pluginpath.SharedResource})
		m.r.do(&nvmlsim.RemoveGPU{GPU: "1"})
		if _, err := m.agent.opts.Hardware.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		listed(replicas[0].ID, replicas[1].ID)
		m.step()
		ofOthers("a GPU has been pulled out", 4, map[string]string{})
		if diff := cmp.Diff([]string{t4First + " healthy", t4First + " healthy", t4Second + " unhealthy", t4Second + " unhealthy"}, told(m.agent.plugins)); diff != "" {
			t.Errorf("a GPU has been pulled out (-want +got):\n%s", diff)
		}
		m.r.do(&nvmlsim.AddGPU{GPU: "1"})
		if _, err := m.agent.opts.Hardware.Discover(ctx); err != nil {
			t.Fatal(err)
		}

		m.annotate("dra")
		m.step()
		if err := allocate(1); !errors.Is(err, deviceplugin.ErrRefused) {
			t.Errorf("another pod gets a replica of a GPU that is moved: %v", err)
		}
		if err := allocate(0); err != nil {
			t.Errorf("the pod that has one gets it for its next container: %v", err)
		}
		listed()
		m.step()
		m.step()
		if m.inSlices(t4First) || !m.inSlices(t4Second) {
			t.Errorf("in slices: the one that a pod has a replica of %t, the other one %t", m.inSlices(t4First), m.inSlices(t4Second))
		}
		if err := m.agent.claims.Unprepare(ctx, hold.UID(ledger.PluginDevice{Resource: pluginpath.SharedResource, ID: replicas[0].ID})); err != nil {
			t.Fatal(err)
		}
		m.step()
		if !m.inSlices(t4First) {
			t.Error("it is in no slice when no pod has a replica any more")
		}
	})
}

// TestAnUnhealthyDeviceOfOursKeepsNobodyFromTheNode: the kubelet does not list it, the node's capacity has it. Only while the kubelet has none
// of ours that is healthy is none counted: what others have would be hidden.
func TestAnUnhealthyDeviceOfOursKeepsNobodyFromTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		m := newMover(ctx, t)
		defer func() { m.stop() }()
		if err := m.prepare("other", "gpu-0000-00-1d-0"); err != nil {
			t.Fatal(err)
		}
		m.annotate(t4First + "=device-plugin," + t4Second + "=device-plugin")
		m.step()
		m.r.do(&nvmlsim.SetRecovery{GPU: "0", Action: nvmlsim.RecoveryReset})
		if err := m.agent.opts.Hardware.monitor.Check(ctx, t4First); err != nil {
			t.Fatal(err)
		}
		m.step()
		if m.offered(t4First) || !m.offered(t4Second) {
			t.Fatalf("offered: %v", told(m.agent.plugins))
		}
		mig := ledger.PluginDevice{Resource: "nvidia.com/mig-1g.10gb", ID: "MIG-another"}
		for _, step := range []struct {
			name     string
			listed   []ledger.PluginDevice
			capacity twopaths.Plugins
			keep     bool
		}{
			{
				name: "one is ill", listed: []ledger.PluginDevice{{Resource: pluginpath.GPUResource, ID: m.uuid(t4Second)}},
				capacity: twopaths.Plugins{pluginpath.GPUResource: {Offered: 2, Held: 1}},
			},
			{
				name: "another plugin has come, too", listed: []ledger.PluginDevice{{Resource: pluginpath.GPUResource, ID: m.uuid(t4Second)}},
				capacity: twopaths.Plugins{pluginpath.GPUResource: {Offered: 2, Held: 1}, "nvidia.com/mig-1g.10gb": {Offered: 1}}, keep: true,
			},
			{
				name: "the kubelet has none of ours", listed: []ledger.PluginDevice{mig},
				capacity: twopaths.Plugins{"nvidia.com/mig-1g.10gb": {Offered: 2, Held: 1}}, keep: true,
			},
		} {
			m.r.pluginDevices = step.listed
			time.Sleep(2 * time.Second)
			m.agent.lookForForeign(ctx)
			m.step()
			slice, err := m.api.ResourceV1().ResourceSlices().Get(ctx, "slice", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			pool := devicesOf(slice.Spec.Devices)
			claimed := func(device string) bool { return device == "gpu-0000-00-1d-0" }
			if got := [2]bool{step.capacity.KeepFromClaims(Name, pool), step.capacity.KeepFromPods(Name, pool, claimed)}; got != [2]bool{step.keep, step.keep} {
				t.Errorf("%s: claims are kept off %t, pods %t; want %t", step.name, got[0], got[1], step.keep)
			}
		}
	})
}

// TestTheFlagDoesNotCountBeforeTheNodeIsRead: when a node boots there are no slices, and the kubelet would give away what the annotation has
// for claims.
func TestTheFlagDoesNotCountBeforeTheNodeIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid", Annotations: map[string]string{pluginpath.Annotation: t4First + "=device-plugin"}}}
		r := newRig(t, "t4")
		agent := r.agent(ctx, newAPIServer(node))
		defer background(ctx, agent.reporter.run)()
		paths, err := advertise.Parse("device-plugin")
		if err != nil {
			t.Fatal(err)
		}
		agent.Advertise(pluginpath.Advertised{Paths: paths})
		agent.plugins.Step(ctx)
		if got := told(agent.plugins); len(got) > 0 {
			t.Errorf("before the Node is read, offered are %v", got)
		}
		agent.plugins.NodeRead(ctx, node)
		agent.plugins.Step(ctx)
		if diff := cmp.Diff([]string{t4First + " healthy"}, told(agent.plugins)); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
	})
}

// TestTheSlicesSoonSayThatOurDevicesAreKnown: until then the scheduler sends no pod to them while claims have devices of the node.
func TestTheSlicesSoonSayThatOurDevicesAreKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		ctx, cancel := context.WithCancel(ctx)
		m := newMover(ctx, t)
		defer func() { m.stop() }()
		var watch sync.WaitGroup
		close(m.agent.publisher.leads)
		watch.Go(func() { m.agent.watchForeign(ctx) })
		defer watch.Wait()
		defer cancel()
		synctest.Wait()
		var offered []string
		for i, gpu := range []string{t4First, t4Second} {
			if n := ptr.Deref(listedOn(t, m.agent.opts.Hardware), -1); n != int64(i) {
				t.Fatalf("the slices say that %d devices are known, want %d", n, i)
			}
			offered = append(offered, gpu+"=device-plugin")
			// Before the step, which wakes the agent.
			m.r.pluginDevices = append(m.r.pluginDevices, ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: m.uuid(gpu)})
			m.annotate(strings.Join(offered, ","))
			m.step()
			time.Sleep(listedAfter + time.Second)
		}
		if n := ptr.Deref(listedOn(t, m.agent.opts.Hardware), -1); n != 2 {
			t.Errorf("the slices say that %d devices are known, want 2", n)
		}
	})
}
