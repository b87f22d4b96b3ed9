// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/nvml"
)

const (
	// PollInterval is how often each GPU is asked. What can be told by an event is told at once.
	PollInterval = 10 * time.Second
	// LookInterval is how often it is looked who uses each GPU.
	LookInterval = 30 * time.Second
	// Deadline is how long NVML may take for an answer about one GPU.
	Deadline = 10 * time.Second
	// listenStep is how long one wait for an event takes, and so the longest that a worker that has to stop keeps a call going.
	listenStep = 2 * time.Second
)

// Target is a GPU that NVML can be asked about. The functions may hang.
type Target struct {
	// Name of the GPU's device.
	Name string
	// UUID of the GPU that is there now: what is remembered of another one is not known of it.
	UUID string
	// Model is its product's name.
	Model string
	// Session is equal, with ==, for targets whose functions ask the same GPU in the same session: who listens to it goes on.
	Session any
	// Ask checks that it still is that GPU, and reads its condition.
	Ask func() (nvml.Readings, error)
	// Listen for its events; the error wraps nvml.ErrNotSupported if it has none.
	Listen func() (nvml.Watch, error)
}

// Options of a Monitor.
type Options struct {
	Clock clock.WithTicker
	FS    durable.FS
	// Dir keeps a file for each GPU, so that faults outlive the agent; nothing is kept if it is empty.
	Dir string
	// Policy softens rules.
	Policy Policy
	// Changed is told when what is known of a GPU has changed in a way that others should know; it must not block.
	Changed func(ctx context.Context, gpu string, was, is Verdict)
	// Reconfigured is told when the driver has gone or a GPU's partitions have changed: the node has to be looked at anew.
	Reconfigured func(reason string)
	// Event is told each event of a GPU; it must not block.
	Event func(gpu string, event nvml.Event)
}

// Monitor watches over the GPUs of a node. Its methods may be called concurrently.
type Monitor struct {
	opts Options
	poke chan struct{}

	// writing is read-locked while a record is written.
	writing sync.RWMutex

	mu      sync.Mutex
	gpus    map[string]*gpu // by name; those that were once watched stay
	bootID  string
	leads   bool
	changed chan struct{} // closed and replaced when a verdict changes or a GPU was asked for the first time
}

// NewMonitor returns a monitor that knows no GPU.
func NewMonitor(opts Options) *Monitor {
	if opts.Changed == nil {
		opts.Changed = func(context.Context, string, Verdict, Verdict) {}
	}
	if opts.Event == nil {
		opts.Event = func(string, nvml.Event) {}
	}
	if opts.Reconfigured == nil {
		opts.Reconfigured = func(string) {}
	}
	if opts.FS == nil {
		opts.FS = durable.OS{}
	}
	return &Monitor{opts: opts, poke: make(chan struct{}, 1), gpus: map[string]*gpu{}, changed: make(chan struct{})}
}

// Watch makes targets the GPUs that are watched. For one that is new its record is read; the error says which record could not be, and
// then nothing is known of that GPU. What was latched before is forgotten if renewed is set: the driver was loaded anew.
func (m *Monitor) Watch(bootID string, targets []Target, renewed bool) error {
	renewed, err := m.watch(bootID, targets, renewed)
	if renewed {
		// What was forgotten must not be known to the next agent.
		for _, g := range m.all() {
			g.save(context.Background())
		}
	}
	return err
}

func (m *Monitor) watch(bootID string, targets []Target, loaded bool) (renewed bool, err error) {
	var errs []error
	m.mu.Lock()
	defer m.mu.Unlock()
	renewed = loaded || m.bootID != "" && m.bootID != bootID
	m.bootID = bootID
	watched := map[string]bool{}
	for _, target := range targets {
		watched[target.Name] = true
		g, known := m.gpus[target.Name]
		if !known {
			g = &gpu{monitor: m, name: target.Name}
			if err := m.restore(target.Name, g); err != nil {
				errs = append(errs, err)
			}
			m.gpus[target.Name] = g
		}
		g.watch(target, renewed)
	}
	for name, g := range m.gpus {
		if !watched[name] {
			g.unwatch()
			delete(m.gpus, name)
		}
	}
	m.wakeLocked()
	m.look()
	return renewed, errors.Join(errs...)
}

func (m *Monitor) restore(name string, g *gpu) error {
	if m.opts.Dir == "" {
		return nil
	}
	data, err := m.opts.FS.ReadFile(m.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		g.state, err = decode(data, m.bootID)
	}
	if err != nil {
		return fmt.Errorf("health record %s: %w", m.path(name), err)
	}
	return nil
}

func (m *Monitor) path(name string) string { return filepath.Join(m.opts.Dir, name+".json") }

// Pause ends all questions to NVML, for it to be closed, and reports whether none is under way any more when it returns, at the latest
// when ctx ends. Watch goes on.
func (m *Monitor) Pause(ctx context.Context) (quiet bool) {
	gpus := m.all()
	for _, g := range gpus {
		g.unwatch()
	}
	quiet = true
	for _, g := range gpus {
		quiet = g.isQuiet(ctx) && quiet
	}
	return quiet
}

// Fail notes for all GPUs that NVML cannot be asked.
func (m *Monitor) Fail(ctx context.Context, err error) {
	for _, g := range m.all() {
		g.observe(ctx, func(now time.Time, s *State) { s.Failed(now, err) })
	}
}

// Lead makes the monitor write records: of several agents of a node only one may.
func (m *Monitor) Lead(ctx context.Context) {
	m.mu.Lock()
	m.leads = true
	m.mu.Unlock()
	for _, g := range m.all() {
		g.save(ctx)
	}
}

// Follow is Lead's reverse. When it returns no record is being written, and none will be.
func (m *Monitor) Follow() {
	m.writing.Lock()
	defer m.writing.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leads = false
}

// Run asks and listens until ctx ends. Only calls that hang are left over then.
func (m *Monitor) Run(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	ticker := m.opts.Clock.NewTicker(PollInterval)
	defer ticker.Stop()
	for {
		for _, g := range m.all() {
			// The answer is kept in the state.
			group.Go(func() { _ = g.ask(ctx) })
			if target, stop, ok := g.startListening(); ok {
				group.Go(func() { g.listen(ctx, target, stop) })
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		case <-m.poke:
		}
	}
}

// look asks soon. It does not block.
func (m *Monitor) look() {
	select {
	case m.poke <- struct{}{}:
	default:
	}
}

// Check asks NVML about a GPU now, or joins who does. The error says why it did not answer as it should.
func (m *Monitor) Check(ctx context.Context, name string) error {
	g := m.gpu(name)
	if g == nil {
		return fmt.Errorf("GPU %s is not watched", name)
	}
	return g.ask(ctx)
}

// Of returns the verdict on everything about a GPU, or on one MIG device of it; Unknown for one that is not watched.
func (m *Monitor) Of(name string, instance *nvml.Instance) Verdict {
	if g := m.gpu(name); g != nil {
		return g.verdict(instance)
	}
	return Verdict{Status: Unknown}
}

// Whole returns the verdict on a GPU without what is wrong with single MIG devices; Unknown for one that is not watched.
func (m *Monitor) Whole(name string) Verdict {
	if g := m.gpu(name); g != nil {
		return g.whole()
	}
	return Verdict{Status: Unknown}
}

// Partitioned tells which GPU instances a GPU had at that time.
func (m *Monitor) Partitioned(ctx context.Context, name string, at time.Time, instances []nvml.GPUInstance) {
	if g := m.gpu(name); g != nil {
		g.observe(ctx, func(_ time.Time, s *State) { s.Partitioned(at, instances) })
	}
}

// Left tells how much memory of a GPU is in use although nobody uses it, in bytes beyond what the driver keeps for itself; nil if somebody
// does, or if that is not known.
func (m *Monitor) Left(ctx context.Context, name string, bytes *uint64) {
	if g := m.gpu(name); g != nil {
		g.observe(ctx, func(now time.Time, s *State) { s.Left(now, bytes) })
	}
}

// Ended tells that a MIG device, or all of a GPU instance (nvml.AllCompute), has been destroyed.
func (m *Monitor) Ended(ctx context.Context, name string, gone nvml.Instance) {
	if g := m.gpu(name); g != nil {
		g.observe(ctx, func(_ time.Time, s *State) { s.Ended(gone) })
	}
}

func (m *Monitor) gpu(name string) *gpu {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gpus[name]
}

// Readings are a GPU's last.
func (m *Monitor) Readings(name string) nvml.Readings {
	g := m.gpu(name)
	if g == nil {
		return nvml.Readings{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.state.Readings()
}

// Known reports whether each GPU has been asked, with an answer or without, and returns a channel that is closed at the next change.
func (m *Monitor) Known() (all bool, changed <-chan struct{}) {
	gpus, changed := m.snapshot()
	return !slices.ContainsFunc(gpus, func(g *gpu) bool { v := g.verdict(nil); return v.Asked.IsZero() }), changed
}

func (m *Monitor) all() []*gpu {
	gpus, _ := m.snapshot()
	return gpus
}

func (m *Monitor) snapshot() ([]*gpu, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.gpus)), m.changed
}

func (m *Monitor) wake() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wakeLocked()
}

func (m *Monitor) wakeLocked() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// write keeps a record, if this is the agent that does.
func (m *Monitor) write(ctx context.Context, name string, s *State) {
	m.writing.RLock()
	defer m.writing.RUnlock()
	m.mu.Lock()
	bootID, leads := m.bootID, m.leads
	m.mu.Unlock()
	if !leads || m.opts.Dir == "" {
		return
	}
	data, err := s.encode(bootID)
	if err == nil {
		err = errors.Join(m.opts.FS.MkdirAll(m.opts.Dir, 0o700), durable.WriteFile(m.opts.FS, m.path(name), data, 0o600))
	}
	if err != nil {
		// The fault is known to this agent all the same, and its successor will see most faults by itself.
		klog.FromContext(ctx).Error(err, "Health record could not be written", "device", name)
	}
}
