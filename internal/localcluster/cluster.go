// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Options say how to start a cluster. The zero value is a good one.
type Options struct {
	// Progress receives a line per step; nil for none.
	Progress io.Writer
	// Dir is the cluster's folder for logs, certificates and data. When empty a
	// temporary one is made and removed by Stop. A given one is never removed.
	Dir string
	// Keep makes Stop leave the temporary folder.
	Keep bool
	// Sets are programs to build beyond the control plane's, for use later.
	Sets []BinarySet
	// FeatureGates are set on every Kubernetes component, for example
	// {"DRAExtendedResource": true}.
	FeatureGates map[string]bool
	// RuntimeConfig turns API groups and versions on or off, for example
	// {"resource.k8s.io/v1beta2": true}.
	RuntimeConfig map[string]bool
	// APIServerArgs are further flags of kube-apiserver, by name without
	// dashes. They replace ours.
	APIServerArgs map[string]string
	// ControllerManagerArgs are further arguments of kube-controller-manager.
	ControllerManagerArgs []string
	// WithoutControllerManager leaves kube-controller-manager out. Then no
	// service accounts, and no claims from templates, are made.
	WithoutControllerManager bool
}

// Cluster is a running control plane and what was started beside it.
type Cluster struct {
	options  Options
	binaries Binaries
	dir      string
	progress *lineWriter

	plane       *plane
	servingCA   *authority
	admin       *rest.Config
	adminConf   string // path of the administrator's kubeconfig
	adminClient kubernetes.Interface

	watchers sync.WaitGroup // one per started process
	stopOnce sync.Once
	stopErr  error
	keep     atomic.Bool // Stop leaves the temporary folder

	mu       sync.Mutex
	stopping bool
	stops    []stopFunc // run in reverse order
	names    map[string]int
}

type stopFunc struct {
	name string
	run  func() error
}

// ErrStopped tells that a cluster is stopping or has stopped.
var ErrStopped = errors.New("the cluster has been stopped")

// Start starts a control plane: etcd, kube-apiserver and
// kube-controller-manager, and waits until it is usable: all are ready and the
// default namespace has its service account. The cluster lives until Stop is
// called or ctx ends, whichever is first; Stop must be called in either case,
// as it waits for the end. When Start fails it has stopped what it had started.
func Start(ctx context.Context, options Options) (*Cluster, error) {
	progress := newLineWriter(options.Progress)
	binaries, err := EnsureBinaries(ctx, progress, append([]BinarySet{ControlPlane}, options.Sets...)...)
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		options:  options,
		binaries: binaries,
		progress: progress,
		names:    map[string]int{},
	}
	c.keep.Store(options.Keep)
	detach := context.AfterFunc(ctx, func() { c.Stop() })
	err = c.OnStop("context", func() error { detach(); return nil })
	if err == nil {
		err = c.start(ctx)
	}
	if err != nil {
		if ctx.Err() == nil {
			c.keep.Store(true) // the error points to the logs
		}
		return nil, errors.Join(fmt.Errorf("starting the cluster: %w", err), c.Stop())
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	begin := time.Now()
	if err := c.makeDir(); err != nil {
		return err
	}
	fmt.Fprintf(c.progress, "starting a control plane, Kubernetes %s; logs in %s\n", c.binaries.KubernetesVersion, c.LogDir())
	if err := c.startPlane(ctx); err != nil {
		return err
	}
	if !c.options.WithoutControllerManager {
		if err := c.startControllerManager(ctx); err != nil {
			return err
		}
		if err := c.waitForServiceAccount(ctx, "default"); err != nil {
			return err
		}
	}
	fmt.Fprintf(c.progress, "control plane is ready after %s\n", time.Since(begin).Round(100*time.Millisecond))
	return nil
}

// Stop ends everything that was started, in reverse order, and removes the
// temporary folder. It returns when all is gone; further and concurrent calls
// wait for the first and return its result. Processes that ended by themselves
// meanwhile are part of the error.
func (c *Cluster) Stop() error {
	c.stopOnce.Do(func() {
		c.mu.Lock()
		c.stopping = true
		stops := c.stops
		c.stops = nil
		c.mu.Unlock()

		var errs []error
		for _, stop := range slices.Backward(stops) {
			if err := stop.run(); err != nil {
				errs = append(errs, fmt.Errorf("stopping %s: %w", stop.name, err))
			}
		}
		c.watchers.Wait()
		c.stopErr = errors.Join(errs...)
	})
	return c.stopErr
}

// OnStop registers what Stop is to undo. Registered last is undone first. When
// the cluster is stopping already, stop is called at once and ErrStopped is
// returned with its error.
func (c *Cluster) OnStop(name string, stop func() error) error {
	c.mu.Lock()
	if !c.stopping {
		c.stops = append(c.stops, stopFunc{name: name, run: stop})
		c.mu.Unlock()
		return nil
	}
	c.mu.Unlock()
	return errors.Join(fmt.Errorf("%s: %w", name, ErrStopped), stop())
}

// StartProcess starts a process that belongs to the cluster: its log is in the
// cluster's folder, Stop ends it, and its unexpected end is reported to the
// progress writer at once and by Stop's error later.
func (c *Cluster) StartProcess(ctx context.Context, command Command) (*Process, error) {
	if command.LogFile == "" {
		command.LogFile = filepath.Join(c.LogDir(), command.Name+".log")
	}
	p, err := launch(command)
	if err != nil {
		return nil, err
	}
	// Registered before it is ready, so that Stop meanwhile finds it.
	if err := c.OnStop(command.Name, func() error { return errors.Join(p.Err(), p.Stop()) }); err != nil {
		return nil, err
	}
	if err := p.waitReady(ctx, command); err != nil {
		err = errors.Join(err, p.Stop())
		p.disown()
		return nil, err
	}
	c.watchers.Go(func() {
		<-p.Exited()
		if err := p.Err(); err != nil {
			fmt.Fprintln(c.progress, err)
		}
	})
	return p, nil
}

// Keep makes Stop leave the temporary folder, as Options.Keep does.
func (c *Cluster) Keep() { c.keep.Store(true) }

// Dir is the cluster's folder.
func (c *Cluster) Dir() string { return c.dir }

// LogDir is the folder with a log file per process.
func (c *Cluster) LogDir() string { return filepath.Join(c.dir, "logs") }

// Binaries are the programs that the cluster runs.
func (c *Cluster) Binaries() Binaries { return c.binaries }

// Progress is where the cluster writes a line per step.
func (c *Cluster) Progress() io.Writer { return c.progress }

// AdminConfig connects as the administrator (group system:masters). It is for
// setting up and looking at a cluster; what is under test must not use it.
func (c *Cluster) AdminConfig() *rest.Config { return rest.CopyConfig(c.admin) }

// AdminClient is a client for AdminConfig.
func (c *Cluster) AdminClient() kubernetes.Interface { return c.adminClient }

// AdminKubeconfig is the path of a kubeconfig file for AdminConfig.
func (c *Cluster) AdminKubeconfig() string { return c.adminConf }

// uniqueName makes a name that is used for the first time here: name, name-2, …
func (c *Cluster) uniqueName(name string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names[name]++
	if n := c.names[name]; n > 1 {
		return fmt.Sprintf("%s-%d", name, n)
	}
	return name
}

// writeFile writes a private file below the cluster's folder and returns its
// path.
func (c *Cluster) writeFile(data []byte, elem ...string) (string, error) {
	path := filepath.Join(append([]string{c.dir}, elem...)...)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", err
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return "", err
	}
	return path, nil
}

// lineWriter makes a writer safe for use by several goroutines.
type lineWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func newLineWriter(w io.Writer) *lineWriter {
	if w == nil {
		w = io.Discard
	}
	return &lineWriter{w: w}
}

func (l *lineWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}
