// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"sync"
	"sync/atomic"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/poolstate"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// tally is what is kept on a NodePool: the state that holders leave it in, and how many devices that leaves to the
// requests seen last. As long as nothing in the pool is taken or given back it is the answer for every pod, and most
// nodes are judged by nothing else: Filter has to look at every node of the cluster, so each place in memory that it
// needs not go to counts.
type tally struct {
	place usage.Place
	mark  usage.Mark
	// apart is nil where the pool looks alike to all namespaces, which is so almost everywhere. Otherwise ask [tally.in].
	apart *apart
	state *poolstate.State
	// counts has, by the number of the matcher modulo its length, a count as made by pack; 0 if there is none.
	counts [4]atomic.Uint64
	// verdicts is what was found for requests where this pool is all that the node has; nil if nothing was.
	verdicts atomic.Pointer[verdicts]
}

// apart is what a pool looks like to claims of different namespaces: where a device's shares are one namespace's, the device is
// held to all others. What it looks like is kept by namespace, with one tally for all namespaces that have no share there. So there are
// at most as many as holders, and one more.
type apart struct {
	owners []poolstate.Owner
	known  sync.Map // namespace, "" for those without a share → *tally
}

// verdicts are by the number of the requests modulo their own number. Immutable.
type verdicts [2]verdict

// verdict is the result for certain requests, as Check returns it.
type verdict struct {
	requests uint64 // their number, which is never 0
	policy   Policy
	scoring  Scoring
	result   Result
}

// verdict returns what is known for the requests.
func (t *tally) verdict(in *Input) (Result, bool) {
	all := t.verdicts.Load()
	if all == nil {
		return Result{}, false
	}
	v := &all[in.Requests.compiled.Number%uint64(len(all))]
	if v.requests != in.Requests.compiled.Number || v.policy != in.Policy || v.scoring != in.Scoring {
		return Result{}, false
	}
	return v.result, true
}

// remember keeps a result, unless it depends on more than requests and devices: on time, or on what claims are called.
func (t *tally) remember(in *Input, result Result) {
	if f := result.Failure; f != nil && (f.Err != nil || f.SelectorError != nil) {
		return
	}
	var next verdicts
	if all := t.verdicts.Load(); all != nil {
		next = *all
	}
	next[in.Requests.compiled.Number%uint64(len(next))] = verdict{
		requests: in.Requests.compiled.Number, policy: in.Policy,
		scoring: in.Scoring, result: result,
	}
	t.verdicts.Store(&next) // another one may get lost
}

// stateOf returns what holders leave of the pool to the requests' namespace.
func (in *Input) stateOf(p *inventory.NodePool) *poolstate.State { return in.tallyOf(p).state }

// isOf tells whether the tally is true in the view.
func (t *tally) isOf(view usage.View) bool { return t.mark == view.Mark(t.place) }

// tallyOf returns the tally that is true in the view, for the requests' namespace.
func (in *Input) tallyOf(p *inventory.NodePool) *tally {
	return tallyOf(p, in.Usage).in(p, in.Requests.compiled.Namespace)
}

// in returns the tally as it is for claims of the namespace.
func (t *tally) in(p *inventory.NodePool, namespace string) *tally {
	if t.apart == nil {
		return t
	}
	if !poolstate.IsAmong(t.apart.owners, namespace) {
		namespace = ""
	}
	if known, ok := t.apart.known.Load(namespace); ok {
		return known.(*tally)
	}
	next := &tally{state: t.state.Without(poolstate.Foreign(t.apart.owners, namespace, p.Len()))}
	known, _ := t.apart.known.LoadOrStore(namespace, next)
	return known.(*tally)
}

// tallyOf returns the tally that is true in the view, as it is kept on the pool.
func tallyOf(p *inventory.NodePool, view usage.View) *tally {
	known, _ := p.Attached.Load().(*tally)
	if known != nil && known.isOf(view) {
		return known
	}
	id := usage.PoolID(p.ID())
	next := &tally{place: usage.PlaceOf(id)}
	next.mark = view.Mark(next.place)
	if in := view.Pool(id); known != nil && known.state.IsOf(in) {
		// Something changed in another pool that has the same mark.
		next.state, next.apart = known.state, known.apart
		for i := range known.counts {
			next.counts[i].Store(known.counts[i].Load())
		}
		next.verdicts.Store(known.verdicts.Load())
	} else {
		next.state = poolstate.New(p, in)
		if owners := poolstate.OwnersOf(p, in); owners != nil {
			next.apart = &apart{owners: owners}
		}
	}
	p.Attached.Store(next)
	return next
}

// count says how the devices of a pool look to a request.
type count struct {
	// free are the devices that the request could have, each alone.
	free int
	// dependent tells that some of them consume counters, so that having one may rule out another.
	dependent bool
	// errors tells that a selector failed on some device.
	errors bool
}

const (
	dependentBit = 1 << 30
	errorsBit    = 1 << 31
)

func (c count) pack(id uint32) uint64 {
	packed := uint64(id)<<32 | uint64(c.free)
	if c.dependent {
		packed |= dependentBit
	}
	if c.errors {
		packed |= errorsBit
	}
	return packed
}

func unpack(packed uint64) count {
	return count{free: int(packed & (dependentBit - 1)), dependent: packed&dependentBit != 0, errors: packed&errorsBit != 0}
}

// count returns the count of the pool, to which the tally belongs, for the alternative, which has no admin access.
func (t *tally) count(in *Input, p *inventory.NodePool, a *compiled.Alternative) count {
	id := a.Matcher.ID()
	slot := &t.counts[id%uint32(len(t.counts))]
	if packed := slot.Load(); packed>>32 == uint64(id) {
		return unpack(packed)
	}
	c := countOf(t.state, in, p, a)
	if in.evaluator.Interrupted == nil {
		slot.Store(c.pack(id))
	}
	return c
}

// countOf counts anew.
func countOf(s *poolstate.State, in *Input, p *inventory.NodePool, a *compiled.Alternative) count {
	match := in.evaluator.Match(a, p)
	return count{
		free:      s.Free(p, match, a.Admin),
		dependent: match.Usable.Intersects(p.Consumers()),
		errors:    match.Errors != nil,
	}
}
