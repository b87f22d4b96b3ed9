// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/test/lab"
)

const (
	// readyTimeout is how long the scheduler may take to read everything, on a machine that does much else.
	readyTimeout = 5 * time.Minute
	// The lease of second-scheduler.yaml.
	leaseNamespace, leaseName = "stowage-system", "stowage-scheduler"
)

// started says when a scheduler had come how far.
type started struct {
	begin, ready, leading time.Time
}

// writeConfig writes the shipped configuration with another auditPeriod.
func (b *bench) writeConfig() (string, error) {
	shipped := filepath.Join(b.root, "manifests", "scheduler-config", "second-scheduler.yaml")
	text, err := os.ReadFile(shipped)
	if err != nil {
		return "", err
	}
	const period = "auditPeriod: 10m"
	if n := strings.Count(string(text), period); n != 1 {
		return "", fmt.Errorf("%s has %q %d times, want it once", shipped, period, n)
	}
	changed := strings.Replace(string(text), period, "auditPeriod: "+b.size.AuditPeriod.String(), 1)
	file := filepath.Join(b.cluster.Dir(), "second-scheduler.yaml")
	return file, os.WriteFile(file, []byte(changed), 0o600)
}

// startScheduler starts the scheduler and waits until it leads.
func (b *bench) startScheduler(ctx context.Context) (at started, err error) {
	o := localcluster.SchedulerOptions{Binary: b.binary, Config: b.config, LeaderElect: true, ReadyTimeout: readyTimeout}
	if b.scheduler != nil {
		o.Kubeconfig = b.scheduler.Kubeconfig
	}
	at.begin = time.Now()
	if b.scheduler, err = b.cluster.StartScheduler(ctx, o); err != nil {
		return at, err
	}
	at.ready = time.Now()
	b.logs = append(b.logs, b.scheduler.LogPath())
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, readyTimeout, true, func(ctx context.Context) (bool, error) {
		lease, err := b.client.CoordinationV1().Leases(leaseNamespace).Get(ctx, leaseName, metav1.GetOptions{})
		return err == nil && lease.Spec.AcquireTime != nil && lease.Spec.AcquireTime.After(at.begin), nil
	})
	at.leading = time.Now()
	if err != nil {
		return at, fmt.Errorf("waiting until %s leads: %w", b.scheduler.Name(), err)
	}
	return at, nil
}

// metrics are what the scheduler tells of itself.
func (b *bench) metrics(ctx context.Context) (lab.Metrics, error) {
	text, err := b.scheduler.Get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	return lab.ParseMetrics(text)
}
