// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"sync"
	"sync/atomic"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"stowage.dev/stowage/pkg/agent/health"
)

const (
	metricsNamespace = "stowage"
	metricsSubsystem = "agent"
)

var (
	callSeconds = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Namespace: metricsNamespace,
		Subsystem: metricsSubsystem,
		Name:      "call_duration_seconds",
		Help: "Time that the kubelet's calls took, counted once for each claim of a call, by operation (prepare, unprepare) and " +
			"outcome (ok, error).",
		Buckets:        []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 45},
		StabilityLevel: metrics.ALPHA,
	}, []string{"operation", "outcome"})

	callsInFlight = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "calls_in_flight",
		Help:           "The kubelet's calls that are under way, by operation (prepare, unprepare).",
		StabilityLevel: metrics.ALPHA,
	}, []string{"operation"})

	sliceErrors = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "slice_errors_total",
		Help:           "ResourceSlices that were not published as wanted, by reason (dropped_fields, invalid, forbidden, other).",
		StabilityLevel: metrics.ALPHA,
	}, []string{"reason"})

	statusErrors = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace: metricsNamespace,
		Subsystem: metricsSubsystem,
		Name:      "claim_status_errors_total",
		Help: "Number of times that the status of a claim's devices could not be written, by reason (forbidden, invalid, other). It " +
			"is tried again.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"reason"})

	sliceGapSeconds = metrics.NewHistogram(&metrics.HistogramOpts{
		Namespace: metricsNamespace,
		Subsystem: metricsSubsystem,
		Name:      "slice_gap_seconds",
		Help: "How long not all of the node's ResourceSlices were in the API server, after somebody deleted some: every start of the " +
			"kubelet deletes all.",
		Buckets:        []float64{.1, .25, .5, 1, 2, 3, 5, 10, 30, 60, 300},
		StabilityLevel: metrics.ALPHA,
	})

	poolGeneration = metrics.NewGauge(&metrics.GaugeOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "pool_generation",
		Help:           "Generation of the node's pool of ResourceSlices, as the API server has it.",
		StabilityLevel: metrics.ALPHA,
	})

	slicesPublished = metrics.NewGauge(&metrics.GaugeOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "slices",
		Help:           "ResourceSlices of the node in the API server.",
		StabilityLevel: metrics.ALPHA,
	})

	leftoversReleased = metrics.NewCounter(&metrics.CounterOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "leftovers_released_total",
		Help:           "Prepared claims that nobody used any more, which the agent released by itself.",
		StabilityLevel: metrics.ALPHA,
	})

	strayFiles = metrics.NewGauge(&metrics.GaugeOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "stray_cdi_files",
		Help:           "CDI specifications of claims that are not in the ledger, while it is not certain that nobody uses them.",
		StabilityLevel: metrics.ALPHA,
	})

	occupiedGPUs = metrics.NewGauge(&metrics.GaugeOpts{
		Namespace: metricsNamespace,
		Subsystem: metricsSubsystem,
		Name:      "occupied_gpus",
		Help: "GPUs of which something is held by a prepared claim that is not allocated any more, while it is not certain that " +
			"nobody uses it, or that are in quarantine.",
		StabilityLevel: metrics.ALPHA,
	})

	socketsRenewed = metrics.NewCounter(&metrics.CounterOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "sockets_renewed_total",
		Help:           "Sockets for the kubelet that were gone and were made anew.",
		StabilityLevel: metrics.ALPHA,
	})

	foreignProcesses = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "processes_without_claim",
		Help:           "Processes on GPUs that no claim has, without those of NVIDIA's daemons, by whose they are (host, pod).",
		StabilityLevel: metrics.ALPHA,
	}, []string{"device", "of"})

	gpusOfUnknownUse = metrics.NewGauge(&metrics.GaugeOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "gpus_of_unknown_use",
		Help:           "GPUs of which it could not be found out at the last look whether processes without a claim use them.",
		StabilityLevel: metrics.ALPHA,
	})

	gpusOfDevicePlugins = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Namespace: metricsNamespace,
		Subsystem: metricsSubsystem,
		Name:      "gpus_of_device_plugins",
		Help: "GPUs that another device plugin of the node offers or has given to a pod (1 each), by its resource. Claims do " +
			"not get them.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"device", "resource"})

	registerMetrics = sync.OnceFunc(func() {
		legacyregistry.MustRegister(callSeconds, callsInFlight, sliceErrors, statusErrors, sliceGapSeconds, poolGeneration, slicesPublished,
			leftoversReleased, strayFiles,
			occupiedGPUs, socketsRenewed, foreignProcesses, gpusOfUnknownUse, gpusOfDevicePlugins)
		legacyregistry.CustomMustRegister(gpuMetrics)
		legacyregistry.CustomMustRegister(claimMetrics)
	})
)

// gpuCollector reads the GPUs' condition when it is asked for metrics.
type gpuCollector struct {
	metrics.BaseStableCollector
	// hardware of the process's agent; nil before there is one.
	hardware atomic.Pointer[Hardware]
}

var gpuMetrics = &gpuCollector{}

func gpuDesc(name, help string, labels ...string) *metrics.Desc {
	return metrics.NewDesc(metrics.BuildFQName(metricsNamespace, metricsSubsystem, name), help,
		append([]string{"device"}, labels...), nil, metrics.ALPHA, "")
}

var (
	healthDesc = gpuDesc("device_health",
		"1 for the health that a GPU, or a MIG device that there is, has, 0 for the others (Healthy, Unhealthy, Unknown).", "health")
	faultDesc = gpuDesc("device_fault",
		"1 for each fault that a GPU, or a MIG device that there is, has, by reason, and by whether somebody has to act (permanent).",
		"reason", "permanent")
	temperatureDesc = gpuDesc("gpu_temperature_celsius", "Temperature of a GPU.")
	powerDesc       = gpuDesc("gpu_power_watts", "Power that a GPU draws.")
	eccDesc         = gpuDesc("gpu_ecc_errors_total", "Memory errors since the driver was loaded, by kind (corrected, uncorrected).", "kind")
	lanesDesc       = gpuDesc("gpu_pcie_lanes", "Lanes of a GPU's PCIe link that are in use.")
)

// DescribeWithStability implements metrics.StableCollector.
func (*gpuCollector) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, desc := range []*metrics.Desc{healthDesc, faultDesc, temperatureDesc, powerDesc, eccDesc, lanesDesc} {
		ch <- desc
	}
}

// CollectWithStability implements metrics.StableCollector.
func (c *gpuCollector) CollectWithStability(ch chan<- metrics.Metric) {
	h := c.hardware.Load()
	if h == nil {
		return
	}
	gauge := func(desc *metrics.Desc, value float64, labels ...string) {
		ch <- metrics.NewLazyConstMetric(desc, metrics.GaugeValue, value, labels...)
	}
	judge := func(name string, verdict health.Verdict) {
		for _, status := range []health.Status{health.Healthy, health.Unhealthy, health.Unknown} {
			value := 0.0
			if verdict.Status == status {
				value = 1
			}
			gauge(healthDesc, value, name, string(status))
		}
		seen := map[health.Reason]bool{}
		for _, fault := range verdict.Faults {
			if permanent := map[bool]string{true: "true", false: "false"}[fault.Permanent()]; !seen[fault.Reason] {
				gauge(faultDesc, 1, name, string(fault.Reason), permanent)
			}
			seen[fault.Reason] = true
		}
	}
	for name, partitions := range h.inventory.devices() {
		judge(name, h.monitor.Whole(name))
		for device, instance := range partitions {
			judge(device, h.monitor.Of(name, instance))
		}
		r := h.monitor.Readings(name)
		if r.TemperatureC != nil {
			gauge(temperatureDesc, float64(*r.TemperatureC), name)
		}
		if r.PowerMilliwatts != nil {
			gauge(powerDesc, float64(*r.PowerMilliwatts)/1000, name)
		}
		if r.ECC != nil {
			// A counter: the driver sets it back when it is loaded.
			ch <- metrics.NewLazyConstMetric(eccDesc, metrics.CounterValue, float64(r.ECC.Corrected), name, "corrected")
			ch <- metrics.NewLazyConstMetric(eccDesc, metrics.CounterValue, float64(r.ECC.Uncorrected), name, "uncorrected")
		}
		if r.PCIe != nil {
			gauge(lanesDesc, float64(r.PCIe.Width), name)
		}
	}
}
