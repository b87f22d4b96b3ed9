// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"encoding/binary"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Recovery is what NVML says must be done to a GPU.
type Recovery string

// The recovery actions, the empty word for none.
const (
	RecoveryNone          Recovery = ""
	RecoveryReset         Recovery = "gpu-reset"
	RecoveryReboot        Recovery = "node-reboot"
	RecoveryDrainP2P      Recovery = "drain-p2p"
	RecoveryDrainAndReset Recovery = "drain-and-reset"
)

var recoveries = map[Recovery]nvml.DeviceGpuRecoveryAction{
	RecoveryNone:          nvml.GPU_RECOVERY_ACTION_NONE,
	RecoveryReset:         nvml.GPU_RECOVERY_ACTION_GPU_RESET,
	RecoveryReboot:        nvml.GPU_RECOVERY_ACTION_NODE_REBOOT,
	RecoveryDrainP2P:      nvml.GPU_RECOVERY_ACTION_DRAIN_P2P,
	RecoveryDrainAndReset: nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET,
}

func (d *device) GetTemperature(sensor nvml.TemperatureSensors) (uint32, nvml.Return) {
	if sensor != nvml.TEMPERATURE_GPU {
		return answerIf[uint32](d, false, 0)
	}
	return read(d, func(g *GPUState) uint32 { return valueOr(g.Health.TemperatureC, d.model.IdleTemperatureC) })
}

// GetTemperatureThreshold is not supported for GPUs that have distances instead:
// nvml.h says of "Ada and later" that it "would be removed", and the recorded
// Hopper has none either.
func (d *device) GetTemperatureThreshold(threshold nvml.TemperatureThresholds) (uint32, nvml.Return) {
	var celsius uint32
	switch threshold {
	case nvml.TEMPERATURE_THRESHOLD_SLOWDOWN:
		celsius = d.model.thermal().SlowdownC
	case nvml.TEMPERATURE_THRESHOLD_SHUTDOWN:
		celsius = d.model.thermal().ShutdownC
	}
	return answerIf(d, celsius > 0, celsius)
}

// GetMarginTemperature is the distance to the nearest threshold.
func (d *device) GetMarginTemperature() (nvml.MarginTemperature, nvml.Return) {
	celsius, ret := d.GetTemperature(nvml.TEMPERATURE_GPU)
	if ret != nvml.SUCCESS {
		return nvml.MarginTemperature{}, ret
	}
	margin := d.model.thermal().IdleMarginC + int32(d.model.IdleTemperatureC) - int32(celsius)
	return answerIf(d, d.model.thermal().IdleMarginC != 0, nvml.MarginTemperature{MarginTemperature: margin})
}

// GetPowerUsage is in milliwatts.
func (d *device) GetPowerUsage() (uint32, nvml.Return) {
	return read(d, func(g *GPUState) uint32 { return 1000 * valueOr(g.Health.PowerWatts, d.model.Power.IdleWatts) })
}

func (d *device) GetCurrentClocksEventReasons() (uint64, nvml.Return) {
	return read(d, func(g *GPUState) uint64 {
		if len(g.Processes) == 0 {
			return g.Health.Throttle | nvml.ClocksEventReasonGpuIdle
		}
		return g.Health.Throttle
	})
}

func (d *device) GetCurrentClocksThrottleReasons() (uint64, nvml.Return) {
	return d.GetCurrentClocksEventReasons()
}

// supportedReasons are those of which nvidia-smi says on every recorded GPU whether they hold. A real H100 has just these.
var supportedReasons = allThrottleReasons() | nvml.ClocksEventReasonApplicationsClocksSetting | nvml.ClocksEventReasonDisplayClockSetting

func (d *device) GetSupportedClocksEventReasons() (uint64, nvml.Return) {
	return answer(d, supportedReasons)
}

func (d *device) GetSupportedClocksThrottleReasons() (uint64, nvml.Return) {
	return d.GetSupportedClocksEventReasons()
}

func (d *device) GetEccMode() (current, pending nvml.EnableState, ret nvml.Return) {
	mode, ret := answer(d, enabled(d.model.ECC))
	return mode, mode, ret
}

func (d *device) GetTotalEccErrors(kind nvml.MemoryErrorType, counter nvml.EccCounterType) (uint64, nvml.Return) {
	g, ret := d.state()
	switch {
	case ret != nvml.SUCCESS:
	case !d.model.ECC:
		ret = nvml.ERROR_NOT_SUPPORTED
	case kind < 0 || kind >= nvml.MEMORY_ERROR_TYPE_COUNT || (counter != nvml.VOLATILE_ECC && counter != nvml.AGGREGATE_ECC):
		ret = nvml.ERROR_INVALID_ARGUMENT
	default:
		return g.Health.ecc(kind, counter), nvml.SUCCESS
	}
	return 0, ret
}

// GetMemoryErrorCounter has all errors in the device memory: none is simulated elsewhere.
func (d *device) GetMemoryErrorCounter(kind nvml.MemoryErrorType, counter nvml.EccCounterType,
	at nvml.MemoryLocation,
) (uint64, nvml.Return) {
	count, ret := d.GetTotalEccErrors(kind, counter)
	if ret == nvml.SUCCESS && (at < 0 || at >= nvml.MEMORY_LOCATION_COUNT) {
		ret = nvml.ERROR_INVALID_ARGUMENT
	}
	if ret != nvml.SUCCESS || at != nvml.MEMORY_LOCATION_DRAM {
		count = 0
	}
	return count, ret
}

func (h *Health) ecc(kind nvml.MemoryErrorType, counter nvml.EccCounterType) uint64 {
	counts := h.Volatile
	if counter == nvml.AGGREGATE_ECC {
		counts = h.Aggregate
	}
	if kind == nvml.MEMORY_ERROR_TYPE_UNCORRECTED {
		return counts.Uncorrected
	}
	return counts.Corrected
}

// GetRemappedRows answers from Ampere on: older GPUs retire pages.
func (d *device) GetRemappedRows() (corrected, uncorrected int, pending, failed bool, ret nvml.Return) {
	if architectures[d.model.Architecture] < nvml.DEVICE_ARCH_AMPERE {
		_, ret = answerIf(d, false, 0)
		return 0, 0, false, false, ret
	}
	rows, ret := read(d, func(g *GPUState) Rows { return g.Health.Rows })
	return rows.Corrected, rows.Uncorrected, rows.Pending, rows.Failed, ret
}

// GetFieldValues fills in each value or says in it why there is none.
func (d *device) GetFieldValues(values []nvml.FieldValue) nvml.Return {
	g, ret := d.state()
	if ret != nvml.SUCCESS {
		return ret
	}
	if len(values) == 0 {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	driver := d.lib.machine.DriverVersion()
	for i := range values {
		v := &values[i]
		value, ok := d.field(g, v.FieldId, v.ScopeId)
		v.Value, v.NvmlReturn = [8]byte{}, uint32(nvml.SUCCESS)
		if !knowsField(driver, v.FieldId) {
			v.NvmlReturn = uint32(nvml.ERROR_INVALID_ARGUMENT)
			continue
		}
		if !ok {
			v.NvmlReturn = uint32(nvml.ERROR_NOT_SUPPORTED)
			continue
		}
		v.ValueType = uint32(nvml.VALUE_TYPE_UNSIGNED_LONG_LONG)
		switch v.FieldId {
		case nvml.FI_DEV_GET_GPU_RECOVERY_ACTION:
			v.ValueType = uint32(nvml.VALUE_TYPE_UNSIGNED_INT)
		case nvml.FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT, nvml.FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT:
			v.ValueType = uint32(nvml.VALUE_TYPE_SIGNED_INT)
			binary.NativeEndian.PutUint32(v.Value[:], uint32(value))
			continue
		}
		binary.NativeEndian.PutUint64(v.Value[:], value)
	}
	return nvml.SUCCESS
}

// fieldSince is the first branch of the driver that has a field, where that is younger than the oldest driver in use.
var fieldSince = map[uint32]int{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: 565}

// knowsField tells whether a driver of that version has heard of a field, whatever the GPU has.
func knowsField(driver string, id uint32) bool {
	branch := branchOf(driver)
	return branch > 0 && id > 0 && id < nvml.FI_MAX && branch >= fieldSince[id]
}

// branchOf is 580 for 580.159.04, and 0 for what is no version.
func branchOf(driver string) int {
	number, _, _ := strings.Cut(driver, ".")
	branch, err := strconv.Atoi(number)
	if err != nil {
		return 0
	}
	return branch
}

func (d *device) field(g *GPUState, id, scope uint32) (value uint64, ok bool) {
	h := &g.Health
	rows := architectures[d.model.Architecture] >= nvml.DEVICE_ARCH_AMPERE
	switch id {
	case nvml.FI_DEV_ECC_SBE_VOL_TOTAL:
		return h.Volatile.Corrected, d.model.ECC
	case nvml.FI_DEV_ECC_DBE_VOL_TOTAL:
		return h.Volatile.Uncorrected, d.model.ECC
	case nvml.FI_DEV_ECC_SBE_AGG_TOTAL:
		return h.Aggregate.Corrected, d.model.ECC
	case nvml.FI_DEV_ECC_DBE_AGG_TOTAL:
		return h.Aggregate.Uncorrected, d.model.ECC
	case nvml.FI_DEV_REMAPPED_COR:
		return uint64(h.Rows.Corrected), rows
	case nvml.FI_DEV_REMAPPED_UNC:
		return uint64(h.Rows.Uncorrected), rows
	case nvml.FI_DEV_REMAPPED_PENDING:
		return oneIf(h.Rows.Pending), rows
	case nvml.FI_DEV_REMAPPED_FAILURE:
		return oneIf(h.Rows.Failed), rows
	case nvml.FI_DEV_GET_GPU_RECOVERY_ACTION:
		return uint64(recoveries[h.Recovery]), true
	case nvml.FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT:
		return uint64(d.model.thermal().SlowdownMarginC), d.model.thermal().IdleMarginC != 0
	case nvml.FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT:
		return uint64(d.model.thermal().ShutdownMarginC), d.model.thermal().IdleMarginC != 0
	}
	return d.nvlinkField(h.Load, id, scope)
}

func oneIf(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func valueOr(v *uint32, otherwise uint32) uint32 {
	if v == nil {
		return otherwise
	}
	return *v
}
