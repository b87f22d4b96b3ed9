// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// CapacityCompute is how much of a shared GPU's compute is reserved, in percent; GPUs that are not shared have none.
const CapacityCompute resourceapi.QualifiedName = "compute"

// AllCompute is the compute of a whole GPU.
const AllCompute = 100

// Shares says which GPUs are offered in shares, so that several claims can have one at once (consumable capacity,
// KEP-5075), and how they are divided. The zero value shares none.
type Shares struct {
	All bool
	// GPUs that are shared, if not all: each is a PCI address, a device's name or an index of NVML's.
	GPUs []string
	// MemoryStep is what shares of the memory are multiples of, in bytes.
	MemoryStep int64
	// ComputeStep is the same for the compute, in percent; with 0 no compute is offered.
	ComputeStep int
	// Replicas is as how many devices a GPU that is shared is offered by the device plugin API; 0 offers none there.
	Replicas int
}

// The bounds of Shares.Replicas: one is a GPU that is not shared, and compute is divided in percent.
const (
	MinReplicas = 2
	MaxReplicas = AllCompute
)

// The words for all GPUs and for none.
const (
	shareAll  = "all"
	shareNone = "none"
)

// gpuNames are the ways to name a GPU that stay out of each other's way.
var gpuNames = regexp.MustCompile(`^([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]|gpu(-[0-9a-f]+){4}|0|[1-9][0-9]{0,2})$`)

// ParseShares reads which GPUs are shared: "all", "none", or a list with commas between. The error names the value.
func ParseShares(gpus string, memoryStep string, computeStep int) (Shares, error) {
	s := Shares{ComputeStep: computeStep}
	switch gpus {
	case shareAll:
		s.All = true
	case shareNone, "":
	default:
		for name := range strings.SplitSeq(gpus, ",") {
			if !gpuNames.MatchString(name) {
				return Shares{}, fmt.Errorf("%q: want %s, %s, or PCI addresses such as 0000:1b:00.0, names such as gpu-0000-1b-00-0 or indices of "+
					"GPUs, with commas between", name, shareAll, shareNone)
			}
			s.GPUs = append(s.GPUs, strings.ToLower(name))
		}
	}
	step, err := resource.ParseQuantity(memoryStep)
	if err != nil {
		return Shares{}, fmt.Errorf("memory step %q: %w", memoryStep, err)
	}
	var exact bool
	if s.MemoryStep, exact = step.AsInt64(); !exact || s.MemoryStep < 1<<20 || s.MemoryStep%(1<<20) != 0 {
		return Shares{}, fmt.Errorf("memory step %q: want whole MiB, at least one", memoryStep)
	}
	if computeStep < 0 || computeStep > 0 && AllCompute%computeStep != 0 {
		return Shares{}, fmt.Errorf("compute step %d: want percent that %d is a multiple of, or 0", computeStep, AllCompute)
	}
	return s, nil
}

// selects tells whether the GPU is to be shared.
func (s *Shares) selects(g *GPU) bool {
	return s.All || slices.ContainsFunc(s.GPUs, func(name string) bool {
		return name == g.Name || name == g.PCIBusID
	})
}

// byName has names of devices in the place of indices.
func (s Shares) byName(n *Node) Shares {
	s.GPUs = slices.Clone(s.GPUs)
	for i, name := range s.GPUs {
		if at := slices.IndexFunc(n.GPUs, func(g GPU) bool { return name == strconv.Itoa(n.IndexOf(&g)) }); at >= 0 {
			s.GPUs[i] = n.GPUs[at].Name
		}
	}
	return s
}

// IndexOf is the GPU's index as long as claims have passed none through: NVML orders GPUs by address, and leaves these out.
func (n *Node) IndexOf(gpu *GPU) int {
	index := gpu.Index
	switch {
	case gpu.LeftOut() && gpu.Unseen():
		return index
	case gpu.LeftOut(): // what it had is of another time
		index = n.numberedBefore(gpu.PCIBusID)
	}
	for i := range n.GPUs {
		if other := &n.GPUs[i]; other.PCIBusID < gpu.PCIBusID && other.LeftOut() && !other.Unseen() {
			index++
		}
	}
	return index
}

// numberedBefore is how many GPUs NVML numbers before the address, also such as do not answer and were never known.
func (n *Node) numberedBefore(address string) (count int) {
	for i := range n.GPUs {
		if g := &n.GPUs[i]; g.PCIBusID < address && !g.LeftOut() {
			count = max(count, g.Index+1)
		}
	}
	for i := range n.Failures {
		if f := &n.Failures[i]; f.PCIBusID != "" && f.PCIBusID < address {
			count = max(count, f.Index+1)
		}
	}
	return count
}

// LeftOut tells that NVML does not number the GPU.
func (g *GPU) LeftOut() bool { return g.Bound() || g.Index < 0 }

// shares returns how the GPU is divided, nil if it is not. Under MIG it is partitioned instead.
func (g *GPU) shares(policy *Policy) *Shares {
	s := &policy.Shares
	switch {
	case !s.selects(g):
		return nil
	case g.MIGEnabled:
		g.warnOnce("not shared: MIG mode is enabled")
		return nil
	case int64(g.MemoryBytes) < 2*s.MemoryStep:
		g.warnOnce("not shared: the memory is less than two steps")
		return nil
	}
	return s
}

func (g *GPU) warnOnce(warning string) {
	if !slices.Contains(g.Warnings, warning) {
		g.Warnings = append(g.Warnings, warning)
	}
}

// Unknown are the names of GPUs to be shared that the node does not have now.
func (s *Shares) Unknown(n *Node) []string {
	return slices.DeleteFunc(slices.Clone(s.GPUs), func(name string) bool {
		one := Shares{GPUs: []string{name}}.byName(n)
		return slices.ContainsFunc(n.GPUs, func(g GPU) bool { return one.selects(&g) })
	})
}

// divide makes a device that several claims can have of one that is a whole GPU's. A claim that asks for no memory takes all
// of it, as on a GPU that is not shared; one that asks for no compute reserves none, and is not limited.
func (s *Shares) divide(device *resourceapi.Device) {
	shared := true
	device.AllowMultipleAllocations = &shared
	memory := device.Capacity[CapacityMemory]
	most := memory.Value.Value() / s.MemoryStep * s.MemoryStep
	memory.RequestPolicy = inSteps(most, s.MemoryStep, s.MemoryStep, most, resource.BinarySI)
	device.Capacity[CapacityMemory] = memory
	if s.ComputeStep > 0 {
		compute := capacity(AllCompute, resource.DecimalSI)
		compute.RequestPolicy = inSteps(0, 0, int64(s.ComputeStep), AllCompute, resource.DecimalSI)
		device.Capacity[CapacityCompute] = compute
	}
}

// Replica is what one of the Replicas of a GPU with so much memory takes of it, in bytes (of whole
// MiB) and, if compute is offered, in percent.
func (s *Shares) Replica(memoryBytes uint64) (memory int64, compute int) {
	memory = int64(memoryBytes) / int64(s.Replicas) >> 20 << 20
	if s.ComputeStep > 0 {
		compute = AllCompute / s.Replicas
	}
	return memory, compute
}

func inSteps(otherwise, least, step, most int64, format resource.Format) *resourceapi.CapacityRequestPolicy {
	q := func(n int64) *resource.Quantity { return resource.NewQuantity(n, format) }
	return &resourceapi.CapacityRequestPolicy{
		Default:    q(otherwise),
		ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: q(least), Step: q(step), Max: q(most)},
	}
}

// String says how a GPU is divided, for tables.
func (s *Shares) String() string {
	text := "in shares of " + resource.NewQuantity(s.MemoryStep, resource.BinarySI).String()
	if s.ComputeStep > 0 {
		text += fmt.Sprintf(" and %d%%", s.ComputeStep)
	}
	return text
}
