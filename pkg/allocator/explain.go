package allocator

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
)

// Limits that keep an explanation within an event's message (1,024 bytes) with room for the scheduler's own words.
const (
	maxExplanation = 800
	maxQuoted      = 80
)

// Explain folds the failures of all nodes into one line for a person: for each request how many devices
// matched, were held, filtered by which selector, or tainted, then problems with constraints, pools and
// selectors. The line is the same for the same failures in any order, and bounded in length. A pool that
// several nodes see alike is counted once. It is empty if there is no failure.
func Explain(reqs *Requests, failures iter.Seq2[string, *Failure]) string {
	e := newExplanation(reqs)
	for node, failure := range failures {
		e.add(node, failure)
	}
	return e.String()
}

// explanation sums up failures.
type explanation struct {
	reqs      *Requests
	totals    []totals // by lane
	nodes     int
	undecided int
	tooMany   int
	// best has the most devices with one value that any node offers, by constraint.
	best      map[constraintKey]ConstraintCounts
	conflicts int // nodes where the free devices suffice for each request, but not for all together
	pools     map[inventory.PoolID]*inventory.PoolProblem
	selectors map[string]struct{}
}

type constraintKey struct{ claim, constraint int }

// totals are the counts for one alternative over all nodes.
type totals struct {
	RequestCounts
	seen map[*inventory.NodePool]struct{}
}

func newExplanation(reqs *Requests) *explanation {
	e := &explanation{
		reqs:      reqs,
		totals:    make([]totals, len(reqs.lanes)),
		best:      make(map[constraintKey]ConstraintCounts),
		pools:     make(map[inventory.PoolID]*inventory.PoolProblem),
		selectors: make(map[string]struct{}),
	}
	for i, a := range reqs.lanes {
		e.totals[i].seen = make(map[*inventory.NodePool]struct{})
		e.totals[i].FilteredBy = make([]int, len(a.selectors))
		e.totals[i].Taints = make(map[string]int)
	}
	return e
}

func (e *explanation) add(_ string, f *Failure) {
	e.nodes++
	switch f.Reason {
	case ReasonUndecided:
		e.undecided++
	case ReasonTooMany:
		e.tooMany++
	case ReasonConstraints:
		e.conflicts++
	}
	for i := range f.Requests {
		c := &f.Requests[i]
		lane := e.reqs.claims[c.Claim].requests[c.Request].alternatives[c.Alternative].lane
		e.totals[lane].add(c)
	}
	for _, c := range f.Constraints {
		key := constraintKey{c.Claim, c.Constraint}
		if best, ok := e.best[key]; !ok || c.Best > best.Best || (c.Best == best.Best && c.Wanted < best.Wanted) {
			e.best[key] = c
		}
	}
	for _, problem := range f.Pools {
		e.pools[problem.Pool] = problem
	}
	if f.SelectorError != nil {
		e.selectors[f.SelectorError.Error()] = struct{}{}
	}
}

func (t *totals) add(c *RequestCounts) {
	if _, ok := t.seen[c.Pool]; ok {
		return
	}
	t.seen[c.Pool] = struct{}{}
	t.Devices += c.Devices
	t.FilteredByClass += c.FilteredByClass
	for k, n := range c.FilteredBy {
		t.FilteredBy[k] += n
	}
	t.Errors += c.Errors
	t.Matching += c.Matching
	t.Held += c.Held
	t.Tainted += c.Tainted
	for key, n := range c.Taints {
		t.Taints[key] += n
	}
	t.Unsupported += c.Unsupported
	t.Free += c.Free
}

// String puts the most useful first: what a user can change about the claim, then what is wrong in the cluster.
func (e *explanation) String() string {
	if e.nodes == 0 {
		return ""
	}
	var parts []string
	if e.undecided < e.nodes {
		for i, a := range e.reqs.lanes {
			parts = append(parts, e.totals[i].describe(e.reqs, a))
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(e.best), func(a, b constraintKey) int {
		return cmp.Or(cmp.Compare(a.claim, b.claim), cmp.Compare(a.constraint, b.constraint))
	}) {
		c := e.best[key]
		parts = append(parts, fmt.Sprintf("at most %d free devices of one node share %s (claim %s wants %d)",
			c.Best, c.Attribute, e.reqs.objects[c.Claim].Name, c.Wanted))
	}
	if e.conflicts > 0 && len(e.best) == 0 {
		parts = append(parts, fmt.Sprintf("%d nodes have free devices for each request, but not for all together", e.conflicts))
	}
	if e.tooMany > 0 {
		parts = append(parts, fmt.Sprintf("on %d nodes the claim would get more than %d devices", e.tooMany, resourceapi.AllocationResultsMaxSize))
	}
	if len(e.selectors) > 0 {
		text := clip(slices.Min(slices.Collect(maps.Keys(e.selectors))), 5*maxQuoted)
		parts = append(parts, text+more(len(e.selectors)-1, "device"))
	}
	if len(e.pools) > 0 {
		first := slices.MinFunc(slices.Collect(maps.Values(e.pools)), func(a, b *inventory.PoolProblem) int {
			return cmp.Or(cmp.Compare(a.Pool.Driver, b.Pool.Driver), cmp.Compare(a.Pool.Pool, b.Pool.Pool))
		})
		parts = append(parts, clip(first.String(), 2*maxQuoted)+more(len(e.pools)-1, "pool"))
	}
	if e.undecided > 0 {
		parts = append(parts, fmt.Sprintf("%d nodes undecided: timed out while searching for devices", e.undecided))
	}
	return clip(strings.Join(parts, "; "), maxExplanation)
}

// describe says how all devices look to one alternative.
func (t *totals) describe(reqs *Requests, a *alternative) string {
	class := a.class.Object.Name
	all := t.Devices - t.FilteredByClass
	text := fmt.Sprintf("request %q of claim %s: ", a.resultName(), reqs.objects[a.request.claim].Name)
	if all <= 0 {
		return text + fmt.Sprintf("no %s devices", class)
	}
	var facts []string
	fact := func(n int, what string) {
		if n <= 0 {
			return
		}
		if len(facts) == 0 {
			facts = append(facts, fmt.Sprintf("%d of %d %s devices %s", n, all, class, what))
		} else {
			facts = append(facts, fmt.Sprintf("%d %s", n, what))
		}
	}
	fact(t.Held, "held")
	for k, n := range t.FilteredBy {
		fact(n, "filtered by selector "+quote(clip(a.selectors[k], maxQuoted)))
	}
	for _, key := range slices.Sorted(maps.Keys(t.Taints)) {
		fact(t.Taints[key], "tainted "+key)
	}
	fact(t.Unsupported, "unsupported because of shared counters or multiple allocations")
	fact(t.Errors, "failing a selector")
	if wanted := a.count; t.Free > 0 {
		switch {
		case a.all:
			fact(t.Free, "free (all of a node wanted)")
		default:
			fact(t.Free, fmt.Sprintf("free (%d wanted on one node)", wanted))
		}
	}
	return text + strings.Join(facts, ", ")
}

// quote puts text into quotes that it does not contain, if there are any, so that it can be read and copied.
func quote(text string) string {
	for _, q := range []string{`"`, "'", "`"} {
		if !strings.Contains(text, q) {
			return q + text + q
		}
	}
	return strconv.Quote(text)
}

func more(n int, what string) string {
	switch {
	case n <= 0:
		return ""
	case n == 1:
		return fmt.Sprintf(" (and 1 more %s)", what)
	}
	return fmt.Sprintf(" (and %d more %ss)", n, what)
}

// clip shortens text to at most limit bytes, at a rune's border and without line breaks.
func clip(text string, limit int) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) <= limit {
		return text
	}
	const ellipsis = "…"
	cut := limit - len(ellipsis)
	for cut > 0 && text[cut]&0xC0 == 0x80 {
		cut--
	}
	return text[:cut] + ellipsis
}
