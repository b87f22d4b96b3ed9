// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/usage"
)

// TestModel drives a tracker through arbitrary histories of an API server, its
// watch and several pods' scheduling, in any interleaving that these allow, and
// compares it after every step with what is recomputed from the history alone:
// what is known and held (I1 to I5), older snapshots (I6), and for each
// allocation when it was written and whether it fits on top of the earlier ones.
// Devices are whole, partitions that take of shared counters, or given out in
// shares of their capacity.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel()
		t.Repeat(map[string]func(*rapid.T){
			"create":          m.create,
			"delete":          m.delete,
			"deallocate":      m.deallocate,
			"touch":           m.touch,
			"other scheduler": m.otherScheduler,
			"watch":           m.watch,
			"watch again":     m.watchAgain,
			"relist":          m.relist,
			"reserve":         m.reserve,
			"share":           m.share,
			"write":           m.write,
			"answer":          m.answer,
			"stale answer":    m.staleAnswer,
			"release":         m.release,
			"withdraw":        m.withdraw,
			"":                m.check,
		})
	})
}

// model is an API server that remembers everything, and the scheduler's side of
// what the tracker promises.
type model struct {
	tracker *Tracker

	// The server: states[r] is what the claims were at revision r+1.
	states []map[string]*resourceapi.ResourceClaim
	names  map[types.UID]string
	shares int

	// The watch: the revision that the tracker has seen, 0 before the list, and how
	// it came there.
	seen  int
	feeds []feed

	// The scheduler.
	answers []*resourceapi.ResourceClaim     // to its writes, not delivered
	assumed []*resourceapi.ResourceClaim     // answers that were delivered
	flying  map[types.UID]*flight            // reserved, not released
	promise map[types.UID]map[taking]promise // I2: what must not be free

	// What was seen in earlier checks.
	snapshots []picture
	fits      map[types.UID]Order // verdicts that are final, for as long as the order is this one
}

// feed is one step of the watch, or a list, from one revision to another.
type feed struct {
	from, to int
	list     bool
}

type flight struct {
	claim      *resourceapi.ResourceClaim // as reserved
	allocation *resourceapi.AllocationResult
	owners     []types.UID
	unanswered int // writes
}

// promise says until when something must be held for a claim: until the watch is
// at a revision; 0 while that is not known.
type promise int

func newModel() *model {
	return &model{
		tracker: New(klog.Logger{}, WithJudge(modelJudge{})),
		states:  []map[string]*resourceapi.ResourceClaim{{}},
		names:   map[types.UID]string{},
		flying:  map[types.UID]*flight{},
		promise: map[types.UID]map[taking]promise{},
		fits:    map[types.UID]Order{},
	}
}

func (m *model) now() map[string]*resourceapi.ResourceClaim { return m.states[len(m.states)-1] }

// commit makes a new revision in which name is claim, or is gone.
func (m *model) commit(name string, claim *resourceapi.ResourceClaim) {
	next := maps.Clone(m.now())
	delete(next, name)
	if claim != nil {
		claim.ResourceVersion = strconv.Itoa(len(m.states) + 1)
		next[name] = claim
	}
	m.states = append(m.states, next)
}

// pick draws the name of a claim for which is is true.
func pick(t *rapid.T, from map[string]*resourceapi.ResourceClaim, is func(*resourceapi.ResourceClaim) bool) string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(from)) {
		if is(from[name]) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		t.Skip("there is none")
	}
	return rapid.SampledFrom(names).Draw(t, "claim")
}

func isAllocated(c *resourceapi.ResourceClaim) bool  { return c.Status.Allocation != nil }
func notAllocated(c *resourceapi.ResourceClaim) bool { return c.Status.Allocation == nil }

func (m *model) create(t *rapid.T) {
	name := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "name")
	if m.now()[name] != nil {
		t.Skip("exists")
	}
	uid := types.UID(fmt.Sprintf("u%d", len(m.names)+1))
	m.names[uid] = name
	m.commit(name, claim(name, uid, 0))
}

func (m *model) delete(t *rapid.T) {
	m.commit(pick(t, m.now(), func(*resourceapi.ResourceClaim) bool { return true }), nil)
}

func (m *model) deallocate(t *rapid.T) {
	name := pick(t, m.now(), isAllocated)
	c := m.now()[name].DeepCopy()
	c.Status.Allocation = nil
	m.commit(name, c)
}

func (m *model) touch(t *rapid.T) {
	name := pick(t, m.now(), func(*resourceapi.ResourceClaim) bool { return true })
	m.commit(name, m.now()[name].DeepCopy())
}

// otherScheduler allocates, or moves, a claim to contested devices, whoever has
// them. (The fence keeps schedulers off each other's devices, not the tracker.)
func (m *model) otherScheduler(t *rapid.T) {
	name := pick(t, m.now(), func(c *resourceapi.ResourceClaim) bool {
		return notAllocated(c) || c.Status.Allocation.Devices.Results[0].Pool == contested
	})
	c := m.now()[name].DeepCopy()
	c.Status.Allocation = allocationOf(m.draw(t, contestedDevices))
	m.commit(name, c)
}

// watch brings the next event, or a bookmark.
func (m *model) watch(t *rapid.T) {
	if m.seen == 0 {
		t.Skip("not listed yet")
	}
	if m.seen == len(m.states) {
		must(t, m.tracker.Store().(store).Bookmark(strconv.Itoa(m.seen)))
		return
	}
	m.feeds = append(m.feeds, feed{from: m.seen, to: m.seen + 1})
	m.seen++
	m.deliver(t, m.seen)
}

// watchAgain brings an event that was brought before, or that is older than the list.
func (m *model) watchAgain(t *rapid.T) {
	if m.seen < 2 {
		t.Skip("nothing was seen")
	}
	m.deliver(t, rapid.IntRange(2, m.seen).Draw(t, "revision"))
}

// deliver brings the event of one revision.
func (m *model) deliver(t *rapid.T, revision int) {
	before, after := m.states[revision-2], m.states[revision-1]
	s := m.tracker.Store()
	for _, name := range []string{"a", "b", "c", "d"} {
		switch {
		case before[name] == after[name]:
		case after[name] == nil:
			last := before[name].DeepCopy()
			last.ResourceVersion = strconv.Itoa(revision)
			must(t, s.Delete(last))
		case before[name] == nil:
			must(t, s.Add(after[name].DeepCopy()))
		default:
			must(t, s.Update(after[name].DeepCopy()))
		}
	}
}

// relist brings a list at any revision that is not older than what was seen.
func (m *model) relist(t *rapid.T) {
	before := m.seen
	m.seen = rapid.IntRange(max(m.seen, 1), len(m.states)).Draw(t, "revision")
	m.feeds = append(m.feeds, feed{from: before, to: m.seen, list: true})
	objs := []any{}
	for _, c := range m.states[m.seen-1] {
		objs = append(objs, c.DeepCopy())
	}
	must(t, m.tracker.Store().Replace(objs, strconv.Itoa(m.seen)))
}

var pods = rapid.SampledFrom([]types.UID{"p1", "p2", "p3"})

// reserve takes what is free in a snapshot.
func (m *model) reserve(t *rapid.T) {
	if m.seen == 0 {
		t.Skip("not synced")
	}
	known := m.layer1()
	c := known[pick(t, known, notAllocated)]
	snapshot := m.tracker.Snapshot()
	takes := m.draw(t, modelDevices)
	if !fitBeside(takes, heldIn(snapshot.Usage)) {
		t.Skip("does not fit")
	}
	owner := pods.Draw(t, "pod")
	a := allocationOf(takes)
	if rapid.IntRange(0, 3).Draw(t, "looks at a device, too") == 0 {
		a.Devices.Results = append(a.Devices.Results, adminAccess(gpu0).Devices.Results[0])
	}
	err := m.tracker.Reserve(snapshot.Usage, owner, []Reservation{{Claim: c, Allocation: a}})
	if flying := m.flying[c.UID] != nil; flying != (err != nil) {
		t.Fatalf("Reserve() of a claim that is in flight (%t) = %v", flying, err)
	}
	if err != nil {
		return
	}
	m.flying[c.UID] = &flight{claim: c, allocation: a, owners: []types.UID{owner}}
	m.promise[c.UID] = map[taking]promise{}
	for _, takes := range takes {
		m.promise[c.UID][takes] = 0
	}
}

// draw makes up one or two results.
func (m *model) draw(t *rapid.T, from []usage.DeviceID) (takes []taking) {
	for _, d := range rapid.SliceOfNDistinct(rapid.SampledFrom(from), 1, 2, rapid.ID[usage.DeviceID]).Draw(t, "devices") {
		one := taking{device: d}
		if isShareable(d) {
			m.shares++
			one.share = types.UID(fmt.Sprintf("s%d", m.shares))
			one.memory = rapid.SampledFrom([]int64{30, 50}).Draw(t, "memory")
		}
		takes = append(takes, one)
	}
	return takes
}

func (m *model) pickFlight(t *rapid.T) (types.UID, *flight) {
	uids := slices.Sorted(maps.Keys(m.flying))
	if len(uids) == 0 {
		t.Skip("nothing is in flight")
	}
	uid := rapid.SampledFrom(uids).Draw(t, "in flight")
	return uid, m.flying[uid]
}

func (m *model) share(t *rapid.T) {
	uid, f := m.pickFlight(t)
	owner := pods.Draw(t, "pod")
	if got, ok := m.tracker.Share(uid, owner); !ok || got != f.allocation {
		t.Fatalf("Share() = %v, %t", got, ok)
	}
	if !slices.Contains(f.owners, owner) {
		f.owners = append(f.owners, owner)
	}
}

// write sends the allocation in flight to the server, which accepts it if the
// claim is still there and not allocated. The answer comes later.
func (m *model) write(t *rapid.T) {
	uid, f := m.pickFlight(t)
	c := m.now()[f.claim.Name]
	if c == nil || c.UID != uid || isAllocated(c) {
		t.Skip("the write would fail")
	}
	written := c.DeepCopy()
	written.Status.Allocation = f.allocation
	m.commit(c.Name, written)
	m.answers = append(m.answers, written)
	f.unanswered++
	for d := range m.promise[uid] {
		m.promise[uid][d] = promise(len(m.states))
	}
}

func (m *model) answer(t *rapid.T) {
	if len(m.answers) == 0 {
		t.Skip("no answers")
	}
	i := rapid.IntRange(0, len(m.answers)-1).Draw(t, "answer")
	c := m.answers[i]
	m.answers = slices.Delete(m.answers, i, i+1)
	m.assumed = append(m.assumed, c)
	_ = m.tracker.Assume(c.DeepCopy()) // fails if the claim is gone: check sees what is left of it
	m.flying[c.UID].unanswered--
}

// staleAnswer brings an old answer once more, as a slow goroutine would.
func (m *model) staleAnswer(t *rapid.T) {
	if len(m.assumed) == 0 {
		t.Skip("no old answers")
	}
	_ = m.tracker.Assume(rapid.SampledFrom(m.assumed).Draw(t, "answer").DeepCopy())
}

// release ends a pod's interest, after all answers.
func (m *model) release(t *rapid.T) {
	uid, f := m.pickFlight(t)
	if f.unanswered > 0 {
		t.Skip("a write has not been answered")
	}
	owner := rapid.SampledFrom(f.owners).Draw(t, "pod")
	f.owners = slices.DeleteFunc(f.owners, func(o types.UID) bool { return o == owner })
	if last := m.tracker.Release(uid, owner); last != (len(f.owners) == 0) {
		t.Fatalf("Release() = %t with %d owners left", last, len(f.owners))
	}
	if len(f.owners) > 0 {
		return
	}
	delete(m.flying, uid)
	for d, until := range m.promise[uid] {
		if until == 0 { // never written
			delete(m.promise[uid], d)
		}
	}
}

// withdraw takes an allocation back that is not in flight here, as the fence may
// want it, or a pod that goes elsewhere after the write. The answer comes at once.
func (m *model) withdraw(t *rapid.T) {
	name := pick(t, m.now(), func(c *resourceapi.ResourceClaim) bool { return isAllocated(c) && m.flying[c.UID] == nil })
	c := m.now()[name].DeepCopy()
	c.Status.Allocation = nil
	m.commit(name, c)
	must(t, m.tracker.Assume(c.DeepCopy()))
	m.assumed = append(m.assumed, c)
	for uid := range m.promise { // of the claim, and of earlier ones of the name, which are known to have gone
		if m.names[uid] == name {
			delete(m.promise, uid)
		}
	}
}
