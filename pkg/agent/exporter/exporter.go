// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"context"
	"net/http"
	"sync"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/podresources"
)

const (
	// DefaultInterval is between two readings of a GPU.
	DefaultInterval = 10 * time.Second
	// MinInterval is the least: the driver's rates are over at least 100 ms, and it is asked some 60 questions for each GPU.
	MinInterval = time.Second
	// Patience is how long a scrape waits for what it has started. Prometheus gives up after 10 s.
	Patience = 5 * time.Second
	// KeepReading is how long the last reading of a GPU is told that does not answer in time. What it says is not true for longer.
	KeepReading = time.Minute
	// readTimeout is for NVML to be opened; a call into it cannot be ended.
	readTimeout = 30 * time.Second
)

// GPUs are those of the node.
type GPUs interface {
	// Node is what was found last; nil before. It is not changed.
	Node() *discovery.Node
	// Read runs f for a GPU that is there; it may hang. f changes nothing of the GPU.
	Read(ctx context.Context, gpu *discovery.GPU, f func(nvml.Device) error) error
}

// Kubelet tells who has what, in bounded time.
type Kubelet interface {
	List(context.Context) ([]podresources.Pod, error)
	Allocatable(context.Context) ([]podresources.Devices, error)
}

// Options of an Exporter.
type Options struct {
	// NodeName is the label hostname.
	NodeName string
	// Driver is the agent's name in claims.
	Driver  string
	GPUs    GPUs
	Kubelet Kubelet
	// Claims are the records of what is prepared.
	Claims func() ([]*ledger.Record, error)
	// Interval is DefaultInterval if 0. No GPU is read more often, with one exception: after an XID, at most once a second.
	Interval time.Duration
	Clock    clock.Clock
}

// Exporter serves the metrics. Events are counted while Run runs.
type Exporter struct {
	opts    Options
	handler http.Handler
	pods    *podresources.Cache
	events  chan event

	mu     sync.Mutex
	gpus   map[string]*gpu // by name
	asking task
	who    who
	xids   xids
}

// New returns an exporter; nothing is asked before the first scrape.
func New(opts Options) *Exporter {
	if opts.Interval == 0 {
		opts.Interval = DefaultInterval
	}
	e := &Exporter{
		opts: opts, events: make(chan event, maxEvents), gpus: map[string]*gpu{}, xids: xids{},
		pods: podresources.NewCache(opts.Kubelet.List, opts.Clock),
	}
	registry := metrics.NewKubeRegistry()
	registry.CustomMustRegister(&collector{exporter: e})
	e.handler = metrics.HandlerFor(registry, metrics.HandlerOpts{ErrorHandling: metrics.ContinueOnError})
	return e
}

// ServeHTTP implements http.Handler.
func (e *Exporter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.refresh(r.Context(), e.opts.Interval)
	e.handler.ServeHTTP(w, r)
}

// task is something that is done at most once at a time. The exporter's mutex guards it.
type task struct {
	began time.Time
	// done is closed when it ends; nil while it is not under way.
	done chan struct{}
}

// start runs f, unless it is under way or began less than the interval ago. It returns what is closed at its end, nil if it is not
// under way.
func (e *Exporter) start(t *task, interval time.Duration, f func()) <-chan struct{} {
	now := e.opts.Clock.Now()
	if t.done == nil && (t.began.IsZero() || now.Sub(t.began) >= interval) {
		done := make(chan struct{})
		t.began, t.done = now, done
		go func() {
			defer func() {
				e.mu.Lock()
				defer e.mu.Unlock()
				t.done = nil
				close(done)
			}()
			f()
		}()
	}
	return t.done
}

// refresh brings what is known up to date, so that it is no older than the interval, and waits for that no longer than Patience.
func (e *Exporter) refresh(ctx context.Context, interval time.Duration) {
	patience := e.opts.Clock.NewTimer(Patience)
	defer patience.Stop()
	for _, done := range e.startAll(ctx, interval) {
		select {
		case <-done:
		case <-ctx.Done():
			return
		case <-patience.C():
			return
		}
	}
}

func (e *Exporter) startAll(ctx context.Context, interval time.Duration) (underWay []<-chan struct{}) {
	ctx = context.WithoutCancel(ctx) // an answer counts, whoever asked
	node := e.opts.GPUs.Node()
	e.mu.Lock()
	defer e.mu.Unlock()
	begin := func(t *task, f func()) {
		if done := e.start(t, interval, f); done != nil {
			underWay = append(underWay, done)
		}
	}
	begin(&e.asking, func() { e.ask(ctx) })
	read := map[string]bool{}
	if node != nil {
		for i := range node.GPUs {
			of := &node.GPUs[i]
			if of.Bound() || of.Unseen() {
				continue // a virtual machine has it: what was read before is not true any more
			}
			read[of.Name] = true
			g := e.gpus[of.Name]
			if g == nil {
				g = &gpu{}
				e.gpus[of.Name] = g
			}
			begin(&g.task, func() { e.read(ctx, of, g) })
		}
	}
	for name, g := range e.gpus {
		if !read[name] && g.done == nil {
			delete(e.gpus, name)
			g.samples.close()
		}
	}
	return underWay
}
