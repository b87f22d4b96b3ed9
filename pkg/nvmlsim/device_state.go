package nvmlsim

import "github.com/NVIDIA/go-nvml/pkg/nvml"

const mib = 1 << 20

// Memory: nothing runs, so only the driver's own part is used.

func (d *device) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	total, used := d.model.MemoryMiB*mib, d.model.ReservedMiB*mib
	return answer(d, nvml.Memory{Total: total, Used: used, Free: total - used})
}

func (d *device) GetMemoryInfo_v2() (nvml.Memory_v2, nvml.Return) {
	total, reserved := d.model.MemoryMiB*mib, d.model.ReservedMiB*mib
	return answer(d, nvml.Memory_v2{Total: total, Reserved: reserved, Free: total - reserved})
}

func (d *device) GetBAR1MemoryInfo() (nvml.BAR1Memory, nvml.Return) {
	return answer(d, nvml.BAR1Memory{Bar1Total: d.model.BAR1MiB * mib, Bar1Free: d.model.BAR1MiB * mib})
}

// Processes and load of an idle GPU.

func (d *device) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return answer[[]nvml.ProcessInfo](d, nil)
}

func (d *device) GetGraphicsRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return answer[[]nvml.ProcessInfo](d, nil)
}

func (d *device) GetMPSComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return answer[[]nvml.ProcessInfo](d, nil)
}

func (d *device) GetUtilizationRates() (nvml.Utilization, nvml.Return) {
	return answer(d, nvml.Utilization{})
}

func (d *device) GetPerformanceState() (nvml.Pstates, nvml.Return) {
	return answer(d, nvml.Pstates(nvml.PSTATE_0))
}

func (d *device) GetTemperature(sensor nvml.TemperatureSensors) (uint32, nvml.Return) {
	if sensor != nvml.TEMPERATURE_GPU {
		return answerIf[uint32](d, false, 0)
	}
	return answer(d, d.model.IdleTemperatureC)
}

// Power, in milliwatts.

func (d *device) GetPowerUsage() (uint32, nvml.Return) {
	return answer(d, 1000*d.model.Power.IdleWatts)
}

func (d *device) GetPowerManagementDefaultLimit() (uint32, nvml.Return) {
	return answer(d, 1000*d.model.Power.DefaultWatts)
}

func (d *device) GetPowerManagementLimitConstraints() (lowest, highest uint32, ret nvml.Return) {
	if ret := d.lib.ready(); ret != nvml.SUCCESS {
		return 0, 0, ret
	}
	return 1000 * d.model.Power.MinWatts, 1000 * d.model.Power.MaxWatts, nvml.SUCCESS
}

func (d *device) GetPowerManagementLimit() (uint32, nvml.Return) {
	return read(d, &d.powerLimit)
}

func (d *device) GetEnforcedPowerLimit() (uint32, nvml.Return) { return read(d, &d.powerLimit) }

func (d *device) SetPowerManagementLimit(milliwatts uint32) nvml.Return {
	inRange := milliwatts >= 1000*d.model.Power.MinWatts && milliwatts <= 1000*d.model.Power.MaxWatts
	return write(d, &d.powerLimit, milliwatts, inRange)
}

// Modes.

func (d *device) GetComputeMode() (nvml.ComputeMode, nvml.Return) { return read(d, &d.computeMode) }

func (d *device) SetComputeMode(mode nvml.ComputeMode) nvml.Return {
	return write(d, &d.computeMode, mode, mode >= nvml.COMPUTEMODE_DEFAULT && mode < nvml.COMPUTEMODE_COUNT)
}

func (d *device) GetPersistenceMode() (nvml.EnableState, nvml.Return) {
	return read(d, &d.persistence)
}

func (d *device) SetPersistenceMode(mode nvml.EnableState) nvml.Return {
	return write(d, &d.persistence, mode, mode == nvml.FEATURE_DISABLED || mode == nvml.FEATURE_ENABLED)
}

// Error correction: no error has happened.

func (d *device) GetEccMode() (current, pending nvml.EnableState, ret nvml.Return) {
	if ret := d.lib.ready(); ret != nvml.SUCCESS {
		return 0, 0, ret
	}
	if !d.model.ECC {
		return nvml.FEATURE_DISABLED, nvml.FEATURE_DISABLED, nvml.SUCCESS
	}
	return nvml.FEATURE_ENABLED, nvml.FEATURE_ENABLED, nvml.SUCCESS
}

func (d *device) GetTotalEccErrors(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) {
	return answerIf[uint64](d, d.model.ECC, 0)
}

// read returns state that any handle may change.
func read[T any](d *device, state *T) (T, nvml.Return) {
	d.lib.mu.RLock()
	value := *state
	d.lib.mu.RUnlock()
	return answer(d, value)
}

// write changes it, unless the value is not one that NVML takes.
func write[T any](d *device, state *T, value T, valid bool) nvml.Return {
	if ret := d.lib.ready(); ret != nvml.SUCCESS {
		return ret
	}
	if !valid {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	d.lib.mu.Lock()
	defer d.lib.mu.Unlock()
	*state = value
	return nvml.SUCCESS
}
