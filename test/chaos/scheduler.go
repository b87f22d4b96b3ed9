// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/test/chaos/proxy"
)

// schedulerConfig is manifests/scheduler-config/second-scheduler.yaml with what a
// phase changes. Client-side limits are well above what one scheduler needs here,
// and below what would let one starve the API server.
const schedulerConfig = `apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {qps: 200, burst: 400}
leaderElection: {leaderElect: false}
profiles:
- schedulerName: %s
  plugins:
    multiPoint:
      disabled: [{name: DynamicResources}]
      enabled: [{name: DeviceClaims, weight: 2}]
    filter: {enabled: [{name: NodeUnschedulable}, {name: NodeName}, {name: TaintToleration}, {name: NodeAffinity}, {name: DeviceClaims}]}
    postFilter: {enabled: [{name: DeviceClaims}]}
    podGroupPostFilter: {enabled: [{name: DeviceClaims}]}
    preBind: {enabled: [{name: DeviceClaims}]}
  pluginConfig:
  - name: DeviceClaims
    args:
      apiVersion: kubescheduler.config.k8s.io/v1
      kind: DeviceClaimsArgs
%s`

// member is one scheduler, which may be killed and started again. Between it and
// the API server is a proxy of its own.
type member struct {
	cluster *localcluster.Cluster
	name    string // of the process and its profile
	stock   bool   // kube-scheduler
	start   func(context.Context) (*localcluster.Scheduler, error)
	proxy   *proxy.Proxy // nil for kube-scheduler

	mu      sync.Mutex
	running *localcluster.Scheduler // nil while it is down
}

// newMember prepares a scheduler of ours. args are lines of its plugin's
// arguments.
func newMember(ctx context.Context, cluster *localcluster.Cluster, binary, name, args string) (*member, error) {
	m := &member{cluster: cluster, name: name}
	kubeconfig, err := m.connect(ctx)
	if err != nil {
		return nil, err
	}
	config := filepath.Join(cluster.Dir(), name+".yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, schedulerConfig, name, args), 0o600); err != nil {
		return nil, err
	}
	m.start = func(ctx context.Context) (*localcluster.Scheduler, error) {
		return cluster.StartScheduler(ctx, localcluster.SchedulerOptions{
			Name: name, Binary: binary, Config: config, Kubeconfig: kubeconfig, Args: []string{"--v=2"},
		})
	}
	return m, nil
}

// newStockMember prepares kube-scheduler as it is.
func newStockMember(cluster *localcluster.Cluster) *member {
	m := &member{cluster: cluster, name: corev1.DefaultSchedulerName, stock: true}
	m.start = func(ctx context.Context) (*localcluster.Scheduler, error) {
		return cluster.StartStockScheduler(ctx, localcluster.SchedulerOptions{})
	}
	return m
}

// connect puts a proxy before the API server, and returns a kubeconfig of the
// scheduler's service account that leads through it.
func (m *member) connect(ctx context.Context) (kubeconfig string, err error) {
	account := localcluster.SchedulerServiceAccount
	file, err := m.cluster.ServiceAccountKubeconfig(ctx, account.Namespace, account.Name, nil)
	if err != nil {
		return "", err
	}
	config, err := clientcmd.LoadFromFile(file)
	if err != nil {
		return "", err
	}
	for _, c := range config.Clusters {
		server, err := url.Parse(c.Server)
		if err != nil {
			return "", fmt.Errorf("kubeconfig %s: %w", file, err)
		}
		if m.proxy, err = proxy.Listen(server.Host); err != nil {
			return "", err
		}
		server.Host = m.proxy.Address()
		c.Server = server.String()
	}
	if err := m.cluster.OnStop("proxy of "+m.name, m.proxy.Close); err != nil {
		return "", err
	}
	file += "-through-proxy"
	return file, clientcmd.WriteToFile(*config, file)
}

// up starts the scheduler and waits until it is ready.
func (m *member) up(ctx context.Context) error {
	s, err := m.start(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.running = s
	return nil
}

// upAgain starts the scheduler until it works: the API server may be away, and
// schedulers give up when they do not find it.
func (m *member) upAgain(ctx context.Context) error {
	for {
		err := m.up(ctx)
		if err == nil {
			return nil
		}
		pause(ctx, 500*time.Millisecond)
		if ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// kill ends the scheduler with SIGKILL. It does nothing while it is down.
func (m *member) kill() (wasUp bool, err error) { return m.end((*localcluster.Process).Kill) }

// stop ends the scheduler in good order.
func (m *member) stop() error {
	_, err := m.end((*localcluster.Process).Stop)
	return err
}

func (m *member) end(how func(*localcluster.Process) error) (wasUp bool, err error) {
	m.mu.Lock()
	s := m.running
	m.running = nil
	m.mu.Unlock()
	if s == nil {
		return false, nil
	}
	if err := s.Err(); err != nil {
		return true, err
	}
	return true, how(s.Process)
}

// crashed returns an error when the scheduler has ended though nobody killed it.
func (m *member) crashed() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.running == nil {
		return nil
	}
	return m.running.Err()
}

// metric is the sum of a metric over its labels. A scheduler that is down gives
// an error.
func (m *member) metric(ctx context.Context, name string) (float64, error) {
	m.mu.Lock()
	s := m.running
	m.mu.Unlock()
	if s == nil {
		return 0, fmt.Errorf("%s does not run", m.name)
	}
	text, err := s.Get(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return 0, fmt.Errorf("metrics of %s: %w", m.name, err)
	}
	family := families[name]
	if family == nil {
		return 0, fmt.Errorf("%s has no metric %s", m.name, name)
	}
	sum := 0.0
	for _, sample := range family.GetMetric() {
		sum += sample.GetGauge().GetValue() + sample.GetCounter().GetValue()
	}
	return sum, nil
}
