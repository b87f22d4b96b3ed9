// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/benbjohnson/immutable"
	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/inventory/bitset"
)

// PoolID names a pool: pool names are unique within a driver.
type PoolID struct{ Driver, Pool string }

func (id PoolID) String() string { return id.Driver + "/" + id.Pool }

func (id PoolID) compare(o PoolID) int {
	return cmp.Or(cmp.Compare(id.Driver, o.Driver), cmp.Compare(id.Pool, o.Pool))
}

// ProblemKind says in which way a pool is unusable.
type ProblemKind string

const (
	// Incomplete: slices of the highest generation are missing; the driver is still publishing.
	Incomplete ProblemKind = "incomplete"
	// Invalid: the slices contradict each other or themselves; the driver has to change them.
	Invalid ProblemKind = "invalid"
)

// PoolProblem is why devices of a pool cannot be used now.
type PoolProblem struct {
	Pool   PoolID
	Kind   ProblemKind
	Detail string
}

func (p *PoolProblem) String() string {
	return fmt.Sprintf("pool %s is %s: %s", p.Pool, p.Kind, p.Detail)
}

// Pool is what the slices of one generation, normally the highest, say about one pool. Immutable but for its
// caches.
type Pool struct {
	ID         PoolID
	Generation int64
	Problem    *PoolProblem // why the pool is unusable on every node that it touches; nil for a usable pool
	Counters   *Counters    // the pool's shared counters; nil if no device consumes any
	// Attached is a place for one value that a consumer derives from this very Pool and something else that it
	// can recognize again. The inventory does not look at it.
	Attached atomic.Value

	slices     []*Slice         // of this generation, by name; also those with counter sets
	nodes      map[string][]int // node name → indexes of the slices that are for this node alone
	roaming    []int            // indexes of the slices that are not for one node alone
	duplicates duplicates
	caches     *caches
	apart      bool // some slice, of any generation, has devices whose shares are one namespace's
	// some slice has devices that can be used only by nodes that can skip node operations
	skipsOperations bool

	// strangers are the problems of the nodes whose slices do not count, by node; of the newest generation only.
	strangers map[string]*PoolProblem
	local     bool // every slice, of this and lower generations, is for one node by name, and these are not too many
	// ofNodes is how many slices are for one node by name, where those of each node are whole by themselves; otherwise 0.
	ofNodes int
	// outdated are the lower generations; of the newest generation only.
	outdated outdated

	// excess is what is told where there are too many slices to look at them all, nil if there are not; hidden has the nodes
	// whose slices are not looked at, or nil if that may be any node.
	excess *PoolProblem
	hidden *immutable.Map[string, struct{}]

	devicesOnce sync.Once
	devices     map[string][]Offer // by name; made when first asked for
	// mu guards everywhere, the parts of the pool that nodes see, by what they see. A pool for all nodes
	// has one entry, one for racks as many as racks.
	mu    sync.RWMutex
	parts map[string]*part
}

// part is what a set of nodes sees of a pool: devices, or why it cannot use them, or both.
type part struct {
	slices  int // how many slices of the pool are for these nodes
	pool    *NodePool
	problem *PoolProblem // beside a pool: there are other devices, which the node cannot use
}

// outdated are the lower generations of a pool.
type outdated struct {
	all []*Pool // newest first
	// of has those that have slices for one node by name, by node: a node has slices of one generation alone.
	of map[string]*Pool
	// roaming are those that have slices which are not for one node alone, newest first, at most maxGenerations.
	roaming []*Pool
}

// duplicates are the device names that several slices have. A name concerns the nodes that see two of them.
type duplicates struct {
	names  []string
	number map[string]int // in names
	of     [][]int        // the numbers of those that a slice has, by its index; nil if there are none
}

// maxSlices bounds the slices of a pool: each change of one looks at all of them. The API allows 128 devices in each.
const maxSlices = 1024

// maxGenerations bounds the outdated generations in which every node looks for its devices, one after the other: those with slices that are
// not for one node alone, which no kubelet can write. A node's own are found by its name.
const maxGenerations = 8

// maxParticulars bounds what the slices of a pool have together, of all generations that are looked at: devices, counters, and what devices
// take of counters. A node with 16 GPUs that are offered in all partitions has less than 5,000.
const maxParticulars = 16 << 10

// maxLocal bounds the nodes of a pool for single nodes for each of which a change of it makes anew what it sees, while others wait. Where
// there are more, that is made when it is asked for.
const maxLocal = 256

// limits are the bounds of a pool, smaller in tests.
type limits struct{ slices, members, generations, particulars, local int }

var defaultLimits = limits{
	slices: maxSlices, members: maxMembers, generations: maxGenerations,
	particulars: maxParticulars, local: maxLocal,
}

// maxParts bounds how many different parts of one pool are kept; more are made each time they are asked for.
const maxParts = 4096

// newPool derives the pool from all its slices, of any generation. There is at least one.
func newPool(id PoolID, members map[string]*Slice, c *caches) *Pool {
	m := membersOf(id, members, c.limits, c.features)
	byGeneration := make(map[int64][]*Slice)
	for _, s := range m.own {
		byGeneration[generationOf(s)] = append(byGeneration[generationOf(s)], s)
	}
	generations := slices.Sorted(maps.Keys(byGeneration))
	slices.Reverse(generations)
	left := c.limits.particulars
	pool := newGeneration(id, generations[0], byGeneration[generations[0]], c, m.judged[generations[0]], &left)
	pool.local = len(pool.roaming) == 0
	for _, generation := range generations[1:] {
		pool.addOutdated(newGeneration(id, generation, byGeneration[generation], c, m.judged[generation], &left))
	}
	pool.strangers = m.strangers
	pool.local = pool.local && len(pool.nodes)+len(pool.outdated.of)+len(pool.strangers) <= c.limits.local
	for _, s := range members {
		pool.apart = pool.apart || s.apart != nil
	}
	return pool
}

// Generations yields what the slices of each generation that count say of the pool, the newest first.
func (p *Pool) Generations() iter.Seq[*Pool] {
	return func(yield func(*Pool) bool) {
		for _, g := range append([]*Pool{p}, p.outdated.all...) {
			if !yield(g) {
				return
			}
		}
	}
}

// addOutdated notes a generation that is lower than all before.
func (p *Pool) addOutdated(g *Pool) {
	o := &p.outdated
	o.all = append(o.all, g)
	p.local = p.local && len(g.roaming) == 0
	if len(g.roaming) > 0 && len(o.roaming) < p.caches.limits.generations {
		o.roaming = append(o.roaming, g)
	}
	for name := range g.nodes {
		if o.of == nil {
			o.of = make(map[string]*Pool)
		}
		o.of[name] = g
	}
}

// newGeneration takes from left how many particulars there may be.
func newGeneration(id PoolID, generation int64, members []*Slice, c *caches, judged bool, left *int) *Pool {
	p := &Pool{ID: id, Generation: generation, caches: c, parts: make(map[string]*part)}
	ignored := 0
	for _, s := range members {
		if s.ignored != "" {
			ignored++
		} else {
			p.slices = append(p.slices, s)
			p.skipsOperations = p.skipsOperations || (s.skipsOperations && c.features.OptionalNodeOperations)
		}
	}
	slices.SortFunc(p.slices, func(a, b *Slice) int { return cmp.Compare(a.Object.Name, b.Object.Name) })
	for i, s := range p.slices {
		if s.rule.kind == ruleName {
			if p.nodes == nil {
				p.nodes = make(map[string][]int)
			}
			p.nodes[s.rule.name] = append(p.nodes[s.rule.name], i)
			if judged {
				p.ofNodes++
			}
		} else if s.isForMany() {
			p.roaming = append(p.roaming, i)
		}
	}
	if kind, detail := p.check(ignored, judged, left); detail != "" {
		p.Problem = &PoolProblem{Pool: id, Kind: kind, Detail: detail}
	}
	return p
}

// check says whether the slices make up a whole and consistent pool, and if not, why. Of those that have been judged the number is right.
func (p *Pool) check(ignored int, judged bool, left *int) (ProblemKind, string) {
	if len(p.slices) == 0 {
		return Incomplete, fmt.Sprintf("%d slices of generation %d use compatibility groups, which are not enabled", ignored, p.Generation)
	}
	if most := p.caches.limits.slices; len(p.slices) > most {
		return Invalid, fmt.Sprintf("%d slices of generation %d, at most %d are looked at", len(p.slices), p.Generation, most)
	}
	want := p.slices[0].Object.Spec.Pool.ResourceSliceCount
	for _, s := range p.slices {
		if judged {
			break
		}
		if other := s.Object.Spec.Pool.ResourceSliceCount; other != want {
			return Invalid, fmt.Sprintf("slices of generation %d disagree about their number: %s says %d, %s says %d",
				p.Generation, p.slices[0].Object.Name, want, s.Object.Name, other)
		}
	}
	if have := int64(len(p.slices)); have != want && !judged {
		detail := fmt.Sprintf("%d of %d slices of generation %d", have, want, p.Generation)
		if ignored > 0 {
			detail += fmt.Sprintf(", %d ignored because they use compatibility groups, which are not enabled", ignored)
		}
		return Incomplete, detail
	}
	for _, s := range p.slices {
		if s.problem != "" {
			return Invalid, s.problem
		}
	}
	if *left -= particularsOf(p.slices, *left); *left < 0 {
		return Invalid, fmt.Sprintf("the slices of generation %d have more devices, counters and uses of counters than are looked at, "+
			"which are %d of all its generations", p.Generation, p.caches.limits.particulars)
	}
	if p.caches.features.PartitionableDevices {
		counters, detail := newCounters(p.slices, p.caches.features, judged)
		if detail != "" {
			return Invalid, detail
		}
		if counters != nil {
			p.Counters = p.caches.counters.shared(counters)
		}
	}
	p.findDuplicates()
	return "", ""
}

func (p *Pool) findDuplicates() {
	devices := 0
	for _, s := range p.slices {
		devices += len(s.Object.Spec.Devices)
	}
	seen := make(map[string]int, devices)
	d := &p.duplicates
	for i, s := range p.slices {
		if s.holdsCounters() {
			continue
		}
		for j := range s.Object.Spec.Devices {
			name := s.Object.Spec.Devices[j].Name
			first, ok := seen[name]
			if !ok {
				seen[name] = i
				continue
			}
			if d.of == nil {
				d.of, d.number = make([][]int, len(p.slices)), make(map[string]int)
			}
			number, ok := d.number[name]
			if !ok {
				number = len(d.names)
				d.names, d.number[name] = append(d.names, name), number
				d.of[first] = append(d.of[first], number)
			}
			d.of[i] = append(d.of[i], number)
		}
	}
}

// nodeNames yields the nodes for which there are slices by name, of any generation. A node may come more than once.
func (p *Pool) nodeNames() iter.Seq[string] {
	return func(yield func(string) bool) {
		for name := range p.strangers {
			if !yield(name) {
				return
			}
		}
		for name := range p.nodes {
			if !yield(name) {
				return
			}
		}
		for name := range p.outdated.of {
			if !yield(name) {
				return
			}
		}
	}
}

// isFor tells whether there is a slice, of any generation, for the node with this name.
func (p *Pool) isFor(node string) bool {
	return p.nodes[node] != nil || p.strangers[node] != nil || p.outdated.of[node] != nil
}

// forNode returns what the node sees of the pool, nil if nothing. A node whose own slices do not count is told so if it sees nothing else,
// and one whose own slices are not looked at is told so in any case: it may miss devices.
func (p *Pool) forNode(node *v1.Node) *part {
	seen, relevant := p.sees(node)
	if !relevant {
		seen = p.forNodeOutdated(node)
	}
	problem := p.strangers[node.Name]
	if p.hides(node.Name) {
		problem = p.excess
	}
	switch {
	case problem == nil || seen != nil && (problem != p.excess || seen.problem != nil):
		return seen
	case seen != nil:
		return &part{pool: seen.pool, problem: problem}
	}
	return &part{problem: problem}
}

// hides tells whether slices that are for the node are not looked at, as far as that is known.
func (p *Pool) hides(node string) bool {
	if p.excess == nil || p.isFor(node) {
		return false
	}
	if p.hidden == nil {
		return true
	}
	_, hidden := p.hidden.Get(node)
	return hidden
}

// forNodeOutdated returns what the node sees of an outdated generation, the newest of which it sees any. As in
// upstream's allocator, it can use the devices while all slices of that generation are there and are for this
// node; otherwise it is as if the pool did not exist.
func (p *Pool) forNodeOutdated(node *v1.Node) *part {
	own := p.outdated.of[node.Name]
	for _, g := range p.outdated.roaming {
		if own != nil && own.Generation >= g.Generation {
			break
		}
		if seen, relevant := g.sees(node); relevant {
			return g.ifWhole(seen, node.Name)
		}
	}
	if own == nil {
		return nil
	}
	seen, _ := own.sees(node)
	return own.ifWhole(seen, node.Name)
}

// ifWhole returns what a node sees of the outdated generation if that is all of it.
func (p *Pool) ifWhole(seen *part, node string) *part {
	others := 0 // slices that the node does not need
	if p.ofNodes > 0 {
		others = p.ofNodes - len(p.nodes[node])
	}
	if seen.slices != len(p.slices)-others || p.Problem != nil && p.Problem.Kind == Incomplete {
		return nil
	}
	return seen
}

// sees returns what the node sees of this generation, and whether any slice of it is for the node.
func (p *Pool) sees(node *v1.Node) (*part, bool) {
	// The key has one bit per slice, then the bits of the devices that choose their nodes, then whether the node can
	// skip operations, if that matters.
	var buf [64]byte
	key := append(buf[:0], make([]byte, (len(p.slices)+7)/8)...)
	relevant := false
	see := func(i int) { key[i/8] |= 1 << (i % 8); relevant = true }
	for _, i := range p.nodes[node.Name] {
		see(i)
	}
	for _, i := range p.roaming {
		s := p.slices[i]
		if s.perDevice == nil {
			if s.rule.matches(node) {
				see(i)
			}
			continue
		}
		chosen := bitset.New(len(s.perDevice))
		for d := range s.perDevice {
			if s.perDevice[d].matches(node) {
				chosen.Add(d)
			}
		}
		if !chosen.Empty() {
			see(i)
		}
		for _, word := range chosen {
			for shift := 0; shift < 64; shift += 8 {
				key = append(key, byte(word>>shift))
			}
		}
	}
	if !relevant {
		return nil, false
	}
	if p.skipsOperations && canSkipOperations(node) {
		key = append(key, 1)
	}
	p.mu.RLock()
	known := p.parts[string(key)]
	p.mu.RUnlock()
	if known != nil {
		return known, true
	}
	made := p.newPart(key, node)
	p.mu.Lock()
	defer p.mu.Unlock()
	if known := p.parts[string(key)]; known != nil {
		return known, true
	}
	if len(p.parts) < maxParts {
		p.parts[string(key)] = made
	} else {
		p.caches.lostParts.Add(1)
	}
	return made, true
}

// newPart makes what a node sees when it sees the slices in the key.
func (p *Pool) newPart(key []byte, node *v1.Node) *part {
	made := &part{}
	var seen []*Slice
	twice := -1 // the first name that two slices have
	once := make(map[int]bool)
	for at := range (len(p.slices) + 7) / 8 {
		for left := key[at]; left != 0; left &= left - 1 {
			i := at*8 + bits.TrailingZeros8(left)
			made.slices++
			if !p.slices[i].holdsCounters() {
				seen = append(seen, p.slices[i])
			}
			if p.duplicates.of == nil {
				continue
			}
			for _, number := range p.duplicates.of[i] {
				if once[number] && (twice < 0 || number < twice) {
					twice = number
				}
				once[number] = true
			}
		}
	}
	switch {
	case p.Problem != nil:
		made.problem = p.Problem
	case twice >= 0:
		made.problem = &PoolProblem{Pool: p.ID, Kind: Invalid, Detail: "duplicate device name " + p.duplicates.names[twice]}
	default:
		made.pool = newNodePool(p, seen, node)
	}
	return made
}

// isDuplicate tells whether several devices of the pool have the name.
func (p *Pool) isDuplicate(device string) bool {
	_, is := p.duplicates.number[device]
	return is
}

// nodeOperationsFeature is what a node declares in status.declaredFeatures if its kubelet can skip node operations
// (KEP-5945's feature gate).
const nodeOperationsFeature = "DRAOptionalNodeOperations"

func canSkipOperations(node *v1.Node) bool {
	return slices.Contains(node.Status.DeclaredFeatures, nodeOperationsFeature)
}
