// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// news is what has changed and has not been looked at. It is collected as it comes, which is on the goroutines of informers,
// and made sense of in Pass.
type news struct {
	// freed are the pools in which devices were freed, with the tracker's revision of the last time.
	freed map[inventory.PoolID]uint64
	// pools are those whose slices changed.
	pools map[inventory.PoolID]*poolNews
}

// poolNews is what has changed about the slices of a pool.
type poolNews struct {
	// generation of the inventory, or a later one.
	generation uint64
	// nodes are those that the slices were or are for.
	nodes sets.Set[string]
	// everywhere tells that some slice was or is not for one node alone.
	everywhere bool
}

func newNews() news {
	return news{freed: map[inventory.PoolID]uint64{}, pools: map[inventory.PoolID]*poolNews{}}
}

// Freed tells that devices have been freed, be it in part, and that the tracker's snapshots of that revision show it.
func (r *Room[T, K]) Freed(devices []usage.DeviceID, revision uint64) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if len(r.waiters) == r.placed {
		return // who comes later sees it
	}
	for _, device := range devices {
		id := inventory.PoolID(device.PoolID())
		r.news.freed[id] = max(r.news.freed[id], revision)
	}
	if len(devices) > 0 {
		r.want()
	}
}

// SliceChanged tells that a slice came, went or changed; either object may be nil. Views of that generation show it.
func (r *Room[T, K]) SliceChanged(before, after *resourceapi.ResourceSlice, generation uint64) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if len(r.waiters) == r.placed {
		return
	}
	for _, slice := range []*resourceapi.ResourceSlice{before, after} {
		if slice == nil {
			continue
		}
		id := inventory.PoolID{Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name}
		known := r.news.pools[id]
		if known == nil {
			known = &poolNews{nodes: sets.New[string]()}
			r.news.pools[id] = known
		}
		known.generation = max(known.generation, generation)
		if slice.Spec.NodeName != nil {
			known.nodes.Insert(*slice.Spec.NodeName)
		} else {
			known.everywhere = true
		}
	}
	r.want()
}

// ClassChanged tells that a class came, went or changed.
func (r *Room[T, K]) ClassChanged(name string, generation uint64) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, w := range r.waiters {
		if w.stage == placed || w.stage == judged && w.seen.Inventory >= generation {
			continue
		}
		// Whether the waiter uses the class is looked at in Pass: it may not be known yet.
		if w.classes == nil {
			w.classes = map[string]uint64{}
		}
		w.classes[name] = max(w.classes[name], generation)
		r.want()
	}
}

// ClaimChanged tells that a claim came, went or changed, or that an allocation of it is no longer in flight.
func (r *Room[T, K]) ClaimChanged(name types.NamespacedName) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for uid := range r.byClaim[name] {
		if w := r.waiters[uid]; w.stage != placed {
			w.claimsChanged = true
			r.want()
		}
	}
}

// NodeChanged tells that a node came or changed in a way that may matter to a pod whose last attempt failed for want of devices. It
// returns false if the pod is not known. Where others could be evicted, that is no news: after [Room.NodeRelieved] it is.
func (r *Room[T, K]) NodeChanged(pod types.UID, node string) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil {
		return false
	}
	if w.stage != placed {
		w.changedNodes.add(r.nodes.number(node))
		r.want()
	}
	return true
}

// NodeRelieved tells that there may be more on a node of what is no device. Where others could have been evicted for the pod by what it
// needs of devices, that may have been missing.
func (r *Room[T, K]) NodeRelieved(pod types.UID, node string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if w, i := r.takeEvictable(pod, node); w != nil {
		w.changedNodes.add(i)
		r.want()
	}
}

// Nominated tells that others are being evicted from the node for the pod, as its last attempt decided; from none if node is empty. Each
// change there is news from then on, and so is what changed since the attempt: somebody else may get what the evicted had.
func (r *Room[T, K]) Nominated(pod types.UID, node string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if w := r.waiters[pod]; w != nil {
		w.nominated = node
	}
	if w, i := r.takeEvictable(pod, node); w != nil && w.skipped.has(i) {
		w.changedNodes.add(i)
		r.want()
	}
}

// IsNominated tells whether others are being evicted from the node for the pod, which the API need not show yet.
func (r *Room[T, K]) IsNominated(pod types.UID, node string) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	return w != nil && w.nominated == node && node != ""
}

// takeEvictable takes the node from those on which others could have been evicted for the pod in its last attempt. It returns nil if it is
// none of them, else the waiter and the node's number. The caller holds mutex.
func (r *Room[T, K]) takeEvictable(pod types.UID, node string) (*waiter[T, K], int) {
	w := r.waiters[pod]
	i, known := r.nodes.index[node]
	if w == nil || w.stage == placed || !known || !w.evictable.has(i) {
		return nil, 0
	}
	var taken nodeSet
	taken.add(i)
	w.evictable.without(&taken)
	return w, i
}

// NominationEnded tells that a node's devices are not kept any more for a pod that was nominated to it. That is no news of the usage or the
// inventory, so it does not matter what a waiter has seen of those.
func (r *Room[T, K]) NominationEnded(node string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, w := range r.waiters {
		if w.stage != placed {
			i := r.nodes.number(node)
			w.changedNodes.add(i)
			w.keptNoMore.add(i)
			r.want()
		}
	}
}

// PodChanged tells that a pod has changed so that it may fit where it did not. It returns false if the pod is not known.
func (r *Room[T, K]) PodChanged(pod types.UID) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil {
		return false
	}
	if w.stage != placed {
		w.podChanged = true
		r.want()
	}
	return true
}

// NominationLost tells that a pod which waits for others to be evicted for it does so no longer: somebody else took its nomination. What
// it found in its last attempt, that others could be evicted, has come to nothing.
func (r *Room[T, K]) NominationLost(pod types.UID) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if w := r.waiters[pod]; w != nil && w.stage != placed {
		w.evictable.clear()
		w.nominated = ""
		w.podChanged = true
		r.want()
	}
}

// change is one of the news with the nodes that it touches.
type change struct {
	cause Cause
	// usage or inventory is the state that shows the change; the other is 0.
	usage, inventory uint64
	// few or many are the nodes, by number.
	few  []int
	many nodeSet
}

// isSeen tells whether the change was part of what an attempt looked at.
func (c *change) isSeen(seen Seen) bool {
	return c.usage <= seen.Usage && c.inventory <= seen.Inventory
}

// addTo adds those nodes of the change to out that are in of, or all if of is nil.
func (c *change) addTo(out, of *nodeSet) {
	for _, i := range c.few {
		if of == nil || of.has(i) {
			out.add(i)
		}
	}
	if of == nil {
		out.or(&c.many)
	} else {
		out.orCommon(&c.many, of)
	}
}

func (c *change) has(i int) bool { return c.many.has(i) || slices.Contains(c.few, i) }

// takeNews takes the news and makes sense of them. Which nodes see a pool that is not for one node alone takes long to tell; who tells
// the room something does not wait for that.
func (p *pass[T, K]) takeNews() []change {
	r := p.room
	r.mutex.Lock()
	n := r.news
	r.news = newNews()
	r.tidy(p.world)
	r.mutex.Unlock()
	// Of pools that change after this there will be news.
	inv, _ := p.world.State()
	var out []change
	for id, revision := range n.freed {
		if pool := inv.Pool(id); pool != nil {
			out = append(out, p.onNodesOf(pool, change{cause: CauseDevice, usage: revision}))
		}
	}
	for id, news := range n.pools {
		c := change{cause: CauseSlice, inventory: news.generation}
		switch pool := inv.Pool(id); {
		case news.everywhere:
			c.many = p.every()
		case pool != nil:
			c = p.onNodesOf(pool, c)
		}
		c.few = append(c.few, p.numbersOf(maps.Keys(news.nodes))...)
		out = append(out, c)
	}
	return out
}

// onNodesOf adds the nodes that see the pool.
func (p *pass[T, K]) onNodesOf(pool *inventory.Pool, c change) change {
	names, local := pool.Reach()
	if local {
		c.few = append(c.few, p.numbersOf(names)...)
		return c
	}
	nodes, numbers := p.allNodes()
	for i, node := range nodes {
		if pool.Reaches(node) {
			c.many.add(numbers[i])
		}
	}
	return c
}

// nodeTable numbers nodes, so that sets of them are small.
type nodeTable struct {
	index map[string]int
	names []string
	// tidyAt is the size at which the names of nodes that are gone are dropped.
	tidyAt int
}

func (t *nodeTable) number(name string) int {
	i, ok := t.index[name]
	if !ok {
		i = len(t.names)
		t.index[name] = i
		t.names = append(t.names, name)
	}
	return i
}

// minNodeNames is up to how many names are never dropped.
const minNodeNames = 256

// tidy drops the names of nodes that are gone, once they may be the larger part, and renumbers the others in all sets.
func (r *Room[T, K]) tidy(world *World[T, K]) {
	if len(r.nodes.names) <= max(r.nodes.tidyAt, minNodeNames) {
		return
	}
	old := r.nodes.names
	r.nodes = nodeTable{index: make(map[string]int), tidyAt: 0}
	renumbered := make([]int, len(old)) // -1 if gone
	for i, name := range old {
		if renumbered[i] = -1; world.Node(name) != nil {
			renumbered[i] = r.nodes.number(name)
		}
	}
	r.nodes.tidyAt = 2 * len(r.nodes.names)
	move := func(s *nodeSet) {
		var moved nodeSet
		for i := s.bits.Next(0); i >= 0; i = s.bits.Next(i + 1) {
			if to := renumbered[i]; to >= 0 {
				moved.add(to)
			}
		}
		*s = moved
	}
	for _, w := range r.waiters {
		move(&w.nodes)
		move(&w.evictable)
		move(&w.skipped)
		move(&w.changedNodes)
		move(&w.keptNoMore)
		move(&w.next)
		for i := range w.missed {
			c := &w.missed[i]
			var few []int
			for _, n := range c.few {
				if to := renumbered[n]; to >= 0 {
					few = append(few, to)
				}
			}
			c.few = few
			move(&c.many)
		}
	}
}
