// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"cmp"
	"slices"
	"strconv"
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

// FreeGroups are the largest sets of free GPUs of a node for each link, within which none is farther: all in one NVLink domain, at one
// root complex, on one NUMA node, and all of the node. A set that is no larger than one with a closer link is left out.
func FreeGroups(gpus []*GPU) (groups []Group) {
	var free []*GPU
	for _, g := range gpus {
		if g.isWholeFree() {
			free = append(free, g)
		}
	}
	if len(free) == 0 {
		return nil
	}
	largest := 1
	for _, link := range closest {
		if n := largestWithin(free, link); n > largest {
			largest = n
			groups = append(groups, Group{Node: free[0].Node, Size: n, Link: link})
		}
	}
	if len(groups) == 0 {
		groups = []Group{{Node: free[0].Node, Size: 1}}
	}
	return groups
}

// largestWithin is the size of the largest set whose members have the same place, which makes them that close to one another.
func largestWithin(gpus []*GPU, link Link) (largest int) {
	with := map[string]int{}
	for _, g := range gpus {
		for _, at := range g.Place.within(link) {
			with[at]++
			largest = max(largest, with[at])
		}
	}
	return largest
}

// within names the places that two GPUs have in common if their link is this one, or a closer one.
func (p *Place) within(link Link) (names []string) {
	switch link {
	case NVLink:
		if p.NVLinkDomain != "" {
			names = append(names, p.NVLinkDomain)
		}
	case SameRoot:
		if p.PCIeRoot != "" {
			names = append(names, p.PCIeRoot)
		}
	case SameNUMA:
		if p.NUMANode != nil {
			names = append(names, strconv.Itoa(*p.NUMANode))
		}
	case System: // each of two has told where it is
		if p.NUMANode != nil {
			names = append(names, "NUMA")
		}
		if p.PCIeRoot != "" {
			names = append(names, "root")
		}
	case Unknown, Self:
		names = append(names, "node")
	}
	return names
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
