// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Load is what programs do to a GPU or to a MIG GPU instance, and what has come
// of it since the driver was loaded. The zero value is an idle GPU's.
type Load struct {
	// Percent of the time: of any kernel, of the multiprocessors (more finely),
	// of tensor cores, of the memory's bandwidth, of the video engines.
	GPU     uint32 `json:"gpu,omitempty"`
	SM      uint32 `json:"sm,omitempty"`
	Tensor  uint32 `json:"tensor,omitempty"`
	Memory  uint32 `json:"memory,omitempty"`
	Encoder uint32 `json:"encoder,omitempty"`
	Decoder uint32 `json:"decoder,omitempty"`
	// Clocks that differ from those of an idle GPU, in MHz; nil for none.
	Clocks *ClockRates `json:"clocks,omitempty"`
	// KB/s over the bus.
	PCIeTransmit uint32 `json:"pcieTransmit,omitempty"`
	PCIeReceive  uint32 `json:"pcieReceive,omitempty"`
	// Counters, in KiB and mJ.
	NVLinkTransmit uint64 `json:"nvlinkTransmit,omitempty"`
	NVLinkReceive  uint64 `json:"nvlinkReceive,omitempty"`
	Energy         uint64 `json:"energy,omitempty"`
}

// loadedDevice is the part of a device that tells its load.
type loadedDevice struct {
	unsupportedDevice

	on *device
}

// GetUtilizationRates has no answer for a GPU with MIG enabled (nvml.h: "On
// MIG-enabled GPUs, querying device utilization rates is not currently supported").
func (l loadedDevice) GetUtilizationRates() (nvml.Utilization, nvml.Return) {
	return unlessMIG(l.on, func(load Load) nvml.Utilization { return nvml.Utilization{Gpu: load.GPU, Memory: load.Memory} })
}

// videoPeriod is over how long video engines are looked at, in microseconds, as
// an H100 with driver 580.159.04 says.
const videoPeriod = 100000

// GetEncoderUtilization is the same (nvml.h).
func (l loadedDevice) GetEncoderUtilization() (percent, period uint32, ret nvml.Return) {
	percent, ret = unlessMIG(l.on, func(load Load) uint32 { return load.Encoder })
	return percent, videoPeriod, ret
}

// GetDecoderUtilization is the same (nvml.h).
func (l loadedDevice) GetDecoderUtilization() (percent, period uint32, ret nvml.Return) {
	percent, ret = unlessMIG(l.on, func(load Load) uint32 { return load.Decoder })
	return percent, videoPeriod, ret
}

func unlessMIG[T any](d *device, value func(Load) T) (T, nvml.Return) {
	g, ret := d.state()
	if ret == nvml.SUCCESS && g.MIG {
		ret = nvml.ERROR_NOT_SUPPORTED
	}
	if ret != nvml.SUCCESS {
		var none T
		return none, ret
	}
	return value(g.Health.Load), ret
}

// GetTotalEnergyConsumption is in mJ since the driver was loaded, from Volta on
// (nvml.h), which all simulated GPUs are.
func (l loadedDevice) GetTotalEnergyConsumption() (uint64, nvml.Return) {
	return read(l.on, func(g *GPUState) uint64 { return g.Health.Load.Energy })
}

// pcieInterval is how long a byte counter is watched for an answer (nvml.h).
const pcieInterval = 20 * time.Millisecond

// GetPcieThroughput is in KB/s.
func (l loadedDevice) GetPcieThroughput(counter nvml.PcieUtilCounter) (uint32, nvml.Return) {
	load, ret := read(l.on, func(g *GPUState) Load { return g.Health.Load })
	if ret != nvml.SUCCESS {
		return 0, ret
	}
	switch counter {
	case nvml.PCIE_UTIL_TX_BYTES:
		time.Sleep(pcieInterval)
		return load.PCIeTransmit, ret
	case nvml.PCIE_UTIL_RX_BYTES:
		time.Sleep(pcieInterval)
		return load.PCIeReceive, ret
	}
	return 0, nvml.ERROR_INVALID_ARGUMENT
}

// GetClockInfo is in MHz: what an idle GPU was recorded with, or what was set.
func (l loadedDevice) GetClockInfo(domain nvml.ClockType) (uint32, nvml.Return) {
	rates, ret := read(l.on, func(g *GPUState) ClockRates {
		if set := g.Health.Load.Clocks; set != nil {
			return *set
		}
		return l.on.model.Clocks.Idle
	})
	return rates.of(domain, ret)
}

// GetMaxClockInfo is in MHz.
func (l loadedDevice) GetMaxClockInfo(domain nvml.ClockType) (uint32, nvml.Return) {
	rates, ret := answer(l.on, l.on.model.Clocks.Highest)
	return rates.of(domain, ret)
}

func (c ClockRates) of(domain nvml.ClockType, ret nvml.Return) (uint32, nvml.Return) {
	mhz, known := map[nvml.ClockType]uint32{
		nvml.CLOCK_GRAPHICS: c.Graphics, nvml.CLOCK_SM: c.SM, nvml.CLOCK_MEM: c.Memory, nvml.CLOCK_VIDEO: c.Video,
	}[domain]
	switch {
	case ret != nvml.SUCCESS:
		return 0, ret
	case !known:
		return 0, nvml.ERROR_INVALID_ARGUMENT
	case mhz == 0:
		return 0, nvml.ERROR_NOT_SUPPORTED
	}
	return mhz, nvml.SUCCESS
}

// allLinks is the scope of a field that is summed up over all NVLinks (nvml.h:
// "A scopeId of UINT_MAX returns aggregate value").
const allLinks = 0xFFFFFFFF

// nvlinkField is a counter of data in KiB. That of a single link is not simulated.
func (l loadedDevice) nvlinkField(load Load, id, scope uint32) (value uint64, ok bool) {
	supported := l.on.model.NVLink != nil && scope == allLinks
	switch id {
	case nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX:
		return load.NVLinkTransmit, supported
	case nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX:
		return load.NVLinkReceive, supported
	}
	return 0, false
}

// The performance monitor (GPM): rates between two samples of counters.

// hasMonitor tells whether the GPU has one: from Hopper on (nvml.h).
func (l loadedDevice) hasMonitor() bool {
	return architectures[l.on.model.Architecture] >= nvml.DEVICE_ARCH_HOPPER
}

func (l loadedDevice) GpmQueryDeviceSupport() (nvml.GpmSupport, nvml.Return) {
	return answer(l.on, nvml.GpmSupport{Version: nvml.GPM_SUPPORT_VERSION, IsSupportedDevice: uint32(oneIf(l.hasMonitor()))})
}

func (l loadedDevice) GpmSampleGet(sample nvml.GpmSample) nvml.Return {
	if sample == nil {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	return sample.Get(l.on)
}

func (l loadedDevice) GpmMigSampleGet(instance int, sample nvml.GpmSample) nvml.Return {
	if sample == nil {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	return sample.MigGet(l.on, instance)
}

// gpmSample is what was counted at a time. The counters are not simulated: the
// load at that time stands for the rates since the sample before.
type gpmSample struct {
	mu    sync.Mutex
	freed bool
	// of is nil before the first Get, and number that of a MIG instance.
	of     *device
	number uint64
	load   Load
}

// GpmSampleAlloc makes an empty sample.
func (l *Library) GpmSampleAlloc() (nvml.GpmSample, nvml.Return) {
	if _, ret := l.now(); ret != nvml.SUCCESS {
		return unsupportedGpmSample{}, ret
	}
	return &gpmSample{}, nvml.SUCCESS
}

func (s *gpmSample) Free() nvml.Return {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.freed {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	s.freed = true
	return nvml.SUCCESS
}

func (s *gpmSample) Get(of nvml.Device) nvml.Return {
	return s.take(of, func(g *GPUState) (uint64, Load, bool) { return 0, g.Health.Load, true })
}

// MigGet answers ERROR_INVALID_ARGUMENT for an instance that is not there, which is assumed.
func (s *gpmSample) MigGet(of nvml.Device, instance int) nvml.Return {
	return s.take(of, func(g *GPUState) (uint64, Load, bool) {
		if found := g.instance(uint32(max(instance, 0))); found != nil && instance >= 0 {
			return found.Number, found.Load, true
		}
		return 0, Load{}, false
	})
}

func (s *gpmSample) take(of nvml.Device, find func(*GPUState) (number uint64, load Load, ok bool)) nvml.Return {
	d, ok := of.(*device)
	if !ok || d == nil {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	g, ret := d.state()
	if ret != nvml.SUCCESS {
		return ret
	}
	if !d.hasMonitor() {
		return nvml.ERROR_NOT_SUPPORTED
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	number, load, ok := find(g)
	if !ok || s.freed {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	s.of, s.number, s.load = d, number, load
	return nvml.SUCCESS
}

// GpmMetricsGet answers for two samples of one GPU or instance.
func (l *Library) GpmMetricsGet(get *nvml.GpmMetricsGetType) nvml.Return {
	if _, ret := l.now(); ret != nvml.SUCCESS {
		return ret
	}
	if get == nil || int(get.NumMetrics) > len(get.Metrics) {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	first, ok1 := get.Sample1.(*gpmSample)
	second, ok2 := get.Sample2.(*gpmSample)
	if !ok1 || !ok2 || first.of == nil || first.of != second.of || first.number != second.number || first.freed || second.freed {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	for i := range get.Metrics[:get.NumMetrics] {
		m := &get.Metrics[i]
		percent, known := map[nvml.GpmMetricId]uint32{
			nvml.GPM_METRIC_GRAPHICS_UTIL: second.load.GPU, nvml.GPM_METRIC_SM_UTIL: second.load.SM,
			nvml.GPM_METRIC_ANY_TENSOR_UTIL: second.load.Tensor, nvml.GPM_METRIC_DRAM_BW_UTIL: second.load.Memory,
		}[nvml.GpmMetricId(m.MetricId)]
		m.Value, m.NvmlReturn = float64(percent), uint32(nvml.SUCCESS)
		if !known {
			m.NvmlReturn = uint32(nvml.ERROR_NOT_SUPPORTED)
		}
	}
	return nvml.SUCCESS
}

// SetLoad is what programs do to a GPU from now on, or to a MIG GPU instance of it.
type SetLoad struct {
	GPU string `json:"gpu"`
	// Instance is a GPU instance's ID; nil for the GPU.
	Instance *uint32 `json:"instance,omitempty"`
	Load     Load    `json:"load"`
}

// Name implements Command.
func (*SetLoad) Name() string { return "load" }

func (c *SetLoad) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.findThere(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	if err := c.Load.validate(); err != nil {
		return Result{}, err
	}
	if c.Instance == nil {
		g.Health.Load = c.Load
		return Result{}, nil
	}
	instance := g.instance(*c.Instance)
	if instance == nil {
		return Result{}, refused("instance", *c.Instance, nvml.ERROR_NOT_FOUND)
	}
	instance.Load = c.Load
	return Result{}, nil
}

func (l Load) validate() error {
	for field, percent := range map[string]uint32{
		"gpu": l.GPU, "sm": l.SM, "tensor": l.Tensor, "memory": l.Memory, "encoder": l.Encoder, "decoder": l.Decoder,
	} {
		if percent > 100 {
			return fmt.Errorf("load.%s: %d: want 0 to 100", field, percent)
		}
	}
	return nil
}
