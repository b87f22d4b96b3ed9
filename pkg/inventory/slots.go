package inventory

import (
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

// slotTable hands out slot numbers to the values of a cache that is bounded by how many they are and by their bytes. Whoever asks for a value
// has it, with all others who did, and each counts it as its own: it is kept while one has it. When the table is full the owner that has the most
// gives up the value that it asked for longest ago. So an owner that has no more than its share, which is the limit divided by the number
// of owners, loses nothing, also of what others asked for first. A value that has lost its slot stays usable: it and its successor then
// overwrite each other's derived values, which are told apart by identity.
type slotTable[T any] struct {
	limit    int
	maxBytes int64
	maxUses  int

	mu      sync.Mutex
	entries map[string]*slotEntry[T]
	free    []int // slots below limit
	owners  map[string]*holding[T]
	bytes   int64 // of entries
	uses    int   // of all owners
	asked   uint64
	evicted uint64
	// making has, by key, what is closed when the value that somebody makes is made, or failed to.
	making map[string]chan struct{}
}

// maxUses bounds what a table remembers of who has what.
const maxUses = 1 << 14

// holding is what an owner has of a table.
type holding[T any] struct {
	recent *list.List // of *use[T], most recently asked for first
	of     map[*slotEntry[T]]*list.Element
	bytes  int64
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
}

// made is a value that needs a slot. bytes is about what it takes of memory.
type made[T any] struct {
	bytes int64
	in    func(slot int) T
}

func newSlotTable[T any](limit int, maxBytes int64) *slotTable[T] {
	t := &slotTable[T]{
		limit: limit, maxBytes: maxBytes, maxUses: maxUses,
		entries: make(map[string]*slotEntry[T]), owners: make(map[string]*holding[T]), making: make(map[string]chan struct{}),
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
	if has == nil {
		has = &holding[T]{recent: list.New(), of: make(map[*slotEntry[T]]*list.Element)}
		t.owners[owner] = has
	}
	t.asked++
	if e, ok := has.of[entry]; ok {
		e.Value.(*use[T]).asked = t.asked
		has.recent.MoveToFront(e)
		return
	}
	has.of[entry] = has.recent.PushFront(&use[T]{entry, t.asked})
	has.bytes += entry.bytes
	entry.owners++
	t.uses++
}

// shrink makes room for so much more of an owner, who has it already as far as it is asked who has the most.
func (t *slotTable[T]) shrink(asks string, entries int, bytes int64) {
	more := func(owner string, n int64) int64 {
		if owner == asks {
			return n
		}
		return 0
	}
	for t.bytes+bytes > t.maxBytes {
		t.giveUp(func(owner string) int64 { return t.owners[owner].bytes + more(owner, bytes) })
	}
	for len(t.entries)+entries > t.limit || t.uses+entries > t.maxUses {
		t.giveUp(func(owner string) int64 { return int64(t.owners[owner].recent.Len()) + more(owner, int64(entries)) })
	}
}

// giveUp takes the oldest value from the owner that has the most: of equals from the one that asked for it first.
func (t *slotTable[T]) giveUp(size func(owner string) int64) {
	var owner string
	var most *holding[T]
	for name, has := range t.owners {
		if most == nil || size(name) > size(owner) || size(name) == size(owner) && oldest(has).asked < oldest(most).asked {
			owner, most = name, has
		}
	}
	entry := oldest(most).entry
	most.recent.Remove(most.of[entry])
	delete(most.of, entry)
	most.bytes -= entry.bytes
	if most.recent.Len() == 0 {
		delete(t.owners, owner)
	}
	t.uses--
	if entry.owners--; entry.owners > 0 {
		return // others have it
	}
	delete(t.entries, entry.key)
	t.free = append(t.free, entry.slot)
	t.bytes -= entry.bytes
	t.evicted++
}

func oldest[T any](h *holding[T]) *use[T] { return h.recent.Back().Value.(*use[T]) }

func (t *slotTable[T]) stats() CacheStats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return CacheStats{Entries: len(t.entries), Limit: t.limit, Evicted: t.evicted}
}
