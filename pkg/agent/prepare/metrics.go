package prepare

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var lockWaitSeconds = metrics.NewHistogramVec(&metrics.HistogramOpts{
	Namespace:      "stowage",
	Subsystem:      "agent",
	Name:           "lock_wait_seconds",
	Help:           "How long a call waited for a lock, by its kind (claim, gpu) and outcome (ok, error: it was not free in time).",
	Buckets:        []float64{.001, .005, .02, .1, .5, 1, 5, 15},
	StabilityLevel: metrics.ALPHA,
}, []string{"lock", "outcome"})

// RegisterMetrics registers the package's metrics in the process's registry, once.
var RegisterMetrics = sync.OnceFunc(func() { legacyregistry.MustRegister(lockWaitSeconds) })

func outcome(err error) string {
	if err != nil {
		return "error"
	}
	return "ok"
}
