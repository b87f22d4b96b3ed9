// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"container/heap"
	"container/list"
	"context"
	"sync"
	"sync/atomic"
)

// slots keeps, on an immutable object, one derived value per slot number. Reading takes no lock. A value put
// while the array grows may be lost, which costs one more computation and nothing else.
type slots[T any] struct {
	p atomic.Pointer[[]atomic.Pointer[T]]
}

func (s *slots[T]) get(slot int) *T {
	a := s.p.Load()
	if a == nil || slot >= len(*a) {
		return nil
	}
	return (*a)[slot].Load()
}

func (s *slots[T]) put(slot int, value *T) {
	for {
		old := s.p.Load()
		if old != nil && slot < len(*old) {
			(*old)[slot].Store(value)
			return
		}
		grown := make([]atomic.Pointer[T], slot+1)
		if old != nil {
			for i := range *old {
				grown[i].Store((*old)[i].Load())
			}
		}
		if s.p.CompareAndSwap(old, &grown) {
			grown[slot].Store(value)
			return
		}
	}
}

// drop forgets the value.
func (s *slots[T]) drop(slot int) {
	if a := s.p.Load(); a != nil && slot < len(*a) {
		(*a)[slot].Store(nil)
	}
}

// copyFrom takes over all values of o. Nobody else may know s yet.
func (s *slots[T]) copyFrom(o *slots[T]) {
	a := o.p.Load()
	if a == nil {
		return
	}
	for slot := range *a {
		if value := (*a)[slot].Load(); value != nil {
			s.put(slot, value)
		}
	}
}

// slotTable hands out slot numbers to the values of a cache that is bounded by how many they are and by their bytes. Whoever asks for
// a value has it, with all others who did, and each counts it as its own: it is kept while one has it. When the table is full the
// owner that has the most gives up the value that it asked for longest ago. A value that nobody has any more is kept until its room is
// needed. So an owner that has no more than its share, which is the limit divided by the number of owners, loses nothing, also of what
// others asked for first. A value that has lost its slot stays usable: it and its successor then overwrite each other's derived
// values, which are told apart by identity.
type slotTable[T any] struct {
	limit    int
	maxBytes int64
	maxUses  int

	mu      sync.Mutex
	entries map[string]*slotEntry[T]
	free    []int // slots below limit
	owners  map[string]*holding[T]
	unowned *list.List // of *slotEntry[T] that nobody has, longest so first
	bytes   int64      // of entries
	uses    int        // of all owners
	// byEntries and byBytes have all owners, by who gives up first.
	byEntries, byBytes ranking[T]
	asked              uint64
	evicted            uint64
	// making has, by key, what is closed when the value that somebody makes is made, or failed to.
	making map[string]chan struct{}
}

// maxUses bounds what a table remembers of who has what, unless twice its limit is more. One put may have to undo most of that, while all
// others wait for it.
const maxUses = 1 << 10

// holding is what an owner has of a table. It has at least one entry.
type holding[T any] struct {
	owner  string
	recent *list.List // of *use[T], most recently asked for first
	of     map[*slotEntry[T]]*list.Element
	bytes  int64
	at     [2]int // its places in the rankings
}

// use is an entry that an owner has.
type use[T any] struct {
	entry *slotEntry[T]
	asked uint64
}

type slotEntry[T any] struct {
	key    string
	slot   int
	bytes  int64
	value  T
	owners int
	// unowned is its place among those that nobody has.
	unowned *list.Element
}

// made is a value that needs a slot. bytes is about what it takes of memory.
type made[T any] struct {
	bytes int64
	in    func(slot int) T
}

func newSlotTable[T any](limit int, maxBytes int64) *slotTable[T] {
	t := &slotTable[T]{
		limit: limit, maxBytes: maxBytes, maxUses: max(maxUses, 2*limit),
		entries: make(map[string]*slotEntry[T]), owners: make(map[string]*holding[T]), making: make(map[string]chan struct{}),
		unowned:   list.New(),
		byEntries: ranking[T]{number: 0, size: func(h *holding[T]) int64 { return int64(h.recent.Len()) }},
		byBytes:   ranking[T]{number: 1, size: func(h *holding[T]) int64 { return h.bytes }},
	}
	for slot := range limit {
		t.free = append(t.free, limit-1-slot)
	}
	return t
}

// get returns the value for key, making it for the owner if it is not there. It is made outside of the lock, and once if several want
// it. An error of create is returned, not kept. If ctx has ended nothing is made.
func (t *slotTable[T]) get(ctx context.Context, owner, key string, create func() (made[T], error)) (T, error) {
	t.mu.Lock()
	for {
		if e, ok := t.entries[key]; ok {
			t.ask(owner, e)
			t.shrink(owner, 0, 0)
			t.mu.Unlock()
			return e.value, nil
		}
		others := t.making[key]
		if others == nil {
			break
		}
		t.mu.Unlock()
		<-others
		t.mu.Lock()
	}
	done := make(chan struct{})
	t.making[key] = done
	t.mu.Unlock()

	defer close(done)
	var fresh made[T]
	err := endOf(ctx)
	if err == nil {
		fresh, err = create()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.making, key)
	if err != nil {
		var none T
		return none, err
	}
	return t.put(owner, key, fresh), nil
}

// put keeps a value. What would take more than a quarter of all bytes is not kept, so that no value flushes the others: it gets a slot that
// is nobody's.
func (t *slotTable[T]) put(owner, key string, fresh made[T]) T {
	if fresh.bytes > t.maxBytes/4 {
		t.evicted++
		return fresh.in(t.limit)
	}
	t.shrink(owner, 1, fresh.bytes)
	last := len(t.free) - 1
	entry := &slotEntry[T]{key: key, slot: t.free[last], bytes: fresh.bytes, value: fresh.in(t.free[last])}
	t.free = t.free[:last]
	t.entries[key] = entry
	t.bytes += entry.bytes
	t.ask(owner, entry)
	return entry.value
}

// ask notes that an owner asked for an entry, which it has from now on.
func (t *slotTable[T]) ask(owner string, entry *slotEntry[T]) {
	has := t.owners[owner]
	isNew := has == nil
	if isNew {
		has = &holding[T]{owner: owner, recent: list.New(), of: make(map[*slotEntry[T]]*list.Element)}
		t.owners[owner] = has
	}
	t.asked++
	if e, ok := has.of[entry]; ok {
		e.Value.(*use[T]).asked = t.asked
		has.recent.MoveToFront(e)
	} else {
		has.of[entry] = has.recent.PushFront(&use[T]{entry, t.asked})
		has.bytes += entry.bytes
		entry.owners++
		t.uses++
	}
	if entry.unowned != nil {
		t.unowned.Remove(entry.unowned)
		entry.unowned = nil
	}
	for _, r := range []*ranking[T]{&t.byEntries, &t.byBytes} {
		if isNew {
			heap.Push(r, has)
		} else {
			heap.Fix(r, has.at[r.number])
		}
	}
}

// shrink makes room for so much more of an owner, who has it already as far as it is asked who has the most.
func (t *slotTable[T]) shrink(asks string, entries int, bytes int64) {
	for t.bytes+bytes > t.maxBytes {
		if !t.drop() {
			t.giveUp(t.byBytes.first(t.owners[asks], bytes))
		}
	}
	for len(t.entries)+entries > t.limit {
		if !t.drop() {
			t.giveUp(t.byEntries.first(t.owners[asks], int64(entries)))
		}
	}
	for t.uses+entries > t.maxUses {
		t.giveUp(t.byEntries.first(t.owners[asks], int64(entries)))
	}
}

// giveUp takes the oldest value from an owner.
func (t *slotTable[T]) giveUp(has *holding[T]) {
	entry := oldest(has).entry
	if has.recent.Len() == 1 {
		heap.Remove(&t.byEntries, has.at[t.byEntries.number])
		heap.Remove(&t.byBytes, has.at[t.byBytes.number])
		delete(t.owners, has.owner)
	}
	has.recent.Remove(has.of[entry])
	delete(has.of, entry)
	has.bytes -= entry.bytes
	t.uses--
	if has.recent.Len() > 0 {
		heap.Fix(&t.byEntries, has.at[t.byEntries.number])
		heap.Fix(&t.byBytes, has.at[t.byBytes.number])
	}
	if entry.owners--; entry.owners == 0 {
		entry.unowned = t.unowned.PushBack(entry)
	}
}

// drop forgets the entry that nobody has for the longest time, if there is one.
func (t *slotTable[T]) drop() bool {
	front := t.unowned.Front()
	if front == nil {
		return false
	}
	entry := t.unowned.Remove(front).(*slotEntry[T])
	delete(t.entries, entry.key)
	t.free = append(t.free, entry.slot)
	t.bytes -= entry.bytes
	t.evicted++
	return true
}

func oldest[T any](h *holding[T]) *use[T] { return h.recent.Back().Value.(*use[T]) }

func (t *slotTable[T]) stats() CacheStats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return CacheStats{Entries: len(t.entries), Limit: t.limit, Evicted: t.evicted}
}

// ranking is a heap of owners: first is who has the most, of equals who asked for its oldest first.
type ranking[T any] struct {
	number int // of the ranking, in holding.at
	size   func(*holding[T]) int64
	owners []*holding[T]
}

// first is who gives up first, if one who asks had so much more.
func (r *ranking[T]) first(asks *holding[T], more int64) *holding[T] {
	if first := r.owners[0]; asks == nil || r.before(first, asks, more) {
		return first
	}
	return asks
}

// before tells whether a gives up before b, if b had so much more.
func (r *ranking[T]) before(a, b *holding[T], more int64) bool {
	if sizeA, sizeB := r.size(a), r.size(b)+more; sizeA != sizeB {
		return sizeA > sizeB
	}
	return oldest(a).asked < oldest(b).asked
}

func (r *ranking[T]) Len() int           { return len(r.owners) }
func (r *ranking[T]) Less(i, j int) bool { return r.before(r.owners[i], r.owners[j], 0) }

func (r *ranking[T]) Swap(i, j int) {
	r.owners[i], r.owners[j] = r.owners[j], r.owners[i]
	r.owners[i].at[r.number], r.owners[j].at[r.number] = i, j
}

func (r *ranking[T]) Push(has any) {
	has.(*holding[T]).at[r.number] = len(r.owners)
	r.owners = append(r.owners, has.(*holding[T]))
}

func (r *ranking[T]) Pop() any {
	last := len(r.owners) - 1
	has := r.owners[last]
	r.owners[last] = nil
	r.owners = r.owners[:last]
	return has
}
