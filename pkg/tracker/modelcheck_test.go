// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/usage"
)

// What there is in the model: whole GPUs, a GPU that is given out in shares, and
// partitions of another one; and once more the same, which other schedulers use,
// too, and over-use.
var (
	modelDevices     = append([]usage.DeviceID{gpu0, gpu1, gpu2, device("node-b", "big"), device("mig", "part-40-0"), device("mig", "part-40-1"), device("mig", "part-80")}, contestedDevices...)
	contestedDevices = []usage.DeviceID{device(contested, "gpu-0"), device(contested, "big"), device(contested, "part-40-0"), device(contested, "part-40-1"), device(contested, "part-80")}
)

const (
	contested = "contested"
	// memory is what a shareable device has, and the counter of a pool.
	memory = 80
)

func isShareable(d usage.DeviceID) bool { return d.Device == "big" }

// counts is what a device takes of its pool's counter.
func counts(d usage.DeviceID) int64 {
	switch {
	case strings.HasPrefix(d.Device, "part-40"):
		return 40
	case strings.HasPrefix(d.Device, "part-80"):
		return 80
	}
	return 0
}

// taking is one result of an allocation: a device, or a share of its memory.
type taking struct {
	device usage.DeviceID
	share  types.UID
	memory int64
}

func allocationOf(takes []taking) *resourceapi.AllocationResult {
	a := &resourceapi.AllocationResult{}
	for _, one := range takes {
		a.Devices.Results = append(a.Devices.Results, allocation(one.device).Devices.Results...)
		if one.share != "" {
			r := &a.Devices.Results[len(a.Devices.Results)-1]
			r.ShareID = ptr.To(one.share)
			r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": *resource.NewQuantity(one.memory, resource.DecimalSI)}
		}
	}
	return a
}

// takingsOf is the opposite. Admin access takes nothing.
func takingsOf(a *resourceapi.AllocationResult) (takes []taking) {
	if a == nil {
		return nil
	}
	for i := range a.Devices.Results {
		r := &a.Devices.Results[i]
		if !ptr.Deref(r.AdminAccess, false) {
			consumed := r.ConsumedCapacity["memory"]
			takes = append(takes, taking{usage.DeviceOf(r), ptr.Deref(r.ShareID, ""), consumed.Value()})
		}
	}
	return takes
}

// heldIn is what is held in a view.
func heldIn(view usage.View) (takes []taking) {
	for id, d := range view.All() {
		for _, h := range d.Holders() {
			takes = append(takes, takingOf(id, h))
		}
	}
	return takes
}

func takingOf(id usage.DeviceID, h usage.Holder) taking {
	consumed := h.ConsumedCapacity["memory"]
	return taking{id, ptr.Deref(h.ShareID, ""), consumed.Value()}
}

// fitBeside tells whether a claim may take something beside what others have.
func fitBeside(own, others []taking) bool {
	for i, one := range own {
		share, counter, seen := one.memory, counts(one.device), map[usage.DeviceID]bool{one.device: true}
		for _, other := range slices.Concat(own[:i], own[i+1:], others) {
			if other.device == one.device {
				if one.share == "" || other.share == "" {
					return false
				}
				share += other.memory
			}
			if other.device.Pool == one.device.Pool && !seen[other.device] {
				seen[other.device] = true
				counter += counts(other.device)
			}
		}
		if share > memory || counts(one.device) > 0 && counter > memory {
			return false
		}
	}
	return true
}

// modelJudge judges by what it is told of usage and precedence.
type modelJudge struct{}

func (modelJudge) Taken(*resourceapi.AllocationResult) {}

func (modelJudge) Judge(c Case) Verdict {
	var earlier, either []taking
	for id, d := range c.Usage.All() {
		for _, h := range d.Holders() {
			switch c.Precedence(id, h) {
			case Earlier:
				earlier = append(earlier, takingOf(id, h))
			case EitherWay:
				either = append(either, takingOf(id, h))
			case Later:
			}
		}
	}
	return Verdict{Outcome: outcome(takingsOf(c.Allocation), earlier, either)}
}

func outcome(own, earlier, either []taking) Outcome {
	switch {
	case !fitBeside(own, earlier):
		return Lost
	case !fitBeside(own, slices.Concat(earlier, either)):
		return Undecided
	default:
		return Fits
	}
}

// layer1 is what the tracker should know: what the watch has seen, and answers
// that are ahead of it.
func (m *model) layer1() map[string]*resourceapi.ResourceClaim {
	known := maps.Clone(m.observed())
	for _, c := range m.assumed {
		if revisionOf(c) > m.seen && (known[c.Name] == nil || revisionOf(c) > revisionOf(known[c.Name])) {
			known[c.Name] = c
		}
	}
	return known
}

// observed is what the watch has seen.
func (m *model) observed() map[string]*resourceapi.ResourceClaim {
	if m.seen == 0 {
		return map[string]*resourceapi.ResourceClaim{}
	}
	return m.states[m.seen-1]
}

// heldBy is what each claim should hold, and whether in flight only.
func (m *model) heldBy() map[types.UID]map[taking]bool {
	held := map[types.UID]map[taking]bool{}
	add := func(uid types.UID, a *resourceapi.AllocationResult, inFlight bool) {
		for _, one := range takingsOf(a) {
			if held[uid] == nil {
				held[uid] = map[taking]bool{}
			}
			held[uid][one] = inFlight
		}
	}
	for uid, f := range m.flying {
		add(uid, f.allocation, true)
	}
	for _, c := range m.layer1() {
		add(c.UID, c.Status.Allocation, false)
	}
	return held
}

func (m *model) check(t *rapid.T) {
	m.checkKnown(t)
	m.checkUsage(t)
	m.checkPromises(t)
	m.checkSnapshots(t)
	m.checkStandings(t)
	m.checkServer(t)
}

// checkKnown compares layer 1 (I4, I5).
func (m *model) checkKnown(t *rapid.T) {
	got := map[string]*resourceapi.ResourceClaim{}
	for _, name := range []string{"a", "b", "c", "d"} {
		if c, err := m.tracker.Get("default", name); err == nil {
			got[name] = c
		}
	}
	if want := m.layer1(); !apiequality.Semantic.DeepEqual(want, got) {
		t.Fatalf("claims (-want +got):\n%s", cmp.Diff(want, got))
	}
}

// checkUsage compares layer 3 (I1, I3).
func (m *model) checkUsage(t *rapid.T) {
	want := map[string][]string{}
	for uid, holds := range m.heldBy() {
		for one, inFlight := range holds {
			holder := holderName(uid, inFlight, one.share)
			if one.share != "" {
				holder += "{memory=" + strconv.FormatInt(one.memory, 10) + "}"
			}
			want[one.device.String()] = append(want[one.device.String()], holder)
		}
	}
	for _, holders := range want {
		slices.Sort(holders)
	}
	if diff := cmp.Diff(want, held(m.tracker)); diff != "" {
		t.Fatalf("usage (-want +got):\n%s", diff)
	}
}

// checkPromises checks that what was reserved is held, for the claim that it was
// reserved for, until the watch has seen the write (I2).
func (m *model) checkPromises(t *rapid.T) {
	view := m.tracker.Snapshot().Usage
	for uid, takes := range m.promise {
		for one, until := range takes {
			if until > 0 && m.seen >= int(until) {
				delete(takes, one)
				continue
			}
			if !slices.ContainsFunc(view.Device(one.device).Holders(), func(h usage.Holder) bool {
				return h.Claim.UID == uid && takingOf(one.device, h) == one
			}) {
				t.Fatalf("%v, reserved for claim %s, is free before the watch has seen the write", one, uid)
			}
		}
	}
}

// picture is a snapshot with what was in it.
type picture struct {
	snapshot Snapshot
	held     map[string][]string
}

// checkSnapshots checks that snapshots never change, though nothing is copied for
// them (I6), and that revisions tell them apart.
func (m *model) checkSnapshots(t *rapid.T) {
	now := picture{m.tracker.Snapshot(), held(m.tracker)}
	for _, before := range m.snapshots {
		if diff := cmp.Diff(before.held, heldOf(before.snapshot.Usage)); diff != "" {
			t.Fatalf("the snapshot of revision %d has changed (-then +now):\n%s", before.snapshot.Revision, diff)
		}
		if before.snapshot.Revision == now.snapshot.Revision && !cmp.Equal(before.held, now.held) {
			t.Fatalf("two snapshots of revision %d differ", now.snapshot.Revision)
		}
	}
	m.snapshots = append(m.snapshots[max(0, len(m.snapshots)-4):], now)
}

// checkStandings compares what the tracker says of each allocation: when it was
// written, and whether it fits on top of the earlier ones.
func (m *model) checkStandings(t *rapid.T) {
	orders, held := map[types.UID]Order{}, m.heldBy()
	for name, c := range m.observed() {
		if got, ok := m.tracker.AllocatedAt(c.UID); ok != isAllocated(c) {
			t.Fatalf("AllocatedAt(%s) = %v, %t, but allocated: %t", c.UID, got, ok, isAllocated(c))
		} else if !ok {
			continue
		} else if want := m.orderOf(name); got != want {
			t.Fatalf("AllocatedAt(%s) = %v, want %v", c.UID, got, want)
		} else if at := m.allocatedAt(name); at < number(got.NotBefore) || at > number(got.NotAfter) {
			t.Fatalf("AllocatedAt(%s) = %v, but it was allocated at %d", c.UID, got, at)
		} else {
			orders[c.UID] = got
		}
	}

	for _, c := range m.observed() {
		order, ok := orders[c.UID]
		if !ok {
			continue
		}
		want := Fits
		if m.fits[c.UID] != order { // else it is final
			earlier, either := m.othersBefore(c, orders, held)
			want = outcome(takingsOf(c.Status.Allocation), earlier, either)
		}
		got, err := m.tracker.Verdict(usage.RefOf(c), c.Status.Allocation, usage.View{})
		if known := m.layer1()[c.Name]; known.UID != c.UID { // made anew, as an answer tells
			if !errors.Is(err, ErrClaimGone) {
				t.Fatalf("Verdict(%s) = %s, %v; want %v", c.UID, got.Outcome, err, ErrClaimGone)
			}
			continue
		}
		if err != nil || got.Outcome != want {
			t.Fatalf("Verdict(%s) = %s, %v; want %s", c.UID, got.Outcome, err, want)
		}
		if want == Fits {
			m.fits[c.UID] = order
		}
	}

	for uid := range m.fits { // those that have gone, too
		if order, ok := m.tracker.AllocatedAt(uid); ok && orders[uid] != order {
			t.Fatalf("AllocatedAt(%s) = %v, which is not observed to be allocated", uid, order)
		}
	}
}

// orderOf recomputes when an observed claim was allocated, from how it was
// observed: the feed that brought the allocation, and lists since then in which
// the claim was another object.
func (m *model) orderOf(name string) Order {
	at := func(i int) *resourceapi.ResourceClaim { return m.states[m.feeds[i].to-1][name] }
	first := len(m.feeds) - 1
	for first > 0 && sameHold(at(first-1), at(first)) {
		first--
	}
	brought := m.feeds[first]
	order := Order{NotBefore: strconv.Itoa(brought.from), NotAfter: at(first).ResourceVersion}
	if !brought.list {
		order.NotBefore = order.NotAfter
	} else if brought.from == 0 {
		order.NotBefore = ""
	}
	for i := first + 1; i < len(m.feeds); i++ {
		if m.feeds[i].list && at(i).ResourceVersion != at(i-1).ResourceVersion {
			order.NotAfter = at(i).ResourceVersion
		}
	}
	return order
}

// allocatedAt is the truth about it.
func (m *model) allocatedAt(name string) int {
	at := m.seen
	for at > 1 && sameHold(m.states[at-2][name], m.states[at-1][name]) {
		at--
	}
	return at
}

// sameHold tells whether two objects are of one claim with one allocation.
func sameHold(a, b *resourceapi.ResourceClaim) bool {
	return a != nil && b != nil && a.UID == b.UID && isAllocated(a) && apiequality.Semantic.DeepEqual(a.Status.Allocation, b.Status.Allocation)
}

// othersBefore is what other claims have had, certainly or perhaps, before one
// was allocated, and have still. Only what was observed counts.
func (m *model) othersBefore(c *resourceapi.ResourceClaim, orders map[types.UID]Order, held map[types.UID]map[taking]bool) (earlier, either []taking) {
	for _, other := range m.observed() {
		if other.UID == c.UID {
			continue
		}
		for _, one := range takingsOf(other.Status.Allocation) {
			if _, still := held[other.UID][one]; !still {
				continue
			}
			switch a, b := orders[other.UID], orders[c.UID]; {
			case b.NotBefore != "" && number(a.NotAfter) <= number(b.NotBefore):
				earlier = append(earlier, one)
			case a.NotBefore == "" || number(b.NotAfter) > number(a.NotBefore):
				either = append(either, one)
			}
		}
	}
	return earlier, either
}

// checkServer checks what it is all for: the server never has what is ours alone
// more often than it is there.
func (m *model) checkServer(t *rapid.T) {
	for name, c := range m.now() {
		var others []taking
		for other, o := range m.now() {
			if other != name {
				others = append(others, takingsOf(o.Status.Allocation)...)
			}
		}
		own := slices.DeleteFunc(takingsOf(c.Status.Allocation), func(one taking) bool { return one.device.Pool == contested })
		if !fitBeside(own, others) {
			t.Fatalf("claim %s has %v, which others have, too: %v", name, own, others)
		}
	}
}

func revisionOf(c *resourceapi.ResourceClaim) int { return number(c.ResourceVersion) }

// number is a resource version as a number, 0 for none.
func number(version string) int {
	n, _ := strconv.Atoi(version)
	return n
}
