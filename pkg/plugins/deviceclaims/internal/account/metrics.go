// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package account

import (
	"sync/atomic"

	"k8s.io/component-base/metrics"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
)

// cacheCollector exports how full the bounded caches of the inventory and the allocator are, and how many pools are unusable. The
// numbers are read when somebody asks for them.
type cacheCollector struct {
	metrics.BaseStableCollector

	// store is that of the scheduler started last; a process has one.
	store atomic.Pointer[inventory.Store]
}

// Caches is the collector of the process.
var Caches = &cacheCollector{}

const metricsSubsystem = "stowage_scheduler"

var (
	cacheEntries = metrics.NewDesc(
		metricsSubsystem+"_cache_entries",
		"Number of entries in a bounded cache: compiled CEL selectors, matchers (the selectors and tolerations of a request), derivations "+
			"(compiled CEL expressions of derived attributes), numbers (kinds of requests), glances (nodes), or, in the pool that has most, parts "+
			"(what different nodes see of it) and columns (attributes of its devices).",
		[]string{"cache"}, nil, metrics.ALPHA, "",
	)
	cacheLimit = metrics.NewDesc(
		metricsSubsystem+"_cache_limit",
		"Largest number of entries of a bounded cache.",
		[]string{"cache"}, nil, metrics.ALPHA, "",
	)
	cacheEvictions = metrics.NewDesc(
		metricsSubsystem+"_cache_evictions_total",
		"Number of entries that had to leave a bounded cache to make room for others, or for which there was none.",
		[]string{"cache"}, nil, metrics.ALPHA, "",
	)
	poolProblems = metrics.NewDesc(
		metricsSubsystem+"_pool_problems",
		"Number of pools of ResourceSlices whose devices cannot be used: incomplete while its driver publishes it, or invalid. A node whose "+
			"slices contradict another node's pool counts as an invalid one.",
		[]string{"problem"}, nil, metrics.ALPHA, "",
	)
)

// DescribeWithStability implements [metrics.StableCollector].
func (c *cacheCollector) DescribeWithStability(ch chan<- *metrics.Desc) {
	ch <- cacheEntries
	ch <- cacheLimit
	ch <- cacheEvictions
	ch <- poolProblems
}

// CollectWithStability implements [metrics.StableCollector].
func (c *cacheCollector) CollectWithStability(ch chan<- metrics.Metric) {
	store := c.store.Load()
	if store == nil {
		return
	}
	stats := store.Stats()
	for name, s := range map[string]inventory.CacheStats{
		"selectors": stats.Selectors, "matchers": stats.Matchers, "derivations": stats.Derivations, "numbers": stats.Numbers,
		"parts": stats.Parts, "columns": stats.Columns, "glances": allocator.GlanceStats(store.View()),
	} {
		ch <- metrics.NewLazyConstMetric(cacheEntries, metrics.GaugeValue, float64(s.Entries), name)
		ch <- metrics.NewLazyConstMetric(cacheLimit, metrics.GaugeValue, float64(s.Limit), name)
		ch <- metrics.NewLazyConstMetric(cacheEvictions, metrics.CounterValue, float64(s.Evicted), name)
	}
	problems := map[inventory.ProblemKind]int{inventory.Incomplete: 0, inventory.Invalid: 0}
	for problem := range store.View().Problems() {
		problems[problem.Kind]++
	}
	for kind, n := range problems {
		ch <- metrics.NewLazyConstMetric(poolProblems, metrics.GaugeValue, float64(n), string(kind))
	}
}
