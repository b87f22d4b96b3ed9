package inventory

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/benbjohnson/immutable"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"
)

// A kubelet's credential may write slices of any driver and pool, for its own node. So a broken or hostile node can add
// slices to another node's pool, which then is incomplete, or outdated. Slices without which other nodes see a whole pool are
// strangers: they do not count, and a node that has nothing else of the pool is told so.

// sliceSet has all slices of a pool, of all generations.
type sliceSet struct {
	count  int
	ofNode map[string]map[string]*Slice // node → slice name → slice; under "" those that are not for one node by name
	// nodes are the keys of ofNode, which views keep; nil until there are more slices than are looked at.
	nodes *immutable.Map[string, struct{}]
}

// nodeOf is the node for which a slice is by name, whatever the features: no kubelet can write one without, or with another's.
func nodeOf(s *Slice) string { return ptr.Deref(s.Object.Spec.NodeName, "") }

func (m *sliceSet) add(s *Slice) {
	node := nodeOf(s)
	if m.ofNode[node] == nil {
		m.ofNode[node] = make(map[string]*Slice)
	}
	m.ofNode[node][s.Object.Name] = s
	m.count++
	if m.nodes != nil {
		m.nodes = m.nodes.Set(node, struct{}{})
	}
}

func (m *sliceSet) remove(s *Slice) {
	node := nodeOf(s)
	delete(m.ofNode[node], s.Object.Name)
	m.count--
	if len(m.ofNode[node]) == 0 {
		delete(m.ofNode, node)
		if m.nodes != nil {
			m.nodes = m.nodes.Delete(node)
		}
	}
}

// maxMembers bounds the slices of a pool, of all generations: as many as it may have, and those of the generation that they replace.
const maxMembers = 2 * maxSlices

// pool derives the pool anew. Where there are too many slices, those count that are not for one node, and if these are not too many together,
// those of the node after which the pool is called. Where there are none, or too many, no slice is looked at. The nodes of the others are told.
func (m *sliceSet) pool(id PoolID, c *caches) *Pool {
	most := c.limits.members
	if m.count <= most {
		return newPool(id, m.slicesOf(most, slices.Collect(maps.Keys(m.ofNode))...), c)
	}
	if m.nodes == nil { // since the last change, so they are no more than most by more than one
		nodes := immutable.NewMapBuilder[string, struct{}](newStringHasher())
		for node := range m.ofNode {
			nodes.Set(node, struct{}{})
		}
		m.nodes = nodes.Map()
	}
	excess := &PoolProblem{Pool: id, Kind: Invalid, Detail: fmt.Sprintf("%d slices, at most %d are looked at", m.count, most)}
	pool := &Pool{ID: id, caches: c, parts: make(map[string]*part), Problem: excess}
	// A kubelet can write those of its node, but no others.
	for _, nodes := range [][]string{{"", ownerOf(id)}, {""}} {
		if kept := m.slicesOf(most, nodes...); len(kept) > 0 {
			pool = newPool(id, kept, c)
			break
		}
	}
	// The nodes may be too many to tell each of them now, as is done where a pool is local.
	pool.excess, pool.local = excess, false
	if len(m.ofNode[""]) <= most {
		pool.hidden = m.nodes
	}
	return pool
}

// slicesOf returns the slices for the nodes, by name; none if they are too many.
func (m *sliceSet) slicesOf(most int, nodes ...string) map[string]*Slice {
	count := 0
	for _, node := range nodes {
		count += len(m.ofNode[node])
	}
	if count > most {
		return nil
	}
	all := make(map[string]*Slice, count)
	for _, node := range nodes {
		maps.Copy(all, m.ofNode[node])
	}
	return all
}

// ownerOf is the node after which a pool is called, if it is.
func ownerOf(id PoolID) string {
	owner, _, _ := strings.Cut(id.Pool, "/")
	return owner
}

// membership is which slices of a pool count.
type membership struct {
	own map[string]*Slice // by name, of any generation
	// judged tells that those of the newest generation are whole for each node by itself, whatever their number together.
	judged bool
	// strangers are the problems of the nodes whose slices do not count, by node.
	strangers map[string]*PoolProblem
}

// membersOf finds out which slices of a pool count.
//
//   - A node whose slices have more particulars than the pool has room for, see crowdOf, is a stranger: else one kubelet could take the pool from all.
//   - Of one node's slices only the newest: it uses no other.
//   - A pool that is called after a node, such as node-1 or node-1/mig, and is whole with that node's slices needs no other node's.
//   - If the newest slices of any other pool are not whole together, those of a node count that are whole for it, and have nothing wrong
//     in themselves: with those for more than one node, they are as many as each of them says.
func membersOf(id PoolID, members map[string]*Slice, most int) membership {
	groups := make(map[string][]*Slice) // the newest of each single node; under "" those for more than one, of any generation
	var all []*Slice                    // the newest of all
	var ignored []*Slice                // of any generation
	m := membership{own: make(map[string]*Slice, len(members))}
	for _, s := range members {
		switch {
		case s.ignored != "": // and its node uses an older one
			ignored = append(ignored, s)
		case nodeOf(s) != "":
			groups[nodeOf(s)] = addNewest(groups[nodeOf(s)], s)
		default:
			groups[""] = append(groups[""], s)
		}
	}
	owner := ownerOf(id)
	crowd := sets.New(crowdOf(owner, groups, most)...)
	for node := range crowd {
		m.estrange(id, node, fmt.Sprintf("the slices of node %s have more devices, counters and uses of counters than there is room for beside others, at most %d", node, most))
		delete(groups, node)
	}
	for _, s := range members {
		if s.ignored != "" || !crowd.Has(nodeOf(s)) {
			all = addNewest(all, s)
		}
	}
	var shared []*Slice // for more than one node, of the newest generation
	for _, s := range groups[""] {
		if s.isForMany() && generationOf(s) == generationOf(all[0]) {
			shared = append(shared, s)
		}
	}
	counts := func(string) bool { return true }
	switch group := groups[owner]; {
	case owner != "" && isWhole(group):
		counts = func(node string) bool { return node == owner }
	case isWhole(all):
	default:
		whole := make(map[string]bool)
		for node, group := range groups {
			if node != "" && generationOf(group[0]) == generationOf(all[0]) {
				whole[node] = isWhole(slices.Concat(shared, group)) && problemIn(group) == ""
				m.judged = m.judged || whole[node]
			}
		}
		if m.judged = m.judged || isWhole(shared) && len(whole) > 0; m.judged {
			counts = func(node string) bool { is, newest := whole[node]; return is || !newest }
		}
	}
	groups[""] = append(groups[""], ignored...)
	for key, group := range groups {
		problem := ""
		if key != "" { // else it has those for other nodes, too
			problem = problemIn(group)
		}
		for _, s := range group {
			node := nodeOf(s)
			if key == "" && s.ignored == "" || node == "" || counts(node) {
				m.own[s.Object.Name] = s
			} else {
				m.estrange(id, node, cmp.Or(problem, fmt.Sprintf("the slices of node %s do not count: the pool is whole without them", node)))
			}
		}
	}
	return m
}

// estrange notes that a node's slices do not count, and why. The first reason stays.
func (m *membership) estrange(id PoolID, node, why string) {
	if m.strangers == nil {
		m.strangers = make(map[string]*PoolProblem)
	}
	if m.strangers[node] == nil {
		m.strangers[node] = &PoolProblem{Pool: id, Kind: Invalid, Detail: why}
	}
}

// crowdOf are the nodes for whose slices a pool has no room beside those for more than one node, those of the node that it is called after, and
// those of nodes that bring less. Somebody's slices stay.
func crowdOf(owner string, groups map[string][]*Slice, most int) (crowd []string) {
	sizes, room := make(map[string]int, len(groups)), most
	for node, group := range groups {
		if sizes[node] = particularsOf(group, most); node == "" || node == owner {
			room -= sizes[node]
		}
	}
	nodes := slices.SortedFunc(maps.Keys(sizes), func(a, b string) int { return cmp.Or(cmp.Compare(sizes[a], sizes[b]), cmp.Compare(a, b)) })
	stays := len(groups[""]) > 0 || len(groups[owner]) > 0
	for _, node := range nodes {
		if node == "" || node == owner {
			continue
		}
		if room -= sizes[node]; room < 0 && stays {
			crowd = append(crowd, node)
		}
		stays = true
	}
	return crowd
}

// addNewest adds a slice to those of the highest generation; an older one changes nothing.
func addNewest(newest []*Slice, s *Slice) []*Slice {
	switch {
	case len(newest) == 0 || generationOf(s) > generationOf(newest[0]):
		return append(newest[:0:0], s)
	case generationOf(s) == generationOf(newest[0]):
		return append(newest, s)
	}
	return newest
}

// isWhole tells whether the slices, all of one generation, are as many as each of them says.
func isWhole(group []*Slice) bool {
	return len(group) > 0 && !slices.ContainsFunc(group, func(s *Slice) bool {
		return s.Object.Spec.Pool.ResourceSliceCount != int64(len(group))
	})
}

// problemIn is what is wrong with one of the slices, the first by name; empty if nothing is.
func problemIn(group []*Slice) (problem string) {
	name := ""
	for _, s := range group {
		if s.problem != "" && (problem == "" || s.Object.Name < name) {
			problem, name = s.problem, s.Object.Name
		}
	}
	return problem
}

func generationOf(s *Slice) int64 { return s.Object.Spec.Pool.Generation }

// isForMany tells whether nodes see the slice that it does not name.
func (s *Slice) isForMany() bool {
	return s.rule.kind == ruleAll || s.rule.kind == ruleSelector || s.perDevice != nil
}
