// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"cmp"
	"slices"
)

// Link is how two GPUs of a node reach each other, as far as their attributes tell: closest first, in the words of nvidia-smi topo -m.
// A driver publishes neither how many NVLinks there are nor the bridges between, so that PIX, PXB and PHB are told as PHB.
type Link string

const (
	// Self is the GPU itself.
	Self Link = "X"
	// NVLink: they are in one NVLink domain.
	NVLink Link = "NV"
	// SameRoot: they have a PCIe root complex in common.
	SameRoot Link = "PHB"
	// SameNUMA: they are on one NUMA node.
	SameNUMA Link = "NODE"
	// System: the way is over the interconnect of NUMA nodes.
	System Link = "SYS"
	// Unknown: nothing is published of where they are.
	Unknown Link = "?"
)

var closest = []Link{NVLink, SameRoot, SameNUMA, System, Unknown}

// LinkOf is how two GPUs reach each other.
func LinkOf(a, b *GPU) Link {
	p, q := &a.Place, &b.Place
	switch {
	case a == b:
		return Self
	case p.NVLinkDomain != "" && p.NVLinkDomain == q.NVLinkDomain:
		return NVLink
	case p.PCIeRoot != "" && p.PCIeRoot == q.PCIeRoot:
		return SameRoot
	case p.NUMANode != nil && q.NUMANode != nil && *p.NUMANode == *q.NUMANode:
		return SameNUMA
	case p.NUMANode != nil && q.NUMANode != nil, p.PCIeRoot != "" && q.PCIeRoot != "":
		return System
	}
	return Unknown
}

// Group is a set of free GPUs of one node.
type Group struct {
	Node string `json:"node"`
	Size int    `json:"size"`
	// Link is the worst link within it; of a single GPU it is empty.
	Link Link `json:"link,omitempty"`
}

// FreeGroups are the largest sets of free GPUs of a node for each link: all in one NVLink domain, at one root complex,
// on one NUMA node, and
// all of the node. A set that is no larger than one with a closer link is left out.
func FreeGroups(gpus []*GPU) (groups []Group) {
	var free []*GPU
	for _, g := range gpus {
		if g.State == Free {
			free = append(free, g)
		}
	}
	largest := 0
	for _, link := range closest {
		for _, one := range free {
			n, worst := 1, Link("")
			for _, other := range free {
				if l := LinkOf(one, other); l != Self && slices.Index(closest, l) <= slices.Index(closest, link) {
					n++
					worst = link
				}
			}
			if n > largest {
				largest = n
				if worst == "" {
					continue // a single GPU is told of below
				}
				groups = append(slices.DeleteFunc(groups, func(g Group) bool { return g.Link == link }), Group{
					Node: one.Node,
					Size: n, Link: link,
				})
			}
		}
	}
	if len(groups) == 0 && len(free) > 0 {
		groups = []Group{{Node: free[0].Node, Size: 1}}
	}
	return groups
}

// largestFree is the largest group of all nodes, of equal ones the one with the closest link, then the first node.
func largestFree(gpus []*GPU) (best *Group) {
	for _, of := range ByNode(gpus) {
		if of[0].Node == Network { // nothing tells that one node reaches all of them
			continue
		}
		for _, g := range FreeGroups(of) {
			if best == nil || cmp.Or(cmp.Compare(g.Size, best.Size), cmp.Compare(slices.Index(closest, best.Link),
				slices.Index(closest, g.Link))) > 0 {
				best = &g
			}
		}
	}
	return best
}

// ByNode divides GPUs, which are ordered by node, into those of each.
func ByNode(gpus []*GPU) (nodes [][]*GPU) {
	for len(gpus) > 0 {
		n := slices.IndexFunc(gpus, func(g *GPU) bool { return g.Node != gpus[0].Node })
		if n < 0 {
			n = len(gpus)
		}
		nodes, gpus = append(nodes, gpus[:n:n]), gpus[n:]
	}
	return nodes
}

// Farther returns the one of two links that is farther.
func Farther(a, b Link) Link {
	if slices.Index(closest, a) > slices.Index(closest, b) {
		return a
	}
	return b
}
