// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import "github.com/NVIDIA/go-nvml/pkg/nvml"

// gpuInstance is the handle of a MIG GPU instance. It does not come alive again
// when another instance gets the ID.
type gpuInstance struct {
	unsupportedGpuInstance

	device *device
	id     uint32
	number uint64
}

// computeInstance is the handle of a compute instance.
type computeInstance struct {
	parent *gpuInstance
	id     uint32
	number uint64
}

var (
	_ nvml.GpuInstance     = (*gpuInstance)(nil)
	_ nvml.ComputeInstance = (*computeInstance)(nil)
)

// in finds the instance in a state, nil if it was destroyed.
func (i *gpuInstance) in(g *GPUState) *GPUInstance {
	found := g.instance(i.id)
	if found == nil || found.Number != i.number {
		return nil
	}
	return found
}

// state answers ERROR_NOT_FOUND for an instance that was destroyed.
func (i *gpuInstance) state() (*GPUInstance, *giProfile, nvml.Return) {
	g, ret := i.device.state()
	if ret != nvml.SUCCESS {
		return nil, nil, ret
	}
	found := i.in(g)
	if found == nil {
		return nil, nil, nvml.ERROR_NOT_FOUND
	}
	return found, i.device.model.MIG.table().byName(found.Profile), nvml.SUCCESS
}

func (i *gpuInstance) GetInfo() (nvml.GpuInstanceInfo, nvml.Return) {
	found, p, ret := i.state()
	if ret != nvml.SUCCESS {
		return nvml.GpuInstanceInfo{}, ret
	}
	return nvml.GpuInstanceInfo{
		Device: i.device, Id: i.id, ProfileId: p.id,
		Placement: nvml.GpuInstancePlacement{Start: found.Start, Size: found.Size},
	}, nvml.SUCCESS
}

func (i *gpuInstance) Destroy() nvml.Return {
	return i.device.change(func(s *State, g *GPUState) nvml.Return {
		if i.in(g) == nil {
			return nvml.ERROR_NOT_FOUND
		}
		return s.destroyInstance(i.device.index, i.id)
	})
}

func (i *gpuInstance) GetComputeInstanceProfileInfo(number, engines int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
	_, p, ret := i.state()
	switch {
	case ret != nvml.SUCCESS:
	case number < 0 || number >= nvml.COMPUTE_INSTANCE_PROFILE_COUNT || engines != nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
		ret = nvml.ERROR_INVALID_ARGUMENT
	case p.computeProfile(number) == nil:
		ret = nvml.ERROR_NOT_SUPPORTED
	default:
		return p.computeProfile(number).info(p), nvml.SUCCESS
	}
	return nvml.ComputeInstanceProfileInfo{}, ret
}

// lookUp finds the compute profile that a caller means by its ID.
func (i *gpuInstance) lookUp(info *nvml.ComputeInstanceProfileInfo) (*GPUInstance, *ciProfile, nvml.Return) {
	found, p, ret := i.state()
	if ret != nvml.SUCCESS {
		return nil, nil, ret
	}
	if info == nil {
		return nil, nil, nvml.ERROR_INVALID_ARGUMENT
	}
	c := p.computeProfile(int(info.Id))
	if c == nil {
		return nil, nil, nvml.ERROR_NOT_SUPPORTED
	}
	return found, c, nvml.SUCCESS
}

func (i *gpuInstance) GetComputeInstancePossiblePlacements(info *nvml.ComputeInstanceProfileInfo) (
	[]nvml.ComputeInstancePlacement, nvml.Return,
) {
	_, c, ret := i.lookUp(info)
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	placements := make([]nvml.ComputeInstancePlacement, 0, len(c.starts))
	for _, start := range c.starts {
		placements = append(placements, nvml.ComputeInstancePlacement{Start: start, Size: c.compute})
	}
	return placements, nvml.SUCCESS
}

func (i *gpuInstance) GetComputeInstanceRemainingCapacity(info *nvml.ComputeInstanceProfileInfo) (int, nvml.Return) {
	found, c, ret := i.lookUp(info)
	if ret != nvml.SUCCESS {
		return 0, ret
	}
	n := 0
	for _, start := range c.starts {
		if found.freeCompute(start, c.compute) {
			n++
		}
	}
	return n, nvml.SUCCESS
}

func (i *gpuInstance) CreateComputeInstance(info *nvml.ComputeInstanceProfileInfo) (nvml.ComputeInstance, nvml.Return) {
	return i.create(info, nil)
}

func (i *gpuInstance) CreateComputeInstanceWithPlacement(info *nvml.ComputeInstanceProfileInfo,
	at *nvml.ComputeInstancePlacement,
) (nvml.ComputeInstance, nvml.Return) {
	_, c, ret := i.lookUp(info)
	if ret == nvml.SUCCESS && (at == nil || at.Size != c.compute) {
		ret = nvml.ERROR_INVALID_ARGUMENT
	}
	if ret != nvml.SUCCESS {
		return unsupportedComputeInstance{}, ret
	}
	return i.create(info, &at.Start)
}

func (i *gpuInstance) create(info *nvml.ComputeInstanceProfileInfo, at *uint32) (nvml.ComputeInstance, nvml.Return) {
	_, c, ret := i.lookUp(info)
	if ret != nvml.SUCCESS {
		return unsupportedComputeInstance{}, ret
	}
	var made ComputeInstance
	ret = i.device.change(func(s *State, g *GPUState) (ret nvml.Return) {
		if i.in(g) == nil {
			return nvml.ERROR_NOT_FOUND
		}
		made, ret = s.createCompute(i.device.index, i.id, c, at)
		return ret
	})
	if ret != nvml.SUCCESS {
		return unsupportedComputeInstance{}, ret
	}
	return &computeInstance{parent: i, id: made.ID, number: made.Number}, nvml.SUCCESS
}

func (i *gpuInstance) GetComputeInstances(info *nvml.ComputeInstanceProfileInfo) ([]nvml.ComputeInstance, nvml.Return) {
	found, c, ret := i.lookUp(info)
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	var all []nvml.ComputeInstance
	for _, compute := range found.Compute {
		if compute.Profile == c.number {
			all = append(all, &computeInstance{parent: i, id: compute.ID, number: compute.Number})
		}
	}
	return all, nvml.SUCCESS
}

func (i *gpuInstance) GetComputeInstanceById(id int) (nvml.ComputeInstance, nvml.Return) {
	found, _, ret := i.state()
	if ret != nvml.SUCCESS {
		return unsupportedComputeInstance{}, ret
	}
	c := found.compute(uint32(id))
	if id < 0 || c == nil {
		return unsupportedComputeInstance{}, nvml.ERROR_NOT_FOUND
	}
	return &computeInstance{parent: i, id: c.ID, number: c.Number}, nvml.SUCCESS
}

func (c *computeInstance) in(g *GPUState) *ComputeInstance {
	parent := c.parent.in(g)
	if parent == nil {
		return nil
	}
	found := parent.compute(c.id)
	if found == nil || found.Number != c.number {
		return nil
	}
	return found
}

func (c *computeInstance) GetInfo() (nvml.ComputeInstanceInfo, nvml.Return) {
	g, ret := c.parent.device.state()
	if ret != nvml.SUCCESS {
		return nvml.ComputeInstanceInfo{}, ret
	}
	found := c.in(g)
	if found == nil {
		return nvml.ComputeInstanceInfo{}, nvml.ERROR_NOT_FOUND
	}
	return nvml.ComputeInstanceInfo{
		Device: c.parent.device, GpuInstance: c.parent, Id: c.id, ProfileId: uint32(found.Profile),
		Placement: nvml.ComputeInstancePlacement{Start: found.Start, Size: found.Size},
	}, nvml.SUCCESS
}

func (c *computeInstance) Destroy() nvml.Return {
	return c.parent.device.change(func(s *State, g *GPUState) nvml.Return {
		if c.in(g) == nil {
			return nvml.ERROR_NOT_FOUND
		}
		return s.destroyCompute(c.parent.device.index, Instance{GPU: c.parent.id, Compute: c.id})
	})
}
