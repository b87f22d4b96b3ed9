// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/benbjohnson/immutable"
	resourceapi "k8s.io/api/resource/v1"
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

// pool derives the pool anew. The nodes of slices that are not looked at are told.
func (m *sliceSet) pool(id PoolID, c *caches) *Pool {
	most := c.limits.members
	kept := m.lookedAt(id, most)
	if m.count <= most {
		return newPool(id, kept, c)
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
	if len(kept) > 0 {
		pool = newPool(id, kept, c)
	}
	// The nodes may be too many to tell each of them now, as is done where a pool is local.
	pool.excess, pool.local = excess, false
	if len(m.ofNode[""]) <= most {
		pool.hidden = m.nodes
	}
	return pool
}

// lookedAt are all slices, by name. Where they are too many, those that are not for one node, and if these are not too many together,
// those of the node after which the pool is called: a kubelet can write those of its node, but no others. Where that has none, those of
// other nodes as far as there is room, of those with the fewest first, unless the nodes are too many to be put in order: one kubelet alone
// does not make them too many. It may be none.
func (m *sliceSet) lookedAt(id PoolID, most int) map[string]*Slice {
	if m.count <= most {
		return m.slicesOf(most, slices.Collect(maps.Keys(m.ofNode))...)
	}
	owner := ownerOf(id)
	if len(m.ofNode[""]) > most {
		return nil
	}
	kept := m.slicesOf(most, "", owner)
	if kept == nil {
		kept = m.slicesOf(most, "")
	}
	if len(m.ofNode[owner]) > 0 || len(m.ofNode) > 2*most {
		return kept
	}
	type share struct {
		node string
		of   map[string]*Slice
	}
	others := make([]share, 0, len(m.ofNode))
	for node, of := range m.ofNode {
		if node != "" {
			others = append(others, share{node, of})
		}
	}
	slices.SortFunc(others, func(a, b share) int { return cmp.Or(len(a.of)-len(b.of), strings.Compare(a.node, b.node)) })
	for _, s := range others {
		if len(kept)+len(s.of) > most {
			break // so it is with all that follow
		}
		maps.Copy(kept, s.of)
	}
	return kept
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
	// judged are the generations of which those are whole for each node by itself, whatever their number together.
	judged map[int64]bool
	// strangers are the problems of the nodes whose slices do not count, by node.
	strangers map[string]*PoolProblem
}

// membersOf finds out which slices of a pool count.
//
//   - A node whose slices are more than a generation has room for, or have more particulars than the pool has, see crowdOf, is a stranger:
//     else one kubelet could take the pool from all.
//   - Of one node's slices only the newest that it sees: it uses no other. Newer ones that nobody sees
//     count where the others' have to be whole.
//   - A pool that is called after a node, such as node-1 or node-1/mig, is that node's, and no other's slices take the place of those that
//     it has yet to publish. Of one with slices for more than one node that is so if it is whole with that node's.
//   - Of a pool with slices for more than one node, no single node's are newer, and of those that are older none
//     has a device called as one of the newest.
//   - If those of a generation are not whole together, those of a node count that are whole for it: with those for more than one node, they
//     are as many as each of them says, and nothing is wrong in themselves or in their counters.
func membersOf(id PoolID, members map[string]*Slice, most limits, features Features) membership {
	groups := make(map[string][]*Slice) // the newest of those that each single node sees; under "" those for more than one, of any generation
	m := membership{own: make(map[string]*Slice, len(members)), judged: make(map[int64]bool)}
	// beside are those that count unless their node is a stranger: ignored ones, and unseen ones that are newer than what their node sees.
	var unseen, beside []*Slice
	for _, s := range members {
		switch {
		case s.ignored != "":
			beside = append(beside, s)
		case nodeOf(s) == "":
			groups[""] = append(groups[""], s)
		case s.rule.kind == ruleNone:
			unseen = append(unseen, s)
		default:
			groups[nodeOf(s)] = addNewest(groups[nodeOf(s)], s)
		}
	}
	for _, s := range unseen { // as counter sets are that are not enabled
		group := groups[nodeOf(s)]
		if len(group) > 0 && group[0].rule.kind != ruleNone && generationOf(s) > generationOf(group[0]) {
			beside = append(beside, s)
		} else {
			groups[nodeOf(s)] = addNewest(group, s)
		}
	}
	owner := ownerOf(id)
	leave := func(crowd []string, what string, most int) {
		for _, node := range crowd {
			m.estrange(id, node, fmt.Sprintf("the slices of node %s %s than there is room for beside others, at most %d", node, what, most))
			delete(groups, node)
		}
	}
	if len(members) > most.slices {
		for _, group := range byGeneration(groups) {
			leave(crowdOf(owner, group, most.slices, func(group []*Slice) int { return len(group) }), "are more of a generation", most.slices)
		}
	}
	leave(crowdOf(owner, groups, most.particulars, func(group []*Slice) int { return particularsOf(group, most.particulars) }),
		"have more devices, counters and uses of counters", most.particulars)
	generations := make(map[int64]*generation)
	at := func(s *Slice) *generation {
		g := generations[generationOf(s)]
		if g == nil {
			g = &generation{}
			generations[generationOf(s)] = g
		}
		return g
	}
	newest, isShared := int64(0), false // of those that nodes see which they do not name
	for _, s := range groups[""] {
		m.own[s.Object.Name] = s
		at(s).shared = append(at(s).shared, s)
		if g := generationOf(s); s.isForMany() && (!isShared || g > newest) {
			newest, isShared = g, true
		}
	}
	whole := isWhole(groups[owner])
	owned := owner != "" && (whole || !isShared && len(groups[owner]) > 0)
	why := func(s *Slice) string {
		switch node := nodeOf(s); {
		case owned && !whole && node != owner:
			return fmt.Sprintf("the slices of node %s do not count: the pool is called after node %s, and is that node's", node, owner)
		case owned && node != owner:
			return without(node)
		case !owned && isShared && generationOf(s) > newest:
			return fmt.Sprintf("the slices of node %s do not count: they are of a newer generation than those for more than one node, %d",
				node, newest)
		}
		return ""
	}
	var names map[string]bool // of the newest that are for more than one node
	for node, group := range groups {
		if node == "" {
			continue
		}
		problem := why(group[0])
		if problem == "" && !owned && isShared && generationOf(group[0]) < newest {
			if names == nil {
				names = namesIn(generations[newest].shared)
			}
			problem = takenIn(names, node, group)
		}
		if problem != "" {
			m.estrange(id, node, cmp.Or(problemIn(group), problem))
		} else {
			g := at(group[0])
			g.nodes = append(g.nodes, nodeSlices{node, group})
		}
	}
	for number, g := range generations {
		strangers, judged := g.judge(most.particulars, features)
		if judged {
			m.judged[number] = true
		}
		for _, own := range g.nodes {
			if why := strangers[own.node]; why != "" {
				m.estrange(id, own.node, why)
				continue
			}
			for _, s := range own.slices {
				m.own[s.Object.Name] = s
			}
		}
	}
	known := maps.Clone(m.strangers)
	for _, s := range beside {
		switch node := nodeOf(s); {
		case node == "" || why(s) == "" && known[node] == nil:
			m.own[s.Object.Name] = s
		default:
			m.estrange(id, node, cmp.Or(why(s), without(node)))
		}
	}
	return m
}

func without(node string) string {
	return fmt.Sprintf("the slices of node %s do not count: the pool is whole without them", node)
}

// generation has the slices of one generation: those for more than one node, and those of single ones.
type generation struct {
	shared []*Slice
	nodes  []nodeSlices
}

type nodeSlices struct {
	node   string
	slices []*Slice
}

// judge says of which nodes the slices do not count, and why, and whether the others are whole for each node by itself. Of more particulars
// than most the counters are not looked at: such a generation is invalid.
func (g *generation) judge(most int, features Features) (strangers map[string]string, judged bool) {
	if len(g.nodes) == 0 || len(g.nodes) == 1 && len(g.shared) == 0 {
		return nil, false
	}
	all := slices.Clone(g.shared)
	for _, own := range g.nodes {
		all = append(all, own.slices...)
	}
	if isWhole(all) {
		return nil, false // without those of one node it would not be
	}
	slices.SortFunc(all, func(a, b *Slice) int { return cmp.Compare(a.Object.Name, b.Object.Name) })
	names, wrong := namesIn(g.shared), make(map[string]string)
	if features.PartitionableDevices && particularsOf(all, most) <= most {
		wrong = problemsOfCounters(all, true)
	}
	want, agree := numberOf(g.shared)
	strangers = make(map[string]string)
	for _, own := range g.nodes {
		problem := cmp.Or(problemIn(own.slices), wrong[own.node], takenIn(names, own.node, own.slices))
		if n, ok := numberOf(own.slices); problem == "" &&
			(!ok || n != int64(len(g.shared)+len(own.slices)) || len(g.shared) > 0 && (!agree || n != want)) {
			problem = without(own.node)
		}
		if problem != "" {
			strangers[own.node] = problem
		}
	}
	if len(strangers) == len(g.nodes) && !isWhole(g.shared) {
		return nil, false // else nothing would be left
	}
	return strangers, true
}

// namesIn are the names of the slices' devices.
func namesIn(group []*Slice) map[string]bool {
	names := make(map[string]bool)
	for _, s := range group {
		for i := range s.Object.Spec.Devices {
			names[s.Object.Spec.Devices[i].Name] = true
		}
	}
	return names
}

// takenIn says that the node's slices have a device with one of the names, which those for more than one node have: whoever looks at what
// such a device takes of counters, or whether it is held, would take the two for one. It is empty if they have none.
func takenIn(names map[string]bool, node string, group []*Slice) string {
	taken := ""
	for _, s := range group {
		for i := range s.Object.Spec.Devices {
			if name := s.Object.Spec.Devices[i].Name; names[name] && (taken == "" || name < taken) {
				taken = name
			}
		}
	}
	if taken == "" {
		return ""
	}
	return fmt.Sprintf("the slices of node %s have a device %s, which is one for more than one node", node, taken)
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

// Counting returns those of the slices of one pool that count, for who has slices and no Store, and why devices of each are not given out:
// nil if they are. Of slices for more than one node these are the newest, of those for single nodes the newest of each that are not older
// than those.
func Counting(pool []*resourceapi.ResourceSlice) (problems map[*resourceapi.ResourceSlice]*PoolProblem) {
	if len(pool) == 0 {
		return nil
	}
	c := &caches{features: Features{PartitionableDevices: true, CompatibilityGroups: true}, limits: defaultLimits}
	set := sliceSet{ofNode: make(map[string]map[string]*Slice)}
	for _, object := range pool {
		set.add(newSlice(object, c.features))
	}
	id := poolOf(pool[0])
	m := membersOf(id, set.lookedAt(id, maxMembers), c.limits, c.features)
	shared := int64(math.MinInt64)
	generations := make(map[int64][]*Slice)
	for _, s := range m.own {
		g := generationOf(s)
		if generations[g] = append(generations[g], s); nodeOf(s) == "" {
			shared = max(shared, g)
		}
	}
	problems = make(map[*resourceapi.ResourceSlice]*PoolProblem, len(m.own))
	for g, all := range generations {
		if g < shared {
			continue
		}
		left := c.limits.particulars
		problem := newGeneration(id, g, all, c, m.judged[g], &left).Problem
		for _, s := range all {
			problems[s.Object] = problem
		}
	}
	return problems
}

// byGeneration has the groups of each generation apart.
func byGeneration(groups map[string][]*Slice) map[int64]map[string][]*Slice {
	apart := make(map[int64]map[string][]*Slice)
	for node, group := range groups {
		for _, s := range group {
			g := generationOf(s)
			if apart[g] == nil {
				apart[g] = make(map[string][]*Slice)
			}
			apart[g][node] = append(apart[g][node], s)
		}
	}
	return apart
}

// crowdOf are the nodes for whose slices there is no room beside those for more than one node, those of the node that the pool is called
// after, and those of nodes that bring less. Somebody's slices stay.
func crowdOf(owner string, groups map[string][]*Slice, most int, sizeOf func(group []*Slice) int) (crowd []string) {
	sizes, room := make(map[string]int, len(groups)), most
	for node, group := range groups {
		if sizes[node] = sizeOf(group); node == "" || node == owner {
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
	n, agree := numberOf(group)
	return agree && n == int64(len(group))
}

// numberOf is how many the pool has, according to these slices, and whether there are any and they say the same.
func numberOf(group []*Slice) (n int64, agree bool) {
	if len(group) == 0 {
		return 0, false
	}
	n = group[0].Object.Spec.Pool.ResourceSliceCount
	return n, !slices.ContainsFunc(group, func(s *Slice) bool { return s.Object.Spec.Pool.ResourceSliceCount != n })
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
