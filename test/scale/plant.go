// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/test/lab"
)

const (
	comparisonsMetric  = "stowage_scheduler_audit_comparisons_total"
	comparedAtMetric   = "stowage_scheduler_audit_last_comparison_timestamp_seconds"
	differencesMetric  = "stowage_scheduler_audit_differences"
	doubleHoldsMetric  = "stowage_scheduler_audit_double_held_devices"
	doubleHoldsReason  = "DeviceHeldTwice" // of the event
	doubleHoldsTimeout = 5 * time.Minute
)

// plant is a device that this program has given to a second claim.
type plant struct {
	device string // as driver/pool/device
}

// audit waits for two complete comparisons without a difference, and then for the auditor to find a device that two claims hold.
func (b *bench) audit(ctx context.Context) error {
	m, err := b.metrics(ctx)
	if err != nil {
		return err
	}
	var at [2]float64
	for i := range at {
		so := m.Sum(comparisonsMetric, "result", "done")
		if m, err = b.awaitMetrics(ctx, "a complete comparison with the API", 3*b.AuditPeriod+5*time.Minute, func(m lab.Metrics) bool {
			// Metrics are not read in one moment: the counter may be ahead of the gauge.
			return m.Sum(comparisonsMetric, "result", "done") > so && m.Sum(comparedAtMetric) > at[0]
		}); err != nil {
			return err
		}
		at[i] = m.Sum(comparedAtMetric)
	}
	b.figures.number("audit: one comparison takes", at[1]-at[0]-b.AuditPeriod.Seconds(), "s")
	b.figures.number("audit: complete comparisons so far", m.Sum(comparisonsMetric, "result", "done"), "")
	b.figures.number("audit: comparisons that failed", m.Sum(comparisonsMetric, "result", "error"), "")
	b.figures.number("audit: differences", m.Sum(differencesMetric), "")
	if m.Sum(differencesMetric) > 0 || m.Sum(doubleHoldsMetric) > 0 {
		return errors.New("the auditor has found what nobody planted: see the scheduler's log")
	}
	return b.findPlant(ctx)
}

// findPlant gives a device to a second claim, waits until that is told, and takes it back.
func (b *bench) findPlant(ctx context.Context) error {
	// From here on the holdings are as they were made, but for those that have ended.
	i := slices.IndexFunc(b.running, func(r running) bool { return r.claim != "" })
	if i < 0 {
		return errors.New("no claim is left of those that were held before the scheduler started")
	}
	taken := b.running[i]
	victim := b.held[slices.IndexFunc(b.held, func(h holding) bool { return h.namespace == taken.namespace && h.name == taken.claim })]
	second := holding{
		namespace: namespaceName(0), name: "planted", node: victim.node, gpus: victim.gpus[:1], count: 1, pods: []string{"planted"},
	}
	b.planted = &plant{device: fmt.Sprintf("%s/%s/%s", driver, nodeName(victim.node), gpuName(victim.gpus[0]))}
	begin := time.Now()
	if err := b.makeHolding(ctx, &second); err != nil {
		return err
	}
	if _, err := b.awaitMetrics(ctx, "the device that two claims hold to be found", doubleHoldsTimeout, func(m lab.Metrics) bool {
		return m.Sum(doubleHoldsMetric) == 1
	}); err != nil {
		return err
	}
	b.figures.seconds("audit: device held by two claims found after", time.Since(begin))
	for _, claim := range []*holding{&victim, &second} {
		if err := b.awaitEvent(ctx, claim); err != nil {
			return err
		}
	}
	if err := b.end(ctx, running{namespace: second.namespace, pods: second.pods, claim: second.name}); err != nil {
		return err
	}
	_, err := b.awaitMetrics(ctx, "the device to be held by one claim again", doubleHoldsTimeout, func(m lab.Metrics) bool {
		return m.Sum(doubleHoldsMetric) == 0
	})
	return err
}

// awaitEvent waits for the event of a claim whose device another one holds.
func (b *bench) awaitEvent(ctx context.Context, claim *holding) error {
	selector := fmt.Sprintf("involvedObject.name=%s,reason=%s,type=%s", claim.name, doubleHoldsReason, corev1.EventTypeWarning)
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		events, err := b.client.CoreV1().Events(claim.namespace).List(ctx, metav1.ListOptions{FieldSelector: selector})
		if err != nil || len(events.Items) == 0 {
			return false, nil
		}
		b.say("event of claim %s/%s: %s", claim.namespace, claim.name, events.Items[0].Message)
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for event %s of claim %s/%s: %w", doubleHoldsReason, claim.namespace, claim.name, err)
	}
	return nil
}

// awaitMetrics waits until the scheduler's metrics are as they should be, and returns them.
func (b *bench) awaitMetrics(
	ctx context.Context, what string, timeout time.Duration, condition func(lab.Metrics) bool,
) (m lab.Metrics, err error) {
	var last error
	err = wait.PollUntilContextTimeout(ctx, 500*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
		m, last = b.metrics(ctx)
		return last == nil && condition(m), nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("waiting for %s: %w", what, err), last)
	}
	return m, nil
}
