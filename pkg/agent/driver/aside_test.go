// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/stepaside"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// upgraded is a node whose agents let the driver go when they are asked to.
type upgraded struct {
	*rig
	ctx context.Context
	api *apiServer
	// sessions are open in this process, of whichever agent, and inits were tried.
	sessions, inits atomic.Int32
	// returned: the next process comes in the place of one that has stepped aside.
	returned bool
	// mismatch: the library of this process is of another version than the kernel's driver.
	mismatch atomic.Bool
}

// counting is a library whose sessions are counted.
type counting struct {
	nvml.Library
	u *upgraded
}

func (c counting) Init() error {
	c.u.inits.Add(1)
	if c.u.mismatch.Load() {
		return fmt.Errorf("%w: %w", nvml.ErrVersionMismatch, &nvml.CallError{Call: "nvmlInit", Return: gonvml.ERROR_LIB_RM_VERSION_MISMATCH})
	}
	err := c.Library.Init()
	if err == nil {
		c.u.sessions.Add(1)
	}
	return err
}

func (c counting) Shutdown() error { c.u.sessions.Add(-1); return c.Library.Shutdown() }

func newUpgraded(t *testing.T, claims ...*resourceapi.ResourceClaim) *upgraded {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}}
	u := &upgraded{rig: newRig(t, "t4"), ctx: ctx, api: newAPIServer(node)}
	u.wrap = func(library nvml.Library) nvml.Library { return counting{library, u} }
	for _, claim := range claims {
		if _, err := u.api.ResourceV1().ResourceClaims("default").Create(ctx, claim, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return u
}

// ask annotates the Node, or ends that.
func (u *upgraded) ask(value string) {
	u.t.Helper()
	node, err := u.api.CoreV1().Nodes().Get(u.ctx, "node-1", metav1.GetOptions{})
	if err == nil {
		node.Annotations = map[string]string{stepaside.Annotation: value}
		_, err = u.api.CoreV1().Nodes().Update(u.ctx, node, metav1.UpdateOptions{})
	}
	if err != nil {
		u.t.Fatal(err)
	}
}

// locked tells whether somebody says that he has the driver open.
func (u *upgraded) locked() bool {
	u.t.Helper()
	ctx, cancel := context.WithTimeout(u.ctx, time.Millisecond)
	defer cancel()
	unlock, err := durable.Lock(ctx, filepath.Join(stepaside.Dir(u.state), "lock"))
	if err == nil {
		unlock()
	} else if ctx.Err() == nil {
		u.t.Error(err)
	}
	return err != nil
}

// process is an agent's, with all that looks at GPUs.
type process struct {
	*Agent
	plugin *plugin
	stop   func()
	anew   atomic.Bool
}

// start begins a new process.
func (u *upgraded) start() *process {
	u.t.Helper()
	u.keeper = stepaside.New(stepaside.Options{
		Clock: clock.RealClock{}, Dir: stepaside.Dir(u.state), Returned: u.returned,
		Node: func(ctx context.Context) (*corev1.Node, error) {
			return u.api.CoreV1().Nodes().Get(ctx, "node-1", metav1.GetOptions{})
		},
		Opens: func(context.Context) error {
			if !u.machine.State().Driver.Loaded {
				return errors.New("no driver is loaded")
			}
			return nil
		},
	})
	u.keeper.Start(u.ctx)
	agent := u.blindAgent(u.ctx, u.api)
	agent.opts.Hardware.Lead(u.ctx)
	if why := u.keeper.Why(); why != nil {
		agent.Aside(u.ctx, why) // as Run does
	}
	if _, err := agent.claims.Recover(u.ctx); err != nil {
		u.t.Fatal(err)
	}
	p := &process{Agent: agent, plugin: agent.newPlugin(func(error) {})}
	stops := []func(){
		background(u.ctx, agent.publisher.discover), background(u.ctx, agent.watch),
		background(u.ctx, func(ctx context.Context) { p.anew.Store(errors.Is(u.keeper.Run(ctx, agent), stepaside.ErrAnew)) }),
		background(u.ctx, func(ctx context.Context) {
			renewClaims(ctx, agent.claims, agent.opts.Hardware, agent.reporter.ledger.Records, u.api)
		}),
	}
	agent.publisher.leading()
	p.stop = func() {
		for _, stop := range stops {
			stop()
		}
		_ = agent.opts.Hardware.Close(u.ctx) // as the kernel does
	}
	return p
}

// prepare is the kubelet's call for one claim.
func (p *process) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	results, err := p.plugin.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{claim})
	return errors.Join(err, results[claim.UID].Err)
}

func (p *process) unprepare(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	results, err := p.plugin.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{UID: claim.UID}})
	return errors.Join(err, results[claim.UID])
}

// devices are what the kubelet is told of the health of devices.
func (p *process) devices() (statuses []kubeletplugin.HealthStatus) {
	for _, device := range p.plugin.health() {
		statuses = append(statuses, device.Health)
	}
	return slices.Compact(statuses)
}

const secondT4 = "gpu-0000-00-1c-0"

const exclusive = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"Exclusive"}}`

// exclusively is a claim whose GPU is given a compute mode, which the driver forgets when it is loaded anew.
func exclusively(name, device string) *resourceapi.ResourceClaim {
	claim := allocatedClaim(name, device)
	claim.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: Name, Parameters: runtime.RawExtension{Raw: []byte(exclusive)},
		}},
	}}
	return claim
}

// TestADriverUpgradeUnderPods: one that runs and one that ends meanwhile. Nothing of the driver is open, new claims wait
// and are told why, nobody is moved, and the next process has everything back.
func TestADriverUpgradeUnderPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stays, ends := exclusively("stays", "gpu-0000-00-1b-0"), allocatedClaim("ends", secondT4)
		late, next := allocatedClaim("late", "gpu-0000-00-1d-0"), allocatedClaim("next", secondT4)
		u := newUpgraded(t, stays, ends, late, next)
		p := u.start()
		time.Sleep(time.Minute)
		before := published(t, p.opts.Hardware)
		if !u.locked() {
			t.Error("the driver is open, and nobody who waits for it can see that")
		}
		for _, claim := range []*resourceapi.ResourceClaim{stays, ends} {
			if err := p.prepare(u.ctx, claim); err != nil {
				t.Fatal(err)
			}
		}
		file := filepath.Join(u.state, "cdi", "k8s.gpu.nvidia.com-claim_stays-uid.json")
		specification, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}

		u.ask("driver 580")
		time.Sleep(15 * time.Second)
		if n := u.sessions.Load(); n != 0 || u.locked() {
			t.Errorf("%d sessions are open, and who waits for that sees one: %t", n, u.locked())
		}
		u.do(&nvmlsim.UnloadDriver{})
		inits := u.inits.Load()
		told := fmt.Sprint(p.prepare(u.ctx, late))
		if !strings.Contains(told, `stowage.dev/release-driver: "driver 580"`) || !strings.Contains(told, "tries again") {
			t.Errorf("a claim that comes is told %s", told)
		}
		if err := p.unprepare(u.ctx, ends); err != nil {
			t.Errorf("a pod that ends does not: %v", err)
		}
		time.Sleep(10 * time.Minute)
		if n := u.inits.Load() - inits; n != 0 {
			t.Errorf("the driver was opened %d times meanwhile", n)
		}
		for i, device := range published(t, p.opts.Hardware) {
			want := before[i] + " not-ready=DriverReleased:NoSchedule"
			if before[i] == secondT4 {
				want += " occupied=ends-uid:NoSchedule"
			}
			if device != want {
				t.Errorf("published %q, want %q", device, want)
			}
		}
		if got := p.devices(); !slices.Equal(got, []kubeletplugin.HealthStatus{kubeletplugin.HealthStatusUnknown}) {
			t.Errorf("the kubelet is told %v", got)
		}
		view, ok := p.nodeView()
		if blind, err := testutil.GetGaugeMetricValue(gpusOfUnknownUse); err != nil || blind != 0 {
			t.Errorf("of %v GPUs it counts as not known who uses them, %v", blind, err)
		}
		if c := judgeNode(view); !ok || c.Reason != stepaside.Released || !strings.Contains(c.Message, "driver 580") {
			t.Errorf("the Node says %s: %s", c.Reason, c.Message)
		}
		if after, err := os.ReadFile(file); err != nil || string(after) != string(specification) {
			t.Errorf("the specification of the claim that stays: %v, %s", err, after)
		}
		if p.anew.Load() {
			t.Error("the agent begins anew while the driver is released")
		}

		u.ask("false")
		time.Sleep(time.Minute)
		if p.anew.Load() {
			t.Error("the agent begins anew without a driver")
		}
		u.do(&nvmlsim.LoadDriver{Version: "999.1.2"})
		time.Sleep(time.Minute)
		if !p.anew.Load() {
			t.Fatal("the agent does not begin anew")
		}
		p.stop()
		if mode := u.machine.State().GPUs[0].ComputeMode; mode != nvmlsim.ComputeDefault {
			t.Fatalf("the driver that was loaded anew has compute mode %s", mode)
		}

		u.returned = true
		p = u.start()
		time.Sleep(3 * time.Minute)
		if mode := u.machine.State().GPUs[0].ComputeMode; mode != nvmlsim.ComputeExclusiveProcess {
			t.Errorf("of the claim that stays compute mode %s is left", mode)
		}
		if diff := cmp.Diff(before, published(t, p.opts.Hardware)); diff != "" {
			t.Errorf("the next process publishes (-before +after):\n%s", diff)
		}
		if v := p.opts.Hardware.Node().DriverVersion; v != "999.1.2" {
			t.Errorf("it is driver %s", v)
		}
		for _, claim := range []*resourceapi.ResourceClaim{stays, late, next} {
			if err := p.prepare(u.ctx, claim); err != nil {
				t.Errorf("claim %s: %v", claim.Name, err)
			}
		}
		p.stop()
	})
}

// reload has the driver loaded anew.
func (u *upgraded) reload() {
	u.t.Helper()
	u.do(&nvmlsim.UnloadDriver{})
	u.do(&nvmlsim.LoadDriver{})
}

// modes checks the compute modes of the first GPUs.
func (u *upgraded) modes(when string, want ...nvmlsim.ComputeMode) {
	u.t.Helper()
	for i, want := range want {
		if is := u.machine.State().GPUs[i].ComputeMode; is != want {
			u.t.Errorf("%s: compute mode %s of GPU %d, want %s", when, is, i, want)
		}
	}
}

// TestClaimsAreRenewedByWhicheverAgentComes: the one that has let the driver go may end before it is loaded again, and the next one
// before it is done. Or no agent is there while the driver is loaded anew, and nobody has asked for it.
func TestClaimsAreRenewedByWhicheverAgentComes(t *testing.T) {
	const lost, whole = nvmlsim.ComputeDefault, nvmlsim.ComputeExclusiveProcess
	synctest.Test(t, func(t *testing.T) {
		one, two := exclusively("one", "gpu-0000-00-1b-0"), exclusively("two", secondT4)
		u := newUpgraded(t, one, two)
		var refused atomic.Bool
		u.api.PrependReactor("get", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
			return refused.Load() && action.(clienttesting.GetAction).GetName() == "two", nil, errors.New("not now")
		})
		p := u.start()
		time.Sleep(time.Minute)
		for _, claim := range []*resourceapi.ResourceClaim{one, two} {
			if err := p.prepare(u.ctx, claim); err != nil {
				t.Fatal(err)
			}
		}
		for _, asked := range []string{"the same driver again", "once more", ""} {
			if asked != "" {
				u.ask(asked)
				time.Sleep(15 * time.Second)
			}
			p.stop()
			u.reload()
			u.ask("false")
			u.modes("the driver was loaded anew", lost, lost)
			u.start().stop() // the kubelet starts it, and it ends at once
			p = u.start()
			time.Sleep(15 * time.Second)
			u.modes("the next agent is there", whole, whole)
		}

		// The driver is asked for while one claim is renewed and the other one is not yet, whose pod then ends.
		refused.Store(true)
		p.stop()
		u.reload()
		p = u.start()
		time.Sleep(time.Minute)
		u.modes("one claim cannot be read", whole, lost)
		u.ask("a reset")
		time.Sleep(15 * time.Second)
		if err := p.unprepare(u.ctx, two); err != nil {
			t.Error(err)
		}
		time.Sleep(10 * time.Minute)
		p.stop()
		u.reload()
		u.ask("false")
		p = u.start()
		time.Sleep(15 * time.Second)
		u.modes("the next agent is there, with one claim less", whole, lost)
		p.stop()
	})
}

// TestARenewalWaitsForTheDriver without asking the API server, and is soon done when there is one. A claim that cannot be read now,
// here or there, is renewed when it can.
func TestARenewalWaitsForTheDriver(t *testing.T) {
	const lost, whole = nvmlsim.ComputeDefault, nvmlsim.ComputeExclusiveProcess
	synctest.Test(t, func(t *testing.T) {
		one, two := exclusively("one", "gpu-0000-00-1b-0"), exclusively("two", secondT4)
		u := newUpgraded(t, one, two)
		p := u.start()
		time.Sleep(time.Minute)
		for _, claim := range []*resourceapi.ResourceClaim{one, two} {
			if err := p.prepare(u.ctx, claim); err != nil {
				t.Fatal(err)
			}
		}
		p.stop()
		u.do(&nvmlsim.UnloadDriver{})
		p = u.start()
		asked := u.askedForClaims()
		time.Sleep(20 * time.Minute)
		waiting := u.askedForClaims() - asked

		// The driver is there, and for a while not what is to be read.
		files, err := filepath.Glob(filepath.Join(u.state, "claims", "two-uid_*"))
		if err != nil || len(files) != 2 {
			t.Fatal(files, err)
		}
		content := map[string][]byte{}
		for _, file := range files {
			if content[file], err = os.ReadFile(file); err == nil {
				err = os.WriteFile(file, []byte("garbage"), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		u.api.away.Store(true)
		u.do(&nvmlsim.LoadDriver{})
		time.Sleep(20 * time.Minute)
		u.modes("the API server is away", lost, lost)
		u.api.away.Store(false)
		time.Sleep(time.Minute)
		u.modes("one record cannot be read", whole, lost)
		for file := range content {
			if err := os.WriteFile(file, content[file], 0o600); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Minute)
		u.modes("all can be read", whole, whole)

		asked = u.askedForClaims()
		time.Sleep(20 * time.Minute)
		if settled := u.askedForClaims() - asked; waiting > settled+settled/2 { // at times that are not the same
			t.Errorf("the API server was asked for claims %d times without a driver, and %d times when all is done", waiting, settled)
		}
		p.stop()
	})
}

// askedForClaims is how often the API server was asked for one.
func (u *upgraded) askedForClaims() (n int) {
	for _, action := range u.api.Actions() {
		if action.Matches("get", "resourceclaims") {
			n++
		}
	}
	return n
}

// TestAnAgentThatStartsWhileTheDriverIsReleased does not open it. It publishes what the one before did, and knows its
// faults; without one before, nothing.
func TestAnAgentThatStartsWhileTheDriverIsReleased(t *testing.T) {
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprintf("API server away: %t", away), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u := newUpgraded(t)
				p := u.start()
				u.do(&nvmlsim.SetRecovery{GPU: "1", Action: nvmlsim.RecoveryReset})
				time.Sleep(time.Minute)
				before, _ := p.opts.Hardware.Resources("node-1")
				u.ask("reset")
				time.Sleep(15 * time.Second)
				p.stop()
				inits := u.inits.Load()
				u.api.away.Store(away)

				p = u.start()
				time.Sleep(5 * time.Minute)
				if n := u.inits.Load() - inits; n != 0 {
					t.Errorf("the driver was opened %d times", n)
				}
				after, ok := p.opts.Hardware.Resources("node-1")
				if !ok {
					t.Fatal("nothing would be published")
				}
				for s := range after.Pools["node-1"].Slices {
					for d := range after.Pools["node-1"].Slices[s].Devices {
						taints := &after.Pools["node-1"].Slices[s].Devices[d].Taints
						is := func(taint resourceapi.DeviceTaint) bool { return taint.Value == stepaside.Released }
						if !slices.ContainsFunc(*taints, is) {
							t.Errorf("device %d has taints %v", d, *taints)
						}
						if *taints = slices.DeleteFunc(*taints, is); len(*taints) == 0 {
							*taints = nil
						}
					}
				}
				if diff := cmp.Diff(before, after); diff != "" {
					t.Errorf("published otherwise than by the agent before (-before +after):\n%s", diff)
				}
				if p := p.status.notReady(); p != nil && p.reason == stepaside.Released {
					t.Errorf("the agent is not ready: %v", p)
				}
				u.api.away.Store(false)
				u.ask("false")
				time.Sleep(time.Minute)
				if !p.anew.Load() {
					t.Error("the agent does not begin anew")
				}
				p.stop()
			})
		})
	}
}

// TestTheFirstAgentOfANodeWhoseDriverIsReleased knows of no GPUs, and opens nothing to find out.
func TestTheFirstAgentOfANodeWhoseDriverIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := newUpgraded(t)
		u.ask("")
		p := u.start()
		time.Sleep(5 * time.Minute)
		if _, ok := p.opts.Hardware.Resources("node-1"); ok || u.inits.Load() != 0 {
			t.Errorf("GPUs are known: %t, the driver was opened %d times", ok, u.inits.Load())
		}
		p.stop()
	})
}

// TestALibraryOfAnotherVersionIsNoFaultOfTheGPUs: after an upgrade in place the process has the old one for good.
func TestALibraryOfAnotherVersionIsNoFaultOfTheGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := newUpgraded(t)
		p := u.start()
		time.Sleep(time.Minute)
		before := published(t, p.opts.Hardware)
		u.mismatch.Store(true)
		u.do(&nvmlsim.UnloadDriver{})
		u.do(&nvmlsim.LoadDriver{Version: "999.1.2"})
		// A new process can open it at once.
		time.Sleep(30 * time.Second)
		if !p.anew.Load() {
			t.Error("the agent does not begin anew")
		}
		for i, device := range published(t, p.opts.Hardware) {
			if want := before[i] + " not-ready=DriverReplaced:NoSchedule"; device != want {
				t.Errorf("published %q, want %q", device, want)
			}
		}
		if u.locked() {
			t.Error("who waits for the driver sees one who has it open")
		}
		p.stop()
		u.mismatch.Store(false)
		p = u.start()
		time.Sleep(time.Minute)
		if diff := cmp.Diff(before, published(t, p.opts.Hardware)); diff != "" {
			t.Errorf("the next process publishes (-before +after):\n%s", diff)
		}
		p.stop()
	})
}

// TestAClaimThatIsBeingPreparedKeepsTheDriver, and so does one that is being unprepared: they come to their end, and are named meanwhile.
func TestAClaimThatIsBeingPreparedKeepsTheDriver(t *testing.T) {
	for _, unprepare := range []bool{false, true} {
		t.Run(fmt.Sprintf("unprepared: %t", unprepare), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				claim := allocatedClaim("busy", "gpu-0000-00-1b-0")
				u := newUpgraded(t, claim)
				p := u.start()
				time.Sleep(time.Minute)
				act := "preparation"
				if unprepare {
					act = "release"
					if err := p.prepare(u.ctx, claim); err != nil {
						t.Fatal(err)
					}
				}
				u.do(&nvmlsim.SlowGPU{GPU: "0", Milliseconds: 300})
				ended := make(chan error, 1)
				go func() {
					if unprepare {
						ended <- p.unprepare(u.ctx, claim)
					} else {
						ended <- p.prepare(u.ctx, claim)
					}
				}()
				time.Sleep(100 * time.Millisecond)
				u.ask("reset")
				named, closedUnder := false, false
				var err error
				for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
					if aside := p.onNode.aside.Load(); aside != nil && strings.Contains(aside.message, "the "+act+" of claim default/busy") {
						named = true
					}
					// When a claim is unprepared the API server is waited for, and the driver is not needed any more.
					closedUnder = closedUnder || u.sessions.Load() == 0
					select {
					case err = <-ended:
					default:
						if time.Now().Before(deadline) {
							continue
						}
						t.Fatal("the call does not end")
					}
					break
				}
				if err != nil || closedUnder && !unprepare || !named {
					t.Errorf("the call ends with %v; the driver was closed under it: %t; it was named: %t", err, closedUnder, named)
				}
				u.do(&nvmlsim.SlowGPU{GPU: "0"})
				time.Sleep(time.Minute)
				if n := u.sessions.Load(); n != 0 {
					t.Errorf("afterwards %d sessions are open", n)
				}
				if got := published(t, p.opts.Hardware)[0]; strings.Contains(got, "occupied") {
					t.Errorf("published %q: something is owed", got)
				}
				p.stop()
			})
		})
	}
}

// TestACallThatHangsIsNamed: the driver cannot be closed under it.
func TestACallThatHangsIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := newUpgraded(t)
		p := u.start()
		time.Sleep(time.Minute)
		u.do(&nvmlsim.HangGPU{GPU: "0"})
		time.Sleep(2 * health.PollInterval)
		u.ask("reset")
		time.Sleep(time.Minute)
		const call = "a question about the health of gpu-0000-00-1b-0"
		if aside := p.onNode.aside.Load(); u.sessions.Load() != 1 || aside == nil || !strings.Contains(aside.message, call) {
			t.Errorf("%d sessions are open, told %v", u.sessions.Load(), aside)
		}
		u.do(&nvmlsim.UnhangGPU{GPU: "0"})
		time.Sleep(time.Minute)
		if aside := p.onNode.aside.Load(); u.sessions.Load() != 0 || strings.Contains(aside.message, "still") {
			t.Errorf("when the call has returned %d sessions are open, told %v", u.sessions.Load(), aside)
		}
		p.stop()
	})
}

// TestNobodyOpensASessionWithinOneThatIsClosed: who makes CDI specifications opens sessions of its own with the library that it was given.
func TestNobodyOpensASessionWithinOneThatIsClosed(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	h := newRig(t, "t4").found(ctx)
	given := h.NVML()
	for range 2 {
		if ret := given.Init(); ret != gonvml.SUCCESS {
			t.Fatal(ret)
		}
	}
	soon, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	lib := h.sessions.current()
	go h.sessions.close(soon, lib, false)
	for h.sessions.current() != nil {
		time.Sleep(time.Millisecond)
	}
	for i := range 2 {
		if err := lib.isClosed(); err == nil || err.Error() != "the CDI specification of a claim" {
			t.Errorf("with %d sessions left it is open for %v", 2-i, err)
		}
		if ret := given.Init(); ret != gonvml.ERROR_UNINITIALIZED {
			t.Errorf("a session is opened that is closed: %v", ret)
		}
		if ret := given.Shutdown(); ret != gonvml.SUCCESS {
			t.Errorf("shutdown: %v", ret)
		}
	}
	<-lib.closed
	if ret := given.Shutdown(); ret != gonvml.ERROR_UNINITIALIZED {
		t.Errorf("one shutdown too many: %v", ret)
	}
	if h.NVML() != nil {
		t.Error("a library is given away that is closed")
	}
}

// TestPodsComeBackWhenTheKubeletKnowsTheAgent: they wait for the GPUs of an agent that returns, and the kubelet lets them
// wait for more than a minute if it does not know the agent yet when they come. A kubelet that never comes by does not
// keep the slices as they were.
func TestPodsComeBackWhenTheKubeletKnowsTheAgent(t *testing.T) {
	for _, returned := range []bool{false, true} {
		for _, after := range []time.Duration{0, 2 * time.Second, time.Hour} {
			t.Run(fmt.Sprintf("returned %t, registered after %s", returned, after), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					_, ctx := ktesting.NewTestContext(t)
					r := newRig(t, "t4")
					r.keeper = stepaside.New(stepaside.Options{Clock: clock.RealClock{}, Dir: stepaside.Dir(r.state), Returned: returned})
					status := newStatus()
					p := newPublisher(Options{Hardware: r.hardware(), StateDir: r.state}, status)
					close(p.occupiedKnown)
					close(p.foreignKnown)
					time.AfterFunc(after, func() { status.set(stageRegistered, true) })
					begun, want := time.Now(), time.Duration(0)
					if returned {
						want = min(after, firstLookTime)
					}
					p.awaitFirstLooks(ctx)
					if took := time.Since(begun); took < want || took > want+registeredPoll {
						t.Errorf("publishing waited for %s, want %s", took, want)
					}
				})
			})
		}
	}
}

// TestAnXIDEndsWithTheDriverThatToldIt: the process that sees the next driver is another one, and knows the XID of the one
// before. Drivers before R565 never say that nothing is to be done any more.
func TestAnXIDEndsWithTheDriverThatToldIt(t *testing.T) {
	for _, version := range []string{"", "999.1.2"} {
		t.Run("version "+version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u := newUpgraded(t)
				p := u.start()
				time.Sleep(time.Minute)
				for _, gpu := range []string{"0", "1"} {
					u.do(&nvmlsim.RaiseXID{GPU: gpu, Code: 119})
				}
				time.Sleep(time.Second)
				u.ask("upgrade")
				time.Sleep(15 * time.Second)
				if version != "" {
					u.do(&nvmlsim.UnloadDriver{})
					u.do(&nvmlsim.LoadDriver{Version: version})
				}
				p.stop()
				u.ask("false")
				for range 2 { // nor does the process after it know it
					p = u.start()
					time.Sleep(time.Minute)
					for i, device := range published(t, p.opts.Hardware)[:2] {
						if strings.Contains(device, "xid=119:NoSchedule") != (version == "") {
							t.Errorf("GPU %d is published as %q", i, device)
						}
					}
					p.stop()
				}
			})
		})
	}
}
