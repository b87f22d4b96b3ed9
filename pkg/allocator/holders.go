// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"cmp"
	"context"
	"iter"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/allocator/internal/evaluation"
	"stowage.dev/stowage/pkg/allocator/internal/minimize"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
	"stowage.dev/stowage/pkg/usage"
)

// HolderOptions bound what [FindHolders] and [Blockers] cost. The zero value of a number means its default.
type HolderOptions struct {
	// Nodes is how many nodes are looked at, the most promising first. Default 8.
	Nodes int
	// Decisions is how often one node is decided again, each time without some of the holders. Default 256.
	Decisions int
	// Keep are claims whose release is out of the question, such as the pod's own.
	Keep sets.Set[types.UID]
	// Namespace is that of the pod: among sets of one size its claims are preferred, which its owner can do something about.
	Namespace string
}

func (o *HolderOptions) setDefaults() {
	if o.Nodes <= 0 {
		o.Nodes = 8
	}
	if o.Decisions <= 0 {
		o.Decisions = 256
	}
}

// FindHolders looks for nodes that would do if some claims were released, among those that the failures, by node
// name, say lack the least. The node with the fewest claims to release comes first. nodeOf returns nil for a node
// that is not there any more; in.Node is not used.
//
// It decides each node many times over. It is bounded by the options and by ctx, after which it returns what it has
// found: it is meant for a pod that was refused everywhere, not for every node on the way.
func FindHolders(ctx context.Context, in Input, failures iter.Seq2[string, *Failure], nodeOf func(string) *v1.Node,
	opts HolderOptions,
) []explain.NodeHolders {
	opts.setDefaults()
	var found []explain.NodeHolders
	for _, in.Node = range mostPromising(failures, nodeOf, opts.Nodes) {
		if blockers := Blockers(ctx, in, opts); blockers != nil {
			found = append(found, *blockers)
		}
		if ctx.Err() != nil {
			break
		}
	}
	slices.SortStableFunc(found, func(a, b explain.NodeHolders) int {
		return cmp.Or(cmp.Compare(len(a.Release), len(b.Release)), cmp.Compare(devicesOf(a.Release), devicesOf(b.Release)),
			cmp.Compare(foreignOf(a.Release, opts.Namespace), foreignOf(b.Release, opts.Namespace)))
	})
	return found
}

// Blockers says whose release would make a node usable that was refused. It is nil if the release of all holders would not, or if
// ctx or the options did not leave enough time to tell.
func Blockers(ctx context.Context, in Input, opts HolderOptions) *explain.NodeHolders {
	opts.setDefaults()
	// only whether there is an answer matters
	in.evaluator, in.Policy, in.Scoring = evaluation.Evaluator{Ctx: ctx, Attempt: in.Attempt}, FirstFit, NoScoring
	holders, pools := holdersOn(in, opts)
	if len(holders) == 0 {
		return nil
	}
	view := in.Usage
	smallest := minimize.Set(len(holders), opts.Decisions, func(released []int) minimize.Answer {
		gone := sets.New[types.UID]()
		for _, i := range released {
			gone.Insert(holders[i].UID)
		}
		in.Usage = view.Without(pools, func(claim usage.ClaimRef) bool { return gone.Has(claim.UID) })
		switch result := Check(ctx, in); {
		case ctx.Err() != nil:
			return minimize.Unknown
		case result.Fits():
			return minimize.Yes
		case result.Failure.Reason == explain.ReasonUndecided:
			return minimize.Unknown
		}
		return minimize.No
	})
	if len(smallest) == 0 {
		return nil
	}
	out := &explain.NodeHolders{Node: in.Node.Name, Holders: holders}
	for _, i := range smallest {
		out.Release = append(out.Release, holders[i])
	}
	return out
}

func devicesOf(claims []explain.ClaimHolder) int {
	n := 0
	for i := range claims {
		n += len(claims[i].Devices)
	}
	return n
}

// foreignOf counts the claims of other namespaces.
func foreignOf(claims []explain.ClaimHolder, namespace string) int {
	n := 0
	for i := range claims {
		if claims[i].Namespace != namespace {
			n++
		}
	}
	return n
}

// holdersOn returns the claims that hold what the requests could use on the node, those with the fewest devices
// first, then those of the pod's namespace, and the pools in which they hold it.
func holdersOn(in Input, opts HolderOptions) ([]explain.ClaimHolder, []usage.PoolID) {
	var holders []explain.ClaimHolder
	var pools []usage.PoolID
	index := make(map[types.UID]int)
	for _, p := range in.Inventory.ForNode(in.Node).Pools {
		id := usage.PoolID(p.ID())
		wanted := in.wantedFrom(p)
		if in.Usage.Pool(id) == nil || wanted.Empty() {
			continue
		}
		pools = append(pools, id)
		for name, device := range in.Usage.Pool(id).All() {
			if !isInTheWay(p, wanted, p.Index(name)) {
				continue
			}
			for _, h := range device.Holders() {
				if opts.Keep.Has(h.Claim.UID) {
					continue
				}
				at, ok := index[h.Claim.UID]
				if !ok {
					at = len(holders)
					index[h.Claim.UID] = at
					holders = append(holders, explain.ClaimHolder{Namespace: h.Claim.Namespace, Claim: h.Claim.Name, UID: h.Claim.UID})
				}
				holder := &holders[at]
				holder.InFlight = holder.InFlight || h.InFlight
				text := usage.DeviceID{Driver: id.Driver, Pool: id.Pool, Device: name}.String()
				if n := len(holder.Devices); n == 0 || holder.Devices[n-1] != text {
					holder.Devices = append(holder.Devices, text)
				}
			}
		}
	}
	slices.SortFunc(holders, func(a, b explain.ClaimHolder) int {
		return cmp.Or(cmp.Compare(len(a.Devices), len(b.Devices)),
			cmp.Compare(foreignOf([]explain.ClaimHolder{a}, opts.Namespace), foreignOf([]explain.ClaimHolder{b}, opts.Namespace)),
			cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Claim, b.Claim), cmp.Compare(a.UID, b.UID))
	})
	return holders, pools
}

// isInTheWay tells whether a held device is wanted, or may use up counters that wanted devices need. Its index is -1 if
// the node does not see it.
func isInTheWay(p *inventory.NodePool, wanted bitset.Set, i int) bool {
	if i < 0 {
		return p.Consumers() != nil
	}
	return wanted.Has(i) || p.Consumers().Has(i)
}

// wantedFrom are the devices of the pool that some request would take if nobody held them. Admin access does not
// mind holders, but needs what they leave of counters and capacity.
func (in *Input) wantedFrom(p *inventory.NodePool) bitset.Set {
	wanted := bitset.New(p.Len())
	for _, a := range in.Requests.compiled.Lanes {
		if !a.Admin || p.Consumers() != nil || p.Shareable() != nil {
			wanted.Or(in.evaluator.Match(a, p).Match)
		}
	}
	return wanted
}

// mostPromising returns up to limit nodes that might do without some holders, those that lack the fewest devices
// first, then by name. Those for which nodeOf returns nil do not count.
func mostPromising(failures iter.Seq2[string, *Failure], nodeOf func(string) *v1.Node, limit int) []*v1.Node {
	type candidate struct {
		name  string
		lacks int
		node  *v1.Node
	}
	compare := func(a, b candidate) int { return cmp.Or(cmp.Compare(a.lacks, b.lacks), cmp.Compare(a.name, b.name)) }
	var best []candidate
	for name, failure := range failures {
		lacks, ok := failure.lacks()
		if !ok {
			continue
		}
		c := candidate{name: name, lacks: lacks}
		at, _ := slices.BinarySearchFunc(best, c, compare)
		if at == limit {
			continue
		}
		if c.node = nodeOf(name); c.node != nil {
			best = slices.Insert(best[:min(len(best), limit-1)], at, c)
		}
	}
	nodes := make([]*v1.Node, len(best))
	for i, c := range best {
		nodes[i] = c.node
	}
	return nodes
}

// lacks estimates how many devices would have to be released on the node. ok is false if no release would help.
func (f *Failure) lacks() (n int, ok bool) {
	if !f.Resolvable() {
		return 0, false
	}
	for i := 0; i < len(f.Requests); {
		first := &f.Requests[i]
		least := -1
		for i < len(f.Requests) && f.Requests[i].Claim == first.Claim && f.Requests[i].Request == first.Request {
			wanted, alternative := f.Requests[i].Wanted, f.Requests[i].Alternative
			possible, free := 0, 0
			for ; i < len(f.Requests) && f.Requests[i].Claim == first.Claim && f.Requests[i].Request == first.Request &&
				f.Requests[i].Alternative == alternative; i++ {
				c := &f.Requests[i]
				possible += c.Matching - c.Tainted - c.Unsupported
				free += c.Free
			}
			if wanted == 0 { // all
				wanted = possible
			}
			if lack := max(0, wanted-free); possible >= wanted && (least < 0 || lack < least) {
				least = lack
			}
		}
		if least < 0 {
			return 0, false
		}
		n += least
	}
	for _, c := range f.Constraints {
		n = max(n, c.Wanted-c.Best)
	}
	return n, true
}
