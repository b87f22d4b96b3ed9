// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

// SchedulerServiceAccount is the identity that our manifests give to the
// scheduler.
var SchedulerServiceAccount = types.NamespacedName{Namespace: "stowage-system", Name: "stowage-scheduler"}

// SchedulerOptions say how to run a scheduler.
type SchedulerOptions struct {
	// Name names the process and its log; "scheduler" when empty, with a number
	// for further ones.
	Name string
	// Binary is the scheduler; required, except for StartStockScheduler.
	Binary string
	// Config is a KubeSchedulerConfiguration file. Its clientConnection's
	// kubeconfig and its leaderElection are replaced; all else stays as it is.
	// When empty, kube-scheduler's defaults hold.
	Config string
	// ServiceAccount is the identity; SchedulerServiceAccount when empty. It and
	// its RBAC must exist: apply the manifests first.
	ServiceAccount types.NamespacedName
	// Kubeconfig replaces the service account's kubeconfig.
	Kubeconfig string
	// LeaderElect keeps the configuration's leader election. It is off
	// otherwise, as it delays the start.
	LeaderElect bool
	// Args are further arguments.
	Args []string
	// Env is added to our environment.
	Env []string
	// ReadyTimeout is DefaultReadyTimeout when 0.
	ReadyTimeout time.Duration
}

// Scheduler is a running scheduler.
type Scheduler struct {
	*Process
	// URL is "https://127.0.0.1:<port>", where /metrics and the health checks
	// are. It has a certificate of the authority in CAFile.
	URL string
	// CAFile is the certificate of the authority that signed the server's.
	CAFile string
	// Kubeconfig is the file that the scheduler connects with.
	Kubeconfig string

	client *http.Client
}

// Get asks the scheduler's secure port, as the administrator, for example for
// "/metrics" or "/configz".
func (s *Scheduler) Get(ctx context.Context, path string) ([]byte, error) {
	return getHTTP(ctx, s.client, s.URL+path)
}

// StartScheduler starts our scheduler with a token of its service account and
// waits until it is ready, which with leader election does not mean leading.
// A scheduler that refuses its configuration gives an *ExitError with what it
// logged.
func (c *Cluster) StartScheduler(ctx context.Context, o SchedulerOptions) (*Scheduler, error) {
	if o.Name == "" {
		o.Name = "scheduler"
	}
	if o.Kubeconfig == "" {
		account := o.ServiceAccount
		if account == (types.NamespacedName{}) {
			account = SchedulerServiceAccount
		}
		var err error
		if o.Kubeconfig, err = c.ServiceAccountKubeconfig(ctx, account.Namespace, account.Name, nil); err != nil {
			return nil, fmt.Errorf("starting %s: %w", o.Name, err)
		}
	}
	return c.startScheduler(ctx, o)
}

// StartStockScheduler starts kube-scheduler of the same Kubernetes version as
// user system:kube-scheduler. It is built on first use.
func (c *Cluster) StartStockScheduler(ctx context.Context, o SchedulerOptions) (*Scheduler, error) {
	if _, err := EnsureBinaries(ctx, c.progress, StockScheduler); err != nil {
		return nil, err
	}
	if o.Name == "" {
		o.Name = "kube-scheduler"
	}
	if o.Binary == "" {
		o.Binary = c.binaries.KubeScheduler()
	}
	if o.Kubeconfig == "" {
		var err error
		if o.Kubeconfig, err = c.userKubeconfig("kube-scheduler", "system:kube-scheduler"); err != nil {
			return nil, err
		}
	}
	return c.startScheduler(ctx, o)
}

func (c *Cluster) startScheduler(ctx context.Context, o SchedulerOptions) (*Scheduler, error) {
	name := c.uniqueName(o.Name)
	config, err := schedulerConfig(o)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	configFile, err := c.writeFile(config, "config", name+".yaml")
	if err != nil {
		return nil, err
	}
	server, err := c.secureServer(name)
	if err != nil {
		return nil, err
	}
	args := append(server.args,
		"--config="+configFile,
		"--authentication-kubeconfig="+o.Kubeconfig,
		"--authorization-kubeconfig="+o.Kubeconfig,
	)
	if gates := gatesFlag(c.options.FeatureGates); gates != "" {
		args = append(args, "--feature-gates="+gates)
	}
	process, err := c.StartProcess(ctx, Command{
		Name:  name,
		Path:  o.Binary,
		Args:  append(args, o.Args...),
		Env:   o.Env,
		Ready: server.ready("/readyz"),

		ReadyTimeout: o.ReadyTimeout,
	})
	if err != nil {
		return nil, err
	}
	return &Scheduler{
		Process:    process,
		URL:        server.url(""),
		CAFile:     c.ServersCAFile(),
		Kubeconfig: o.Kubeconfig,
		client:     server.client,
	}, nil
}

// schedulerConfig is the configuration file with our connection. Fields that we
// do not know are kept, for the scheduler to judge.
func schedulerConfig(o SchedulerOptions) ([]byte, error) {
	config := map[string]any{
		"apiVersion": "kubescheduler.config.k8s.io/v1",
		"kind":       "KubeSchedulerConfiguration",
	}
	if o.Config != "" {
		data, err := os.ReadFile(o.Config)
		if err != nil {
			return nil, fmt.Errorf("reading the scheduler's configuration: %w", err)
		}
		if err := yaml.Unmarshal(data, &config); err != nil {
			return nil, fmt.Errorf("reading the scheduler's configuration %s: %w", o.Config, err)
		}
	}
	if err := setField(config, o.Kubeconfig, "clientConnection", "kubeconfig"); err != nil {
		return nil, fmt.Errorf("configuration %s: %w", o.Config, err)
	}
	if !o.LeaderElect {
		if err := setField(config, false, "leaderElection", "leaderElect"); err != nil {
			return nil, fmt.Errorf("configuration %s: %w", o.Config, err)
		}
	}
	return yaml.Marshal(config)
}

func setField(config map[string]any, value any, section, field string) error {
	inner := map[string]any{}
	if existing := config[section]; existing != nil {
		var ok bool
		if inner, ok = existing.(map[string]any); !ok {
			return fmt.Errorf("%s is a %T, not an object", section, existing)
		}
	}
	inner[field] = value
	config[section] = inner
	return nil
}
