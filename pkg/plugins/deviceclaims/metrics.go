package deviceclaims

import (
	"errors"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"stowage.dev/stowage/pkg/wakeup"
)

const metricsSubsystem = "stowage_scheduler"

// Values of the label "write".
const (
	writeFinalizer    = "finalizer"
	writeAdoption     = "adoption"
	writeAllocation   = "allocation"
	writeDeallocation = "deallocation"
	writeUndo         = "undo"
	writeWithdrawal   = "withdrawal"
	writeCreation     = "creation"
	writeDeletion     = "deletion"
)

var (
	allocationsTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem:      metricsSubsystem,
		Name:           "allocations_total",
		Help:           "Number of times that devices were to be chosen on a node picked for a pod, by result: chosen, refused (the node no longer fits, or a claim changed), or error.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"result"})
	allocationDuration = metrics.NewHistogram(&metrics.HistogramOpts{
		Subsystem:      metricsSubsystem,
		Name:           "allocation_duration_seconds",
		Help:           "Time taken to choose devices on a node picked for a pod and to reserve them.",
		Buckets:        metrics.ExponentialBuckets(0.00001, 4, 10),
		StabilityLevel: metrics.ALPHA,
	})
	claimWritesTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem:      metricsSubsystem,
		Name:           "claim_writes_total",
		Help:           "Number of writes to ResourceClaims, by what was written and result: success, conflict or error.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"write", "result"})
	refusedNodesTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem:      metricsSubsystem,
		Name:           "refused_nodes_total",
		Help:           "Number of nodes refused in attempts that found no node for a pod's claims, by the reason that the pod's event gives.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"reason"})
	nodesDecidedAgain = metrics.NewCounter(&metrics.CounterOpts{
		Subsystem:      metricsSubsystem,
		Name:           "nodes_decided_again_total",
		Help:           "Number of refused nodes that were decided once more, without what pods of lower priority hold or what is about to be released, to know whether preemption can help.",
		StabilityLevel: metrics.ALPHA,
	})
	claimUndosTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem:      metricsSubsystem,
		Name:           "claim_undos_total",
		Help:           "Number of times that what was written to a claim was to be taken back, by result: done, kept (the pod is bound, or may be), or failed.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"result"})
	waitingPodsGauge = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem:      metricsSubsystem,
		Name:           "waiting_pods",
		Help:           "Number of pods with claims that have been tried and not been scheduled yet.",
		StabilityLevel: metrics.ALPHA,
	})
)

// What the auditor finds.
var (
	doubleHeldDevices = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem:      metricsSubsystem,
		Name:           "audit_double_held_devices",
		Help:           "Number of devices that several claims hold, at least one of them for itself alone, or of which, or of a counter that they take, more is held than there is.",
		StabilityLevel: metrics.ALPHA,
	})
	doubleHoldsTotal = metrics.NewCounter(&metrics.CounterOpts{
		Subsystem:      metricsSubsystem,
		Name:           "audit_double_holds_total",
		Help:           "Number of times that a device was found to be held by several claims, at least one of them for itself alone, or that more was held of it, or of a counter that it takes, than there is.",
		StabilityLevel: metrics.ALPHA,
	})
	differencesGauge = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Subsystem:      metricsSubsystem,
		Name:           "audit_differences",
		Help:           "Number of differences between the claims that are known and the API at the last comparison, by kind: missing, gone, outdated, or usage.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"kind"})
	comparisonsTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem:      metricsSubsystem,
		Name:           "audit_comparisons_total",
		Help:           "Number of comparisons of the claims that are known with the API, by result: done, or error (it could not be made).",
		StabilityLevel: metrics.ALPHA,
	}, []string{"result"})
	lastComparison = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem:      metricsSubsystem,
		Name:           "audit_last_comparison_timestamp_seconds",
		Help:           "Unix time of the last comparison with the API that could be made; before the first one, of the auditor's start. 0 if auditPeriod is 0.",
		StabilityLevel: metrics.ALPHA,
	})
	comparisonPeriod = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem:      metricsSubsystem,
		Name:           "audit_period_seconds",
		Help:           "Time between two comparisons with the API, 0 if there are none.",
		StabilityLevel: metrics.ALPHA,
	})
	staleInFlight = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem:      metricsSubsystem,
		Name:           "audit_stale_in_flight_allocations",
		Help:           "Number of allocations that have been in flight for longer than the binding timeout while no pod is being bound with them.",
		StabilityLevel: metrics.ALPHA,
	})
)

var wakeUpsTotal = metrics.NewCounterVec(&metrics.CounterOpts{
	Subsystem: metricsSubsystem,
	Name:      "wakeups_total",
	Help: "Number of times that a pod waiting for devices or claims was woken, by cause (device: freed; slice: new, gone or changed, also by taints; class; claim: the pod's own; node; pod; " +
		"next: a pod woken earlier did not take the devices; retry: the last attempt had no answer) and by result: placed (the pod was bound), or not_placed.",
	StabilityLevel: metrics.ALPHA,
}, []string{"result", "cause"})

// countWakeUp counts the outcome of a wake-up.
func countWakeUp(cause wakeup.Cause, placed bool) {
	result := "not_placed"
	if placed {
		result = "placed"
	}
	wakeUpsTotal.WithLabelValues(result, string(cause)).Inc()
}

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(allocationsTotal, allocationDuration, claimWritesTotal, claimUndosTotal, refusedNodesTotal, nodesDecidedAgain, waitingPodsGauge, wakeUpsTotal)
	legacyregistry.MustRegister(doubleHeldDevices, doubleHoldsTotal, differencesGauge, comparisonsTotal, lastComparison, comparisonPeriod,
		staleInFlight)
	legacyregistry.CustomMustRegister(caches)
})

func allocationResult(err error) string {
	var refusal *refusedError
	switch {
	case err == nil:
		return "chosen"
	case errors.As(err, &refusal):
		return "refused"
	default:
		return "error"
	}
}

func countWrite(write string, err error) {
	result := "success"
	switch {
	case apierrors.IsConflict(err):
		result = "conflict"
	case err != nil:
		result = "error"
	}
	claimWritesTotal.WithLabelValues(write, result).Inc()
}

func countUndo(kept bool, err error) {
	result := "done"
	switch {
	case err != nil:
		result = "failed"
	case kept:
		result = "kept"
	}
	claimUndosTotal.WithLabelValues(result).Inc()
}
