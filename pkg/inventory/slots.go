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

// slotTable hands out slot numbers to the values of a cache that is bounded by how many they are and by their bytes. When it is full the
// owner that has the most gives up the value that was asked for longest ago. So an owner that has no more than its share, which is
// the limit divided by the number of owners, loses nothing to others. A value that has lost its slot stays usable: it and its successor then
// overwrite each other's derived values, which are told apart by identity.
type slotTable[T any] struct {
	limit    int
	maxBytes int64

	mu      sync.Mutex
	entries map[string]*list.Element // key → element of recent, whose value is *slotEntry[T]
	recent  *list.List               // most recently asked for first
	free    []int                    // slots below limit
	owners  map[string]holding
	bytes   int64
	evicted uint64
	// making has, by key, what is closed when the value that somebody makes is made, or failed to.
	making map[string]chan struct{}
}

// holding is what an owner has of a table.
type holding struct {
	entries int
	bytes   int64
}

type slotEntry[T any] struct {
	key, owner string
	slot       int
	bytes      int64
	value      T
}

// made is a value that needs a slot. bytes is about what it takes of memory.
type made[T any] struct {
	bytes int64
	in    func(slot int) T
}

func newSlotTable[T any](limit int, maxBytes int64) *slotTable[T] {
	t := &slotTable[T]{
		limit: limit, maxBytes: maxBytes,
		entries: make(map[string]*list.Element), recent: list.New(), owners: make(map[string]holding), making: make(map[string]chan struct{}),
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
			t.recent.MoveToFront(e)
			t.mu.Unlock()
			return e.Value.(*slotEntry[T]).value, nil
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
	t.charge(owner, 1, fresh.bytes)
	for t.recent.Len() >= t.limit || t.bytes > t.maxBytes {
		t.evict(t.bytes > t.maxBytes)
	}
	last := len(t.free) - 1
	entry := &slotEntry[T]{key: key, owner: owner, slot: t.free[last], bytes: fresh.bytes, value: fresh.in(t.free[last])}
	t.free = t.free[:last]
	t.entries[key] = t.recent.PushFront(entry)
	return entry.value
}

// evict takes the oldest value from the owner that has the most bytes or, without byBytes, entries: of equals from the one whose value is
// the oldest.
func (t *slotTable[T]) evict(byBytes bool) {
	var oldest *list.Element
	var most int64
	seen := make(map[string]bool, len(t.owners))
	for e := t.recent.Back(); e != nil && len(seen) < len(t.owners); e = e.Prev() {
		owner := e.Value.(*slotEntry[T]).owner
		if seen[owner] {
			continue
		}
		seen[owner] = true
		has := int64(t.owners[owner].entries)
		if byBytes {
			has = t.owners[owner].bytes
		}
		if has > most {
			most, oldest = has, e
		}
	}
	entry := t.recent.Remove(oldest).(*slotEntry[T])
	delete(t.entries, entry.key)
	t.free = append(t.free, entry.slot)
	t.charge(entry.owner, -1, -entry.bytes)
	t.evicted++
}

// charge changes what an owner has.
func (t *slotTable[T]) charge(owner string, entries int, bytes int64) {
	has := t.owners[owner]
	has.entries, has.bytes, t.bytes = has.entries+entries, has.bytes+bytes, t.bytes+bytes
	if has.entries == 0 {
		delete(t.owners, owner)
		return
	}
	t.owners[owner] = has
}

func (t *slotTable[T]) stats() CacheStats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return CacheStats{Entries: t.recent.Len(), Limit: t.limit, Evicted: t.evicted}
}
