// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/reconcile"
	"stowage.dev/stowage/pkg/nvmlsim"
)

var (
	restHistories = flag.Int("histories", 50, "random histories of TestRest")
	restSeed      = flag.Uint64("seed", 1, "of the first of them")
)

// history is a random life of a machine with two GPUs, on which agents, claims and an administrator come and go.
type history struct {
	*node
	t    *testing.T
	seed uint64
	rand *rand.Rand
	log  []string
	// power is on the disk that h.disk is.
	power *durabletest.Volatile
	// told is what the kubelet knows: that a claim is prepared, or that it is not.
	told map[types.UID]bool
	// theirs are the administrator's MIG instances, by their numbers.
	theirs map[uint64]bool
	pid    uint32
	// rebooted: what is made anew for a claim is in its record already, so that an administrator's instance in the same place would be taken for it.
	// So nobody meddles then, and if a claim has not been made anew to the end it is unsure what becomes of an administrator's instances.
	rebooted, unsure bool
	// lost: a GPU was, and its instances with it.
	lost bool
}

// restClaims are what a claim may want. Many of them cannot be had at once.
var restClaims = map[string]func(name string) *resourceapi.ResourceClaim{
	"whole":     wholeWith(""),
	"exclusive": wholeWith(sharingConfig("GpuConfig", "Exclusive", "")),
	"slices":    wholeWith(longSlices),
	"MPS":       wholeWith(underMPS),
	"both":      func(name string) *resourceapi.ResourceClaim { return claim(name, "a="+gpu0, "b="+gpu1) },
	"both by MPS": func(name string) *resourceapi.ResourceClaim {
		return withConfig(claim(name, "a="+gpu0, "b="+gpu1), driverName, underMPS)
	},
	"a share":     func(name string) *resourceapi.ResourceClaim { return sharedBy(name, "20Gi:25", "") },
	"more shares": func(name string) *resourceapi.ResourceClaim { return sharedBy(name, "10Gi:25", "") },
	"a part":      func(name string) *resourceapi.ResourceClaim { return claim(name, "a="+gpu0+"-mig-1g10gb-0") },
	"two parts": func(name string) *resourceapi.ResourceClaim {
		return claim(name, "a="+gpu0+"-mig-1g10gb-1", "b="+gpu1+"-mig-3g40gb-4")
	},
	"parts of one": func(name string) *resourceapi.ResourceClaim {
		return claim(name, "a="+gpu0+"-mig-1g10gb-1", "b="+gpu0+"-mig-1g10gb-2")
	},
	"a part's MPS": func(name string) *resourceapi.ResourceClaim {
		return withConfig(claim(name, "a="+gpu1+"-mig-2g20gb-0"), driverName, sharingConfig("MigDeviceConfig", "MPS", ""))
	},
	"the other": func(name string) *resourceapi.ResourceClaim { return claim(name, "a="+gpu1) },
}

func (h *history) claim(kind string) *resourceapi.ResourceClaim {
	name := strings.NewReplacer(" ", "-", "'", "").Replace(strings.ToLower(kind))
	return reservedFor(restClaims[kind](name), types.UID("pod-of-"+name))
}

// one of the list.
func one[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

func (h *history) say(format string, args ...any) {
	h.log = append(h.log, fmt.Sprintf(format, args...))
}

// try commands the machine, which may refuse.
func (h *history) try(c nvmlsim.Command) error {
	_, err := h.hardware.machine.Do(c)
	return err
}

// agent does something as the agent, which may fail or end at any step. Then the next one starts.
func (h *history) agent(what string, do func(m *prepare.Manager) error) {
	faulty := &durabletest.Faulty{FS: h.disk}
	disturbed := h.rand.IntN(3) == 0
	undisturbed := func() {}
	if disturbed {
		faulty.Mode = one(h.rand, []durabletest.Mode{durabletest.Fail, durabletest.CrashBefore, durabletest.CrashAfter})
		faulty.At = 1 + h.rand.IntN(25)
		h.disturb(faulty)
		what += fmt.Sprintf(", %v step %d", faulty.Mode, faulty.At)
	} else if !h.rebooted && h.rand.IntN(4) == 0 {
		meddling := &meddling{h: h, looks: h.rand.IntN(9)}
		h.hardware.wrap = func(d nvml.Device) nvml.Device { return meddled{d, meddling} }
		undisturbed = func() {
			h.hardware.wrap = nil
			meddling.end()
		}
	}
	m, err := h.tryManager()
	if err == nil {
		err = do(m)
	}
	undisturbed()
	h.say("%s: %v", what, err)
	if disturbed {
		h.restart()
		if faulty.Mode != durabletest.Fail {
			recovery, err := h.manager().Recover(h.ctx)
			h.say("the next agent: %+v, %v", recovery, err)
		}
	}
}

// meddling is an administrator who makes an instance just before the agent looks for the last time, where claims have theirs.
type meddling struct {
	mu    sync.Mutex
	h     *history
	looks int
}

// end: a call of the agent that took too long may go on when the agent has given it up.
func (m *meddling) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.looks = 0
}

func (m *meddling) look() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.looks--; m.looks == 0 {
		at := one(m.h.rand, placesOfClaims)
		m.h.theirInstance(at.gpu, at.profile, at.start)
	}
}

// meddled is a GPU with such an administrator.
type meddled struct {
	nvml.Device
	by *meddling
}

func (d meddled) GPUInstances() ([]nvml.GPUInstance, error) {
	d.by.look()
	return d.Device.GPUInstances()
}

// theirInstance is one that the administrator makes, if there is room.
func (h *history) theirInstance(gpu, profile string, start uint32) {
	err := h.try(&nvmlsim.CreateMIG{GPU: gpu, Profile: profile, Start: &start})
	if err == nil {
		h.theirs[h.hardware.machine.State().LastInstance-1] = true // its compute instance is the last
	}
	h.say("the administrator makes an instance %s on GPU %s at %d: %v", profile, gpu, start, err)
}

// placesOfClaims are where restClaims have partitions.
var placesOfClaims = []struct {
	gpu, profile string
	start        uint32
}{{"0", "1g.10gb", 0}, {"0", "1g.10gb", 1}, {"1", "3g.40gb", 4}, {"1", "2g.20gb", 0}}

// bootScript is an administrator's, which makes an instance where claims have theirs.
func (h *history) bootScript() {
	at := one(h.rand, placesOfClaims)
	h.do(&nvmlsim.SetMIG{GPU: at.gpu, Enabled: true})
	h.theirInstance(at.gpu, at.profile, at.start)
}

// next is one thing that happens.
func (h *history) next() {
	gpu := fmt.Sprint(h.rand.IntN(2))
	kind := one(h.rand, slices.Sorted(maps.Keys(restClaims)))
	c := h.claim(kind)
	switch h.rand.IntN(18) {
	case 0, 1, 2, 3, 4:
		h.agent("prepare "+kind, func(m *prepare.Manager) error {
			err := h.prepare(m, kind)
			return h.tell(c.UID, true, err)
		})
	case 5, 6, 7:
		if held := h.recorded(); len(held) > 0 {
			kind = one(h.rand, held)
			c = h.claim(kind)
		}
		h.agent("unprepare "+kind, func(m *prepare.Manager) error { return h.tell(c.UID, false, m.Unprepare(h.ctx, c.UID)) })
	case 8:
		h.agent("reconcile", func(m *prepare.Manager) error { _, err := m.Reconcile(h.ctx); return err })
	case 9:
		h.pid++
		p := nvmlsim.Process{PID: h.pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 64, Pod: string(c.Status.ReservedFor[0].UID), Stuck: h.rand.IntN(2) == 0}
		h.say("process %d of %s on GPU %s, stuck %v: %v", p.PID, p.Pod, gpu, p.Stuck, h.try(&nvmlsim.AddProcess{GPU: gpu, Process: p}))
	case 10:
		if h.rand.IntN(4) == 0 {
			h.lost = true
			h.say("GPU %s is lost: %v", gpu, h.try(&nvmlsim.LoseGPU{GPU: gpu}))
		} else {
			h.say("GPU %s is back: %v", gpu, h.try(&nvmlsim.RestoreGPU{GPU: gpu}))
			h.look()
		}
	case 11:
		if daemons := h.hardware.machine.State().Daemons; len(daemons) > 0 {
			h.say("daemon %s dies: %v", daemons[0].Name, h.try(&nvmlsim.StopMPS{Daemon: daemons[0].Name}))
		}
	case 12:
		// It overlaps what claims take, and is never one of these.
		h.theirInstance(gpu, "1g.20gb", uint32(2*h.rand.IntN(4)))
	case 13:
		if h.rand.IntN(3) == 0 {
			how := "reboot"
			if h.rand.IntN(2) == 0 {
				how = "power cut"
				h.powerCut()
			}
			h.do(&nvmlsim.Reboot{})
			h.rebooted, h.unsure = true, false
			clear(h.theirs)
			if h.rand.IntN(2) == 0 {
				h.bootScript()
			}
			h.look()
			recovery, err := h.manager().Recover(h.ctx)
			h.say("%s: %+v, %v", how, recovery, err)
		}
	case 14:
		c = h.claim(kind)
		if h.nobodyMisses(c.UID) {
			h.say("somebody removes the record of %s: %v", kind, h.loseRecord(c.UID))
			delete(h.told, c.UID)
		}
	case 15:
		h.watch(h.rand.IntN(2) == 0)
	case 16, 17:
		h.processInPartition(h.rand.IntN(2))
	}
}

// watch has DCGM watch all GPUs, or not: MIG cannot be switched meanwhile, and no instance destroyed.
func (h *history) watch(begins bool) {
	const pid = 801
	if !begins {
		h.say("DCGM lets go: %v", h.try(&nvmlsim.RemoveClient{PID: pid}))
		return
	}
	h.say("DCGM watches: %v", h.try(&nvmlsim.AddClient{Client: nvmlsim.Client{PID: pid, Command: "nv-hostengine", Watches: true}}))
}

// processInPartition has a pod of a claim start a process in one of the claim's partitions.
func (h *history) processInPartition(gpu int) {
	instances := h.gpu(gpu).Instances
	if len(instances) == 0 {
		return
	}
	in := one(h.rand, instances)
	for _, kind := range h.recorded() {
		_, record := h.recordOf(h.claim(kind).UID)
		if record.Entry == nil || !slices.ContainsFunc(record.Entry.Devices, func(d ledger.Device) bool {
			return d.GPU == []string{gpu0, gpu1}[gpu] && d.Partition != nil && d.Partition.Start == in.Start
		}) {
			continue
		}
		h.pid++
		p := nvmlsim.Process{
			PID: h.pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 64, Pod: string(record.Entry.Pods[0]), Stuck: h.rand.IntN(2) == 0,
			Instance: &nvmlsim.Instance{GPU: in.ID},
		}
		err := h.try(&nvmlsim.AddProcess{GPU: fmt.Sprint(gpu), Process: p})
		h.say("process %d of %s on GPU %d at slice %d, stuck %v: %v", p.PID, p.Pod, gpu, in.Start, p.Stuck, err)
	}
}

// nobodyMisses tells that what was done for the claim is undone without its record: there are only a file, or settings that others keep.
func (h *history) nobodyMisses(claim types.UID) bool {
	_, record := h.recordOf(claim)
	if record == nil || record.Entry == nil {
		return false
	}
	shared := func(gpu string) bool {
		return slices.ContainsFunc(h.recorded(), func(kind string) bool {
			_, other := h.recordOf(h.claim(kind).UID)
			return other.UID != claim && other.Entry != nil && slices.Contains(other.Entry.HeldGPUs(), gpu)
		})
	}
	return !slices.ContainsFunc(record.Entry.Undo, func(s ledger.Step) bool {
		if slices.Contains([]ledger.StepKind{ledger.StepCDIFile, ledger.StepProcesses, ledger.StepPersistence}, s.Kind) {
			return false
		}
		return !s.Shared || !shared(s.GPU)
	})
}

// loseRecord removes the files of the claim's record.
func (h *history) loseRecord(claim types.UID) error {
	entries, err := h.disk.ReadDir(h.claimsDir())
	for _, entry := range entries {
		if strings.Contains(entry.Name(), string(claim)) {
			err = errors.Join(err, h.disk.Remove(filepath.Join(h.claimsDir(), entry.Name())))
		}
	}
	return errors.Join(err, h.disk.SyncDir(h.claimsDir()))
}

// prepare is the kubelet's call.
func (h *history) prepare(m *prepare.Manager, kind string) error {
	_, err := m.Prepare(h.ctx, h.claim(kind))
	h.unsure = h.unsure || h.rebooted && err != nil && strings.Contains(kind, "part")
	return err
}

// tell answers the kubelet. It knows nothing from an error.
func (h *history) tell(claim types.UID, prepared bool, err error) error {
	if h.told[claim] = prepared; err != nil {
		delete(h.told, claim)
	}
	return err
}

// powerCut takes away what was not synced, or some of it, which must be nothing that the kubelet was told.
func (h *history) powerCut() {
	if err := h.power.PowerCut(func() bool { return h.rand.IntN(2) == 0 }); err != nil {
		h.errorf("power cut: %v", err)
	}
	for _, claim := range slices.Sorted(maps.Keys(h.told)) {
		_, record := h.recordOf(claim)
		if is := record != nil && record.Err == nil && record.Recovered == nil; is != h.told[claim] {
			h.errorf("after a power cut the record of claim %s is %+v, and the kubelet was told that it is prepared: %v", claim, record, h.told[claim])
		}
	}
}

// recorded are the kinds of claims that have a record.
func (h *history) recorded() (kinds []string) {
	for _, kind := range slices.Sorted(maps.Keys(restClaims)) {
		if h.node.recorded(h.claim(kind).UID) {
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

func (h *history) look() {
	if _, err := h.hardware.Discover(h.ctx); err != nil {
		h.say("look: %v", err)
	}
}

// rest lets everything come to its end: what can be mended is, the kubelet prepares some claims once more and unprepares the others.
func (h *history) rest() *prepare.Manager {
	h.watch(false)
	for i := range 2 {
		_ = h.try(&nvmlsim.RestoreGPU{GPU: fmt.Sprint(i)})
		for _, p := range h.gpu(i).Processes {
			h.do(&nvmlsim.RemoveProcess{GPU: fmt.Sprint(i), PID: p.PID})
		}
	}
	for _, daemon := range h.hardware.machine.State().Daemons {
		if h.rand.IntN(2) == 0 {
			h.do(&nvmlsim.StopMPS{Daemon: daemon.Name})
			h.say("at rest, daemon %s dies", daemon.Name)
		}
	}
	h.options.EndTimeout = 0 // nothing is stuck any more
	h.look()
	m := h.manager()
	// A daemon of a partition that went with its GPU cannot be started before that is made anew.
	recovery, err := m.Recover(h.ctx)
	h.say("at rest, an agent starts: %+v, %v", recovery, err)
	var forgotten []types.UID
	for _, kind := range slices.Sorted(maps.Keys(restClaims)) {
		c := h.claim(kind)
		_, record := h.recordOf(c.UID)
		if record != nil && h.rand.IntN(3) == 0 {
			err := h.prepare(m, kind)
			h.say("at rest, prepare %s again: %v", kind, err)
			if err == nil {
				continue
			}
		}
		// A partition, with its daemon, may have gone with a GPU that was lost.
		if h.told[c.UID] && kind != "a part's MPS" && h.rand.IntN(2) == 0 {
			h.say("at rest, %s goes on", kind)
			for i, gpu := range []string{gpu0, gpu1} {
				if strings.Contains(kind, "share") && slices.Contains(record.Entry.HeldGPUs(), gpu) { // what another claim has left must go all the same
					h.pid++
					p := nvmlsim.Process{PID: h.pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 64, Pod: string(c.Status.ReservedFor[0].UID)}
					h.say("at rest, its process %d on GPU %d: %v", p.PID, i, h.try(&nvmlsim.AddProcess{GPU: fmt.Sprint(i), Process: p}))
				}
			}
			continue
		}
		if record != nil && h.rand.IntN(3) == 0 {
			h.say("at rest, the kubelet has forgotten %s", kind)
			forgotten = append(forgotten, c.UID)
			continue
		}
		if err := m.Unprepare(h.ctx, c.UID); err != nil {
			h.errorf("unprepare %s: %v", kind, err)
		}
	}
	clock := testingclock.NewFakeClock(time.Date(2026, 11, 22, 1, 0, 0, 0, time.UTC))
	leftovers, found := h.leftovers(m, clock, func(claim string) bool { return slices.Contains(forgotten, types.UID(claim+"-uid")) }, func() {})
	for range 2 {
		if err := leftovers.Once(h.ctx); err != nil {
			h.errorf("leftovers: %v", err)
		}
		clock.Step(reconcile.Interval)
	}
	if found.Released != len(forgotten) {
		h.errorf("of %v, which the kubelet has forgotten, %d are released", forgotten, found.Released)
	}
	if _, err := m.Reconcile(h.ctx); err != nil {
		h.errorf("reconcile: %v", err)
	}
	return m
}

// offered are the devices that an agent would publish, by name. Their taints come from what watches over GPUs, which nothing does here.
func (h *history) offered(hardware *driver.Hardware) map[string]resourceapi.Device {
	resources, ok := hardware.Resources(pool)
	if !ok {
		h.errorf("nothing is known of the machine")
	}
	devices := map[string]resourceapi.Device{}
	for _, slice := range resources.Pools[pool].Slices {
		for _, device := range slice.Devices {
			device.Taints = nil
			devices[device.Name] = device
		}
	}
	return devices
}

func (h *history) errorf(format string, args ...any) {
	h.t.Helper()
	h.t.Errorf("seed %d: "+format+"\n  %s", slices.Concat([]any{h.seed}, args, []any{strings.Join(h.log, "\n  ")})...)
}

// judge looks at a machine at rest.
func (h *history) judge(m *prepare.Manager) {
	h.look()
	// 1. No GPU is in quarantine: none has a fault.
	if list, err := m.Quarantined(); err != nil || len(list) > 0 {
		h.errorf("in quarantine: %+v, %v", list, err)
	}
	// 2. A new agent changes nothing.
	before := h.state()
	offered := h.offered(h.hardware.Hardware)
	h.hardware.reopen(h.t)
	other := h.manager()
	h.hardware.Offer(discovery.Policy{Dynamic: true, Ours: other.Made})
	h.look()
	if _, err := other.Recover(h.ctx); err != nil {
		h.errorf("a new agent: %v", err)
	}
	if _, err := other.Reconcile(h.ctx); err != nil {
		h.errorf("a new agent: %v", err)
	}
	if diff := before.diff(h.state()); diff != "" {
		h.errorf("a new agent changes (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(offered, h.offered(h.hardware.Hardware)); diff != "" {
		h.errorf("a new agent publishes something else (-before +after):\n%s", diff)
	}
	// 3. What no record names is not there, and what is an administrator's is.
	held, named := map[string]bool{}, map[string]bool{}
	for _, entry := range before.Claims {
		for _, gpu := range entry.HeldGPUs() {
			held[gpu] = true
		}
		for _, step := range entry.Undo {
			if step.Kind != ledger.StepMPSDaemon {
				continue
			}
			named[step.Target] = true
			runs := slices.ContainsFunc(before.Daemons, func(d nvmlsim.Daemon) bool { return d.Name == step.Target })
			if entry.BootID == "BOOT" && !runs { // the boot of now
				h.errorf("daemon %s of claim %s does not run", step.Target, entry.Claim.UID)
			}
		}
	}
	for _, daemon := range before.Daemons {
		if !named[daemon.Name] {
			h.errorf("daemon %s is nobody's", daemon.Name)
		}
	}
	for path := range before.Files {
		if !slices.ContainsFunc(before.claimUIDs(), func(uid string) bool { return strings.Contains(path, uid) }) {
			h.errorf("file %s is nobody's", path)
		}
	}
	there := map[uint64]bool{}
	for i := range 2 {
		for _, instance := range h.gpu(i).Instances {
			there[instance.Number] = true
		}
	}
	for number := range h.theirs {
		if !there[number] && !h.unsure && !h.lost {
			h.errorf("the administrator's instance %d is gone", number)
		}
	}
	for i, name := range []string{gpu0, gpu1} {
		g := h.gpu(i)
		theirs := 0
		for _, instance := range g.Instances {
			if h.theirs[instance.Number] {
				theirs++
			}
		}
		if held[name] {
			continue
		}
		if g.ComputeMode != nvmlsim.ComputeDefault || g.TimeSlice != "" || g.MIG != (theirs > 0) || len(g.Instances) != theirs {
			h.errorf("GPU %d is nobody's and has: compute mode %s, time slice %q, MIG %v, instances %+v, %d of which are an administrator's", i, g.ComputeMode, g.TimeSlice, g.MIG, g.Instances, theirs)
		}
		// 4. It is offered, and who comes gets it.
		if theirs == 0 {
			if _, is := offered[name]; !is {
				h.errorf("GPU %d is nobody's and is not offered", i)
			}
			next := claim("next", result("gpu="+name))
			if _, err := m.Prepare(h.ctx, next); err != nil {
				h.errorf("GPU %d is nobody's: %v", i, err)
			}
			if err := m.Unprepare(h.ctx, next.UID); err != nil {
				h.errorf("GPU %d: %v", i, err)
			}
		}
	}
}

func (s *machineState) claimUIDs() (uids []string) {
	for _, entry := range s.Claims {
		uids = append(uids, string(entry.Claim.UID))
	}
	return uids
}

// TestRest: after any history a machine at rest is as its records say, a new agent has nothing to do there, and no GPU is out of service that works.
func TestRest(t *testing.T) {
	histories := *restHistories
	if raceDetector {
		histories = min(histories, 15) // make test-long plays all
	}
	for i := range histories {
		seed := *restSeed + uint64(i)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			h := &history{
				node: newNodeOf(t, twoGPUs), t: t, seed: seed, rand: rand.New(rand.NewPCG(seed, 0)),
				power: durabletest.NewVolatile(), told: map[types.UID]bool{}, theirs: map[uint64]bool{},
			}
			h.fsys, h.disk = h.power, h.power
			h.options.EndTimeout = 20 * time.Millisecond // what is stuck is waited for in vain
			h.rules.Shares = one(h.rand, []config.Strategy{config.TimeSlicing, config.MPS})
			for gpu := range 2 {
				var refused []nvmlsim.Setting
				for _, setting := range []nvmlsim.Setting{nvmlsim.SettingComputeMode, nvmlsim.SettingTimeSlice, nvmlsim.SettingMPS, nvmlsim.SettingPersistence} {
					if h.rand.IntN(4) == 0 {
						refused = append(refused, setting)
					}
				}
				h.do(&nvmlsim.Refuse{GPU: fmt.Sprint(gpu), Settings: refused})
				h.say("GPU %d refuses %v", gpu, refused)
			}
			h.hardware.discover(t, discovery.Policy{Dynamic: true, Ours: h.manager().Made})
			for range 50 {
				h.next()
			}
			h.judge(h.rest())
		})
	}
}
