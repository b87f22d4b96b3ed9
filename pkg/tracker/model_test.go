package tracker

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/usage"
)

// TestModel drives a tracker through arbitrary histories of an API server, its
// watch and several pods' scheduling, in any interleaving that these allow, and
// compares it after every step with a model that recomputes all of it.
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
			"relist":          m.relist,
			"reserve":         m.reserve,
			"share":           m.share,
			"write":           m.write,
			"answer":          m.answer,
			"stale answer":    m.staleAnswer,
			"release":         m.release,
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
	uids   int

	// The watch: the revision that the tracker has seen; 0 before the list.
	seen int

	// The scheduler.
	answers []*resourceapi.ResourceClaim             // to its writes, not delivered
	assumed []*resourceapi.ResourceClaim             // answers that were delivered
	flying  map[types.UID]*flight                    // reserved, not released
	promise map[types.UID]map[usage.DeviceID]promise // I2: what must not be free
}

type flight struct {
	claim      *resourceapi.ResourceClaim // as reserved
	allocation *resourceapi.AllocationResult
	owners     []types.UID
	unanswered int // writes
}

// promise says until when a device must be held for a claim: until the watch is
// at a revision; 0 while that is not known.
type promise int

func newModel() *model {
	return &model{
		tracker: quiet(),
		states:  []map[string]*resourceapi.ResourceClaim{{}},
		flying:  map[types.UID]*flight{},
		promise: map[types.UID]map[usage.DeviceID]promise{},
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
	m.uids++
	m.commit(name, claim(name, types.UID(fmt.Sprintf("u%d", m.uids)), 0))
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

// otherScheduler allocates, or moves, a claim to devices that only it uses. (The
// fence keeps schedulers off each other's devices, not the tracker.)
func (m *model) otherScheduler(t *rapid.T) {
	name := pick(t, m.now(), func(c *resourceapi.ResourceClaim) bool {
		return notAllocated(c) || c.Status.Allocation.Devices.Results[0].Pool == "other"
	})
	c := m.now()[name].DeepCopy()
	c.Status.Allocation = allocation(device("other", "gpu-"+strconv.Itoa(rapid.IntRange(0, 2).Draw(t, "device"))))
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
	before, after := m.states[m.seen-1], m.states[m.seen]
	m.seen++
	s := m.tracker.Store()
	for _, name := range []string{"a", "b", "c", "d"} {
		switch {
		case before[name] == after[name]:
		case after[name] == nil:
			last := before[name].DeepCopy()
			last.ResourceVersion = strconv.Itoa(m.seen)
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
	m.seen = rapid.IntRange(max(m.seen, 1), len(m.states)).Draw(t, "revision")
	objs := []any{}
	for _, c := range m.states[m.seen-1] {
		objs = append(objs, c.DeepCopy())
	}
	must(t, m.tracker.Store().Replace(objs, strconv.Itoa(m.seen)))
}

var pods = rapid.SampledFrom([]types.UID{"p1", "p2", "p3"})

// reserve takes devices that are free in a snapshot.
func (m *model) reserve(t *rapid.T) {
	if m.seen == 0 {
		t.Skip("not synced")
	}
	known := m.layer1()
	c := known[pick(t, known, notAllocated)]
	snapshot := m.tracker.Snapshot()
	var free []usage.DeviceID
	for _, d := range []usage.DeviceID{gpu0, gpu1, gpu2} {
		if snapshot.Usage.Device(d) == nil {
			free = append(free, d)
		}
	}
	if len(free) == 0 {
		t.Skip("no device is free")
	}
	chosen := rapid.SliceOfNDistinct(rapid.SampledFrom(free), 1, len(free), rapid.ID[usage.DeviceID]).Draw(t, "devices")
	owner := pods.Draw(t, "pod")
	a := allocation(chosen...)
	err := m.tracker.Reserve(snapshot.Usage, owner, []Reservation{{Claim: c, Allocation: a}})
	if flying := m.flying[c.UID] != nil; flying != (err != nil) {
		t.Fatalf("Reserve() of a claim that is in flight (%t) = %v", flying, err)
	}
	if err != nil {
		return
	}
	m.flying[c.UID] = &flight{claim: c, allocation: a, owners: []types.UID{owner}}
	m.promise[c.UID] = map[usage.DeviceID]promise{}
	for _, d := range chosen {
		m.promise[c.UID][d] = 0
	}
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

// layer1 is what the tracker should know: what the watch has seen, and answers
// that are ahead of it.
func (m *model) layer1() map[string]*resourceapi.ResourceClaim {
	known := map[string]*resourceapi.ResourceClaim{}
	if m.seen > 0 {
		known = maps.Clone(m.states[m.seen-1])
	}
	for _, c := range m.assumed {
		if revisionOf(c) > m.seen && (known[c.Name] == nil || revisionOf(c) > revisionOf(known[c.Name])) {
			known[c.Name] = c
		}
	}
	return known
}

func (m *model) check(t *rapid.T) {
	// Layer 1 (I4, I5).
	want := m.layer1()
	got := map[string]*resourceapi.ResourceClaim{}
	for _, name := range []string{"a", "b", "c", "d"} {
		if c, err := m.tracker.Get("default", name); err == nil {
			got[name] = c
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("claims (-want +got):\n%s", diff)
	}

	// Layer 3 (I1, I3).
	holding := map[string][]string{}
	for _, c := range want {
		if isAllocated(c) {
			for _, r := range c.Status.Allocation.Devices.Results {
				holding[usage.DeviceOf(&r).String()] = append(holding[usage.DeviceOf(&r).String()], string(c.UID))
			}
		}
	}
	for uid, f := range m.flying {
		for _, r := range f.allocation.Devices.Results {
			if id := usage.DeviceOf(&r).String(); !slices.Contains(holding[id], string(uid)) {
				holding[id] = append(holding[id], string(uid)+"*")
			}
		}
	}
	for _, h := range holding {
		slices.Sort(h)
	}
	if diff := cmp.Diff(holding, held(m.tracker)); diff != "" {
		t.Fatalf("usage (-want +got):\n%s", diff)
	}

	// I2.
	for uid, devices := range m.promise {
		for d, until := range devices {
			if until > 0 && m.seen >= int(until) {
				delete(devices, d)
			} else if m.tracker.Snapshot().Usage.Device(d) == nil {
				t.Fatalf("%s, reserved for claim %s, is free before the watch has seen the write", d, uid)
			}
		}
	}

	// And what it is all for: the server never has a device of ours twice.
	owners := map[usage.DeviceID]string{}
	for _, c := range m.now() {
		if !isAllocated(c) {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if d := usage.DeviceOf(&r); d.Pool != "other" {
				if owners[d] != "" {
					t.Fatalf("%s is allocated to %s and to %s", d, owners[d], c.Name)
				}
				owners[d] = c.Name
			}
		}
	}
}

func revisionOf(c *resourceapi.ResourceClaim) int {
	revision, _ := strconv.Atoi(c.ResourceVersion)
	return revision
}
