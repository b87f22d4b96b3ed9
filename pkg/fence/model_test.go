// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// TestSchedulersNeverOverUseADevice drives three schedulers, each with a tracker
// and an inventory of its own, through arbitrary interleavings of their steps on
// one API server: watches lag, skip what a list brings at once, schedulers are
// killed and started again, slices come late, claims are shared by pods of
// different schedulers.
//
// After every step no device is over-used by the claims of bound pods. In the end,
// when nobody is disturbed any more, every pod runs that can, and nothing is left
// over.
func TestSchedulersNeverOverUseADevice(t *testing.T) {
	// Long histories of few things: what goes wrong takes several attempts at the
	// same device, and one history in 40 has what shows a mistake of testdata/mutants.yaml.
	draws := map[string]string{"rapid.steps": "90"}
	if flag.Lookup("rapid.checks").Value.String() == "100" { // no other number is asked for
		draws["rapid.checks"] = "500"
	}
	for name, value := range draws {
		if err := flag.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(t)
		t.Repeat(map[string]func(*rapid.T){
			"schedule":          m.schedule,
			"write":             m.write,
			"answer":            m.answer,
			"decide":            m.decide,
			"go on":             m.goOn,
			"go on with others": m.goOn,
			"finish":            m.finish,
			"watch":             m.watch,
			"catch up":          m.catchUp,
			"relist":            m.relist,
			"restart":           m.restart,
			"slices":            m.slices,
			"":                  m.check,
		})
		m.drain(t)
	})
}

// modelSlices are what there is: two whole GPUs, one that is given out in shares,
// and partitions of another one: of three small ones two fit at a time, or one that
// takes everything and is given out in shares itself.
func modelSlices() []*resourceapi.ResourceSlice {
	all := shareable("all", "80Gi")
	all.ConsumesCounters = partition("", "80Gi").ConsumesCounters
	return append(
		withCounters("mig", map[string]string{"memory": "80Gi"}, partition("p0", "40Gi"), partition("p1", "40Gi"), partition("p2", "40Gi"), all),
		slice("a", whole("gpu-0"), whole("gpu-1"), shareable("big", "80Gi")))
}

// kinds are what claims may want, with all the allocations that would do.
var kinds = map[string]func(claim string) []results{
	"gpu": func(string) []results {
		return []results{results{}.device("a", "gpu-0"), results{}.device("a", "gpu-1")}
	},
	"gpus": func(string) []results { return []results{results{}.device("a", "gpu-0").device("a", "gpu-1")} },
	"part": func(string) []results {
		return []results{results{}.device("mig", "p0"), results{}.device("mig", "p1"), results{}.device("mig", "p2")}
	},
	"share": func(claim string) []results { return []results{results{}.share("a", "big", "share-"+claim, "30Gi")} },
	"piece": func(claim string) []results { return []results{results{}.share("mig", "all", "piece-"+claim, "30Gi")} },
}

// model is an API server, and schedulers that use it.
type model struct {
	// states[r] is what the claims were at revision r+1.
	states     []map[string]*resourceapi.ResourceClaim
	schedulers []*modelScheduler
	pods       []*modelPod
}

type modelScheduler struct {
	*scheduler
	seen   int  // the revision that the tracker has seen
	slices bool // whether the slices are known
}

// modelPod is a pod, and how far its scheduler is with it.
type modelPod struct {
	name      string
	claim     string
	scheduler int
	stage     stage

	decidedOn usage.View
	// reserved is the allocation in flight, nil if the claim had one already.
	reserved *resourceapi.AllocationResult
	// written is what the server answered.
	written *resourceapi.ResourceClaim
}

type stage string

const (
	waiting  stage = "waiting"  // to be scheduled
	reserved stage = "reserved" // Reserve is over
	written  stage = "written"  // the server has the allocation
	answered stage = "answered" // and we know
	bound    stage = "bound"
	over     stage = "over"
)

func newModel(t *rapid.T) *model {
	m := &model{states: []map[string]*resourceapi.ResourceClaim{{}}}
	for i := range 3 {
		m.schedulers = append(m.schedulers, &modelScheduler{scheduler: newScheduler()})
		if rapid.Bool().Draw(t, "slices are known at first") {
			m.learnSlices(i)
		}
	}
	names := rapid.SampledFrom([][]string{{"gpu"}, {"gpu", "gpus"}, {"part"}, {"share"}, {"part", "piece"}, {"gpu", "gpus", "part", "share", "piece"}}).Draw(t, "kinds")
	for i := range rapid.IntRange(4, 8).Draw(t, "pods") {
		name := fmt.Sprintf("%s-%d", rapid.SampledFrom(names).Draw(t, "kind"), i)
		if i > 0 && rapid.IntRange(0, 3).Draw(t, "shares a claim") == 0 {
			name = m.pods[rapid.IntRange(0, i-1).Draw(t, "with")].claim
		}
		if m.now()[name] == nil {
			m.commit(claim(name, 0, nil))
		}
		m.pods = append(m.pods, &modelPod{name: fmt.Sprintf("pod-%d", i), claim: name, scheduler: i % len(m.schedulers), stage: waiting})
	}
	for i := range m.schedulers {
		m.listAt(i, len(m.states))
	}
	return m
}

func (m *model) now() map[string]*resourceapi.ResourceClaim { return m.states[len(m.states)-1] }

// commit makes a new revision with the claim, and returns what the server answers.
func (m *model) commit(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	next := maps.Clone(m.now())
	c.ResourceVersion = strconv.Itoa(len(m.states) + 1)
	next[c.Name] = c
	m.states = append(m.states, next)
	return c.DeepCopy()
}

func (m *model) learnSlices(i int) {
	for _, s := range modelSlices() {
		m.schedulers[i].store.SetSlice(s)
	}
	m.schedulers[i].slices = true
}

func (m *model) listAt(i, revision int) {
	var claims []*resourceapi.ResourceClaim
	for _, c := range m.states[revision-1] {
		claims = append(claims, c.DeepCopy())
	}
	m.schedulers[i].list(revision, claims...)
	m.schedulers[i].seen = revision
}

func (m *model) next(i int) {
	s := m.schedulers[i]
	s.seen++
	for name, c := range m.states[s.seen-1] {
		if before := m.states[s.seen-2][name]; before != c {
			s.watch(c.DeepCopy())
		}
	}
}

// Steps.

func (m *model) pick(t *rapid.T, stages ...stage) *modelPod {
	var found []*modelPod
	for _, p := range m.pods {
		if slices.Contains(stages, p.stage) {
			found = append(found, p)
		}
	}
	if len(found) == 0 {
		t.Skip("no pod is there")
	}
	return rapid.SampledFrom(found).Draw(t, "pod")
}

func (m *model) pickScheduler(t *rapid.T) int {
	return rapid.IntRange(0, len(m.schedulers)-1).Draw(t, "scheduler")
}

func (m *model) schedule(t *rapid.T) {
	p := m.pick(t, waiting)
	if !m.tryReserve(p, func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "allocation") }) {
		t.Skip("does not fit")
	}
}

// tryReserve does what the plugin does up to Reserve.
func (m *model) tryReserve(p *modelPod, choose func(n int) int) bool {
	s := m.schedulers[p.scheduler]
	known, err := s.tracker.Get("default", p.claim)
	if err != nil || !s.slices {
		return false
	}
	if known.Status.Allocation != nil {
		p.stage, p.reserved, p.written = reserved, nil, nil
		return true
	}
	if pending, _ := s.tracker.Pending(known.UID); pending != nil {
		return false
	}
	view := s.tracker.Snapshot().Usage
	var fitting []results
	for _, r := range kinds[kindOf(p.claim)](p.claim) {
		if fitsOn(s, known, r, view) {
			fitting = append(fitting, r)
		}
	}
	if len(fitting) == 0 {
		return false
	}
	p.reserved = fitting[choose(len(fitting))].allocation()
	if err := s.tracker.Reserve(view, types.UID(p.name), []tracker.Reservation{{Claim: known, Allocation: p.reserved}}); err != nil {
		panic(err)
	}
	p.stage, p.decidedOn, p.written = reserved, view, nil
	return true
}

func kindOf(claim string) string {
	for kind := range kinds {
		if _, err := strconv.Atoi(claim[min(len(kind)+1, len(claim)):]); err == nil && claim[:len(kind)] == kind {
			return kind
		}
	}
	panic("claim " + claim + " is of no kind")
}

// fitsOn is the allocator: whatever is held counts.
func fitsOn(s *modelScheduler, c *resourceapi.ResourceClaim, r results, view usage.View) bool {
	return NewJudge(s.store.View).Judge(tracker.Case{
		Claim: usage.RefOf(c), Allocation: r.allocation(), Usage: view, DecidedOn: view,
		Precedence: func(usage.DeviceID, usage.Holder) tracker.Precedence { return tracker.Earlier },
	}).Outcome == tracker.Fits
}

// goOn takes the next step with a pod, whatever it is.
func (m *model) goOn(t *rapid.T) {
	switch p := m.pick(t, waiting, reserved, written, answered); p.stage {
	case waiting:
		if !m.tryReserve(p, func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "allocation") }) {
			t.Skip("does not fit")
		}
	case reserved:
		m.writeFor(p)
	case written:
		m.answerTo(p)
	case answered:
		m.decideOn(p)
	case bound, over: // they are not picked
	}
}

func (m *model) write(t *rapid.T) {
	m.writeFor(m.pick(t, reserved))
}

// writeFor writes allocation and reservation, on the newest object, as the plugin
// does after a conflict.
func (m *model) writeFor(p *modelPod) {
	c := m.now()[p.claim].DeepCopy()
	switch {
	case p.reserved == nil && c.Status.Allocation == nil,
		p.reserved != nil && c.Status.Allocation != nil:
		m.letGo(p)
		p.stage = waiting
		return
	case p.reserved != nil:
		c.Status.Allocation = p.reserved
	}
	p.stage = written
	if isUser(c, p.name) { // found after a restart
		p.written = c
		return
	}
	c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: p.name, UID: types.UID(p.name)})
	p.written = m.commit(c)
}

func isUser(c *resourceapi.ResourceClaim, pod string) bool {
	return slices.ContainsFunc(c.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.Name == pod })
}

func (m *model) answer(t *rapid.T) { m.answerTo(m.pick(t, written)) }

func (m *model) answerTo(p *modelPod) {
	_ = m.schedulers[p.scheduler].tracker.Assume(p.written.DeepCopy())
	m.letGo(p)
	p.stage = answered
}

// letGo ends what is in flight for the pod.
func (m *model) letGo(p *modelPod) {
	if p.reserved != nil {
		m.schedulers[p.scheduler].tracker.Release(types.UID(p.claim), types.UID(p.name))
	}
}

func (m *model) watch(t *rapid.T) {
	i := m.pickScheduler(t)
	if m.schedulers[i].seen == len(m.states) {
		t.Skip("nothing is new")
	}
	m.next(i)
}

func (m *model) catchUp(t *rapid.T) {
	for i := m.pickScheduler(t); m.schedulers[i].seen < len(m.states); {
		m.next(i)
	}
}

func (m *model) relist(t *rapid.T) {
	i := m.pickScheduler(t)
	m.listAt(i, rapid.IntRange(m.schedulers[i].seen, len(m.states)).Draw(t, "revision"))
}

func (m *model) slices(t *rapid.T) {
	i := m.pickScheduler(t)
	if m.schedulers[i].slices {
		t.Skip("known")
	}
	m.learnSlices(i)
}

// restart kills a scheduler. The next one knows what the API server knows.
func (m *model) restart(t *rapid.T) {
	i := m.pickScheduler(t)
	m.schedulers[i] = &modelScheduler{scheduler: newScheduler()}
	if rapid.Bool().Draw(t, "slices are known at once") {
		m.learnSlices(i)
	}
	m.listAt(i, len(m.states))
	for _, p := range m.pods {
		if p.scheduler == i && p.stage != bound && p.stage != over {
			*p = modelPod{name: p.name, claim: p.claim, scheduler: i, stage: waiting}
		}
	}
}

func (m *model) decide(t *rapid.T) { m.decideOn(m.pick(t, answered)) }

// decideOn is the fence, if it has heard enough.
func (m *model) decideOn(p *modelPod) {
	s := m.schedulers[p.scheduler]
	now, cancel := context.WithCancel(context.Background())
	cancel()
	fence := New(s.tracker, Options{Timeout: 1 << 62})
	err := fence.Pass(now, []*resourceapi.ResourceClaim{p.written}, func(*resourceapi.ResourceClaim) usage.View { return p.decidedOn })
	var yield *YieldError
	var claimErr *tracker.ClaimError
	switch {
	case err == nil:
		// The plugin compares with what it knows once more; the server refuses
		// nothing.
		c, err := s.tracker.Get("default", p.claim)
		if err != nil || c.Status.Allocation == nil || !isUser(c, p.name) {
			p.stage = waiting
			return
		}
		p.stage = bound
	case errors.As(err, &yield):
		m.withdraw(p)
	case errors.As(err, &claimErr):
		p.stage = waiting
	case errors.Is(err, context.Canceled):
	default:
		panic(err)
	}
}

// withdraw gives back the pod's reservation and, with the last one, the
// allocation.
func (m *model) withdraw(p *modelPod) {
	m.leave(p)
	p.stage = waiting
}

func (m *model) leave(p *modelPod) {
	c := m.now()[p.claim].DeepCopy()
	if !isUser(c, p.name) {
		return
	}
	c.Status.ReservedFor = slices.DeleteFunc(c.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.Name == p.name })
	if len(c.Status.ReservedFor) == 0 {
		c.Status.ReservedFor = nil
		c.Status.Allocation = nil
	}
	answer := m.commit(c)
	if p.stage != bound { // else the controller wrote it
		_ = m.schedulers[p.scheduler].tracker.Assume(answer)
	}
}

func (m *model) finish(t *rapid.T) {
	p := m.pick(t, bound)
	m.leave(p)
	p.stage = over
}

// check judges by the API's rules alone what the bound pods use.
func (m *model) check(t *rapid.T) {
	users := map[usage.DeviceID][]string{} // claims
	seen := map[string]bool{}
	shares, memory := map[usage.DeviceID]int{}, 0 // what is taken of big and all, and of the counter
	for _, p := range m.pods {
		c := m.now()[p.claim]
		if p.stage != bound || seen[p.claim] {
			continue
		}
		seen[p.claim] = true
		if c.Status.Allocation == nil || !isUser(c, p.name) {
			t.Fatalf("%s is bound, but its claim %s is not allocated and reserved for it: %v", p.name, p.claim, c.Status)
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			device := usage.DeviceOf(&r)
			users[device] = append(users[device], p.claim)
			switch {
			case r.ShareID != nil:
				shares[device]++
				if r.Device == "all" && shares[device] == 1 {
					memory += 80
				}
			case len(users[device]) > 1:
				t.Fatalf("device %s is used by claims %v of bound pods", device, users[device])
			case r.Pool == "mig":
				memory += 40
			}
		}
	}
	for device, n := range shares {
		if n > 2 {
			t.Fatalf("%d shares of %s are used by bound pods, of which 2 fit", n, device)
		}
	}
	if memory > 80 {
		t.Fatalf("partitions with %d Gi of 80 are used by bound pods: %v", memory, users)
	}
	for name, c := range m.now() {
		if (c.Status.Allocation != nil) != (len(c.Status.ReservedFor) > 0) {
			t.Fatalf("claim %s: allocation %v, reserved for %v", name, c.Status.Allocation, c.Status.ReservedFor)
		}
	}
}

// drain lets the schedulers work one after the other, with watches that bring
// everything, until none can do anything.
func (m *model) drain(t *rapid.T) {
	for i := range m.schedulers {
		m.learnSlices(i)
	}
	for range 2 * len(m.pods) {
		for _, p := range m.pods {
			if p.stage == waiting {
				m.tryReserve(p, func(int) int { return 0 })
			}
			if p.stage == reserved {
				m.writeFor(p)
			}
			if p.stage == written {
				m.answerTo(p)
			}
			for i := range m.schedulers {
				for m.schedulers[i].seen < len(m.states) {
					m.next(i)
				}
			}
			if p.stage == answered {
				m.decideOn(p)
			}
			m.check(t)
		}
	}
	for _, p := range m.pods {
		if p.stage == bound || p.stage == over {
			continue
		}
		// Then somebody who runs has what it wants.
		if p.stage != waiting || m.tryReserve(p, func(int) int { return 0 }) {
			t.Fatalf("%s is %s in the end, and could run", p.name, p.stage)
		}
	}
	for name, c := range m.now() {
		for _, user := range c.Status.ReservedFor {
			at := slices.IndexFunc(m.pods, func(p *modelPod) bool { return p.name == user.Name })
			if m.pods[at].stage != bound {
				t.Fatalf("claim %s is reserved for %s, which is %s", name, user.Name, m.pods[at].stage)
			}
		}
	}
}
