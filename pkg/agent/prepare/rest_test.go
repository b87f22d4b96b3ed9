package prepare_test

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

var (
	restHistories = flag.Int("histories", 100, "random histories of TestRest")
	restSeed      = flag.Uint64("seed", 1, "of the first of them")
)

// history is a random life of a machine with two GPUs, on which agents, claims and an administrator come and go.
type history struct {
	*node
	t    *testing.T
	rand *rand.Rand
	log  []string
	// theirs are the administrator's MIG instances, by their numbers.
	theirs map[uint64]bool
	pid    uint32
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
	faulty := &durabletest.Faulty{FS: durabletest.Unsynced{}}
	disturbed := h.rand.IntN(3) == 0
	if disturbed {
		faulty.Mode = one(h.rand, []durabletest.Mode{durabletest.Fail, durabletest.CrashBefore, durabletest.CrashAfter})
		faulty.At = 1 + h.rand.IntN(25)
		h.disturb(faulty)
		what += fmt.Sprintf(", %v step %d", faulty.Mode, faulty.At)
	}
	m, err := h.tryManager()
	if err == nil {
		err = do(m)
	}
	h.say("%s: %v", what, err)
	if disturbed {
		h.restart()
		if faulty.Mode != durabletest.Fail {
			recovery, err := h.manager().Recover(h.ctx)
			h.say("the next agent: %+v, %v", recovery, err)
		}
	}
}

// next is one thing that happens.
func (h *history) next() {
	gpu := fmt.Sprint(h.rand.IntN(2))
	kind := one(h.rand, slices.Sorted(maps.Keys(restClaims)))
	c := h.claim(kind)
	switch h.rand.IntN(14) {
	case 0, 1, 2, 3, 4:
		h.agent("prepare "+kind, func(m *prepare.Manager) error { _, err := m.Prepare(h.ctx, c); return err })
	case 5, 6, 7:
		if held := h.recorded(); len(held) > 0 {
			kind = one(h.rand, held)
			c = h.claim(kind)
		}
		h.agent("unprepare "+kind, func(m *prepare.Manager) error { return m.Unprepare(h.ctx, c.UID) })
	case 8:
		h.agent("reconcile", func(m *prepare.Manager) error { _, err := m.Reconcile(h.ctx); return err })
	case 9:
		h.pid++
		p := nvmlsim.Process{PID: h.pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 64, Pod: string(c.Status.ReservedFor[0].UID), Stuck: h.rand.IntN(2) == 0}
		h.say("process %d of %s on GPU %s, stuck %v: %v", p.PID, p.Pod, gpu, p.Stuck, h.try(&nvmlsim.AddProcess{GPU: gpu, Process: p}))
	case 10:
		if h.rand.IntN(4) == 0 {
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
		start := uint32(2 * h.rand.IntN(4))
		err := h.try(&nvmlsim.CreateMIG{GPU: gpu, Profile: "1g.20gb", Start: &start})
		if err == nil {
			h.theirs[h.hardware.machine.State().LastInstance-1] = true // its compute instance is the last
		}
		h.say("the administrator makes an instance on GPU %s at %d: %v", gpu, start, err)
	case 13:
		if h.rand.IntN(3) == 0 {
			h.do(&nvmlsim.Reboot{})
			h.look()
			recovery, err := h.manager().Recover(h.ctx)
			h.say("reboot: %+v, %v", recovery, err)
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
	for i := range 2 {
		_ = h.try(&nvmlsim.RestoreGPU{GPU: fmt.Sprint(i)})
		for _, p := range h.gpu(i).Processes {
			h.do(&nvmlsim.RemoveProcess{GPU: fmt.Sprint(i), PID: p.PID})
		}
	}
	h.options.EndTimeout = 0 // nothing is stuck any more
	h.look()
	m := h.manager()
	// A daemon of a partition that went with its GPU cannot be started before that is made anew.
	recovery, err := m.Recover(h.ctx)
	h.say("at rest, an agent starts: %+v, %v", recovery, err)
	for _, kind := range slices.Sorted(maps.Keys(restClaims)) {
		c := h.claim(kind)
		_, record := h.recordOf(c.UID)
		if record != nil && h.rand.IntN(3) == 0 {
			_, err := m.Prepare(h.ctx, c)
			h.say("at rest, prepare %s again: %v", kind, err)
			if err == nil {
				continue
			}
		}
		if err := m.Unprepare(h.ctx, c.UID); err != nil {
			h.errorf("unprepare %s: %v", kind, err)
		}
	}
	if _, err := m.Reconcile(h.ctx); err != nil {
		h.errorf("reconcile: %v", err)
	}
	return m
}

func (h *history) errorf(format string, args ...any) {
	h.t.Helper()
	h.t.Errorf(format+"\n  %s", append(args, strings.Join(h.log, "\n  "))...)
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
	other := h.manager()
	if _, err := other.Recover(h.ctx); err != nil {
		h.errorf("a new agent: %v", err)
	}
	if _, err := other.Reconcile(h.ctx); err != nil {
		h.errorf("a new agent: %v", err)
	}
	if diff := before.diff(h.state()); diff != "" {
		h.errorf("a new agent changes (-before +after):\n%s", diff)
	}
	// 3. What no record names is not there, and what is an administrator's is.
	held, named := map[string]bool{}, map[string]bool{}
	for _, entry := range before.Claims {
		for _, gpu := range entry.HeldGPUs() {
			held[gpu] = true
		}
		for _, step := range entry.Undo {
			if step.Kind == "MPSDaemon" {
				named[step.Target] = true
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
		// 4. Who comes gets it.
		if theirs == 0 {
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
	for i := range *restHistories {
		seed := *restSeed + uint64(i)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			h := &history{node: newNodeOf(t, twoGPUs), t: t, rand: rand.New(rand.NewPCG(seed, 0)), theirs: map[uint64]bool{}}
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
