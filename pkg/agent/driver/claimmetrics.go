package driver

import (
	"sync/atomic"

	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/component-base/metrics"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// claimCollector reads the ledger when it is asked for metrics. So a claim's series are those of what is prepared now: they are gone with the
// claim, and there are no more of them than devices are in use, times the pods that share them.
type claimCollector struct {
	metrics.BaseStableCollector
	// records of the process's agent; nil before there is one.
	records atomic.Pointer[ledger.Ledger]
}

var claimMetrics = &claimCollector{}

var (
	ledgerDesc = metrics.NewDesc(metrics.BuildFQName(metricsNamespace, metricsSubsystem, "ledger_claims"),
		"Claims in the ledger, by state (started, completed, unreadable).", []string{"state"}, nil, metrics.ALPHA, "")
	claimDesc = metrics.NewDesc(metrics.BuildFQName(metricsNamespace, metricsSubsystem, "device_claim_info"),
		"1 for each device that is prepared, with its GPU, its claim, and each pod that the claim was reserved for (by UID; empty if none is known).",
		[]string{"device", "gpu", "namespace", "claim", "pod_uid"}, nil, metrics.ALPHA, "")
)

// DescribeWithStability implements metrics.StableCollector.
func (*claimCollector) DescribeWithStability(ch chan<- *metrics.Desc) {
	ch <- ledgerDesc
	ch <- claimDesc
}

// CollectWithStability implements metrics.StableCollector.
func (c *claimCollector) CollectWithStability(ch chan<- metrics.Metric) {
	claims := c.records.Load()
	if claims == nil {
		return
	}
	records, err := claims.Records()
	if err != nil {
		utilruntime.HandleError(err)
		return
	}
	states := map[string]int{"started": 0, "completed": 0, "unreadable": 0}
	for _, record := range records {
		switch record.State() {
		case "":
			states["unreadable"]++
		case ledger.PrepareCompleted:
			states["completed"]++
			describeClaim(ch, record.Entry)
		default:
			states["started"]++
		}
	}
	for state, n := range states {
		ch <- metrics.NewLazyConstMetric(ledgerDesc, metrics.GaugeValue, float64(n), state)
	}
}

// describeClaim has a series for each of the claim's devices and pods. A device that several requests have, which takes admin access, is one.
func describeClaim(ch chan<- metrics.Metric, entry *ledger.Entry) {
	pods := entry.Pods
	if len(pods) == 0 {
		pods = []types.UID{""}
	}
	type series struct {
		device string
		pod    types.UID
	}
	seen := map[series]bool{}
	for _, device := range entry.Devices {
		for _, pod := range pods {
			if s := (series{device.Device, pod}); !seen[s] {
				seen[s] = true
				ch <- metrics.NewLazyConstMetric(claimDesc, metrics.GaugeValue, 1, device.Device, device.GPU, entry.Claim.Namespace, entry.Claim.Name, string(pod))
			}
		}
	}
}
