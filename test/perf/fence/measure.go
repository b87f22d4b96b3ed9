// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"stowage.dev/stowage/internal/localcluster"
)

// row is what one scheduler did.
type row struct {
	fence     bool
	latencies []time.Duration // of the pods that came one after the other
	waits     histogram       // at the fence, of all pods
	rate      float64         // pods per second, of those that came at once
}

// measure starts a cluster with two schedulers, and gives them pods in turn.
func measure(ctx context.Context, root, binary string, nodes, pods, burst int) (rows []row, err error) {
	cluster, err := localcluster.Start(ctx, localcluster.Options{Progress: os.Stderr, WithoutControllerManager: true})
	if err != nil {
		return nil, err
	}
	defer func() {
		if stopErr := cluster.Stop(); err == nil {
			err = stopErr
		}
	}()
	// Before the cluster stops: kube-apiserver waits for watches that are still open.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := newWorld(ctx, cluster, root, nodes)
	if err != nil {
		return nil, err
	}

	start := time.Now()
	schedulers := map[bool]*localcluster.Scheduler{}
	for _, fence := range []bool{false, true} {
		if schedulers[fence], err = startScheduler(ctx, cluster, root, binary, fence); err != nil {
			return nil, err
		}
		// The first one waits for the caches.
		if _, err := w.bindOne(ctx, schedulerName(fence)); err != nil {
			return nil, err
		}
	}
	rows = []row{{fence: false}, {fence: true}}
	for range pods {
		for i := range rows {
			took, err := w.bindOne(ctx, schedulerName(rows[i].fence))
			if err != nil {
				return nil, err
			}
			rows[i].latencies = append(rows[i].latencies, took)
		}
	}
	fmt.Fprintf(os.Stderr, "%d pods for each scheduler, one after the other, after %s\n", pods, time.Since(start).Round(time.Second))
	for i := range rows {
		took, err := w.bindMany(ctx, schedulerName(rows[i].fence), burst)
		if err != nil {
			return nil, err
		}
		rows[i].rate = float64(burst) / took.Seconds()
		fmt.Fprintf(os.Stderr, "%d pods for %s, all at once, in %s\n", burst, schedulerName(rows[i].fence), took.Round(time.Millisecond))
	}
	for i := range rows {
		if !rows[i].fence {
			continue
		}
		if rows[i].waits, err = readWaits(ctx, schedulers[rows[i].fence]); err != nil {
			return nil, err
		}
		if n := rows[i].waits.count(); n < uint64(pods+burst) {
			return nil, fmt.Errorf("%d pods passed the fence, want %d at least", n, pods+burst)
		}
	}
	return rows, nil
}

func schedulerName(fence bool) string { return fmt.Sprintf("fence-%t", fence) }

// startScheduler starts a scheduler with the example configuration, but for its name and the fence.
func startScheduler(ctx context.Context, cluster *localcluster.Cluster, root, binary string, fence bool) (*localcluster.Scheduler, error) {
	example := filepath.Join(root, "manifests", "scheduler-config", "second-scheduler.yaml")
	text, err := os.ReadFile(example)
	if err != nil {
		return nil, err
	}
	name, enabled := "- schedulerName: stowage\n", "      fence:\n        enabled: true\n"
	if strings.Count(string(text), name) != 1 || strings.Count(string(text), enabled) != 1 {
		return nil, fmt.Errorf("%s: want %q and %q once each", example, name, enabled)
	}
	changed := strings.NewReplacer(
		name, fmt.Sprintf("- schedulerName: %s\n", schedulerName(fence)),
		enabled, fmt.Sprintf("      fence:\n        enabled: %t\n", fence),
	).Replace(string(text))
	file := filepath.Join(cluster.Dir(), schedulerName(fence)+".yaml")
	if err := os.WriteFile(file, []byte(changed), 0o600); err != nil {
		return nil, err
	}
	return cluster.StartScheduler(ctx, localcluster.SchedulerOptions{Name: schedulerName(fence), Binary: binary, Config: file})
}

// histogram is a Prometheus histogram: how many values are at most so large, by bound in seconds.
type histogram map[float64]uint64

func (h histogram) count() uint64 { return h[math.Inf(1)] }

// quantile returns the bound below which the share q of the values is.
func (h histogram) quantile(q float64) time.Duration {
	bounds := make([]float64, 0, len(h))
	for bound := range h {
		bounds = append(bounds, bound)
	}
	slices.Sort(bounds)
	for _, bound := range bounds {
		if float64(h[bound]) >= q*float64(h.count()) {
			return time.Duration(bound * float64(time.Second))
		}
	}
	return 0
}

// readWaits reads what the scheduler's fence says about its waits.
func readWaits(ctx context.Context, s *localcluster.Scheduler) (histogram, error) {
	const name = "stowage_fence_wait_duration_seconds"
	text, err := s.Get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("read the metrics of %s: %w", s.Name(), err)
	}
	family := families[name]
	if family == nil || len(family.GetMetric()) != 1 {
		return nil, fmt.Errorf("%s has no metric %s", s.Name(), name)
	}
	h := histogram{}
	for _, bucket := range family.GetMetric()[0].GetHistogram().GetBucket() {
		h[bucket.GetUpperBound()] = bucket.GetCumulativeCount()
	}
	h[math.Inf(1)] = family.GetMetric()[0].GetHistogram().GetSampleCount()
	return h, nil
}

// quantile returns the value below which the share q of the values is.
func quantile(values []time.Duration, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
