package inventory

import (
	"container/list"
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

// slotTable hands out slot numbers to the values of a bounded cache. When it is full the value that was asked
// for longest ago gives up its slot. That value stays usable: it and its successor then overwrite each
// other's derived values, which are told apart by identity.
type slotTable[T any] struct {
	limit int

	mu      sync.Mutex
	entries map[string]*list.Element // key → element of recent, whose value is *slotEntry[T]
	recent  *list.List               // most recently asked for first
	evicted uint64
}

type slotEntry[T any] struct {
	key   string
	slot  int
	value T
}

func newSlotTable[T any](limit int) *slotTable[T] {
	return &slotTable[T]{limit: limit, entries: make(map[string]*list.Element), recent: list.New()}
}

// get returns the value for key, making it if it is not there. An error of make is returned, not kept.
func (t *slotTable[T]) get(key string, make func(slot int) (T, error)) (T, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e, ok := t.entries[key]; ok {
		t.recent.MoveToFront(e)
		return e.Value.(*slotEntry[T]).value, nil
	}
	slot := t.recent.Len()
	var oldest *list.Element
	if slot >= t.limit {
		oldest = t.recent.Back()
		slot = oldest.Value.(*slotEntry[T]).slot
	}
	value, err := make(slot)
	if err != nil {
		var zero T
		return zero, err
	}
	if oldest != nil {
		delete(t.entries, oldest.Value.(*slotEntry[T]).key)
		t.recent.Remove(oldest)
		t.evicted++
	}
	t.entries[key] = t.recent.PushFront(&slotEntry[T]{key: key, slot: slot, value: value})
	return value, nil
}

func (t *slotTable[T]) stats() CacheStats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return CacheStats{Entries: t.recent.Len(), Limit: t.limit, Evicted: t.evicted}
}
