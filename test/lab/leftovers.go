// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
)

// Leftovers lists what should be gone after all pods and claims are deleted:
// claims, devices that the scheduler still counts as held, CDI specs and ledger
// entries.
func (l *Lab) Leftovers(ctx context.Context) ([]string, error) {
	var left []string
	claims, err := l.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, claim := range claims.Items {
		left = append(left, "claim "+claim.Namespace+"/"+claim.Name)
	}
	for _, gauge := range []string{"stowage_tracker_held_devices", "stowage_tracker_in_flight_allocations"} {
		value, err := l.gauge(ctx, gauge)
		if err != nil {
			return nil, err
		}
		if value != 0 {
			left = append(left, fmt.Sprintf("the scheduler's %s is %g", gauge, value))
		}
	}
	for _, node := range l.nodes {
		for _, pattern := range node.leavings {
			files, err := filepath.Glob(pattern)
			if err != nil {
				return nil, err
			}
			for _, file := range files {
				if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
					left = append(left, "file "+file)
				}
			}
		}
	}
	return left, nil
}

// WaitForNoLeftovers waits until Leftovers lists nothing. What cannot be read is read again.
func (l *Lab) WaitForNoLeftovers(ctx context.Context, timeout time.Duration) error {
	var left []string
	var unread error
	err := wait.PollUntilContextTimeout(ctx, pollInterval, timeout, true, func(ctx context.Context) (bool, error) {
		left, unread = l.Leftovers(ctx)
		return unread == nil && len(left) == 0, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for claims, held devices, CDI specs and ledger entries to be gone: %w; left: %v", both(err, unread), left)
	}
	return nil
}

// gauge reads one of the scheduler's metrics.
func (l *Lab) gauge(ctx context.Context, name string) (float64, error) {
	text, err := l.scheduler.Get(ctx, "/metrics")
	if err != nil {
		return 0, fmt.Errorf("reading the scheduler's metrics: %w", err)
	}
	metrics, err := ParseMetrics(text)
	if err != nil {
		return 0, fmt.Errorf("of the scheduler: %w", err)
	}
	family, ok := metrics[name]
	if !ok || len(family.GetMetric()) != 1 {
		return 0, fmt.Errorf("the scheduler does not have the metric %s", name)
	}
	return family.GetMetric()[0].GetGauge().GetValue(), nil
}
