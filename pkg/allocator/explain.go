package allocator

import (
	"cmp"
	"iter"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/inventory"
)

// Explanation is why the claims of one pod were not satisfied, summed up over nodes: the one value that events,
// metrics and the command line show. It refers to nothing and can be kept, compared and written as JSON or YAML;
// field names are stable. Lists are in a fixed order, so that equal failures give equal explanations.
type Explanation struct {
	// Nodes is how many nodes were refused.
	Nodes int `json:"nodes"`
	// Reasons counts the nodes by reason.
	Reasons map[Reason]int `json:"reasons,omitempty"`
	// Requests says, for each request and each of its alternatives, in the order of the claims, how all devices
	// look to it. A pool that several nodes see alike is counted once. Empty if all nodes are undecided.
	Requests []RequestExplanation `json:"requests,omitempty"`
	// Constraints says how far each matchAttribute constraint gets on the node where it gets farthest.
	Constraints []ConstraintExplanation `json:"constraints,omitempty"`
	// SelectorErrors are CEL selectors that failed at run time, one for each device on which a node was given up.
	SelectorErrors []SelectorErrorExplanation `json:"selectorErrors,omitempty"`
	// Pools are the pools that are incomplete or invalid, by driver and name.
	Pools []PoolExplanation `json:"pools,omitempty"`
	// Holders has nodes that would do if some claims were released, the one with the fewest first. Only
	// [FindHolders] fills it.
	Holders []NodeHolders `json:"holders,omitempty"`
	// NeverTogether tells that no node satisfies the requests together even if nobody holds a device, although each alone could be
	// satisfied. Only [FindLimits] sets it.
	NeverTogether bool `json:"neverTogether,omitempty"`
	// PerNode has the same counts node by node, if that was asked for, see [ExplainNodes].
	PerNode []NodeExplanation `json:"perNode,omitempty"`
}

// RequestExplanation says how devices look to one request, or to one alternative of it.
type RequestExplanation struct {
	// Namespace and Claim name the claim.
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	// Request is "request" or "request/subrequest".
	Request string `json:"request"`
	// Subject is what the request stands for, where no user has written it.
	Subject string `json:"subject,omitempty"`
	// DeviceClass is the class that the request names.
	DeviceClass string `json:"deviceClass"`
	// Wanted is how many devices the request needs on one node; 0 with All.
	Wanted int `json:"wanted,omitempty"`
	// All tells that the request is for all matching devices of a node.
	All bool `json:"all,omitempty"`
	// Limit is what no node exceeds, if that is less than the request asks for. Only [FindLimits] sets it.
	Limit *Limit `json:"limit,omitempty"`
	// Offered is how many devices the nodes can use, of any class.
	Offered int `json:"offered"`
	// Devices is how many devices of the class there are. Each of them is in exactly one of FilteredBy,
	// TooSmall, Failing and Matching.
	Devices int `json:"devices"`
	// FilteredBy counts the devices by the selector of the request that was the first to reject them.
	FilteredBy []SelectorCount `json:"filteredBy,omitempty"`
	DeviceCounts
}

// SelectorCount is how many devices one selector rejected.
type SelectorCount struct {
	Expression string `json:"expression"`
	Devices    int    `json:"devices"`
}

// ConstraintExplanation says how far a matchAttribute constraint gets.
type ConstraintExplanation struct {
	// Namespace and Claim name the claim.
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	// Attribute is what the devices must have in common.
	Attribute resourceapi.FullyQualifiedName `json:"attribute"`
	// Best is the largest number of free devices of one node with one value; Wanted is how many are needed.
	Best   int `json:"best"`
	Wanted int `json:"wanted"`
}

// SelectorErrorExplanation says on which device which CEL selector, or which expression that derives an attribute,
// failed at run time.
type SelectorErrorExplanation struct {
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	Request   string `json:"request"`
	// Subject is as in RequestExplanation.
	Subject string `json:"subject,omitempty"`
	// DeviceClass is set if the selector is the class's, not the request's own.
	DeviceClass string `json:"deviceClass,omitempty"`
	// Attribute is set if the expression derives that attribute and is not a selector.
	Attribute  resourceapi.FullyQualifiedName `json:"attribute,omitempty"`
	Expression string                         `json:"expression"`
	Driver     string                         `json:"driver"`
	Pool       string                         `json:"pool"`
	Device     string                         `json:"device"`
	// Message is what CEL said.
	Message string `json:"message"`
}

// PoolExplanation says why a pool cannot be used.
type PoolExplanation struct {
	Driver string                `json:"driver"`
	Pool   string                `json:"pool"`
	Kind   inventory.ProblemKind `json:"kind"`
	Detail string                `json:"detail"`
}

// NodeExplanation says why one node was refused.
type NodeExplanation struct {
	Node   string `json:"node"`
	Reason Reason `json:"reason"`
	// Detail is what the reason, being the same for many nodes, does not say: which device, pool, or error.
	Detail string `json:"detail,omitempty"`
	// Requests and Constraints are as in Explanation, for this node alone.
	Requests    []RequestExplanation    `json:"requests,omitempty"`
	Constraints []ConstraintExplanation `json:"constraints,omitempty"`
}

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
func Explain(reqs *Requests, failures iter.Seq2[string, *Failure], naming Naming) *Explanation {
	s := newSum(reqs, naming)
	for _, failure := range failures {
		s.add(failure)
	}
	return s.explanation()
}

// ExplainNodes explains the failures node by node, for the first nodes by name, limit at most.
func ExplainNodes(reqs *Requests, failures iter.Seq2[string, *Failure], limit int) []NodeExplanation {
	all := maps.Collect(failures)
	nodes := slices.Sorted(maps.Keys(all))
	out := make([]NodeExplanation, 0, min(limit, len(nodes)))
	for _, node := range nodes[:min(limit, len(nodes))] {
		failure := all[node]
		s := newSum(reqs, Naming{})
		s.add(failure)
		e := s.explanation()
		out = append(out, NodeExplanation{
			Node: node, Reason: failure.Reason, Detail: failure.detail(), Requests: e.Requests, Constraints: e.Constraints,
		})
	}
	return out
}

// sum adds up failures.
type sum struct {
	reqs      *Requests
	naming    Naming
	requests  []RequestExplanation // by lane; FilteredBy has all selectors
	seen      []map[*inventory.NodePool]struct{}
	nodes     int
	reasons   map[Reason]int
	best      map[constraintKey]ConstraintCounts
	pools     map[inventory.PoolID]*inventory.PoolProblem
	selectors map[SelectorErrorExplanation]struct{}
}

type constraintKey struct{ claim, constraint int }

func newSum(reqs *Requests, naming Naming) *sum {
	s := &sum{
		reqs:      reqs,
		naming:    naming,
		reasons:   make(map[Reason]int),
		best:      make(map[constraintKey]ConstraintCounts),
		pools:     make(map[inventory.PoolID]*inventory.PoolProblem),
		selectors: make(map[SelectorErrorExplanation]struct{}),
	}
	for _, a := range reqs.lanes {
		claim := reqs.objects[a.request.claim]
		r := RequestExplanation{
			Namespace: claim.Namespace, Claim: claim.Name, Request: a.resultName(), DeviceClass: a.class.Object.Name,
			Subject: naming.subject(claim.Namespace, claim.Name, a.resultName()), Wanted: a.count, All: a.all,
		}
		for _, expression := range a.selectors {
			r.FilteredBy = append(r.FilteredBy, SelectorCount{Expression: expression})
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
		a := s.reqs.claims[c.Claim].requests[c.Request].alternatives[c.Alternative]
		if _, ok := s.seen[a.lane][c.Pool]; !ok {
			s.seen[a.lane][c.Pool] = struct{}{}
			s.requests[a.lane].add(c, a, &s.naming)
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
		e := f.SelectorError.explanation()
		e.Subject = s.naming.subject(e.Namespace, e.Claim, e.Request)
		s.selectors[e] = struct{}{}
	}
}

// add adds how the devices of one pool look to the alternative.
func (r *RequestExplanation) add(c *RequestCounts, a *alternative, naming *Naming) {
	r.Offered += c.Devices
	r.Devices += c.Devices - c.FilteredByClass
	for k, n := range c.FilteredBy {
		r.FilteredBy[k].Devices += n
	}
	r.DeviceCounts.add(&c.DeviceCounts)
	r.addTaints(c, a, naming)
}

func (r *RequestExplanation) addTaints(c *RequestCounts, a *alternative, naming *Naming) {
	if len(c.Taints) == 0 {
		return
	}
	if r.Taints == nil {
		r.Taints = make(map[string]int)
	}
	known := a.matcher.Known(c.Pool)
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
		taint := a.matcher.RefusedTaint(device)
		key := taint.Key
		if rule := naming.Rule(c.Pool.ID(), device.Name, taint); rule != "" {
			key += " by DeviceTaintRule " + rule
		}
		r.Taints[key]++
	}
}

func (s *sum) explanation() *Explanation {
	e := &Explanation{Nodes: s.nodes, Reasons: s.reasons}
	if s.reasons[ReasonUndecided] < s.nodes {
		for _, r := range s.requests {
			if r.FilteredBy = slices.DeleteFunc(r.FilteredBy, func(f SelectorCount) bool { return f.Devices == 0 }); len(r.FilteredBy) == 0 {
				r.FilteredBy = nil
			}
			e.Requests = append(e.Requests, r)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(s.best), func(a, b constraintKey) int {
		return cmp.Or(cmp.Compare(a.claim, b.claim), cmp.Compare(a.constraint, b.constraint))
	}) {
		c, claim := s.best[key], s.reqs.objects[key.claim]
		e.Constraints = append(e.Constraints, ConstraintExplanation{
			Namespace: claim.Namespace, Claim: claim.Name, Attribute: c.Attribute, Best: c.Best, Wanted: c.Wanted,
		})
	}
	e.SelectorErrors = slices.SortedFunc(maps.Keys(s.selectors), func(a, b SelectorErrorExplanation) int {
		return cmp.Or(cmp.Compare(a.String(), b.String()), cmp.Compare(a.Device, b.Device))
	})
	for _, id := range slices.SortedFunc(maps.Keys(s.pools), func(a, b inventory.PoolID) int {
		return cmp.Or(cmp.Compare(a.Driver, b.Driver), cmp.Compare(a.Pool, b.Pool))
	}) {
		e.Pools = append(e.Pools, PoolExplanation{Driver: id.Driver, Pool: id.Pool, Kind: s.pools[id].Kind, Detail: s.pools[id].Detail})
	}
	return e
}
