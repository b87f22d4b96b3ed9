// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/uuid"
)

const migPrefix = "MIG-"

// migDevice is the handle of a MIG device: a compute instance with its share of
// a GPU instance's memory and engines.
type migDevice struct {
	unsupportedDevice

	device *device
	at     Instance
	number uint64
}

var _ nvml.Device = (*migDevice)(nil)

// uuid follows from the GPU's and the instances' IDs: what is made again at the
// same place is the same device.
func (m *migDevice) uuid() string { return migUUID(m.device.uuid, m.at) }

func migUUID(gpu string, at Instance) string {
	return migPrefix + uuid.NewSHA1(namespace, fmt.Appendf(nil, "%s/mig/%d/%d", gpu, at.GPU, at.Compute)).String()
}

// parts are what the device consists of.
type parts struct {
	gpu     *GPUState
	inst    *GPUInstance
	profile *giProfile
	compute *ciProfile
}

// state answers ERROR_NOT_FOUND for a device that was destroyed.
func (m *migDevice) state() (parts, nvml.Return) {
	g, ret := m.device.state()
	if ret != nvml.SUCCESS {
		return parts{}, ret
	}
	inst := g.instance(m.at.GPU)
	if inst == nil {
		return parts{}, nvml.ERROR_NOT_FOUND
	}
	c := inst.compute(m.at.Compute)
	if c == nil || c.Number != m.number {
		return parts{}, nvml.ERROR_NOT_FOUND
	}
	p := m.device.model.MIG.table().byName(inst.Profile)
	return parts{g, inst, p, p.computeProfile(c.Profile)}, nvml.SUCCESS
}

// ofMIG is the value, if the device is still there.
func ofMIG[T any](m *migDevice, value func(parts) T) (T, nvml.Return) {
	p, ret := m.state()
	if ret != nvml.SUCCESS {
		var none T
		return none, ret
	}
	return value(p), nvml.SUCCESS
}

func (m *migDevice) IsMigDeviceHandle() (bool, nvml.Return) {
	return ofMIG(m, func(parts) bool { return true })
}

func (m *migDevice) GetUUID() (string, nvml.Return) {
	return ofMIG(m, func(parts) string { return m.uuid() })
}

// GetName is the GPU's with the profile, which a compute instance that is not
// the whole GPU instance has a prefix in.
func (m *migDevice) GetName() (string, nvml.Return) {
	return ofMIG(m, func(p parts) string {
		name := p.profile.name
		if p.compute.compute != p.profile.compute {
			name = fmt.Sprintf("%dc.%s", p.compute.compute, name)
		}
		return m.device.model.ProductName + " MIG " + name
	})
}

func (m *migDevice) GetIndex() (int, nvml.Return) {
	return ofMIG(m, func(parts) int {
		return slices.IndexFunc(m.device.migDevices(), func(other *migDevice) bool { return other.at == m.at })
	})
}

func (m *migDevice) GetGpuInstanceId() (int, nvml.Return) {
	return ofMIG(m, func(parts) int { return int(m.at.GPU) })
}

func (m *migDevice) GetComputeInstanceId() (int, nvml.Return) {
	return ofMIG(m, func(parts) int { return int(m.at.Compute) })
}

func (m *migDevice) GetDeviceHandleFromMigDeviceHandle() (nvml.Device, nvml.Return) {
	if _, ret := m.state(); ret != nvml.SUCCESS {
		return unsupportedDevice{}, ret
	}
	return m.device, nvml.SUCCESS
}

func (m *migDevice) GetAttributes() (nvml.DeviceAttributes, nvml.Return) {
	return ofMIG(m, func(p parts) nvml.DeviceAttributes {
		return nvml.DeviceAttributes{
			MultiprocessorCount: p.compute.sms, SharedCopyEngineCount: p.profile.copies, SharedDecoderCount: p.profile.dec,
			SharedJpegCount: p.profile.jpeg, SharedOfaCount: p.profile.fa,
			GpuInstanceSliceCount: p.profile.compute, ComputeInstanceSliceCount: p.compute.compute, MemorySizeMB: p.profile.memoryMiB,
		}
	})
}

// GetMemoryInfo: all compute instances of a GPU instance share its memory.
func (m *migDevice) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	return ofMIG(m, func(p parts) nvml.Memory {
		used := p.gpu.usedMiB(func(process Process) bool { return process.Instance != nil && process.Instance.GPU == m.at.GPU })
		return nvml.Memory{Total: p.profile.memoryMiB * mib, Used: used * mib, Free: (p.profile.memoryMiB - used) * mib}
	})
}

func (m *migDevice) GetComputeMode() (nvml.ComputeMode, nvml.Return) {
	return ofMIG(m, func(parts) nvml.ComputeMode { return nvml.COMPUTEMODE_DEFAULT })
}

func (m *migDevice) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return m.processes(ProcessCompute)
}

func (m *migDevice) GetGraphicsRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return m.processes(ProcessGraphics)
}

func (m *migDevice) GetMPSComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return m.processes(ProcessMPS)
}

func (m *migDevice) processes(kind ProcessKind) ([]nvml.ProcessInfo, nvml.Return) {
	return ofMIG(m, func(p parts) []nvml.ProcessInfo {
		return processInfos(p.gpu, func(process Process) bool {
			return process.Kind == kind && process.Instance != nil && *process.Instance == m.at
		})
	})
}
