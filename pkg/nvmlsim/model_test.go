// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"pgregory.net/rapid"
)

// TestAnySequenceOfCallsKeepsTheInvariants drives a GPU at random, through NVML
// and by commands, and checks after each step what must always be true.
func TestAnySequenceOfCallsKeepsTheInvariants(t *testing.T) {
	tables := []string{"a30-24gb", "a100-40gb", "h100-80gb", "b200-180gb"}
	rapid.Check(t, func(r *rapid.T) {
		name := rapid.SampledFrom(tables).Draw(r, "table")
		table := migTables[name]
		lib, d := machineWith(t, name)
		m := lib.machine
		dead := map[nvml.GpuInstance]bool{}
		live := map[nvml.GpuInstance]bool{}
		pid := uint32(0)
		pick := func(r *rapid.T) nvml.GpuInstance {
			if len(live) == 0 {
				r.Skip("none")
			}
			ids := map[uint32]nvml.GpuInstance{}
			for gi := range live {
				info, _ := gi.GetInfo()
				ids[info.Id] = gi
			}
			keys := make([]uint32, 0, len(ids))
			for id := range ids {
				keys = append(keys, id)
			}
			slices.Sort(keys)
			return ids[rapid.SampledFrom(keys).Draw(r, "instance")]
		}
		r.Repeat(map[string]func(*rapid.T){
			"create": func(r *rapid.T) {
				p := rapid.SampledFrom(table.profiles).Draw(r, "profile")
				info := p.info()
				if gi, ret := d.CreateGpuInstance(&info); ret == nvml.SUCCESS {
					live[gi] = true
				}
			},
			"create at": func(r *rapid.T) {
				p := rapid.SampledFrom(table.profiles).Draw(r, "profile")
				info := p.info()
				at := nvml.GpuInstancePlacement{Start: rapid.Uint32Range(0, 8).Draw(r, "start"), Size: p.size}
				if gi, ret := d.CreateGpuInstanceWithPlacement(&info, &at); ret == nvml.SUCCESS {
					live[gi] = true
				}
			},
			"create compute": func(r *rapid.T) {
				gi := pick(r)
				compute, ret := gi.GetComputeInstanceProfileInfo(rapid.IntRange(0, 4).Draw(r, "compute"), 0)
				if ret == nvml.SUCCESS {
					gi.CreateComputeInstance(&compute)
				}
			},
			"destroy compute": func(r *rapid.T) {
				if ci, ret := pick(r).GetComputeInstanceById(0); ret == nvml.SUCCESS {
					ci.Destroy()
				}
			},
			"destroy": func(r *rapid.T) {
				gi := pick(r)
				if gi.Destroy() == nvml.SUCCESS {
					delete(live, gi)
					dead[gi] = true
				}
			},
			"start a process": func(r *rapid.T) {
				pid++
				at := Instance{GPU: rapid.Uint32Range(0, 13).Draw(r, "gpu instance")}
				m.Do(&AddProcess{GPU: "0", Process: Process{PID: pid, Kind: ProcessCompute, MemoryMiB: rapid.Uint64Range(0, 30000).Draw(r, "MiB"), Instance: &at}})
			},
			"end a process": func(*rapid.T) {
				if ps := m.State().GPUs[0].Processes; len(ps) > 0 {
					do(t, m, &RemoveProcess{GPU: "0", PID: ps[0].PID})
				}
			},
			"reset": func(*rapid.T) {
				if _, err := m.Do(&ResetGPU{GPU: "0"}); err == nil {
					for gi := range live {
						dead[gi] = true
					}
					clear(live)
				}
			},
			"": func(r *rapid.T) {
				checkInvariants(r, table, &m.State().GPUs[0], len(live))
				for gi := range dead {
					if _, ret := gi.GetInfo(); ret != nvml.ERROR_NOT_FOUND {
						r.Fatalf("a handle of a destroyed instance answers %v", ret)
					}
				}
			},
		})
		// Destroying everything gives everything back.
		for _, p := range m.State().GPUs[0].Processes {
			do(t, m, &RemoveProcess{GPU: "0", PID: p.PID})
		}
		for _, i := range m.State().GPUs[0].Instances {
			do(t, m, &DestroyMIG{GPU: "0", Instance: i.ID})
		}
		for i := range table.profiles {
			p := &table.profiles[i]
			if got := table.capacity(&m.State().GPUs[0], p); got != int(p.max) {
				r.Fatalf("%s: capacity %d of an empty GPU, want %d", p.name, got, p.max)
			}
		}
		if memory, _ := d.GetMemoryInfo(); memory.Used != d.model.ReservedMiB*mib {
			r.Fatalf("memory of an idle GPU: %+v", memory)
		}
	})
}

func checkInvariants(r *rapid.T, table *migTable, g *GPUState, live int) {
	var slicesUsed, compute uint32
	taken, ids := map[uint32]string{}, map[uint32]bool{}
	for _, i := range g.Instances {
		p := table.byName(i.Profile)
		compute += p.compute
		slicesUsed += i.Size
		if ids[i.ID] {
			r.Fatalf("two instances with ID %d", i.ID)
		}
		ids[i.ID] = true
		for s := i.Start; s < i.Start+i.Size; s++ {
			if taken[s] != "" {
				r.Fatalf("memory slice %d is both %s's and %s's", s, taken[s], i.Profile)
			}
			taken[s] = fmt.Sprintf("%s@%d", i.Profile, i.Start)
		}
		inUse := map[uint32]bool{}
		for _, c := range i.Compute {
			for s := c.Start; s < c.Start+c.Size; s++ {
				if inUse[s] || s >= p.compute {
					r.Fatalf("%s: compute slice %d twice or beyond the end", i.Profile, s)
				}
				inUse[s] = true
			}
		}
		if used := g.usedMiB(func(p Process) bool { return p.Instance.GPU == i.ID }); used > p.memoryMiB {
			r.Fatalf("%s: %d MiB of %d used", i.Profile, used, p.memoryMiB)
		}
	}
	if slicesUsed > table.slices || compute > table.whole().compute {
		r.Fatalf("%d of %d memory slices, %d of %d compute slices", slicesUsed, table.slices, compute, table.whole().compute)
	}
	if len(g.Instances) != live {
		r.Fatalf("%d instances, %d handles", len(g.Instances), live)
	}
	for _, p := range g.Processes {
		if i := g.instance(p.Instance.GPU); i == nil || i.compute(p.Instance.Compute) == nil {
			r.Fatalf("process %d is in an instance that is gone", p.PID)
		}
	}
}
