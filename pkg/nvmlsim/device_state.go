// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import "github.com/NVIDIA/go-nvml/pkg/nvml"

const mib = 1 << 20

// Memory: the driver's own part, and that of the processes.

func (d *device) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	return read(d, func(g *GPUState) nvml.Memory {
		total, used := d.model.MemoryMiB, d.usedMiB(g)
		return nvml.Memory{Total: total * mib, Used: used * mib, Free: (total - used) * mib}
	})
}

func (d *device) GetMemoryInfo_v2() (nvml.Memory_v2, nvml.Return) {
	return read(d, func(g *GPUState) nvml.Memory_v2 {
		total, reserved, used := d.model.MemoryMiB, d.model.ReservedMiB, d.usedMiB(g)
		return nvml.Memory_v2{Total: total * mib, Reserved: reserved * mib, Used: (used - reserved) * mib, Free: (total - used) * mib}
	})
}

func (d *device) usedMiB(g *GPUState) uint64 {
	return d.model.ReservedMiB + g.LeakedMiB + g.usedMiB(func(Process) bool { return true })
}

func (d *device) GetBAR1MemoryInfo() (nvml.BAR1Memory, nvml.Return) {
	return answer(d, nvml.BAR1Memory{Bar1Total: d.model.BAR1MiB * mib, Bar1Free: d.model.BAR1MiB * mib})
}

// Processes.

func (d *device) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return d.processes(ProcessCompute)
}

func (d *device) GetGraphicsRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return d.processes(ProcessGraphics)
}

func (d *device) GetMPSComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return d.processes(ProcessMPS)
}

func (d *device) processes(kind ProcessKind) ([]nvml.ProcessInfo, nvml.Return) {
	return read(d, func(g *GPUState) []nvml.ProcessInfo {
		return processInfos(g, func(p Process) bool { return p.Kind == kind })
	})
}

// noInstance stands for a MIG instance where there is none.
const noInstance = 0xFFFFFFFF

// processInfos are the processes for which in holds.
func processInfos(g *GPUState, in func(Process) bool) (infos []nvml.ProcessInfo) {
	for _, p := range g.Processes {
		if !in(p) {
			continue
		}
		info := nvml.ProcessInfo{Pid: p.PID, UsedGpuMemory: p.MemoryMiB * mib, GpuInstanceId: noInstance, ComputeInstanceId: noInstance}
		if p.Instance != nil {
			info.GpuInstanceId, info.ComputeInstanceId = p.Instance.GPU, p.Instance.Compute
		}
		infos = append(infos, info)
	}
	return infos
}

func (d *device) GetPerformanceState() (nvml.Pstates, nvml.Return) {
	return answer(d, nvml.Pstates(nvml.PSTATE_0))
}

// Power limits, in milliwatts.

func (d *device) GetPowerManagementDefaultLimit() (uint32, nvml.Return) {
	return answer(d, 1000*d.model.Power.DefaultWatts)
}

func (d *device) GetPowerManagementLimitConstraints() (lowest, highest uint32, ret nvml.Return) {
	if ret := d.ready(); ret != nvml.SUCCESS {
		return 0, 0, ret
	}
	return 1000 * d.model.Power.MinWatts, 1000 * d.model.Power.MaxWatts, nvml.SUCCESS
}

func (d *device) GetPowerManagementLimit() (uint32, nvml.Return) {
	return read(d, func(g *GPUState) uint32 { return g.PowerLimitMilliwatts })
}

func (d *device) GetEnforcedPowerLimit() (uint32, nvml.Return) { return d.GetPowerManagementLimit() }

func (d *device) SetPowerManagementLimit(milliwatts uint32) nvml.Return {
	return d.change(func(_ *State, g *GPUState) nvml.Return {
		if milliwatts < 1000*d.model.Power.MinWatts || milliwatts > 1000*d.model.Power.MaxWatts {
			return nvml.ERROR_INVALID_ARGUMENT
		}
		g.PowerLimitMilliwatts = milliwatts
		return nvml.SUCCESS
	})
}

// Modes.

func (d *device) GetComputeMode() (nvml.ComputeMode, nvml.Return) {
	return read(d, func(g *GPUState) nvml.ComputeMode { return computeModes[g.ComputeMode] })
}

// SetComputeMode knows no exclusive thread mode, as drivers since CUDA 8, and a
// partitioned GPU has the default mode only.
func (d *device) SetComputeMode(mode nvml.ComputeMode) nvml.Return {
	return d.change(func(_ *State, g *GPUState) nvml.Return {
		for name, value := range computeModes {
			if value != mode {
				continue
			}
			if g.MIG && name != ComputeDefault || g.refuses(SettingComputeMode) {
				return nvml.ERROR_NOT_SUPPORTED
			}
			g.ComputeMode = name
			return nvml.SUCCESS
		}
		return nvml.ERROR_INVALID_ARGUMENT
	})
}

func (d *device) GetPersistenceMode() (nvml.EnableState, nvml.Return) {
	daemon := false
	state, _ := d.lib.machine.look()
	for _, c := range state.ClientsOf(d.index) {
		daemon = daemon || c.Persistence != nil && c.Persistence.Seen
	}
	return read(d, func(g *GPUState) nvml.EnableState { return enabled(g.Persistence || daemon) })
}

func (d *device) SetPersistenceMode(mode nvml.EnableState) nvml.Return {
	return d.change(func(_ *State, g *GPUState) nvml.Return {
		if mode != nvml.FEATURE_DISABLED && mode != nvml.FEATURE_ENABLED {
			return nvml.ERROR_INVALID_ARGUMENT
		}
		if g.refuses(SettingPersistence) {
			return nvml.ERROR_NOT_SUPPORTED
		}
		g.Persistence = mode == nvml.FEATURE_ENABLED
		return nvml.SUCCESS
	})
}

func (d *device) GetVirtualizationMode() (nvml.GpuVirtualizationMode, nvml.Return) {
	mode := nvml.GPU_VIRTUALIZATION_MODE_NONE
	if d.lib.profile.System.VirtualMachine {
		mode = nvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH
	}
	return answer(d, mode)
}

func enabled(on bool) nvml.EnableState {
	if on {
		return nvml.FEATURE_ENABLED
	}
	return nvml.FEATURE_DISABLED
}
