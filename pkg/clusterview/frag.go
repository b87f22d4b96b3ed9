// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"maps"
	"slices"
)

// Size is how often a number of free GPUs of one model can be had on one node.
type Size struct {
	Driver string `json:"driver"`
	Model  string `json:"model"`
	GPUs   int    `json:"gpus"`
	// Fit is how many pods of that size have a place, Linked how many of them with all GPUs in one NVLink domain, and Ideal how many would
	// have one if all free GPUs were together on nodes that are large enough.
	Fit    int `json:"fit"`
	Linked int `json:"linked"`
	Ideal  int `json:"ideal"`
	// Nodes are those that have a place.
	Nodes []string `json:"nodes,omitempty"`
}

// Sizes are the powers of two up to the largest node, and the largest node's own size, by model. Devices of no one node are left out.
func Sizes(gpus []*GPU) (sizes []*Size) {
	type model struct{ driver, model string }
	free, total := map[model]map[string][]*GPU{}, map[model]map[string]int{}
	for _, g := range gpus {
		if g.State == Gone || g.Node == Network {
			continue
		}
		m := model{g.Driver, g.Model}
		if free[m] == nil {
			free[m], total[m] = map[string][]*GPU{}, map[string]int{}
		}
		total[m][g.Node]++
		if g.isWholeFree() {
			free[m][g.Node] = append(free[m][g.Node], g)
		}
	}
	models := slices.SortedFunc(maps.Keys(total), func(a, b model) int {
		return slices.Compare([]string{a.driver, a.model},
			[]string{b.driver, b.model})
	})
	for _, m := range models {
		largest := slices.Max(slices.Collect(maps.Values(total[m])))
		for n := 1; ; n *= 2 {
			n = min(n, largest)
			sizes = append(sizes, sizeOf(m.driver, m.model, n, free[m]))
			if n == largest {
				break
			}
		}
	}
	return sizes
}

func sizeOf(driver, model string, n int, free map[string][]*GPU) *Size {
	s, all := &Size{Driver: driver, Model: model, GPUs: n}, 0
	for _, node := range slices.Sorted(maps.Keys(free)) {
		gpus := free[node]
		all += len(gpus)
		if len(gpus) >= n {
			s.Fit += len(gpus) / n
			s.Nodes = append(s.Nodes, node)
		}
		domains := map[string]int{}
		for _, g := range gpus {
			domains[g.Place.NVLinkDomain]++
		}
		for domain, count := range domains {
			if domain != "" || n == 1 {
				s.Linked += count / n
			}
		}
	}
	s.Ideal = all / n
	return s
}
