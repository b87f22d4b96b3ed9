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

// CreateMIG makes a GPU instance and one compute instance that is all of it, as
// nvidia-smi mig -cgi <profile> -C.
type CreateMIG struct {
	GPU     string `json:"gpu"`
	Profile string `json:"profile"`
	// Start is the first memory slice; nil leaves the choice to the driver.
	Start *uint32 `json:"start,omitempty"`
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
	all := p.computeProfiles()
	compute, ret := s.createCompute(i, made.ID, &all[len(all)-1], nil)
	if ret != nvml.SUCCESS {
		return Result{}, refused("profile", c.Profile, ret)
	}
	at := Instance{GPU: made.ID, Compute: compute.ID}
	return Result{MIG: &MIGDevice{UUID: migUUID(gpuUUID(m.node, i), at), Instance: at}}, nil
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
