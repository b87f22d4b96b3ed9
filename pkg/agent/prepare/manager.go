// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/locks"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
)

const (
	// KubeletPatience is how long the kubelet waits for the answer to one call (defaultClientCallTimeout in
	// k8s.io/kubernetes/pkg/kubelet/cm/dra/plugin).
	KubeletPatience = 45 * time.Second
	// DefaultLockTimeout leaves most of it for the work itself, and to unprepare all that it may take.
	DefaultLockTimeout = 15 * time.Second
	// DefaultUndoTimeout is also how long an agent that is told to stop must be able to go on.
	DefaultUndoTimeout = 25 * time.Second

	// defaultGPUTimeout bounds the questions and acts of one kind on one GPU; making a MIG instance takes about a second.
	defaultGPUTimeout = 10 * time.Second
	// defaultEndTimeout is for processes to end and for their memory to be freed.
	defaultEndTimeout = 5 * time.Second
)

// Options of a Manager; the fields up to Tools are required, other than HostRoot.
type Options struct {
	// Driver and Pool select the allocation results that are this agent's.
	Driver, Pool string
	// StateDir gets the folders claims (the ledger), quarantine and locks. Agents that follow one another, or serve
	// the kubelet together during a rolling update, share it.
	StateDir string
	// CDIDir is read by the container runtime.
	CDIDir string
	// HostRoot is the host's root folder as the agent sees it; "/" if empty. What CDI specifications name is looked up below it.
	HostRoot string
	Backend  cdi.Backend
	Hardware Hardware
	Tools    sharing.Tools
	// PCI and Users are needed for GPUs that are passed through to virtual machines.
	PCI   *vfio.Binder
	Users vfio.Users

	FS    durable.FS
	Clock clock.PassiveClock
	// LockTimeout is for all locks of one call together, GPUTimeout for one question or act on one GPU, EndTimeout for processes that
	// were killed to be gone, UndoTimeout for everything on a claim's GPUs that is undone together.
	LockTimeout, GPUTimeout, EndTimeout, UndoTimeout time.Duration
	// Leftovers is EndLeftovers if empty.
	Leftovers Leftovers
	// Sharing is what the node's administrator has decided about it.
	Sharing config.Rules
	Handover
}

// Hardware answers for the node's GPUs.
type Hardware interface {
	// Find returns what is behind a published device, after NVML has answered for its GPU just now. The error
	// says what is wrong with it. Of a device whose GPU is with a virtual machine the GPU's name is returned beside it.
	Find(ctx context.Context, device string) (Target, error)
	// Begin keeps the driver open until done is called, for something that takes several steps. The error says why it is not to be opened now.
	Begin(what string) (done func(), err error)
	steps.Hardware
}

// Leftovers says what is done about processes of a claim's pods that are still on its devices when it is unprepared.
type Leftovers = steps.Leftovers

// The policies.
const (
	// EndLeftovers kills them; a GPU whose processes do not end is quarantined.
	EndLeftovers = steps.EndLeftovers
	// QuarantineLeftovers leaves them alone, and quarantines the GPU until they are gone.
	QuarantineLeftovers = steps.QuarantineLeftovers
)

// Manager prepares and unprepares claims. Its methods may be called concurrently. It has the flows; what they need stands
// in parts that do not know of it, nor of each other more than they are given.
type Manager struct {
	opts        Options
	locks       *locks.Locker
	ledger      *ledger.Ledger
	quarantines quarantines
	// effects are what steps does, kind by kind.
	effects   steps.Effects
	steps     *steps.Table
	holders   *holders
	resolver  *resolver
	decider   *decider
	describer *describer
	undoer    *undoer
	sweeper   *sweeper
}

// Result is the outcome for one claim of a batch.
type Result struct {
	Devices []ledger.Device
	Err     error
}

// LedgerDir is the ledger's folder below Options.StateDir.
func LedgerDir(stateDir string) string { return filepath.Join(stateDir, "claims") }

// LocksDir is the folder of lock files below Options.StateDir.
func LocksDir(stateDir string) string { return filepath.Join(stateDir, "locks") }

// New makes nothing yet. Call MakeFolders, and Recover before the kubelet can call.
func New(opts Options) *Manager {
	opts.FS = cmp.Or[durable.FS](opts.FS, durable.OS{})
	opts.Clock = cmp.Or[clock.PassiveClock](opts.Clock, clock.RealClock{})
	opts.LockTimeout = cmp.Or(opts.LockTimeout, DefaultLockTimeout)
	opts.GPUTimeout = cmp.Or(opts.GPUTimeout, defaultGPUTimeout)
	opts.EndTimeout = cmp.Or(opts.EndTimeout, defaultEndTimeout)
	opts.UndoTimeout = cmp.Or(opts.UndoTimeout, DefaultUndoTimeout)
	opts.Leftovers = cmp.Or(opts.Leftovers, EndLeftovers)
	opts.Handover.setDefaults()
	opts.HostRoot = cmp.Or(opts.HostRoot, "/")
	m := &Manager{
		opts:        opts,
		locks:       &locks.Locker{Dir: LocksDir(opts.StateDir), Timeout: opts.LockTimeout},
		ledger:      ledger.At(opts.FS, LedgerDir(opts.StateDir)),
		quarantines: quarantines{fs: opts.FS, dir: QuarantineDir(opts.StateDir)},
	}
	gpus := steps.GPUs{Hardware: opts.Hardware, Timeout: opts.GPUTimeout}
	m.holders = &holders{
		ledger: m.ledger, bootID: func() (string, error) { return opts.Hardware.BootID() },
		node: opts.Pool, acrossNamespaces: opts.Sharing.AcrossNamespaces,
	}
	backend := patient{opts.Backend, opts.GPUTimeout}
	e := steps.Effects{
		GPUs:       gpus,
		PCI:        steps.PCI{Binder: opts.PCI, Users: opts.Users, Timeout: opts.GPUTimeout},
		TimeSlices: steps.TimeSlices{GPUs: gpus, Tool: opts.Tools.TimeSlicer},
		Keeper:     steps.Keeper{Tool: opts.Tools.Persistenced, Timeout: opts.GPUTimeout},
		Daemons:    steps.Daemons{Tool: opts.Tools.Daemons, Timeout: opts.GPUTimeout, Nodes: backend.ControlNodes},
		Files:      filesOf(opts.FS, opts.StateDir, cdi.NewStore(opts.FS, opts.CDIDir, opts.HostRoot)),
		Ender:      steps.Ender{Tool: opts.Tools.Processes, Policy: opts.Leftovers, Timeout: opts.EndTimeout},
		Kept:       m.holders.kept,
	}
	if opts.Tools.Processes != nil {
		e.PCI.Name = opts.Tools.Processes.NameOf
	}
	m.effects, m.steps = e, steps.NewTable(e)
	m.resolver = &resolver{driver: opts.Driver, hardware: opts.Hardware, holders: m.holders, rules: opts.Sharing}
	m.decider = &decider{
		gpus: gpus, pci: e.PCI, timeSlices: e.TimeSlices, daemons: e.Daemons, keeper: e.Keeper, files: e.Files,
		processes: opts.Tools.Processes, holders: m.holders, quarantines: m.quarantines,
	}
	m.describer = &describer{
		driver: opts.Driver, backend: backend, pci: e.PCI, daemons: opts.Tools.Daemons, files: e.Files,
	}
	m.undoer = &undoer{
		steps: m.steps, ledger: m.ledger, quarantines: m.quarantines, locks: m.locks, clock: opts.Clock, timeout: opts.UndoTimeout,
	}
	m.sweeper = &sweeper{ledger: m.ledger, files: e.Files, daemons: e.Daemons, quarantines: m.quarantines, locks: m.locks}
	return m
}

// filesOf are those that an agent with that state folder writes for containers.
func filesOf(fsys durable.FS, stateDir string, store *cdi.Store) steps.Files {
	return steps.Files{FS: fsys, CDI: store, MetadataDir: filepath.Join(stateDir, "metadata")}
}

// MakeFolders makes those that are missing. To be called again when it failed.
func (m *Manager) MakeFolders() error {
	if _, err := ledger.Open(m.opts.FS, m.ledger.Dir()); err != nil {
		return err
	}
	if err := m.opts.FS.MkdirAll(m.quarantines.dir, 0o700); err != nil {
		return fmt.Errorf("make the folder for quarantine: %w", err)
	}
	return m.MakeEmptyFolders()
}

// MakeEmptyFolders makes those that may be made anew at any time: nothing in them is remembered.
func (m *Manager) MakeEmptyFolders() error {
	if err := m.opts.FS.MkdirAll(m.locks.Dir, 0o700); err != nil {
		return fmt.Errorf("make the folder for locks: %w", err)
	}
	return m.effects.Files.CDI.MakeFolder()
}

// PrepareAll prepares the claims of one call in parallel. Each has its own result: one that fails, or waits
// for a lock, does not keep the others from being prepared.
func (m *Manager) PrepareAll(ctx context.Context, claims []*resourceapi.ResourceClaim) map[types.UID]Result {
	return inParallel(claims, func(claim *resourceapi.ResourceClaim) (types.UID, Result) {
		devices, err := m.Prepare(ctx, claim)
		return claim.UID, Result{Devices: devices, Err: err}
	})
}

// UnprepareAll is PrepareAll's reverse.
func (m *Manager) UnprepareAll(ctx context.Context, claims []types.UID) map[types.UID]error {
	return inParallel(claims, func(uid types.UID) (types.UID, error) { return uid, m.Unprepare(ctx, uid) })
}

// inParallel does all of it at once, and returns the results by their keys.
func inParallel[T any, K comparable, R any](items []T, do func(T) (K, R)) map[K]R {
	var (
		group   sync.WaitGroup
		mu      sync.Mutex
		results = make(map[K]R, len(items))
	)
	for _, item := range items {
		group.Go(func() {
			key, result := do(item)
			mu.Lock()
			defer mu.Unlock()
			results[key] = result
		})
	}
	group.Wait()
	return results
}

// Prepare makes the claim's GPUs ready for its containers and returns what the kubelet has to tell the
// container runtime. A claim that is prepared already is verified again, and repaired if needed.
func (m *Manager) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) (devices []ledger.Device, err error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KObj(claim), "claimUID", claim.UID)
	ctx = klog.NewContext(ctx, logger)
	start := m.opts.Clock.Now()
	defer func() {
		if err == nil {
			logger.V(2).Info("Claim is prepared", "devices", len(devices), "took", m.opts.Clock.Since(start))
		}
	}()

	// 1. What has this node to do for the claim?
	results, parameters, err := plan(claim, m.opts.Driver, m.opts.Pool)
	if len(results) == 0 { // as with an error
		return nil, err
	}

	// 2. Is it prepared, or is to be waited for who has its GPUs and is about to go?
	wait := beginHandover(ctx, m.opts.Handover, m.ledger, claim)
	for {
		devices, err = m.prepare(ctx, claim, results, parameters, nil)
		if errors.Is(err, errAnew) {
			continue
		}
		if err == nil || !wait.again(ctx, err) {
			return devices, wait.end(err)
		}
	}
}

// errAnew: what the claim had is undone, so that the node's rules are for it like for one that was never prepared.
var errAnew = errors.New("the claim is to be prepared anew")

// prepare is one try, which fails at once where another claim has the GPUs. Where the claim's record is not one that goes on,
// nothing is done; any does if that is nil.
func (m *Manager) prepare(
	ctx context.Context, claim *resourceapi.ResourceClaim, results []resourceapi.DeviceRequestAllocationResult, parameters *config.Set,
	goesOn func(*ledger.Record) bool,
) ([]ledger.Device, error) {
	done, err := m.opts.Hardware.Begin("the preparation of claim " + name(claim))
	if err != nil {
		return nil, fmt.Errorf("claim %s cannot be prepared now, and the kubelet tries again: %w", name(claim), err)
	}
	defer done()

	// 1. Does NVML answer for each of its GPUs, and how are they to be set up? No lock is held: a GPU that
	// hangs here must not block other claims.
	var j *job
	if err := steps.Measured(steps.Preparing, steps.Find, func() (err error) {
		j, err = m.resolver.resolve(ctx, claim, results, parameters)
		return err
	}); err != nil {
		return nil, err
	}

	// 2. Is nobody else holding them? Who does may need their locks to give them back. What is refused anyway does not wait for them.
	if j.refused != nil && !j.prepared {
		return nil, j.refused
	}
	if err := m.holders.check(j); err != nil {
		return nil, err
	}

	// 3. Is that still so, and what was done for this claim before?
	locks := m.locks.Begin()
	defer locks.Unlock()
	if err := locks.Claim(ctx, claim.UID); err != nil {
		return nil, fmt.Errorf("prepare claim %s: %w", name(claim), err)
	}
	record, err := m.ledger.Get(claim.UID)
	if err != nil {
		return nil, fmt.Errorf("prepare claim %s: %w", name(claim), err)
	}
	if goesOn != nil && !goesOn(record) {
		return nil, nil
	}
	gpus := j.entry.HeldGPUs()
	if record != nil && record.Entry != nil {
		// What is undone of an earlier preparation may be on other GPUs: the claim was allocated anew meanwhile.
		gpus = append(gpus, record.Entry.HeldGPUs()...)
	}
	if err := locks.GPUs(ctx, gpus...); err != nil {
		return nil, fmt.Errorf("prepare claim %s: %w", name(claim), err)
	}
	if err := m.holders.check(j); err != nil {
		return nil, err
	}
	before, err := m.reconcilePrevious(ctx, record, j.entry)
	if err != nil {
		return nil, err
	}

	// 4. What is to be done to the GPUs? It is, for a claim that is prepared already, what was done, as long as a reboot has not ended that.
	if !before.completed {
		if j.prepared {
			return nil, errAnew // and refused if it must not be
		}
		if err := m.settleGPUs(ctx, j.entry); err != nil {
			return nil, err
		}
	}
	if before.fresh() {
		if err := steps.Measured(steps.Preparing, steps.Decide, func() error { return m.decider.decide(ctx, j) }); err != nil {
			return nil, fmt.Errorf("claim %s: %w", name(claim), err)
		}
	}

	// 5. Record, do, verify, record.
	if err := m.apply(ctx, j, before); err != nil {
		return nil, err
	}
	return j.entry.Devices, nil
}

// settleGPUs refuses GPUs, and partitions, in quarantine that cannot be taken out of it now.
func (m *Manager) settleGPUs(ctx context.Context, entry *ledger.Entry) error {
	for _, gpu := range entry.HeldGPUs() {
		// What is stuck elsewhere would take its time.
		if err := m.undoer.settle(ctx, gpu, func(q *Quarantine) bool { return q.keepsOff(entry) }); err != nil {
			var stays *QuarantinedError
			if errors.As(err, &stays) {
				stays.Claim = entry.Claim
			}
			return fmt.Errorf("claim %s: %w", entry.Claim, err)
		}
	}
	return nil
}

// apply brings the claim to PrepareCompleted. If it fails, a claim that was not completed before is rolled
// back; one that had been keeps its GPUs and its files, because containers may use them.
func (m *Manager) apply(ctx context.Context, j *job, before previous) (err error) {
	entry := j.entry
	// The kubelet may have given up while this call waited; what it does next must not find a half-made claim.
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("prepare claim %s: %w", entry.Claim, err)
	}
	defer func() {
		// Of a claim from before a reboot nobody uses anything. Where its place is taken it has to be
		// decided anew, and the record does not say so.
		if err != nil && (!before.completed || before.rebooted && errors.Is(err, steps.ErrPlaceTaken)) {
			begun := *entry
			begun.Undo = entry.Undo[:j.begun]
			if before.rebooted {
				begun.Undo = append(slices.Clone(begun.Undo), entry.Undo[len(entry.Undo)-1]) // the CDI file is of the boot before
			}
			err = errors.Join(err, m.undoer.rollBack(ctx, &begun))
		}
	}()
	if !before.completed {
		if err := m.put(entry, ledger.PrepareStarted); err != nil {
			return err
		}
	}
	recorded := slices.Clone(entry.Undo)
	if err := m.perform(ctx, j, before); err != nil {
		return err
	}
	// Limits of a daemon may be others than those of the record, or not in it.
	before.stale = before.stale || !reflect.DeepEqual(recorded, entry.Undo)
	if err := m.effects.GPUs.Identify(ctx, j.entry); err != nil {
		return err
	}
	if entry.Metadata, err = m.describer.metadata(j); err != nil {
		return err
	}
	if entry.CDISpec, err = m.describer.spec(ctx, j); err != nil {
		return err
	}
	var written bool
	if err := steps.Measured(steps.Preparing, ledger.StepCDIFile, func() (err error) {
		written, err = m.effects.Files.Restore(entry)
		return err
	}); err != nil {
		return err
	}
	if err := steps.Measured(steps.Preparing, steps.Verify, func() error {
		return m.effects.Files.CDI.Verify(entry.Claim.UID, deviceIDs(entry))
	}); err != nil {
		return fmt.Errorf("claim %s: the container runtime would not find its devices: %w", entry.Claim, err)
	}
	if before.completed && !before.stale && !written && !before.rebooted {
		return nil
	}
	if before.completed && written {
		klog.FromContext(ctx).Info("CDI specification was missing or out of date and is written again",
			"path", m.effects.Files.CDI.Path(entry.Claim.UID))
	}
	return m.put(entry, ledger.PrepareCompleted)
}

// perform does the recorded steps. For a claim that was completed before they find their work done, unless the machine
// was rebooted since, something has ended on its own, or the disk failed when the claim was unprepared.
func (m *Manager) perform(ctx context.Context, j *job, before previous) error {
	if before.rebooted {
		if err := m.put(j.entry, ledger.PrepareCompleted); err != nil {
			return err
		}
	}
	claim := j.doing(before.fresh())
	for i, step := range j.entry.Undo {
		if step.Kind == ledger.StepMPSDaemon {
			// It takes its GPUs by UUID.
			if err := m.effects.GPUs.Identify(ctx, j.entry); err != nil {
				return err
			}
			daemon, err := j.daemon(true)
			if err != nil {
				return fmt.Errorf("claim %s: %w", j.entry.Claim, err)
			}
			if daemon == nil {
				continue // its parameters are others by now: what there is of the daemon stays until the claim is unprepared
			}
			step.Daemon = &ledger.Daemon{
				GPUs: daemon.GPUs, ActiveThreadPercentage: daemon.ActiveThreadPercentage, MemoryMiB: daemon.MemoryMiB,
				MultiUser: string(daemon.MultiUser),
			}
			j.entry.Undo[i] = step
		}
		j.begun = i + 1
		err := m.steps.Do(ctx, claim, step)
		if err == nil {
			continue
		}
		if before.fresh() && errors.Is(err, steps.ErrPlaceTaken) {
			// What is in that place now is not ours to destroy, whoever undoes the rest.
			j.entry.Undo, j.begun = slices.Delete(slices.Clone(j.entry.Undo), i, i+1), i
			err = errors.Join(err, m.put(j.entry, j.entry.State))
		}
		return fmt.Errorf("claim %s: %s%s: %w", j.entry.Claim, j.field(step), step, err)
	}
	return nil
}

func (m *Manager) put(entry *ledger.Entry, state ledger.State) error {
	entry.State = state
	entry.Updated = m.opts.Clock.Now().UTC()
	if state == ledger.PrepareCompleted && entry.Completed.IsZero() {
		entry.Completed = entry.Updated
	}
	return steps.Measured(steps.Preparing, steps.Record, func() error { return m.ledger.Put(entry) })
}

// describe lists the devices with their GPUs, for messages.
func describe(entry *ledger.Entry) []string {
	names := make([]string, 0, len(entry.Devices))
	for _, device := range entry.Devices {
		names = append(names, device.Device+"="+cmp.Or(device.UUID, device.GPUUUID))
	}
	return names
}
