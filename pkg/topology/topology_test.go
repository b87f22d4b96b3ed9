// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package topology_test

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/topology"
)

// machine is what brute force is told of: nothing that the package computes.
type machine struct {
	numa, root []string
	links      [][]int
}

// pair is the closeness as the package's documents have it.
func (m *machine) pair(i, j int) int {
	sum := 100 * m.links[i][j]
	switch {
	case m.root[i] != "" && m.root[i] == m.root[j]:
		return sum + 30
	case m.numa[i] != "" && m.numa[i] == m.numa[j]:
		return sum + 20
	}
	return sum + 10
}

func (m *machine) inside(set uint) (sum int) {
	for i := range m.links {
		for j := range i {
			if set>>i&1 == 1 && set>>j&1 == 1 {
				sum += m.pair(i, j)
			}
		}
	}
	return sum
}

// best goes through every set of the GPUs of the machine.
func (m *machine) best(available, must uint, size int) (best topology.Score) {
	best.Inside = -1
	for set := range uint(1) << len(m.links) {
		if set&^available != 0 || must&^set != 0 || bits.OnesCount(set) != size {
			continue
		}
		if score := (topology.Score{Inside: m.inside(set), Left: m.inside(available &^ set)}); best.Inside < 0 || best.Less(score) {
			best = score
		}
	}
	return best
}

func (m *machine) devices() []topology.Device {
	devices := make([]topology.Device, len(m.links))
	for i := range devices {
		devices[i] = topology.Device{PCIeRoot: m.root[i], NVLinks: map[int]int{}}
		if m.numa[i] != "" {
			var node int
			_, _ = fmt.Sscan(m.numa[i], &node)
			devices[i].NUMANode = &node
		}
		for j, links := range m.links[i] {
			devices[i].NVLinks[j] = links
		}
	}
	return devices
}

// of is a simulated machine as discovery finds it.
func of(t testing.TB, profile string) (*machine, []topology.Device) {
	t.Helper()
	p, err := nvmlsim.LoadProfile(profile)
	if err != nil {
		t.Fatal(err)
	}
	sim := nvmlsim.NewFromProfile(p, "node-a")
	_, ctx := ktesting.NewTestContext(t)
	node, err := discovery.Discover(ctx, nvml.Adapt(sim, "sim:"+profile), sim.Sysfs())
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{}
	var names []string
	for _, gpu := range node.GPUs {
		names = append(names, gpu.Name)
		numa := ""
		if gpu.NUMANode != nil {
			numa = fmt.Sprint(*gpu.NUMANode)
		}
		m.numa, m.root = append(m.numa, numa), append(m.root, gpu.PCIeRoot)
	}
	for _, gpu := range node.GPUs {
		links := make([]int, len(names))
		if gpu.NVLink != nil {
			for _, peer := range gpu.NVLink.Peers {
				links[slices.Index(names, peer.Name)] = peer.Links
			}
		}
		m.links = append(m.links, links)
	}
	return m, node.Topology(names)
}

// random machines have links in pairs, rings and at random, which no profile has.
func random(r *rand.Rand, n int) *machine {
	m := &machine{numa: make([]string, n), root: make([]string, n), links: make([][]int, n)}
	for i := range n {
		m.links[i] = make([]int, n)
		if r.IntN(4) > 0 {
			m.numa[i] = fmt.Sprint(r.IntN(2))
		}
		if r.IntN(4) > 0 {
			m.root[i] = fmt.Sprintf("pci0000:%d", r.IntN(4))
		}
		for j := range i {
			if r.IntN(3) == 0 {
				m.links[i][j] = r.IntN(5)
				m.links[j][i] = m.links[i][j]
			}
		}
	}
	return m
}

func indices(set uint) (list []int) {
	for ; set != 0; set &= set - 1 {
		list = append(list, bits.TrailingZeros(set))
	}
	return list
}

// subset takes n of the set.
func subset(r *rand.Rand, set uint, n int) (sub uint) {
	members := indices(set)
	for _, at := range r.Perm(len(members))[:n] {
		sub |= 1 << members[at]
	}
	return sub
}

// check compares one answer with brute force.
func check(t *testing.T, m *machine, table *topology.Table, available, must uint, size int) {
	t.Helper()
	got, score, err := table.Best(indices(available), indices(must), size)
	if err != nil {
		t.Fatalf("Best(%v, %v, %d): %v", indices(available), indices(must), size, err)
	}
	var set uint
	for _, i := range got {
		set |= 1 << i
	}
	if set&^available != 0 || must&^set != 0 || len(got) != size || bits.OnesCount(set) != size || !slices.IsSorted(got) {
		t.Fatalf("Best(%v, %v, %d) = %v, which is no answer", indices(available), indices(must), size, got)
	}
	if is := (topology.Score{Inside: m.inside(set), Left: m.inside(available &^ set)}); is != score {
		t.Fatalf("Best(%v, %v, %d) = %v with %+v, and it has %+v", indices(available), indices(must), size, got, score, is)
	}
	if want := m.best(available, must, size); score != want {
		t.Fatalf("Best(%v, %v, %d) = %v with %+v, brute force finds %+v", indices(available), indices(must), size, got, score, want)
	}
}

func TestBestEqualsBruteForceOnEachProfile(t *testing.T) {
	for _, profile := range nvmlsim.Profiles() {
		t.Run(profile, func(t *testing.T) {
			m, devices := of(t, profile)
			table := topology.NewTable(topology.NewMatrix(devices))
			r := rand.New(rand.NewPCG(1, 2))
			all := uint(1)<<len(devices) - 1
			for size := range len(devices) + 1 {
				for forced := range size + 1 {
					for range 4 {
						check(t, m, table, all, subset(r, all, forced), size)
						available := subset(r, all, size+r.IntN(len(devices)-size+1))
						check(t, m, table, available, subset(r, available, forced), size)
					}
				}
			}
		})
	}
}

func TestBestEqualsBruteForceOnRandomMachines(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 60 {
		m := random(r, 1+r.IntN(10))
		table := topology.NewTable(topology.NewMatrix(m.devices()))
		all := uint(1)<<len(m.links) - 1
		for size := range len(m.links) + 1 {
			available := subset(r, all, size+r.IntN(len(m.links)-size+1))
			check(t, m, table, available, subset(r, available, r.IntN(size+1)), size)
		}
	}
	m := random(r, topology.MaxExact)
	table := topology.NewTable(topology.NewMatrix(m.devices()))
	for _, size := range []int{1, 4, 8, 15, 16} {
		check(t, m, table, 1<<topology.MaxExact-1, 1<<3, size)
	}
}

// What people expect of the order, in sets that they can see.
func TestBest(t *testing.T) {
	zero, one := 0, 1
	linked := func(peers map[int]int) topology.Device { return topology.Device{NVLinks: peers} }
	tests := map[string]struct {
		devices         []topology.Device
		available, must []int
		size            int
		want            []int
	}{
		"two that are linked": {
			devices:   []topology.Device{{}, linked(map[int]int{3: 4}), {}, {}},
			available: []int{0, 1, 2, 3}, size: 2, want: []int{1, 3},
		},
		"more links win over a common root complex": {
			devices:   []topology.Device{{PCIeRoot: "a"}, {PCIeRoot: "a"}, linked(map[int]int{3: 1}), {}},
			available: []int{0, 1, 2, 3}, size: 2, want: []int{2, 3},
		},
		"a root complex wins over a NUMA node": {
			devices:   []topology.Device{{NUMANode: &zero}, {NUMANode: &zero}, {PCIeRoot: "a"}, {PCIeRoot: "a"}},
			available: []int{0, 1, 2, 3}, size: 2, want: []int{2, 3},
		},
		"a NUMA node wins over nothing": {
			devices:   []topology.Device{{NUMANode: &zero}, {NUMANode: &one}, {}, {NUMANode: &one}},
			available: []int{0, 1, 2, 3}, size: 2, want: []int{1, 3},
		},
		"one alone is not taken from a pair": {
			devices:   []topology.Device{linked(map[int]int{1: 4}), {}, {}},
			available: []int{0, 1, 2}, size: 1, want: []int{2},
		},
		"one that was in a pair whose other half is taken is as good as any": {
			devices:   []topology.Device{linked(map[int]int{1: 4}), {}, {}},
			available: []int{0, 2}, size: 1, want: []int{0},
		},
		"what must be in it decides on the others": {
			devices:   []topology.Device{linked(map[int]int{1: 12}), {}, linked(map[int]int{3: 1}), {}},
			available: []int{0, 1, 2, 3}, must: []int{3}, size: 2, want: []int{2, 3},
		},
		"none": {devices: make([]topology.Device, 2), available: []int{0, 1}, size: 0, want: []int{}},
		"indices that are given twice count once": {
			devices: make([]topology.Device, 3), available: []int{2, 1, 2, 1}, must: []int{2, 2}, size: 2, want: []int{1, 2},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, _, err := topology.NewTable(topology.NewMatrix(test.devices)).Best(test.available, test.must, test.size)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestBestRefusesWhatCannotBe(t *testing.T) {
	tests := map[string]struct {
		available, must []int
		size            int
		want            string
	}{
		"an index beyond the machine":       {available: []int{0, 4}, size: 1, want: "available GPU 4: this machine has 4"},
		"an index below 0":                  {available: []int{-1}, size: 1, want: "available GPU -1: this machine has 4"},
		"one of must is not available":      {available: []int{0, 1}, must: []int{2}, size: 1, want: "GPU 2 must be in the set, and is not available"},
		"more than there are":               {available: []int{0, 1}, size: 3, want: "size 3: want 0, which must be in the set, to 2, which are available"},
		"less than what must be in it":      {available: []int{0, 1}, must: []int{0, 1}, size: 1, want: "size 1: want 2, which must be in the set, to 2, which are available"},
		"a negative number, as an int32 is": {available: []int{0, 1}, size: -1, want: "size -1: want 0, which must be in the set, to 2, which are available"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, _, err := topology.NewTable(topology.NewMatrix(make([]topology.Device, 4))).Best(test.available, test.must, test.size)
			if err == nil || err.Error() != test.want {
				t.Errorf("Best = %v, %v; want the error %q", got, err, test.want)
			}
		})
	}
}

// Beyond MaxExact it is not exact, but never worse than what one exchange would make of it, and the same rules hold.
func TestBestOfManyIsNotImprovedByOneExchange(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	m := random(r, 20)
	table := topology.NewTable(topology.NewMatrix(m.devices()))
	all := uint(1)<<20 - 1
	for size := range 21 {
		must := subset(r, all, r.IntN(size+1))
		got, score, err := table.Best(indices(all), indices(must), size)
		if err != nil {
			t.Fatal(err)
		}
		var set uint
		for _, i := range got {
			set |= 1 << i
		}
		if must&^set != 0 || bits.OnesCount(set) != size || !slices.IsSorted(got) {
			t.Fatalf("size %d, must %v: %v is no answer", size, indices(must), got)
		}
		for _, out := range indices(set &^ must) {
			for _, in := range indices(all &^ set) {
				other := set&^(1<<out) | 1<<in
				if is := (topology.Score{Inside: m.inside(other), Left: m.inside(all &^ other)}); score.Less(is) {
					t.Fatalf("size %d: %v has %+v; with %d for %d it has %+v", size, got, score, in, out, is)
				}
			}
		}
	}
}

func BenchmarkNewTable(b *testing.B) {
	matrix := topology.NewMatrix(random(rand.New(rand.NewPCG(7, 8)), topology.MaxExact).devices())
	for b.Loop() {
		topology.NewTable(matrix)
	}
}

func BenchmarkBest(b *testing.B) {
	for _, n := range []int{8, topology.MaxExact, 32} {
		table := topology.NewTable(topology.NewMatrix(random(rand.New(rand.NewPCG(7, 8)), n).devices()))
		all := indices(uint(1)<<n - 1)
		b.Run(fmt.Sprintf("%d of %d", n/2, n), func(b *testing.B) {
			for b.Loop() {
				if _, _, err := table.Best(all, nil, n/2); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
