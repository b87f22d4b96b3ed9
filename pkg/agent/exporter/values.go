// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/component-base/metrics"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// desc is a metric, with what it counts as.
type desc struct {
	name string
	desc *metrics.Desc
	kind metrics.ValueType
}

// allDescs are in the order in which they are made.
var allDescs []*desc

func newDesc(kind metrics.ValueType, name, help string, labels ...string) *desc {
	name = metrics.BuildFQName("stowage", "gpu", name)
	d := &desc{name, metrics.NewDesc(name, help, labels, nil, metrics.ALPHA, ""), kind}
	allDescs = append(allDescs, d)
	return d
}

var (
	// deviceLabels say which GPU or MIG device it is, holderLabels who has it.
	deviceLabels = []string{"uuid", "gpu", "device", "pci_bus_id", "model", "hostname"}
	holderLabels = []string{"namespace", "pod", "container", "claim"}
)

func gauge(name, help string, more ...string) *desc {
	return newDesc(metrics.GaugeValue, name, help, append(append(deviceLabels[:6:6], holderLabels...), more...)...)
}

func counter(name, help string, more ...string) *desc {
	return newDesc(metrics.CounterValue, name, help, append(append(deviceLabels[:6:6], holderLabels...), more...)...)
}

// The metrics. docs/metrics.md, *Metrics*, has the same list.
var (
	info = gauge("info", "1 for each GPU, and for each MIG device that there is or that somebody holds, by who holds it.")

	kernelUtil    = gauge("util_ratio", "Share of the time in which any kernel ran, 0 to 1.")
	smUtil        = gauge("sm_util_ratio", "How much of the multiprocessors was busy since the reading before, 0 to 1.")
	tensorUtil    = gauge("tensor_util_ratio", "Share of the time in which tensor cores were busy since the reading before, 0 to 1.")
	memoryUtil    = gauge("memory_util_ratio", "Share of the time in which the GPU's memory was read or written, 0 to 1.")
	bandwidthUtil = gauge("memory_bandwidth_util_ratio", "How much of the memory's bandwidth was used since the reading before, 0 to 1.")
	encoderUtil   = gauge("encoder_util_ratio", "Share of the time in which the video encoder was busy, 0 to 1.")
	decoderUtil   = gauge("decoder_util_ratio", "Share of the time in which the video decoder was busy, 0 to 1.")

	memoryUsed = gauge("memory_used_bytes",
		"Memory in use. Of a GPU it includes what the driver keeps for itself; of a partitioned one its MIG devices have it.")
	memoryTotal = gauge("memory_total_bytes", "All memory of the GPU, or of the MIG device.")

	power       = gauge("power_watts", "Power that the GPU draws.")
	powerLimit  = gauge("power_limit_watts", "Power that the GPU may draw.")
	energy      = counter("energy_joules_total", "Energy that the GPU has used since the driver was loaded.")
	temperature = gauge("temperature_celsius", "Temperature of the GPU.")

	clockRate    = gauge("clock_hertz", "Clocks, by their domain (graphics, sm, memory, video).", "clock")
	clockHighest = gauge("clock_max_hertz", "The highest that they can be.", "clock")
	throttled    = gauge("throttled", "1 for each reason for which the clocks are lower than they could be, 0 for the others.", "reason")

	eccErrors = counter("ecc_errors_total", "Memory errors since the driver was loaded, by kind (corrected, uncorrected).", "kind")
	xidErrors = counter("xid_errors_total",
		"XIDs since the agent started, by who had the device then; of who has left, or is beyond 8, without a pod.", "xid")
	xidTime = gauge("xid_timestamp_seconds", "When the XID was told last, in seconds since 1970.", "xid")

	pcieTX   = gauge("pcie_tx_bytes_per_second", "What the GPU sends over the PCIe bus, over 20 ms.")
	pcieRX   = gauge("pcie_rx_bytes_per_second", "What it receives, over 20 ms.")
	nvlinkTX = counter("nvlink_tx_bytes_total", "What the GPU has sent over all NVLinks since the driver was loaded.")
	nvlinkRX = counter("nvlink_rx_bytes_total", "What it has received.")

	readingAge = newDesc(metrics.GaugeValue, "reading_age_seconds",
		"How long ago the GPU was read. A GPU that does not answer has none, and no values.", deviceLabels...)
	pluginIDs = newDesc(metrics.GaugeValue, "device_plugin_ids",
		"Device IDs by which device plugins offer the GPU or MIG device to pods, by resource. A GPU that claims can have, too, may be "+
			"given out twice.",
		append(deviceLabels[:6:6], "resource")...)

	kubeletAnswers = newDesc(metrics.GaugeValue, "exporter_pod_resources_up",
		"1 if the kubelet has answered the last question who has which device.")
	podsAge = newDesc(metrics.GaugeValue, "exporter_pod_resources_age_seconds",
		"How old the kubelet's answer is that pods and containers are from. After 5 minutes it does not count any more.")
	unreadableClaims = newDesc(metrics.GaugeValue, "exporter_unreadable_claims",
		"Records of claims that cannot be read: their devices are without a pod and a claim.")
	leftOut = newDesc(metrics.GaugeValue, "exporter_holders_left_out",
		"Containers for which there are no series, because their device has 128 others.")
	unknownDevices = newDesc(metrics.GaugeValue, "exporter_unknown_devices",
		"1 for each resource of a device plugin with GPUs that this node is not known to have.", "resource")
)

// throttleReasons are in the words of nvidia-smi. GPUs that idle are slow for that reason.
var throttleReasons = map[string]uint64{
	"gpu_idle":                    gonvml.ClocksEventReasonGpuIdle,
	"applications_clocks_setting": gonvml.ClocksEventReasonApplicationsClocksSetting,
	"sw_power_cap":                gonvml.ClocksEventReasonSwPowerCap,
	"hw_slowdown":                 gonvml.ClocksThrottleReasonHwSlowdown,
	"sync_boost":                  gonvml.ClocksEventReasonSyncBoost,
	"sw_thermal_slowdown":         gonvml.ClocksEventReasonSwThermalSlowdown,
	"hw_thermal_slowdown":         gonvml.ClocksThrottleReasonHwThermalSlowdown,
	"hw_power_brake_slowdown":     gonvml.ClocksThrottleReasonHwPowerBrakeSlowdown,
	"display_clocks_setting":      gonvml.ClocksEventReasonDisplayClockSetting,
}

// condition puts what health reads, too.
func (o *output) condition(t target, r *reading) {
	c := &r.condition
	number(o, t, temperature, c.TemperatureC, 1)
	number(o, t, power, c.PowerMilliwatts, 1e-3)
	if c.Throttle != nil {
		for reason, bit := range throttleReasons {
			o.each(t, throttled, oneIf(*c.Throttle&bit != 0), reason)
		}
	}
	if c.ECC != nil {
		o.each(t, eccErrors, float64(c.ECC.Corrected), "corrected")
		o.each(t, eccErrors, float64(c.ECC.Uncorrected), "uncorrected")
	}
}

// usage puts what is used of a whole GPU. Memory of a partitioned one is told of its MIG devices, so that a sum counts it once.
func (o *output) usage(t target, r *reading) {
	u := &r.usage
	number(o, t, kernelUtil, u.KernelPercent, 1e-2)
	number(o, t, memoryUtil, u.MemoryPercent, 1e-2)
	number(o, t, encoderUtil, u.EncoderPercent, 1e-2)
	number(o, t, decoderUtil, u.DecoderPercent, 1e-2)
	number(o, t, powerLimit, u.PowerLimitMilliwatts, 1e-3)
	number(o, t, energy, u.EnergyMillijoules, 1e-3)
	if !r.partitioned {
		o.memory(t, u.Memory)
	}
	for domain, clock := range u.Clocks {
		number(o, t, clockRate, clock.Now, 1e6, string(domain))
		number(o, t, clockHighest, clock.Highest, 1e6, string(domain))
	}
	if u.PCIe != nil {
		o.each(t, pcieTX, float64(u.PCIe.Transmit))
		o.each(t, pcieRX, float64(u.PCIe.Receive))
	}
	if u.NVLink != nil {
		o.each(t, nvlinkTX, float64(u.NVLink.Transmit))
		o.each(t, nvlinkRX, float64(u.NVLink.Receive))
	}
}

func (o *output) memory(t target, memory *nvml.MemoryUse) {
	if memory != nil {
		o.each(t, memoryUsed, float64(memory.Used))
		o.each(t, memoryTotal, float64(memory.Total))
	}
}

// rates puts those since the reading before. Of a MIG device there is no other source of how much of the time it was used.
func (o *output) rates(t target, r *reading, instance uint32) {
	rates, ok := r.rates[instance]
	if !ok {
		return
	}
	number(o, t, smUtil, rates.SMPercent, 1e-2)
	number(o, t, tensorUtil, rates.TensorPercent, 1e-2)
	number(o, t, bandwidthUtil, rates.MemoryPercent, 1e-2)
	if instance != whole {
		number(o, t, kernelUtil, rates.KernelPercent, 1e-2)
	}
}

// number puts a value, unless the GPU lacks it.
func number[T uint32 | uint64 | float64](o *output, t target, desc *desc, value *T, factor float64, more ...string) {
	if value != nil {
		o.each(t, desc, float64(*value)*factor, more...)
	}
}
