// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"cmp"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// free tells whether a GPU instance of that profile fits there: its memory slices
// are nobody's, the profile's number of instances is not reached, and the one
// media extension of the GPU is not taken.
func (t *migTable) free(g *GPUState, p *giProfile, start uint32) bool {
	same, ofa := uint32(0), p.fa
	for _, other := range g.Instances {
		if start < other.Start+other.Size && other.Start < start+p.size {
			return false
		}
		q := t.byName(other.Profile)
		ofa += q.fa
		if q == p {
			same++
		}
	}
	return same < p.max && ofa <= t.whole().fa
}

// capacity is how many instances of that profile can still be made.
func (t *migTable) capacity(g *GPUState, p *giProfile) int {
	n := 0
	trial := &GPUState{Instances: slices.Clone(g.Instances)}
	for _, start := range p.starts {
		if t.free(trial, p, start) {
			trial.Instances = append(trial.Instances, GPUInstance{Profile: p.name, Start: start, Size: p.size})
			n++
		}
	}
	return n
}

// choose returns the start at which an instance leaves the most choice to later
// ones, the last of several.
func (t *migTable) choose(g *GPUState, p *giProfile) (start uint32, ok bool) {
	best := -1
	for _, s := range p.starts {
		if !t.free(g, p, s) {
			continue
		}
		trial := &GPUState{Instances: append(slices.Clone(g.Instances), GPUInstance{Profile: p.name, Start: s, Size: p.size})}
		left := 0
		for i := range t.profiles {
			for _, at := range t.profiles[i].starts {
				if t.free(trial, &t.profiles[i], at) {
					left++
				}
			}
		}
		if left >= best {
			best, start, ok = left, s, true
		}
	}
	return start, ok
}

// createInstance adds a GPU instance, at that start or, for nil, where it is best.
func (s *State) createInstance(t *migTable, gpu int, p *giProfile, at *uint32) (GPUInstance, nvml.Return) {
	g := &s.GPUs[gpu]
	if !g.MIG {
		return GPUInstance{}, nvml.ERROR_NOT_SUPPORTED
	}
	var start uint32
	if at == nil {
		var ok bool
		if start, ok = t.choose(g, p); !ok {
			return GPUInstance{}, nvml.ERROR_INSUFFICIENT_RESOURCES
		}
	} else {
		start = *at
		if !slices.Contains(p.starts, start) {
			return GPUInstance{}, nvml.ERROR_INVALID_ARGUMENT
		}
		if !t.free(g, p, start) {
			return GPUInstance{}, nvml.ERROR_INSUFFICIENT_RESOURCES
		}
	}
	made := GPUInstance{ID: t.instanceID(start, p.size), Profile: p.name, Start: start, Size: p.size, Number: s.newInstance()}
	g.Instances = append(g.Instances, made)
	slices.SortFunc(g.Instances, func(a, b GPUInstance) int { return cmp.Compare(a.Start, b.Start) })
	s.emit(Event{GPU: gpu, Type: nvml.EventMigConfigChange})
	return made, nvml.SUCCESS
}

// destroyInstance removes a GPU instance, unless there are compute instances or processes in it.
func (s *State) destroyInstance(gpu int, id uint32) nvml.Return {
	g := &s.GPUs[gpu]
	inst := g.instance(id)
	switch {
	case inst == nil:
		return nvml.ERROR_NOT_FOUND
	case len(inst.Compute) > 0, s.watched(gpu):
		return nvml.ERROR_IN_USE
	}
	g.Instances = slices.DeleteFunc(g.Instances, func(i GPUInstance) bool { return i.ID == id })
	s.emit(Event{GPU: gpu, Type: nvml.EventMigConfigChange})
	return nvml.SUCCESS
}

// freeCompute tells whether the compute slices are nobody's.
func (i *GPUInstance) freeCompute(start, size uint32) bool {
	return !slices.ContainsFunc(i.Compute, func(c ComputeInstance) bool {
		return start < c.Start+c.Size && c.Start < start+size
	})
}

// createCompute adds a compute instance, at that start or, for nil, at the first that is free.
func (s *State) createCompute(gpu int, id uint32, p *ciProfile, at *uint32) (ComputeInstance, nvml.Return) {
	inst := s.GPUs[gpu].instance(id)
	starts := p.starts
	if at != nil {
		if !slices.Contains(p.starts, *at) {
			return ComputeInstance{}, nvml.ERROR_INVALID_ARGUMENT
		}
		starts = []uint32{*at}
	}
	first := slices.IndexFunc(starts, func(start uint32) bool { return inst.freeCompute(start, p.compute) })
	if first < 0 {
		return ComputeInstance{}, nvml.ERROR_INSUFFICIENT_RESOURCES
	}
	made := ComputeInstance{Profile: p.number, Start: starts[first], Size: p.compute, Number: s.newInstance()}
	for inst.compute(made.ID) != nil {
		made.ID++
	}
	inst.Compute = append(inst.Compute, made)
	slices.SortFunc(inst.Compute, func(a, b ComputeInstance) int { return cmp.Compare(a.ID, b.ID) })
	s.emit(Event{GPU: gpu, Type: nvml.EventMigConfigChange})
	return made, nvml.SUCCESS
}

// destroyCompute removes a compute instance, unless a process uses it.
func (s *State) destroyCompute(gpu int, at Instance) nvml.Return {
	g := &s.GPUs[gpu]
	inst := g.instance(at.GPU)
	if inst == nil || inst.compute(at.Compute) == nil {
		return nvml.ERROR_NOT_FOUND
	}
	if s.watched(gpu) || slices.ContainsFunc(g.Processes, func(p Process) bool { return p.Instance != nil && *p.Instance == at }) {
		return nvml.ERROR_IN_USE
	}
	inst.Compute = slices.DeleteFunc(inst.Compute, func(c ComputeInstance) bool { return c.ID == at.Compute })
	s.emit(Event{GPU: gpu, Type: nvml.EventMigConfigChange})
	return nvml.SUCCESS
}

// setMIG asks for a mode. Where a reset is needed to switch, it stays pending
// until then; elsewhere the GPU must be idle and without instances. One that is
// in use keeps what it was asked to be: enabling MIG beside DCGM fails, and MIG
// is pending from then on (kubernetes-sigs/dra-driver-nvidia-gpu pull 1411).
func (s *State) setMIG(t *migTable, gpu int, on bool) (activation nvml.Return) {
	g := &s.GPUs[gpu]
	if on == g.MIG {
		g.PendingMIG = on
		return nvml.SUCCESS
	}
	if len(g.Processes) > 0 || len(g.Instances) > 0 || s.watched(gpu) {
		if t.resetToSwitch || on {
			g.PendingMIG = on
		}
		return nvml.ERROR_IN_USE
	}
	g.PendingMIG = on
	if t.resetToSwitch {
		return nvml.ERROR_RESET_REQUIRED
	}
	g.switchMIG(s, gpu)
	return nvml.SUCCESS
}

// switchMIG makes the pending mode the current one. Compute modes do not exist under MIG.
func (g *GPUState) switchMIG(s *State, gpu int) {
	if g.MIG == g.PendingMIG {
		return
	}
	g.MIG = g.PendingMIG
	g.ComputeMode = ComputeDefault
	s.emit(Event{GPU: gpu, Type: nvml.EventMigConfigChange})
}
