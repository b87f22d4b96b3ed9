// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/snapshot"
)

// State is what a GPU is used for.
type State string

const (
	// Free: nobody holds anything of it, and claims can have it.
	Free State = "free"
	// Held: one claim, or several that share one allocation, have all of it.
	Held State = "held"
	// Shared: claims hold shares of it.
	Shared State = "shared"
	// Partitioned: claims hold partitions of it.
	Partitioned State = "partitioned"
	// Tainted: nobody holds it, and a taint keeps claims off it.
	Tainted State = "tainted"
	// Incomplete: nobody holds it, and claims cannot have it, because not all slices of its pool are there, or they
	// contradict each other.
	Incomplete State = "incomplete"
	// Gone: a claim holds it, and it is not published any more.
	Gone State = "gone"
)

// GPU is a device that is one piece of hardware, with its partitions. A device of a driver that has no partitions is one, too.
type GPU struct {
	Node   string `json:"node"`
	Driver string `json:"driver"`
	Pool   string `json:"pool"`
	// Device is the name of the whole device, or what its partitions' names have in common.
	Device string `json:"device"`
	Model  string `json:"model,omitempty"`
	// MemoryBytes is the whole GPU's; of one that offers partitions alone it is the largest one's.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	State       State `json:"state"`
	// Holders are the claims that have it, partitions of it, or shares.
	Holders []Holder `json:"holders,omitempty"`
	Taints  []Taint  `json:"taints,omitempty"`
	// Partitions counts the partitions that are offered, by profile. They may exclude each other.
	Partitions map[string]int `json:"partitions,omitempty"`
	// SharedMemoryBytes is what shares take of its memory; nil if it cannot be shared.
	SharedMemoryBytes *int64 `json:"sharedMemoryBytes,omitempty"`
	// Place is where it is on its machine.
	Place Place `json:"place"`

	offer offer
	// closed tells that its node takes no pods.
	closed bool
}

// offer counts the devices of a GPU that can be allocated by themselves: the whole of it if that is published, else partitions; and
// those of them that a taint keeps claims off, or others leave too little of their counters for.
type offer struct {
	whole                     bool
	offered, refused, blocked int
	incomplete                bool
	// left is the most that is left for one, and beside are the claims that have the rest.
	left   Left
	beside []Holder
}

// Place is where a GPU is on its machine; what is not published is empty.
type Place struct {
	UUID         string `json:"uuid,omitempty"`
	PCIBusID     string `json:"pciBusID,omitempty"`
	PCIeRoot     string `json:"pcieRoot,omitempty"`
	NUMANode     *int   `json:"numaNode,omitempty"`
	NVLinkDomain string `json:"nvlinkDomain,omitempty"`
}

// Layout is "3g.40gb,1g.10gb": the partitions that claims hold.
func (g *GPU) Layout() string {
	var profiles []string
	for i := range g.Holders {
		if p := g.Holders[i].Profile; p != "" {
			profiles = append(profiles, p)
		}
	}
	return strings.Join(profiles, ",")
}

// Refuses tells whether taints keep new claims off the GPU: off the whole of it, or, where that is not published, off all its partitions.
func (g *GPU) Refuses() bool { return g.offer.offered > 0 && g.offer.refused == g.offer.offered }

// isWholeFree tells whether a pod can have all of it: of a GPU that offers partitions alone, or on a node that takes no pods, none can.
func (g *GPU) isWholeFree() bool {
	return g.State == Free && !g.closed && (g.offer.whole || len(g.Partitions) == 0)
}

// count takes a published device into the numbers.
func (g *GPU) count(d *Device, whole bool) {
	o := &g.offer
	switch {
	case d.Object == nil || !whole && o.whole:
		return
	case whole && !o.whole: // what partitions say does not matter any more
		o.whole, o.offered, o.refused, o.blocked, o.left, o.beside = true, 0, 0, 0, Enough, nil
	}
	o.offered++
	if slices.ContainsFunc(d.Taints, func(t Taint) bool { return t.Effect != "None" }) {
		o.refused++
		o.blocked++
	} else if d.Left != Enough {
		o.blocked++
		if o.left == Enough || d.Left < o.left {
			o.left, o.beside = d.Left, d.Beside
		}
	}
}

// block gives a GPU that nobody holds the state of those whose counters it shares: a driver may publish no attribute that tells which
// devices are partitions of which.
func (g *GPU) block() {
	g.State, g.Holders = Partitioned, append(g.Holders, g.offer.beside...)
	if g.offer.left == Nothing {
		g.State = Held
	}
}

// GPUs returns all GPUs, by node, driver and place on the PCI bus. Accelerators of any driver are taken for GPUs, and network interfaces,
// CPUs and IMEX channels are not.
func GPUs(s *snapshot.Snapshot) []*GPU {
	var gpus []*GPU
	type key struct{ node, driver, pool, part string }
	by := map[key]*GPU{}
	devices := Devices(s)
	others := notGPUs(devices)
	for _, d := range devices {
		if others[d.Driver] || isOther(d) {
			continue
		}
		uuid, bus := cmp.Or(d.Text("parentUUID"), d.Text("uuid")), d.busOnNode()
		k := key{d.Node, d.Driver, d.Pool, cmp.Or(uuid, bus, d.ID.Device)}
		g := by[k]
		if g == nil && bus != "" { // for virtual machines it has no UUID
			if g = by[key{d.Node, d.Driver, d.Pool, bus}]; g != nil && uuid != "" && g.Place.UUID != "" {
				g = nil
			}
		}
		if g == nil {
			g = &GPU{Node: d.Node, Driver: d.Driver, Pool: d.Pool, Device: wholeName(d), State: Free}
			gpus = append(gpus, g)
		}
		by[k] = g
		if bus != "" {
			by[key{d.Node, d.Driver, d.Pool, bus}] = g
		}
		g.add(d)
	}
	closed := closedTo(s)
	for _, g := range gpus {
		g.closed = closed(g.Node)
		g.joinTaints()
		switch {
		case g.State == Free && g.offer.incomplete:
			g.State = Incomplete
		case g.State == Free && g.Refuses():
			g.State = Tainted
		case g.State == Free && g.offer.left != Enough && g.offer.blocked == g.offer.offered:
			g.block()
		}
	}
	slices.SortStableFunc(gpus, Compare)
	return gpus
}

// joinTaints tells a taint that the whole GPU has, or each of its partitions, once.
func (g *GPU) joinTaints() {
	count := map[Taint]int{}
	for _, t := range g.Taints {
		t.Partition = ""
		count[t]++
	}
	partitions := 0
	for _, n := range g.Partitions {
		partitions += n
	}
	var joined []Taint
	for _, t := range g.Taints {
		all := t
		all.Partition = ""
		if slices.Contains(g.Taints, all) || count[all] == partitions {
			t = all
		}
		if !slices.Contains(joined, t) {
			joined = append(joined, t)
		}
	}
	g.Taints = joined
}

// Compare orders GPUs by node, driver, place on the PCI bus, and name.
func Compare(a, b *GPU) int {
	return cmp.Or(strings.Compare(a.Node, b.Node), strings.Compare(a.Driver, b.Driver),
		strings.Compare(a.Place.PCIBusID, b.Place.PCIBusID), strings.Compare(a.Device, b.Device))
}

// wholeName is the device's name without what a partition adds to it.
func wholeName(d *Device) string {
	if d.isPartition() {
		if name, _, ok := strings.Cut(d.ID.Device, "-mig-"); ok {
			return name
		}
	}
	return d.ID.Device
}

// busOnNode tells devices of one machine apart: others have the same addresses on their buses.
func (d *Device) busOnNode() string {
	if d.Node == Network {
		return ""
	}
	return d.Text("resource.kubernetes.io/pciBusID")
}

func (d *Device) isPartition() bool { return d.Text("parentUUID") != "" }

// add takes in a device of the GPU: the whole of it, or a partition.
func (g *GPU) add(d *Device) {
	profile := ""
	if d.isPartition() {
		profile = cmp.Or(d.Text("profile"), d.ID.Device)
		if g.Partitions == nil {
			g.Partitions = map[string]int{}
		}
		g.Partitions[profile]++
	} else if d.Text("type") != "vfio" {
		g.Device = d.ID.Device
		g.Place.UUID, g.Place.NVLinkDomain = cmp.Or(g.Place.UUID, d.Text("uuid")), cmp.Or(g.Place.NVLinkDomain, d.Text("nvlinkDomain"))
	}
	g.MemoryBytes = max(g.MemoryBytes, d.memory())
	g.Model = cmp.Or(g.Model, d.Text("productName"), d.Text("model"), d.Text("type"))
	g.Place.UUID = cmp.Or(g.Place.UUID, d.Text("parentUUID"))
	g.Place.PCIBusID = cmp.Or(g.Place.PCIBusID, d.Text("resource.kubernetes.io/pciBusID"))
	g.Place.PCIeRoot = cmp.Or(g.Place.PCIeRoot, d.Text("resource.kubernetes.io/pcieRoot"))
	if numa, ok := d.attribute("resource.kubernetes.io/numaNode"); ok && numa.IntValue != nil {
		g.Place.NUMANode = ptr.To(int(*numa.IntValue))
	}
	g.count(d, profile == "")
	g.offer.incomplete = g.offer.incomplete || d.Incomplete
	for _, taint := range d.Taints {
		if profile != "" {
			taint.Partition = d.ID.Device
		}
		if !slices.Contains(g.Taints, taint) {
			g.Taints = append(g.Taints, taint)
		}
	}
	shared := d.Object != nil && ptr.Deref(d.Object.AllowMultipleAllocations, false)
	if shared && g.SharedMemoryBytes == nil {
		g.SharedMemoryBytes = new(int64)
	}
	for _, h := range d.Holders {
		if profile != "" {
			h.Device, h.Profile = d.ID.Device, profile
		}
		g.Holders = append(g.Holders, h)
		switch {
		case d.Object == nil: // also if somebody merely looks at it: nobody can have it
			g.State = Gone
		case h.Admin:
		case profile != "":
			g.State = Partitioned
		case shared:
			g.State = Shared
			if q, err := resource.ParseQuantity(cmp.Or(h.Memory(d.Driver), "0")); err == nil {
				*g.SharedMemoryBytes += min(bytesOf(q), math.MaxInt64-*g.SharedMemoryBytes)
			}
		default:
			g.State = Held
		}
	}
}

// Totals sums up GPUs.
type Totals struct {
	Nodes  int           `json:"nodes"`
	GPUs   int           `json:"gpus"`
	States map[State]int `json:"states"`
	// LargestFree is the largest set of free GPUs of one node that are all linked, nil if none is free.
	LargestFree *Group `json:"largestFreeGroup,omitempty"`
}

// Total sums up GPUs.
func Total(gpus []*GPU) Totals {
	t := Totals{GPUs: len(gpus), States: map[State]int{}}
	nodes := map[string]bool{}
	for _, g := range gpus {
		if g.Node != Network {
			nodes[g.Node] = true
		}
		t.States[g.State]++
	}
	t.Nodes = len(nodes)
	t.LargestFree = largestFree(gpus)
	return t
}
