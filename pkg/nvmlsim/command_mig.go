// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// SetMIG is nvidia-smi --multi-instance-gpu. Where a reset is needed to switch,
// the mode stays pending until [ResetGPU].
type SetMIG struct {
	GPU     string `json:"gpu"`
	Enabled bool   `json:"enabled"`
}

// Name implements Command.
func (*SetMIG) Name() string { return "mig mode" }

func (c *SetMIG) do(m *Machine, s *State) (Result, error) {
	i, _, table, err := m.findMIG(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	if ret := s.setMIG(table, i, c.Enabled); ret != nvml.ERROR_RESET_REQUIRED {
		return Result{}, refused("enabled", c.Enabled, ret)
	}
	return Result{}, nil
}

// CreateMIG makes a GPU instance and compute instances in it, as nvidia-smi mig
// -cgi <profile>, and -C or -cci. The result is the first of them.
type CreateMIG struct {
	GPU     string `json:"gpu"`
	Profile string `json:"profile"`
	// Start is the first memory slice; nil leaves the choice to the driver.
	Start *uint32 `json:"start,omitempty"`
	// Compute has the slices of each compute instance; if it is empty, there is
	// one with all of them.
	Compute []uint32 `json:"compute,omitempty"`
}

// Name implements Command.
func (*CreateMIG) Name() string { return "mig create" }

func (c *CreateMIG) do(m *Machine, s *State) (Result, error) {
	i, _, table, err := m.findMIG(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	p := table.byName(c.Profile)
	if p == nil {
		var names []string
		for _, p := range table.profiles {
			names = append(names, p.name)
		}
		return Result{}, fmt.Errorf("profile: %q: want one of %v", c.Profile, names)
	}
	made, ret := s.createInstance(table, i, p, c.Start)
	if ret == nvml.ERROR_INVALID_ARGUMENT {
		return Result{}, fmt.Errorf("start: %d: want one of %v for %s", *c.Start, p.starts, p.name)
	}
	if ret != nvml.SUCCESS {
		return Result{}, refused("profile", c.Profile, ret)
	}
	wanted := c.Compute
	if len(wanted) == 0 {
		wanted = []uint32{p.compute}
	}
	for _, slices := range wanted {
		profile := p.computeSlices(slices)
		if profile == nil {
			return Result{}, fmt.Errorf("compute: %d: %s has no compute instance of so many slices", slices, p.name)
		}
		if _, ret := s.createCompute(i, made.ID, profile, nil); ret != nvml.SUCCESS {
			return Result{}, refused("compute", slices, ret)
		}
	}
	at := Instance{GPU: made.ID}
	return Result{MIG: &MIGDevice{UUID: migUUID(gpuUUID(m.node, i), at), Instance: at}}, nil
}

// computeSlices is the compute profile with so many, nil if there is none.
func (p *giProfile) computeSlices(n uint32) *ciProfile {
	for _, c := range p.computeProfiles() {
		if c.compute == n {
			return &c
		}
	}
	return nil
}

// DestroyMIG ends a GPU instance with its compute instances, as nvidia-smi mig
// -dci and -dgi. Processes in it are a reason not to.
type DestroyMIG struct {
	GPU string `json:"gpu"`
	// Instance is the GPU instance's ID.
	Instance uint32 `json:"instance"`
}

// Name implements Command.
func (*DestroyMIG) Name() string { return "mig destroy" }

func (c *DestroyMIG) do(m *Machine, s *State) (Result, error) {
	i, g, _, err := m.findMIG(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	inst := g.instance(c.Instance)
	if inst == nil {
		return Result{}, refused("instance", c.Instance, nvml.ERROR_NOT_FOUND)
	}
	for len(inst.Compute) > 0 {
		if ret := s.destroyCompute(i, Instance{GPU: inst.ID, Compute: inst.Compute[0].ID}); ret != nvml.SUCCESS {
			return Result{}, refused("instance", c.Instance, ret)
		}
	}
	return Result{}, refused("instance", c.Instance, s.destroyInstance(i, c.Instance))
}

// findMIG is findThere for a GPU that can be partitioned.
func (m *Machine) findMIG(s *State, gpu string) (int, *GPUState, *migTable, error) {
	i, g, err := m.findThere(s, gpu)
	table := m.profile.GPU.MIG.table()
	if err == nil && table == nil {
		err = fmt.Errorf("gpu: %q: %s can't be partitioned", gpu, m.profile.GPU.ProductName)
	}
	return i, g, table, err
}
