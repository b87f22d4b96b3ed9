// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"cmp"
	"iter"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/inventory"
)

// Naming gives names to what the allocator knows only by its content. Functions that are nil, or return nothing, name nothing.
type Naming struct {
	// Subject returns what a request of a claim stands for, if no user has written the claim.
	Subject func(claim types.NamespacedName, request string) string
	// Rule returns the DeviceTaintRule that a device has a taint from.
	Rule func(pool inventory.PoolID, device string, taint *resourceapi.DeviceTaint) string
}

func (n *Naming) subject(namespace, claim, request string) string {
	if n.Subject == nil {
		return ""
	}
	return n.Subject(types.NamespacedName{Namespace: namespace, Name: claim}, request)
}

// Explain sums up the failures of nodes, by node name, that Check or Allocate gave for reqs. The order of the
// failures does not matter.
func Explain(reqs *Requests, failures iter.Seq2[string, *Failure], naming Naming) *explain.Explanation {
	s := newSum(reqs.compiled, naming)
	for _, failure := range failures {
		s.add(failure)
	}
	return s.explanation()
}

// ExplainNodes explains the failures node by node, for the first nodes by name, limit at most.
func ExplainNodes(reqs *Requests, failures iter.Seq2[string, *Failure], limit int) []explain.Node {
	all := maps.Collect(failures)
	nodes := slices.Sorted(maps.Keys(all))
	out := make([]explain.Node, 0, min(limit, len(nodes)))
	for _, node := range nodes[:min(limit, len(nodes))] {
		failure := all[node]
		s := newSum(reqs.compiled, Naming{})
		s.add(failure)
		e := s.explanation()
		out = append(out, explain.Node{
			Node: node, Reason: failure.Reason, Detail: failure.detail(), Requests: e.Requests, Constraints: e.Constraints,
		})
	}
	return out
}

// sum adds up failures.
type sum struct {
	reqs      *compiled.Requests
	naming    Naming
	requests  []explain.Request // by lane; FilteredBy has all selectors
	seen      []map[*inventory.NodePool]struct{}
	nodes     int
	reasons   map[explain.Reason]int
	best      map[constraintKey]ConstraintCounts
	pools     map[inventory.PoolID]*inventory.PoolProblem
	selectors map[explain.SelectorError]struct{}
}

type constraintKey struct{ claim, constraint int }

func newSum(reqs *compiled.Requests, naming Naming) *sum {
	s := &sum{
		reqs:      reqs,
		naming:    naming,
		reasons:   make(map[explain.Reason]int),
		best:      make(map[constraintKey]ConstraintCounts),
		pools:     make(map[inventory.PoolID]*inventory.PoolProblem),
		selectors: make(map[explain.SelectorError]struct{}),
	}
	for _, a := range reqs.Lanes {
		claim := reqs.Objects[a.Request.Claim]
		r := explain.Request{
			Namespace: claim.Namespace, Claim: claim.Name, Request: a.ResultName(), DeviceClass: a.Class.Object.Name,
			Subject: naming.subject(claim.Namespace, claim.Name, a.ResultName()), Wanted: a.Count, All: a.All,
		}
		for _, expression := range a.Selectors {
			r.FilteredBy = append(r.FilteredBy, explain.SelectorCount{Expression: expression})
		}
		s.requests, s.seen = append(s.requests, r), append(s.seen, make(map[*inventory.NodePool]struct{}))
	}
	return s
}

func (s *sum) add(f *Failure) {
	s.nodes++
	s.reasons[f.Reason]++
	for i := range f.Requests {
		c := &f.Requests[i]
		a := s.reqs.Claims[c.Claim].Requests[c.Request].Alternatives[c.Alternative]
		if _, ok := s.seen[a.Lane][c.Pool]; !ok {
			s.seen[a.Lane][c.Pool] = struct{}{}
			addPool(&s.requests[a.Lane], c, a, &s.naming)
		}
	}
	for _, c := range f.Constraints {
		key := constraintKey{c.Claim, c.Constraint}
		if best, ok := s.best[key]; !ok || c.Best > best.Best || (c.Best == best.Best && c.Wanted < best.Wanted) {
			s.best[key] = c
		}
	}
	for _, problem := range f.Pools {
		s.pools[problem.Pool] = problem
	}
	if f.SelectorError != nil {
		e := f.SelectorError.Explanation()
		e.Subject = s.naming.subject(e.Namespace, e.Claim, e.Request)
		s.selectors[e] = struct{}{}
	}
}

// addPool adds how the devices of one pool look to the alternative.
func addPool(r *explain.Request, c *RequestCounts, a *compiled.Alternative, naming *Naming) {
	r.Offered += c.Devices
	r.Devices += c.Devices - c.FilteredByClass
	for k, n := range c.FilteredBy {
		r.FilteredBy[k].Devices += n
	}
	r.DeviceCounts.Add(&c.DeviceCounts)
	addTaints(r, c, a, naming)
}

func addTaints(r *explain.Request, c *RequestCounts, a *compiled.Alternative, naming *Naming) {
	if len(c.Taints) == 0 {
		return
	}
	if r.Taints == nil {
		r.Taints = make(map[string]int)
	}
	known := a.Matcher.Known(c.Pool)
	if naming.Rule == nil || known == nil { // it is not worth evaluating selectors again
		for key, n := range c.Taints {
			r.Taints[key] += n
		}
		return
	}
	tainted := known.Tainted
	for i := tainted.Next(0); i >= 0; i = tainted.Next(i + 1) {
		if c.Pool.Unsupported().Has(i) {
			continue
		}
		device := c.Pool.Device(i)
		taint := a.Matcher.RefusedTaint(device)
		key := taint.Key
		if rule := naming.Rule(c.Pool.ID(), device.Name, taint); rule != "" {
			key += " by DeviceTaintRule " + rule
		}
		r.Taints[key]++
	}
}

func (s *sum) explanation() *explain.Explanation {
	e := &explain.Explanation{Nodes: s.nodes, Reasons: s.reasons}
	if s.reasons[explain.ReasonUndecided] < s.nodes {
		for _, r := range s.requests {
			if r.FilteredBy = slices.DeleteFunc(r.FilteredBy, func(f explain.SelectorCount) bool { return f.Devices == 0 }); len(r.FilteredBy) == 0 {
				r.FilteredBy = nil
			}
			e.Requests = append(e.Requests, r)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(s.best), func(a, b constraintKey) int {
		return cmp.Or(cmp.Compare(a.claim, b.claim), cmp.Compare(a.constraint, b.constraint))
	}) {
		c, claim := s.best[key], s.reqs.Objects[key.claim]
		e.Constraints = append(e.Constraints, explain.Constraint{
			Namespace: claim.Namespace, Claim: claim.Name, Attribute: c.Attribute, Best: c.Best, Wanted: c.Wanted,
		})
	}
	e.SelectorErrors = slices.SortedFunc(maps.Keys(s.selectors), func(a, b explain.SelectorError) int {
		return cmp.Or(cmp.Compare(a.String(), b.String()), cmp.Compare(a.Device, b.Device))
	})
	for _, id := range slices.SortedFunc(maps.Keys(s.pools), func(a, b inventory.PoolID) int {
		return cmp.Or(cmp.Compare(a.Driver, b.Driver), cmp.Compare(a.Pool, b.Pool))
	}) {
		e.Pools = append(e.Pools, explain.Pool{Driver: id.Driver, Pool: id.Pool, Kind: s.pools[id].Kind, Detail: s.pools[id].Detail})
	}
	return e
}
