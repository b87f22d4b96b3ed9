// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/component-base/metrics"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// claimCollector tells what the ledger has when it is asked for metrics. So a claim's series are those of what is prepared now: they are
// gone with the claim, and there are no more of them than devices are in use, times the pods that share them. Records are read when a file
// of the ledger has changed, or when that was longer ago than ledgerAge: who asks often has nothing read and hashed by that.
type claimCollector struct {
	metrics.BaseStableCollector
	// records of the process's agent; nil before there is one.
	records atomic.Pointer[ledger.Ledger]

	mu sync.Mutex // who asks while another reads waits for it
	// at is when the records were read, and files what there was of them then; empty if that is not known.
	at     time.Time
	files  string
	states map[string]int
	series []claimSeries
}

// claimSeries is a device of a claim, and a pod that has it.
type claimSeries struct {
	device, gpu string
	claim       ledger.Claim
	pod         types.UID
}

// ledgerAge is how old what is told of the ledger may be. It is for what becomes unreadable without a change, and
// for file systems that do not tell changes.
const ledgerAge = time.Minute

var claimMetrics = &claimCollector{}

var (
	ledgerDesc = metrics.NewDesc(metrics.BuildFQName(metricsNamespace, metricsSubsystem, "ledger_claims"),
		"Claims in the ledger, by state (started, completed, unreadable).", []string{"state"}, nil, metrics.ALPHA, "")
	claimDesc = metrics.NewDesc(metrics.BuildFQName(metricsNamespace, metricsSubsystem, "device_claim_info"),
		"1 for each device that is prepared, with its GPU, its claim, and each pod that the claim was reserved for (by UID; empty if "+
			"none is known).",
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
	states, series, err := c.read(claims)
	if err != nil {
		utilruntime.HandleError(err)
		return
	}
	for state, n := range states {
		ch <- metrics.NewLazyConstMetric(ledgerDesc, metrics.GaugeValue, float64(n), state)
	}
	for _, s := range series {
		ch <- metrics.NewLazyConstMetric(claimDesc, metrics.GaugeValue, 1, s.device, s.gpu, s.claim.Namespace, s.claim.Name, string(s.pod))
	}
}

// read returns what is told of the claims: how many are in each state, and the devices of those that are prepared. Nobody changes it after.
func (c *claimCollector) read(claims *ledger.Ledger) (map[string]int, []claimSeries, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	files := filesOf(claims.Dir()) // before they are read: what changes meanwhile is seen the next time
	if files != "" && files == c.files && time.Since(c.at) < ledgerAge {
		return c.states, c.series, nil
	}
	c.files = ""
	records, err := claims.Records()
	if err != nil {
		return nil, nil, err
	}
	c.at, c.files, c.series = time.Now(), files, nil
	c.states = map[string]int{"started": 0, "completed": 0, "unreadable": 0}
	for _, record := range records {
		switch record.State() {
		case "":
			c.states["unreadable"]++
		case ledger.PrepareCompleted:
			c.states["completed"]++
			c.series = append(c.series, seriesOf(record.Entry)...)
		case ledger.PrepareStarted:
			c.states["started"]++
		}
	}
	return c.states, c.series, nil
}

// filesOf tells the files of a folder in a text that is another one when one of them is written, replaced or removed. It is empty if they
// cannot all be told.
func filesOf(dir string) string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ""
	}
	var b strings.Builder
	b.WriteString(dir)
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			return ""
		}
		var inode uint64
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			inode = stat.Ino
		}
		fmt.Fprintf(&b, "\n%s %d %d %d", entry.Name(), inode, info.Size(), info.ModTime().UnixNano())
	}
	return b.String()
}

// seriesOf has a series for each of the claim's devices and pods. A device that several requests have, which takes admin access, is one.
func seriesOf(entry *ledger.Entry) (all []claimSeries) {
	pods := entry.Pods
	if len(pods) == 0 {
		pods = []types.UID{""}
	}
	seen := map[claimSeries]bool{}
	for _, device := range entry.Devices {
		for _, pod := range pods {
			s := claimSeries{device.Device, device.GPU, entry.Claim, pod}
			if !seen[s] {
				seen[s] = true
				all = append(all, s)
			}
		}
	}
	return all
}
