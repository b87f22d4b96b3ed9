// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Load is the part of Device that tells how much of a GPU is used.
type Load interface {
	// Usage asks for all at once. That takes some 80 ms: a counter of the bus is watched for 20 ms each way. What the GPU or
	// the driver lacks is nil, and so is a single reading that failed; an error means that the GPU did not answer, as with
	// Readings.
	Usage() (Usage, error)
	// MIGUsage lists the MIG devices that there are, whoever made them, with the memory of each; none for a GPU that is not
	// partitioned.
	MIGUsage() ([]MIGUsage, error)
	// Sample takes counters from which a later sample tells rates: of the GPU, or of the GPU instance with that ID. The error
	// wraps ErrNotSupported for a GPU before Hopper. Who takes a sample closes it.
	Sample(gpuInstance *uint32) (Sample, error)
}

// Usage of a GPU. Percents are 0 to 100.
type Usage struct {
	// KernelPercent is the share of the time in which any kernel ran, MemoryPercent in which memory was read or written. NVML
	// has neither for a GPU with MIG enabled, nor the two below.
	KernelPercent, MemoryPercent   *uint32
	EncoderPercent, DecoderPercent *uint32
	// Memory is that of the whole GPU, in bytes.
	Memory *MemoryUse
	// PowerLimitMilliwatts that is enforced, and the energy since the driver was loaded.
	PowerLimitMilliwatts *uint32
	EnergyMillijoules    *uint64
	// Clocks by their domain.
	Clocks map[ClockDomain]Clock
	// PCIe is the traffic on the bus, in bytes a second over 20 ms. NVLink is what was moved over all links, in bytes, counted
	// by the driver.
	PCIe, NVLink *Traffic
	// Odd says which readings are nil although they are not just lacked; nil for none.
	Odd error
}

// MemoryUse is in bytes. Used includes what the driver keeps for itself.
type MemoryUse struct{ Total, Used uint64 }

// Traffic is seen from the GPU.
type Traffic struct{ Transmit, Receive uint64 }

// ClockDomain is a part of the GPU with a clock of its own.
type ClockDomain string

// The clock domains, in the words of nvidia-smi.
const (
	ClockGraphics ClockDomain = "graphics"
	ClockSM       ClockDomain = "sm"
	ClockMemory   ClockDomain = "memory"
	ClockVideo    ClockDomain = "video"
)

var clockDomains = map[ClockDomain]gonvml.ClockType{
	ClockGraphics: gonvml.CLOCK_GRAPHICS, ClockSM: gonvml.CLOCK_SM, ClockMemory: gonvml.CLOCK_MEM, ClockVideo: gonvml.CLOCK_VIDEO,
}

// Clock is in MHz. What is not known is nil.
type Clock struct{ Now, Highest *uint32 }

// MIGUsage of a MIG device.
type MIGUsage struct {
	UUID     string
	Instance Instance
	// Memory is that of the GPU instance, which its compute instances share; nil where it is not known.
	Memory *MemoryUse
}

// Sample of a GPU's counters, or of those of a GPU instance.
type Sample interface {
	// Since returns the rates from an earlier sample of the same GPU or instance to this one. They should be 100 ms apart
	// (nvml.h). The error wraps ErrNoSession if the driver was opened anew between the two.
	Since(earlier Sample) (Rates, error)
	// Close makes no call into NVML, and may come at any time, also after the session's end, which closes all samples: NVML frees
	// it with the next call of Sample.
	Close()
}

// Rates between two samples, in percent from 0 to 100. What the GPU does not tell is nil.
type Rates struct {
	// KernelPercent is the share of the time in which anything ran, SMPercent how much of the multiprocessors was busy,
	// TensorPercent of their tensor cores, MemoryPercent of the memory's bandwidth.
	KernelPercent, SMPercent, TensorPercent, MemoryPercent *float64
}

func (d *handle) Usage() (Usage, error) {
	u := Usage{Clocks: map[ClockDomain]Clock{}}
	var heard outcomes
	keep := heard.keep
	const rates, encoder, decoder = "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetDecoderUtilization"
	utilization, err := get(d.lib, rates, d.nvml.GetUtilizationRates)
	read(&u.KernelPercent, keep)(percent(rates, utilization.Gpu, err))
	read(&u.MemoryPercent, keep)(percent(rates, utilization.Memory, err))
	read(&u.EncoderPercent, keep)(d.videoPercent(encoder, d.nvml.GetEncoderUtilization))
	read(&u.DecoderPercent, keep)(d.videoPercent(decoder, d.nvml.GetDecoderUtilization))
	read(&u.Memory, keep)(memoryUse(d.lib, d.nvml))
	read(&u.PowerLimitMilliwatts, keep)(get(d.lib, "nvmlDeviceGetEnforcedPowerLimit", d.nvml.GetEnforcedPowerLimit))
	read(&u.EnergyMillijoules, keep)(get(d.lib, "nvmlDeviceGetTotalEnergyConsumption", d.nvml.GetTotalEnergyConsumption))
	for domain, kind := range clockDomains {
		var clock Clock
		read(&clock.Now, keep)(get(d.lib, "nvmlDeviceGetClockInfo", func() (uint32, gonvml.Return) { return d.nvml.GetClockInfo(kind) }))
		read(&clock.Highest, keep)(get(d.lib, "nvmlDeviceGetMaxClockInfo",
			func() (uint32, gonvml.Return) { return d.nvml.GetMaxClockInfo(kind) }))
		if clock != (Clock{}) {
			u.Clocks[domain] = clock
		}
	}
	read(&u.PCIe, keep)(d.pcieTraffic())
	read(&u.NVLink, keep)(d.nvlinkTraffic())
	u.Odd, err = heard.verdict()
	return u, err
}

// percent refuses what is none: a driver in trouble answers anything.
func percent(call string, value uint32, err error) (uint32, error) {
	if err == nil && value > 100 {
		err = &CallError{Call: fmt.Sprintf("%s: %d percent", call, value), Return: gonvml.ERROR_INVALID_STATE}
	}
	return value, err
}

// videoPercent leaves out over how long it was measured.
func (d *handle) videoPercent(call string, f func() (uint32, uint32, gonvml.Return)) (uint32, error) {
	value, err := get(d.lib, call, func() (uint32, gonvml.Return) {
		value, _, ret := f()
		return value, ret
	})
	return percent(call, value, err)
}

func memoryUse(lib *library, of gonvml.Device) (MemoryUse, error) {
	memory, err := get(lib, "nvmlDeviceGetMemoryInfo", of.GetMemoryInfo)
	return MemoryUse{Total: memory.Total, Used: memory.Used}, err
}

// pcieTraffic is told in KB/s.
func (d *handle) pcieTraffic() (traffic Traffic, err error) {
	const kilobyte = 1000
	for counter, into := range map[gonvml.PcieUtilCounter]*uint64{
		gonvml.PCIE_UTIL_TX_BYTES: &traffic.Transmit, gonvml.PCIE_UTIL_RX_BYTES: &traffic.Receive,
	} {
		rate, err := get(d.lib, "nvmlDeviceGetPcieThroughput", func() (uint32, gonvml.Return) { return d.nvml.GetPcieThroughput(counter) })
		if err != nil {
			return traffic, err
		}
		*into = kilobyte * uint64(rate)
	}
	return traffic, nil
}

// allLinks is the scope of a field that is summed up over all NVLinks.
const allLinks = ^uint32(0)

// nvlinkTraffic is told in KiB.
func (d *handle) nvlinkTraffic() (traffic Traffic, err error) {
	for id, into := range map[uint32]*uint64{
		gonvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX: &traffic.Transmit, gonvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX: &traffic.Receive,
	} {
		value, err := fieldIn(d, id, allLinks)
		if err != nil {
			return traffic, err
		}
		*into = binary.NativeEndian.Uint64(value[:]) << 10
	}
	return traffic, nil
}

func (d *handle) MIGUsage() ([]MIGUsage, error) {
	if mode, err := d.MIGMode(); err != nil || !mode.Enabled {
		return nil, err
	}
	var devices []MIGUsage
	err := d.eachMIGDevice(func(handle gonvml.Device) error {
		uuid, instance, err := d.migIdentity(handle)
		if err != nil {
			return err
		}
		used := MIGUsage{UUID: uuid, Instance: instance}
		memory, err := memoryUse(d.lib, handle)
		switch {
		case err == nil:
			used.Memory = &memory
		case errors.Is(err, ErrNotFound) || concernsGPU(err):
			return err
		}
		devices = append(devices, used)
		return nil
	})
	return devices, err
}

type sample struct {
	lib *library
	gpm gonvml.GpmSample
}

// samples are those of a session that NVML holds, and whether they have been closed. NVML lets go of a closed one when the next one is
// taken, or at the session's end: only then is it known that the library is not being closed at the same time.
type samples struct {
	mu     sync.Mutex
	closed map[*sample]bool
}

func (s *samples) add(taken *sample) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed == nil {
		s.closed = map[*sample]bool{}
	}
	s.closed[taken] = false
}

// open tells whether rates can be told from the sample.
func (s *samples) open(of *sample) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	closed, held := s.closed[of]
	return held && !closed
}

func (s *samples) close(of *sample) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, held := s.closed[of]; held {
		s.closed[of] = true
	}
}

// free lets go of the closed ones, or of all. To be called by who uses the session. There is nothing to do about one that NVML keeps.
func (s *samples) free(all bool) {
	for held := s.take(all); held != nil; held = s.take(all) {
		_ = ask(held.lib, "nvmlGpmSampleFree", held.gpm.Free)
	}
}

// take is a closed one, or any, and nil if there is none: one that hangs keeps the others for who comes next.
func (s *samples) take(any bool) *sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	for held, closed := range s.closed {
		if closed || any {
			delete(s.closed, held)
			return held
		}
	}
	return nil
}

func (d *handle) Sample(gpuInstance *uint32) (Sample, error) {
	support, err := get(d.lib, "nvmlGpmQueryDeviceSupport", d.nvml.GpmQueryDeviceSupport)
	if err == nil && support.IsSupportedDevice == 0 || errors.Is(err, gonvml.ERROR_FUNCTION_NOT_FOUND) {
		err = &CallError{Call: "nvmlGpmQueryDeviceSupport", Return: gonvml.ERROR_NOT_SUPPORTED}
	}
	if err != nil {
		return nil, err
	}
	d.lib.samples.free(false)
	taken, err := get(d.lib, "nvmlGpmSampleAlloc", d.lib.nvml.GpmSampleAlloc)
	if err == nil && taken == nil {
		err = &CallError{Call: "nvmlGpmSampleAlloc", Return: gonvml.ERROR_UNKNOWN}
	}
	if err != nil {
		return nil, err
	}
	s := &sample{lib: d.lib, gpm: taken}
	d.lib.samples.add(s)
	if gpuInstance == nil {
		err = ask(d.lib, "nvmlGpmSampleGet", func() gonvml.Return { return d.nvml.GpmSampleGet(taken) })
	} else {
		err = ask(d.lib, "nvmlGpmMigSampleGet", func() gonvml.Return { return d.nvml.GpmMigSampleGet(int(*gpuInstance), taken) })
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *sample) Since(earlier Sample) (rates Rates, err error) {
	before, ok := earlier.(*sample)
	if !ok || before.lib != s.lib || !s.lib.samples.open(before) || !s.lib.samples.open(s) {
		return rates, fmt.Errorf("the driver was opened anew since: %w", ErrNoSession)
	}
	wanted := []struct {
		id   gonvml.GpmMetricId
		into **float64
	}{
		{gonvml.GPM_METRIC_GRAPHICS_UTIL, &rates.KernelPercent},
		{gonvml.GPM_METRIC_SM_UTIL, &rates.SMPercent},
		{gonvml.GPM_METRIC_ANY_TENSOR_UTIL, &rates.TensorPercent},
		{gonvml.GPM_METRIC_DRAM_BW_UTIL, &rates.MemoryPercent},
	}
	question := &gonvml.GpmMetricsGetType{NumMetrics: uint32(len(wanted)), Sample1: before.gpm, Sample2: s.gpm}
	for i, w := range wanted {
		question.Metrics[i].MetricId = uint32(w.id)
	}
	err = ask(s.lib, "nvmlGpmMetricsGet", func() gonvml.Return { return s.lib.nvml.GpmMetricsGet(question) })
	if err != nil {
		return Rates{}, err
	}
	for i, w := range wanted {
		answer := question.Metrics[i]
		// A value that is no percentage, or no number, is none.
		if gonvml.Return(answer.NvmlReturn) == gonvml.SUCCESS && answer.Value >= 0 && answer.Value <= 100 {
			value := answer.Value
			*w.into = &value
		}
	}
	return rates, nil
}

func (s *sample) Close() { s.lib.samples.close(s) }
