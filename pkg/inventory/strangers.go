package inventory

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// A kubelet's credential may write slices of any driver and pool, for its own node. So a broken or hostile node can add
// slices to another node's pool, which then is incomplete, or outdated. Slices without which other nodes see a whole pool are
// strangers: they do not count, and a node that has nothing else of the pool is told so.

// sliceSet has all slices of a pool, of all generations.
type sliceSet struct {
	count  int
	ofNode map[string]map[string]*Slice // node → slice name → slice; under "" those that are not for one node by name
}

func (m *sliceSet) add(s *Slice) {
	if m.ofNode[s.rule.name] == nil {
		m.ofNode[s.rule.name] = make(map[string]*Slice)
	}
	m.ofNode[s.rule.name][s.Object.Name] = s
	m.count++
}

func (m *sliceSet) remove(s *Slice) {
	delete(m.ofNode[s.rule.name], s.Object.Name)
	if len(m.ofNode[s.rule.name]) == 0 {
		delete(m.ofNode, s.rule.name)
	}
	m.count--
}

// maxMembers bounds the slices of a pool, of all generations: as many as it may have, and those of the generation that they replace.
const maxMembers = 2 * maxSlices

// pool derives the pool anew. Where there are too many slices only those of the node count after which the pool is called. Where that has none
// none is looked at, and no node sees any.
func (m *sliceSet) pool(id PoolID, c *caches) *Pool {
	all := make(map[string]*Slice, min(m.count, maxMembers))
	owner := ownerOf(id)
	switch own := m.ofNode[owner]; {
	case m.count <= maxMembers:
		for _, slices := range m.ofNode {
			maps.Copy(all, slices)
		}
	case owner != "" && len(own) > 0 && len(own) <= maxMembers:
		all = own
	default:
		return &Pool{ID: id, caches: c, parts: make(map[string]*part), Problem: &PoolProblem{
			Pool: id, Kind: Invalid, Detail: fmt.Sprintf("%d slices, at most %d are looked at", m.count, maxMembers),
		}}
	}
	return newPool(id, all, c)
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
//   - Of one node's slices only the newest: it uses no other.
//   - A pool that is called after a node, such as node-1 or node-1/mig, and is whole with that node's slices needs no other node's.
//   - If the newest slices of any other pool are not whole together, those of a node count that are whole for it: with
//     those for more than one node, they are as many as each of them says.
func membersOf(id PoolID, members map[string]*Slice) membership {
	groups := make(map[string][]*Slice) // the newest of each single node; under "" those for more than one, of any generation
	var all []*Slice                    // the newest of all
	m := membership{own: make(map[string]*Slice, len(members))}
	for _, s := range members {
		all = addNewest(all, s)
		if s.ignored != "" {
			m.own[s.Object.Name] = s // and its node uses an older one
			continue
		}
		if s.rule.name != "" {
			groups[s.rule.name] = addNewest(groups[s.rule.name], s)
		} else {
			groups[""] = append(groups[""], s)
		}
	}
	for _, group := range groups {
		for _, s := range group {
			m.own[s.Object.Name] = s
		}
	}
	var shared []*Slice // for more than one node, of the newest generation
	for _, s := range groups[""] {
		if s.isForMany() && generationOf(s) == generationOf(all[0]) {
			shared = append(shared, s)
		}
	}
	owner := ownerOf(id)
	counts := func(string) bool { return true }
	switch group := groups[owner]; {
	case owner != "" && isWhole(group):
		counts = func(node string) bool { return node == owner }
	case isWhole(all):
	default:
		whole := make(map[string]bool)
		for node, group := range groups {
			if node != "" && generationOf(group[0]) == generationOf(all[0]) {
				whole[node] = isWhole(slices.Concat(shared, group))
				m.judged = m.judged || whole[node]
			}
		}
		if m.judged = m.judged || isWhole(shared) && len(whole) > 0; m.judged {
			counts = func(node string) bool { is, newest := whole[node]; return is || !newest }
		}
	}
	for node, group := range groups {
		if node == "" || counts(node) {
			continue
		}
		if m.strangers == nil {
			m.strangers = make(map[string]*PoolProblem)
		}
		m.strangers[node] = &PoolProblem{Pool: id, Kind: Invalid, Detail: fmt.Sprintf("the slices of node %s do not count: the pool is whole without them", node)}
		for _, s := range group {
			delete(m.own, s.Object.Name)
		}
	}
	return m
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

func generationOf(s *Slice) int64 { return s.Object.Spec.Pool.Generation }

// isForMany tells whether nodes see the slice that it does not name.
func (s *Slice) isForMany() bool {
	return s.rule.kind == ruleAll || s.rule.kind == ruleSelector || s.perDevice != nil
}
