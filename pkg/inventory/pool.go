package inventory

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

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

// Pool is what the slices of the highest generation say about one pool. Immutable but for its caches.
type Pool struct {
	ID         PoolID
	Generation int64
	// Problem is why the pool is unusable on every node that it touches. Nil for a usable pool.
	Problem *PoolProblem

	slices     []*Slice         // of the highest generation, by name; also those with counter sets
	nodes      map[string][]int // node name → indexes of the slices that are for this node alone
	roaming    []int            // indexes of the slices that are not for one node alone
	duplicates []duplicate

	// mu guards everywhere, the parts of the pool that nodes see, by what they see. A pool for all nodes
	// has one entry, one for racks as many as racks.
	mu    sync.RWMutex
	parts map[string]*part
}

// part is what a set of nodes sees of a pool: devices, or why it cannot use them.
type part struct {
	pool    *NodePool
	problem *PoolProblem
}

// duplicate is a device name that several slices have. It concerns the nodes that see two of them.
type duplicate struct {
	device string
	slices []int
}

// maxParts bounds how many different parts of one pool are kept; more are made each time they are asked for.
const maxParts = 4096

// newPool derives the pool from all its slices, of any generation. There is at least one.
func newPool(id PoolID, members map[string]*Slice) *Pool {
	p := &Pool{ID: id, parts: make(map[string]*part)}
	for _, s := range members {
		p.Generation = max(p.Generation, s.Object.Spec.Pool.Generation)
	}
	ignored := 0
	for _, s := range members {
		switch {
		case s.Object.Spec.Pool.Generation != p.Generation:
		case s.ignored != "":
			ignored++
		default:
			p.slices = append(p.slices, s)
		}
	}
	slices.SortFunc(p.slices, func(a, b *Slice) int { return cmp.Compare(a.Object.Name, b.Object.Name) })
	for i, s := range p.slices {
		if s.rule.kind == ruleName {
			if p.nodes == nil {
				p.nodes = make(map[string][]int)
			}
			p.nodes[s.rule.name] = append(p.nodes[s.rule.name], i)
		} else {
			p.roaming = append(p.roaming, i)
		}
	}
	if kind, detail := p.check(ignored); detail != "" {
		p.Problem = &PoolProblem{Pool: id, Kind: kind, Detail: detail}
	}
	return p
}

// check says whether the slices make up a whole and consistent pool, and if not, why.
func (p *Pool) check(ignored int) (ProblemKind, string) {
	if len(p.slices) == 0 {
		return Incomplete, fmt.Sprintf("%d slices of generation %d use compatibility groups, which are not enabled", ignored, p.Generation)
	}
	want := p.slices[0].Object.Spec.Pool.ResourceSliceCount
	for _, s := range p.slices {
		if other := s.Object.Spec.Pool.ResourceSliceCount; other != want {
			return Invalid, fmt.Sprintf("slices of generation %d disagree about their number: %s says %d, %s says %d",
				p.Generation, p.slices[0].Object.Name, want, s.Object.Name, other)
		}
	}
	if have := int64(len(p.slices)); have != want {
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
	if detail := p.checkCounters(); detail != "" {
		return Invalid, detail
	}
	p.findDuplicates()
	return "", ""
}

// checkCounters makes sure that counters which devices consume exist, exactly once.
func (p *Pool) checkCounters() string {
	counterSets := make(map[string]*resourceapi.CounterSet)
	for _, s := range p.slices {
		for i := range s.Object.Spec.SharedCounters {
			counterSet := &s.Object.Spec.SharedCounters[i]
			if _, ok := counterSets[counterSet.Name]; ok {
				return fmt.Sprintf("duplicate counter set name %s", counterSet.Name)
			}
			counterSets[counterSet.Name] = counterSet
		}
	}
	for _, s := range p.slices {
		if s.advanced == nil || s.holdsCounters() {
			continue
		}
		for i := s.advanced.Next(0); i >= 0; i = s.advanced.Next(i + 1) {
			device := &s.Object.Spec.Devices[i]
			for _, consumption := range device.ConsumesCounters {
				counterSet, ok := counterSets[consumption.CounterSet]
				if !ok {
					return fmt.Sprintf("device %s consumes from counter set %s, which does not exist", device.Name, consumption.CounterSet)
				}
				for _, name := range slices.Sorted(maps.Keys(consumption.Counters)) {
					if _, ok := counterSet.Counters[name]; !ok {
						return fmt.Sprintf("device %s consumes counter %s, which counter set %s does not have", device.Name, name, counterSet.Name)
					}
				}
			}
		}
	}
	return ""
}

func (p *Pool) findDuplicates() {
	seen := make(map[string]int)
	again := make(map[string]int) // device name → index in duplicates
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
			d, ok := again[name]
			if !ok {
				d = len(p.duplicates)
				again[name] = d
				p.duplicates = append(p.duplicates, duplicate{device: name, slices: []int{first}})
			}
			p.duplicates[d].slices = append(p.duplicates[d].slices, i)
		}
	}
}

// isLocal tells whether every slice of the pool is for one node by name.
func (p *Pool) isLocal() bool { return len(p.roaming) == 0 }

// forNode returns what the node sees of the pool, nil if nothing.
func (p *Pool) forNode(node *v1.Node) *part {
	// The key has one bit per slice, then the bits of the devices that choose their nodes.
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
		bits := bitset.New(len(s.perDevice))
		for d := range s.perDevice {
			if s.perDevice[d].matches(node) {
				bits.Add(d)
			}
		}
		if !bits.Empty() {
			see(i)
		}
		for _, word := range bits {
			for shift := 0; shift < 64; shift += 8 {
				key = append(key, byte(word>>shift))
			}
		}
	}
	if !relevant {
		return nil
	}
	p.mu.RLock()
	known := p.parts[string(key)]
	p.mu.RUnlock()
	if known != nil {
		return known
	}
	made := p.newPart(key, node)
	p.mu.Lock()
	defer p.mu.Unlock()
	if known := p.parts[string(key)]; known != nil {
		return known
	}
	if len(p.parts) < maxParts {
		p.parts[string(key)] = made
	}
	return made
}

// newPart makes what a node sees when it sees the slices in the key.
func (p *Pool) newPart(key []byte, node *v1.Node) *part {
	sees := func(i int) bool { return key[i/8]&(1<<(i%8)) != 0 }
	if p.Problem != nil {
		return &part{problem: p.Problem}
	}
	for _, d := range p.duplicates {
		n := 0
		for _, i := range d.slices {
			if sees(i) {
				n++
			}
		}
		if n > 1 {
			return &part{problem: &PoolProblem{Pool: p.ID, Kind: Invalid, Detail: "duplicate device name " + d.device}}
		}
	}
	var seen []*Slice
	for i, s := range p.slices {
		if sees(i) && !s.holdsCounters() {
			seen = append(seen, s)
		}
	}
	return &part{pool: newNodePool(p, seen, node)}
}
