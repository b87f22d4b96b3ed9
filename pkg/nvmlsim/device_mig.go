// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import "github.com/NVIDIA/go-nvml/pkg/nvml"

func (d *device) IsMigDeviceHandle() (bool, nvml.Return) { return answer(d, false) }

func (d *device) GetMigMode() (current, pending int, ret nvml.Return) {
	g, _, ret := d.partitionable()
	if ret != nvml.SUCCESS {
		return 0, 0, ret
	}
	return int(enabled(g.MIG)), int(enabled(g.PendingMIG)), nvml.SUCCESS
}

// SetMigMode returns the outcome of the switch, and whether the mode was taken.
func (d *device) SetMigMode(mode int) (activation, ret nvml.Return) {
	_, table, ret := d.partitionable()
	if ret == nvml.SUCCESS && mode != nvml.DEVICE_MIG_DISABLE && mode != nvml.DEVICE_MIG_ENABLE {
		ret = nvml.ERROR_INVALID_ARGUMENT
	}
	if ret != nvml.SUCCESS {
		return ret, ret
	}
	ret = d.change(func(s *State, _ *GPUState) nvml.Return {
		activation = s.setMIG(table, d.index, mode == nvml.DEVICE_MIG_ENABLE)
		return nvml.SUCCESS
	})
	if ret != nvml.SUCCESS {
		return ret, ret
	}
	return activation, nvml.SUCCESS
}

// partitionable answers ERROR_NOT_SUPPORTED for a GPU without MIG.
func (d *device) partitionable() (*GPUState, *migTable, nvml.Return) {
	g, ret := d.state()
	if ret == nvml.SUCCESS && d.model.MIG == nil {
		ret = nvml.ERROR_NOT_SUPPORTED
	}
	return g, d.model.MIG.table(), ret
}

// partitioned answers it also for one that has MIG switched off.
func (d *device) partitioned() (*GPUState, *migTable, nvml.Return) {
	g, table, ret := d.partitionable()
	if ret == nvml.SUCCESS && !g.MIG {
		ret = nvml.ERROR_NOT_SUPPORTED
	}
	return g, table, ret
}

// What a GPU can be partitioned into does not depend on its mode.

func (d *device) GetGpuInstanceProfileInfo(number int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
	_, table, ret := d.partitionable()
	if ret == nvml.SUCCESS && (number < 0 || number >= nvml.GPU_INSTANCE_PROFILE_COUNT) {
		ret = nvml.ERROR_INVALID_ARGUMENT
	}
	if ret != nvml.SUCCESS {
		return nvml.GpuInstanceProfileInfo{}, ret
	}
	p := table.byNumber(number)
	if p == nil {
		return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
	}
	return p.info(), nvml.SUCCESS
}

func (d *device) GetGpuInstancePossiblePlacements(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
	_, table, ret := d.partitionable()
	p, ret := lookUp(table, info, ret)
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	placements := make([]nvml.GpuInstancePlacement, 0, len(p.starts))
	for _, start := range p.starts {
		placements = append(placements, nvml.GpuInstancePlacement{Start: start, Size: p.size})
	}
	return placements, nvml.SUCCESS
}

// GPUInstanceProfileName is that of the GPU instance profile with that ID of a GPU, such as "1g.10gb"; empty if it has none.
func GPUInstanceProfileName(gpu nvml.Device, id uint32) string {
	d, ok := gpu.(*device)
	if !ok || d.model.MIG == nil {
		return ""
	}
	p := d.model.MIG.table().byID(id)
	if p == nil {
		return ""
	}
	return p.name
}

// lookUp finds the profile that a caller means by its ID.
func lookUp(table *migTable, info *nvml.GpuInstanceProfileInfo, ret nvml.Return) (*giProfile, nvml.Return) {
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	if info == nil {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	p := table.byID(info.Id)
	if p == nil {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	return p, nvml.SUCCESS
}

func (d *device) GetGpuInstanceRemainingCapacity(info *nvml.GpuInstanceProfileInfo) (int, nvml.Return) {
	g, table, ret := d.partitioned()
	p, ret := lookUp(table, info, ret)
	if ret != nvml.SUCCESS {
		return 0, ret
	}
	return table.capacity(g, p), nvml.SUCCESS
}

func (d *device) CreateGpuInstance(info *nvml.GpuInstanceProfileInfo) (nvml.GpuInstance, nvml.Return) {
	return d.create(info, nil)
}

func (d *device) CreateGpuInstanceWithPlacement(info *nvml.GpuInstanceProfileInfo,
	at *nvml.GpuInstancePlacement,
) (nvml.GpuInstance, nvml.Return) {
	_, table, ret := d.partitioned()
	p, ret := lookUp(table, info, ret)
	if ret == nvml.SUCCESS && (at == nil || at.Size != p.size) {
		ret = nvml.ERROR_INVALID_ARGUMENT
	}
	if ret != nvml.SUCCESS {
		return unsupportedGpuInstance{}, ret
	}
	return d.create(info, &at.Start)
}

func (d *device) create(info *nvml.GpuInstanceProfileInfo, at *uint32) (nvml.GpuInstance, nvml.Return) {
	_, table, ret := d.partitioned()
	p, ret := lookUp(table, info, ret)
	if ret != nvml.SUCCESS {
		return unsupportedGpuInstance{}, ret
	}
	var made GPUInstance
	ret = d.change(func(s *State, _ *GPUState) (ret nvml.Return) {
		made, ret = s.createInstance(table, d.index, p, at)
		return ret
	})
	if ret != nvml.SUCCESS {
		return unsupportedGpuInstance{}, ret
	}
	return &gpuInstance{device: d, id: made.ID, number: made.Number}, nvml.SUCCESS
}

func (d *device) GetGpuInstances(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstance, nvml.Return) {
	g, table, ret := d.partitioned()
	p, ret := lookUp(table, info, ret)
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	var found []nvml.GpuInstance
	for _, i := range g.Instances {
		if i.Profile == p.name {
			found = append(found, &gpuInstance{device: d, id: i.ID, number: i.Number})
		}
	}
	return found, nvml.SUCCESS
}

func (d *device) GetGpuInstanceById(id int) (nvml.GpuInstance, nvml.Return) {
	g, _, ret := d.partitioned()
	if ret != nvml.SUCCESS {
		return unsupportedGpuInstance{}, ret
	}
	i := g.instance(uint32(id))
	if id < 0 || i == nil {
		return unsupportedGpuInstance{}, nvml.ERROR_NOT_FOUND
	}
	return &gpuInstance{device: d, id: i.ID, number: i.Number}, nvml.SUCCESS
}

// GetMaxMigDeviceCount is zero "if MIG is not supported or enabled" (nvml.h), as on a real H100.
func (d *device) GetMaxMigDeviceCount() (int, nvml.Return) {
	return read(d, func(g *GPUState) int {
		if d.model.MIG == nil || !g.MIG {
			return 0
		}
		return d.model.MIG.MaxDevices
	})
}

func (d *device) GetMigDeviceHandleByIndex(index int) (nvml.Device, nvml.Return) {
	_, _, ret := d.partitionable()
	if ret == nvml.SUCCESS && (index < 0 || index >= d.model.MIG.MaxDevices) {
		ret = nvml.ERROR_INVALID_ARGUMENT
	}
	if ret != nvml.SUCCESS {
		return unsupportedDevice{}, ret
	}
	devices := d.migDevices()
	if index >= len(devices) {
		return unsupportedDevice{}, nvml.ERROR_NOT_FOUND
	}
	return devices[index], nvml.SUCCESS
}

// migDevices are the GPU's MIG devices, one for each compute instance. It does
// not wait for a GPU that hangs.
func (d *device) migDevices() (found []*migDevice) {
	now, ret := d.lib.now()
	if ret != nvml.SUCCESS || now.GPUs[d.index].gone() {
		return nil
	}
	for _, i := range now.GPUs[d.index].Instances {
		for _, c := range i.Compute {
			found = append(found, &migDevice{device: d, at: Instance{GPU: i.ID, Compute: c.ID}, number: c.Number})
		}
	}
	return found
}
