package prepare

import (
	"sync"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"stowage.dev/stowage/pkg/agent/ledger"
)

const (
	metricsNamespace = "stowage"
	metricsSubsystem = "agent"
)

var (
	lockWaitSeconds = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "lock_wait_seconds",
		Help:           "How long a call waited for a lock, by its kind (claim, gpu; release: for a claim that was being released) and outcome (ok, error: it was not free in time).",
		Buckets:        []float64{.001, .005, .02, .1, .5, 1, 5, 15, 40},
		StabilityLevel: metrics.ALPHA,
	}, []string{"lock", "outcome"})

	stepSeconds = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "step_duration_seconds",
		Help:           "How long the steps of preparing and unpreparing claims took, by operation (prepare, or unprepare: also of what is undone after a failure), step (a kind of side effect as in the ledger, or Find, Decide, Record, Verify) and outcome (ok, error).",
		Buckets:        []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25},
		StabilityLevel: metrics.ALPHA,
	}, []string{"operation", "step", "outcome"})

	deviceUseSeconds = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace:      metricsNamespace,
		Subsystem:      metricsSubsystem,
		Name:           "device_use_seconds_total",
		Help:           "How long claims had a device, counted when it is released.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"device"})
)

// RegisterMetrics registers the package's metrics in the process's registry, once.
var RegisterMetrics = sync.OnceFunc(func() { legacyregistry.MustRegister(lockWaitSeconds, stepSeconds, deviceUseSeconds) })

// The operations of stepSeconds.
const (
	preparing   = "prepare"
	unpreparing = "unprepare"
)

// The steps that are no side effects of their own; the others have the words of the ledger.
const (
	stepFind   ledger.StepKind = "Find"   // NVML answers for the claim's GPUs
	stepDecide ledger.StepKind = "Decide" // they are looked at, and what to do is listed
	stepRecord ledger.StepKind = "Record" // the ledger is written
	stepVerify ledger.StepKind = "Verify" // the result is read as the container runtime will
)

// measure enters how long a step took that began at start and ends now, with *err. To be deferred.
func measure(operation string, step ledger.StepKind, start time.Time, err *error) {
	stepSeconds.WithLabelValues(operation, string(step), outcome(*err)).Observe(time.Since(start).Seconds())
}

// measured is measure around f.
func measured(operation string, step ledger.StepKind, f func() error) (err error) {
	defer measure(operation, step, time.Now(), &err)
	return f()
}

// countUse enters how long the claim had its devices.
func (m *Manager) countUse(entry *ledger.Entry) (used time.Duration) {
	if entry.Completed.IsZero() {
		return 0
	}
	used = max(0, m.opts.Clock.Since(entry.Completed))
	for _, device := range entry.Devices {
		if !device.AdminAccess {
			deviceUseSeconds.WithLabelValues(device.Device).Add(used.Seconds())
		}
	}
	return used
}

func outcome(err error) string {
	if err != nil {
		return "error"
	}
	return "ok"
}
