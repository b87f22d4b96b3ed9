// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"fmt"
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Use is the part of Device that says who uses the GPU, and who may.
type Use interface {
	// Processes of all kinds, by PID. One that is in several of NVML's lists is named once.
	Processes() ([]Process, error)
	// MemoryUsedBytes includes what the driver reserves.
	MemoryUsedBytes() (uint64, error)
	// MemoryBeyondReserveBytes is what is in use without what the driver reserves for itself, which depends on the model. Drivers say so from
	// R510 on; the error of others wraps ErrNotSupported.
	MemoryBeyondReserveBytes() (uint64, error)
	// ComputeMode says who may compute on the GPU.
	ComputeMode() (ComputeMode, error)
	// SetComputeMode needs root. Under MIG only ComputeDefault is supported.
	SetComputeMode(ComputeMode) error
	// Persistence tells whether the GPU keeps its settings while nobody uses it.
	Persistence() (bool, error)
	// SetPersistence needs root.
	SetPersistence(on bool) error
}

// Process uses a GPU or a MIG device of it.
type Process struct {
	PID         uint32
	MemoryBytes uint64
	// Instance is nil for a GPU that is not partitioned.
	Instance *Instance
}

// ComputeMode in nvidia-smi's words.
type ComputeMode string

// The compute modes that today's drivers have.
const (
	ComputeDefault          ComputeMode = "Default"
	ComputeProhibited       ComputeMode = "Prohibited"
	ComputeExclusiveProcess ComputeMode = "Exclusive_Process"
)

var computeModes = map[gonvml.ComputeMode]ComputeMode{
	gonvml.COMPUTEMODE_DEFAULT:           ComputeDefault,
	gonvml.COMPUTEMODE_PROHIBITED:        ComputeProhibited,
	gonvml.COMPUTEMODE_EXCLUSIVE_PROCESS: ComputeExclusiveProcess,
}

// Known tells whether it is one of these, which can be set, and not what another driver has.
func (m ComputeMode) Known() bool {
	return m == ComputeDefault || m == ComputeProhibited || m == ComputeExclusiveProcess
}

// unknownMemory is NVML's word for a process whose memory it does not know.
const unknownMemory = ^uint64(0)

func (d *device) Processes() ([]Process, error) {
	var all []Process
	for call, list := range map[string]func() ([]gonvml.ProcessInfo, gonvml.Return){
		"nvmlDeviceGetComputeRunningProcesses":    d.nvml.GetComputeRunningProcesses,
		"nvmlDeviceGetGraphicsRunningProcesses":   d.nvml.GetGraphicsRunningProcesses,
		"nvmlDeviceGetMPSComputeRunningProcesses": d.nvml.GetMPSComputeRunningProcesses,
	} {
		infos, err := get(d.lib, call, list)
		if lacks(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, info := range infos {
			p := Process{PID: info.Pid, MemoryBytes: info.UsedGpuMemory}
			if p.MemoryBytes == unknownMemory {
				p.MemoryBytes = 0
			}
			// A library older than the fields leaves them zero on a GPU without MIG too.
			if info.GpuInstanceId != noInstance && info.ComputeInstanceId != noInstance {
				p.Instance = &Instance{GPU: info.GpuInstanceId, Compute: info.ComputeInstanceId}
			}
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b Process) int {
		return cmp.Or(cmp.Compare(a.PID, b.PID), a.Instance.compare(b.Instance), cmp.Compare(b.MemoryBytes, a.MemoryBytes))
	})
	return slices.CompactFunc(all, func(a, b Process) bool {
		return a.PID == b.PID && a.Instance.compare(b.Instance) == 0
	}), nil
}

// compare orders instances, none first.
func (i *Instance) compare(j *Instance) int {
	if i == nil || j == nil {
		switch {
		case i == j:
			return 0
		case i == nil:
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(i.GPU, j.GPU), cmp.Compare(i.Compute, j.Compute))
}

func (d *device) MemoryUsedBytes() (uint64, error) {
	memory, err := get(d.lib, "nvmlDeviceGetMemoryInfo", d.nvml.GetMemoryInfo)
	return memory.Used, err
}

func (d *device) MemoryBeyondReserveBytes() (uint64, error) {
	memory, err := get(d.lib, "nvmlDeviceGetMemoryInfo_v2", d.nvml.GetMemoryInfo_v2)
	return memory.Used, err
}

func (d *device) ComputeMode() (ComputeMode, error) {
	mode, err := get(d.lib, "nvmlDeviceGetComputeMode", d.nvml.GetComputeMode)
	if err != nil {
		return "", err
	}
	if known, ok := computeModes[mode]; ok {
		return known, nil
	}
	return ComputeMode(fmt.Sprintf("Unknown%d", mode)), nil
}

func (d *device) SetComputeMode(mode ComputeMode) error {
	for value, name := range computeModes {
		if name == mode {
			return ask(d.lib, "nvmlDeviceSetComputeMode", func() gonvml.Return { return d.nvml.SetComputeMode(value) })
		}
	}
	return fmt.Errorf("compute mode %q: want %s, %s or %s", mode, ComputeDefault, ComputeProhibited, ComputeExclusiveProcess)
}

func (d *device) Persistence() (bool, error) {
	mode, err := get(d.lib, "nvmlDeviceGetPersistenceMode", d.nvml.GetPersistenceMode)
	return mode == gonvml.FEATURE_ENABLED, err
}

func (d *device) SetPersistence(on bool) error {
	mode := gonvml.FEATURE_DISABLED
	if on {
		mode = gonvml.FEATURE_ENABLED
	}
	return ask(d.lib, "nvmlDeviceSetPersistenceMode", func() gonvml.Return { return d.nvml.SetPersistenceMode(mode) })
}
