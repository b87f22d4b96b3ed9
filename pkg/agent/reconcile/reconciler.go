// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// Sources are everything that knows who uses the node's GPUs. Each may fail, and may take until the context ends.
type Sources struct {
	// Claim reads a ResourceClaim; the error is NotFound if there is none.
	Claim func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)
	// Pods of this node, by the API server.
	Pods func(ctx context.Context) ([]corev1.Pod, error)
	// Kubelet's list of the resources that pods have.
	Kubelet func(ctx context.Context) ([]KubeletPod, error)
	// Registered is when the kubelet last registered the driver; zero if it has not.
	Registered func() time.Time
	// Ended tells whether a pod that is being deleted certainly has no process left; not asked if nil.
	Ended func(ctx context.Context, pod *corev1.Pod) bool
	// Running are the pods of which a process is there, also of those that nobody lists any more; not asked if nil.
	Running func(ctx context.Context) (map[types.UID]bool, error)
	// Processes counts those on a GPU that are not certain to be outside of these places; the place nil is all of the GPU.
	Processes func(ctx context.Context, gpu string, at ...*ledger.Partition) (int, error)
	// ProcessesBut counts those of pods, other than these pods.
	ProcessesBut func(ctx context.Context, gpu string, pods []types.UID) (int, error)
	// BootID of the machine now.
	BootID func() (string, error)
	// PlaceOf is the GPU that a device of a ResourceSlice is, or is a part of, and where on it; nil if it is all of it or that is not known.
	PlaceOf func(device string) (gpu string, at *ledger.Partition)
}

// Options of a Reconciler.
type Options struct {
	Clock   clock.WithTicker
	Ledger  *ledger.Ledger
	Sources Sources
	// Repair puts back what is missing of prepared claims, such as their CDI specifications.
	Repair func(ctx context.Context) error
	// NotePods records the pods that a prepared claim is reserved for by now.
	NotePods func(ctx context.Context, claim *resourceapi.ResourceClaim) error
	// Release unprepares a claim, as the kubelet would, if its record is still the one that was seen.
	// Otherwise somebody has prepared it since.
	Release func(ctx context.Context, seen *ledger.Entry) (released bool, err error)
	// Strays are CDI files that no record of the ledger owns, and RemoveStray deletes the one of a claim, unless the claim is prepared by now.
	Strays      func() ([]cdi.File, error)
	RemoveStray func(ctx context.Context, claim types.UID) error
	// Again, if it is not nil, asks for a look before its time.
	Again <-chan struct{}
	// Seen gets what was found, each time.
	Seen func(Summary)
}

// Summary of one look at the ledger.
type Summary struct {
	// Released are leftovers that are gone now, and Strays CDI files without a record that are not.
	Released, Strays int
	// Unreadable are the claims whose records cannot be read.
	Unreadable []types.UID
	// Unknown is how many claims the API server has never told about since the start. They may not be allocated any more, so what they hold is
	// occupied.
	Unknown int
	// Occupied is what claims are prepared for although they are not allocated any more: until it is certain that nobody uses
	// it, no other claim can have it. So it is with what a record that cannot be read holds.
	Occupied []Held
}

// Held is a place on a GPU, or all of it if At is nil, and the claim that holds it. GPU is empty for all GPUs of the node.
type Held struct {
	GPU   string
	At    *ledger.Partition
	Claim ledger.Claim
	Why   Why
}

// Why something is held by a claim.
type Why int

const (
	// Left: the claim is not allocated any more.
	Left Why = iota
	// Unread: the claim's record cannot be read, so nobody can be asked about it.
	Unread
	// Unknown: since its start the agent has not heard whether the claim is allocated.
	Unknown
)

// Reconciler looks for leftovers.
type Reconciler struct {
	opts Options
	// began is when the reconciler was made.
	began time.Time
	// before are the readings of what nobody seemed to use the last time.
	before map[subject]*Reading
	// orphans are claims that were not allocated any more when the API server last told.
	orphans map[types.UID]bool
	// said is why something that nobody should use is kept, so that it is logged once.
	said map[subject]string
}

// subject is what readings are taken of.
type subject struct {
	claim types.UID
	// file: the claim's CDI file, which no record of the ledger owns; otherwise the record.
	file bool
}

// New returns a reconciler; nothing is looked at before Run.
func New(opts Options) *Reconciler {
	return &Reconciler{
		opts: opts, began: opts.Clock.Now(), before: map[subject]*Reading{}, orphans: map[types.UID]bool{},
		said: map[subject]string{},
	}
}

// Run looks now, every Interval, and when it is asked to and an Interval after that until ctx ends:
// who asks may wait for the second reading.
func (r *Reconciler) Run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "reconcile"))
	ticker := r.opts.Clock.NewTicker(Interval)
	defer ticker.Stop()
	last := "" // what failed is said once, and not each minute
	var second <-chan time.Time
	for {
		reason := ""
		if err := r.Once(ctx); err != nil && ctx.Err() == nil {
			if reason = err.Error(); reason != last {
				utilruntime.HandleErrorWithContext(ctx, err, "The ledger could not be compared with what is in use")
			}
		}
		last = reason
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		case <-second:
		case <-r.opts.Again:
			second = r.opts.Clock.After(Interval)
		}
	}
}

// Once looks at all claims of the ledger.
func (r *Reconciler) Once(ctx context.Context) error {
	// 1. What is missing is put back.
	errs := []error{r.repair(ctx)}
	// A source that hangs must not take the next look's time.
	ctx, cancel := context.WithTimeout(ctx, Interval/2)
	defer cancel()

	// 2. Of each claim: does anybody use it?
	records, err := r.opts.Ledger.Records()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	var summary Summary
	node := &nodeReading{sources: &r.opts.Sources}
	present := map[subject]bool{}
	for _, record := range records {
		present[subject{claim: record.UID}] = true
		if record.Entry == nil {
			// Nobody can be asked about a claim whose name is not known: it stays held, which Recover has said.
			summary.Occupied = append(summary.Occupied, heldUnread(record)...)
			summary.Unreadable = append(summary.Unreadable, record.UID)
			continue
		}
		orphan, leftover, err := r.look(ctx, record.Entry, records, node)
		errs = append(errs, err)
		if leftover {
			// 3. Nobody does.
			released, err := r.release(ctx, record.Entry)
			if released {
				summary.Released++
			}
			if err == nil {
				continue
			}
			errs = append(errs, err)
		}
		// One that was prepared since the start was allocated then.
		why := Left
		if _, known := r.orphans[record.UID]; !known && record.Entry.Updated.Before(r.began) {
			summary.Unknown++
			orphan, why = true, Unknown
		}
		if orphan {
			for _, gpu := range record.Entry.HeldGPUs() {
				for _, at := range placesOn(gpu, record.Entry) {
					summary.Occupied = append(summary.Occupied, Held{GPU: gpu, At: at, Claim: record.Entry.Claim, Why: why})
				}
			}
		}
	}

	// 4. Of each CDI file that has no record: the same.
	strays, err := r.strays(ctx, records, node, present)
	summary.Strays = strays
	errs = append(errs, err)

	gone := func(s subject) bool { return !present[s] }
	maps.DeleteFunc(r.before, func(s subject, _ *Reading) bool { return gone(s) })
	maps.DeleteFunc(r.orphans, func(claim types.UID, _ bool) bool { return gone(subject{claim: claim}) })
	maps.DeleteFunc(r.said, func(s subject, _ string) bool { return gone(s) })
	r.opts.Seen(summary)
	return errors.Join(errs...)
}

// repair takes neither the time of the look that follows nor that of the next one.
func (r *Reconciler) repair(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Interval/3)
	defer cancel()
	return r.opts.Repair(ctx)
}

// UseOf tells now who uses what a claim holds.
func (r *Reconciler) UseOf(ctx context.Context, entry *ledger.Entry) Use {
	ctx, cancel := context.WithTimeout(ctx, useTimeout)
	defer cancel()
	reading := &Reading{}
	r.readClaim(ctx, entry, reading)
	if reading.ClaimErr == nil {
		reading.Pods, reading.PodsErr = r.opts.Sources.Pods(ctx)
	}
	return UseOf(entry, reading)
}

// useTimeout bounds how long a call of the kubelet, which waits for the answer, waits for the API server.
const useTimeout = 5 * time.Second

// readClaim enters the object of the claim's name.
func (r *Reconciler) readClaim(ctx context.Context, entry *ledger.Entry, reading *Reading) {
	reading.Claim, reading.ClaimErr = r.opts.Sources.Claim(ctx, entry.Claim.Namespace, entry.Claim.Name)
	if reading.ClaimErr != nil {
		reading.Claim = nil
	}
	if apierrors.IsNotFound(reading.ClaimErr) {
		reading.ClaimErr = nil
	}
}

// look takes a reading of one claim and decides, with the one before. An orphan is known not to be allocated any more, or
// was when that was last known; a leftover is one that is known not to be used by anybody, either. Of a claim that is
// allocated, its pods of now are recorded.
func (r *Reconciler) look(ctx context.Context, entry *ledger.Entry, records []*ledger.Record,
	node *nodeReading,
) (orphan, leftover bool, err error) {
	reading := r.read(ctx, entry, records, node)
	if reading.ClaimErr == nil {
		if r.orphans[entry.Claim.UID] = !isAllocated(entry, reading); !r.orphans[entry.Claim.UID] {
			err = r.opts.NotePods(ctx, reading.Claim)
		}
	}
	orphan = r.orphans[entry.Claim.UID] // false while it is not known
	of := subject{claim: entry.Claim.UID}
	leftover, keep := r.conclude(of, reading, func(r *Reading) string { return inUse(entry, r) })
	if orphan && !leftover && r.say(of, keep) {
		klog.FromContext(ctx).Info("Claim is not allocated any more and stays prepared",
			"claim", klog.KRef(entry.Claim.Namespace, entry.Claim.Name), "claimUID", of.claim, "reason", keep)
	}
	return orphan, leftover, err
}

// conclude decides with the reading before, and keeps what the next decision needs.
func (r *Reconciler) conclude(of subject, reading *Reading, inUse func(*Reading) string) (leftover bool, keep string) {
	first := r.before[of]
	leftover, keep = decide(first, reading, inUse)
	switch {
	case inUse(reading) != "":
		delete(r.before, of)
	case first == nil || reading.Registered.After(first.At.Add(-settle)):
		// Otherwise the first reading stays: the time between counts.
		r.before[of] = reading
	}
	return leftover, keep
}

// say tells whether the reason is another one than the last time.
func (r *Reconciler) say(of subject, reason string) (isNew bool) {
	isNew = r.said[of] != reason
	r.said[of] = reason
	return isNew
}

// read asks everybody about one claim, and stops at the first who uses it.
func (r *Reconciler) read(ctx context.Context, entry *ledger.Entry, records []*ledger.Record, node *nodeReading) *Reading {
	reading := &Reading{At: r.opts.Clock.Now()}
	r.readClaim(ctx, entry, reading)
	if reading.ClaimErr != nil || isAllocated(entry, reading) {
		return reading
	}
	node.fill(ctx, reading)
	if r.rebooted(entry) {
		return reading
	}
	for _, gpu := range entry.HeldGPUs() {
		r.countProcesses(ctx, reading, gpu, entry.Claim.UID, records, placesOn(gpu, entry)...)
	}
	return reading
}

// rebooted tells whether the machine has started anew since the claim was prepared. Then nothing of it runs, and
// a GPU that has been lost need not say so.
func (r *Reconciler) rebooted(entry *ledger.Entry) bool {
	if entry.BootID == "" {
		return false
	}
	now, err := r.opts.Sources.BootID()
	return err == nil && now != "" && now != entry.BootID
}

// countProcesses counts those on a GPU that may be the claim's. What runs in other partitions is other
// claims', as is what those who share the GPU run.
func (r *Reconciler) countProcesses(ctx context.Context, reading *Reading, gpu string, claim types.UID, records []*ledger.Record,
	at ...*ledger.Partition,
) {
	if others, shared := sharers(gpu, claim, records); shared {
		reading.count(r.opts.Sources.ProcessesBut(ctx, gpu, others))
	} else {
		reading.count(r.opts.Sources.Processes(ctx, gpu, at...))
	}
}

// heldUnread is what a record holds by its file's name.
func heldUnread(record *ledger.Record) (held []Held) {
	if record.AllGPUs {
		return []Held{{Claim: ledger.Claim{UID: record.UID}, Why: Unread}}
	}
	for _, gpu := range record.GPUs {
		held = append(held, Held{GPU: gpu, Claim: ledger.Claim{UID: record.UID}, Why: Unread})
	}
	return held
}

// placesOn are those of a GPU that the claim holds: nil, once, for all of it or shares of it.
func placesOn(gpu string, entry *ledger.Entry) (places []*ledger.Partition) {
	for _, device := range entry.Devices {
		if device.GPU == gpu && !device.AdminAccess && !slices.Contains(places, device.Partition) {
			places = append(places, device.Partition)
		}
	}
	return places
}

// count adds what NVML says of one GPU.
func (r *Reading) count(processes int, err error) {
	r.Processes += processes
	r.ProcessesErr = errors.Join(r.ProcessesErr, err)
}

// sharers are the pods of the other claims that have a share of the GPU, if there are such claims. Their processes, and the daemon that
// serves them, are no sign that this claim is in use.
func sharers(gpu string, but types.UID, records []*ledger.Record) (pods []types.UID, shared bool) {
	for _, record := range records {
		if record.UID == but || record.Entry == nil {
			continue
		}
		if slices.ContainsFunc(record.Entry.Devices, func(d ledger.Device) bool { return d.GPU == gpu && d.Share != nil }) {
			pods, shared = append(pods, record.Entry.Pods...), true
		}
	}
	return pods, shared
}

// release tells that a claim stays without an error where it was prepared again since it was read: then nothing is known of it.
func (r *Reconciler) release(ctx context.Context, entry *ledger.Entry) (released bool, err error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KRef(entry.Claim.Namespace, entry.Claim.Name),
		"claimUID", entry.Claim.UID)
	logger.Info("Nobody uses the prepared claim any more, releasing it", "gpus", entry.HeldGPUs())
	if released, err = r.opts.Release(ctx, entry); err != nil {
		return false, fmt.Errorf("release claim %s, which nobody uses any more: %w", entry.Claim, err)
	}
	if !released {
		logger.Info("Claim was prepared again meanwhile and stays")
	}
	r.forget(subject{claim: entry.Claim.UID})
	delete(r.orphans, entry.Claim.UID)
	return released, nil
}

func (r *Reconciler) forget(s subject) {
	delete(r.before, s)
	delete(r.said, s)
}

// nodeReading is what is the same for all claims of a look, asked for when the first claim needs it.
type nodeReading struct {
	sources *Sources
	once    sync.Once
	reading Reading
	claims  nodeUsers
}

func (n *nodeReading) fill(ctx context.Context, into *Reading) {
	n.once.Do(func() {
		// In this order: a pod that has processes must be known to the API server, and one that runs by that to the kubelet, which started it.
		if n.sources.Running != nil {
			n.reading.Running, n.reading.RunningErr = n.sources.Running(ctx)
		}
		n.reading.Pods, n.reading.PodsErr = n.sources.Pods(ctx)
		n.reading.Kubelet, n.reading.KubeletErr = n.sources.Kubelet(ctx)
		n.reading.Registered = n.sources.Registered()
		n.withoutEnded(ctx)
	})
	into.Pods, into.PodsErr = n.reading.Pods, n.reading.PodsErr
	into.Kubelet, into.KubeletErr = n.reading.Kubelet, n.reading.KubeletErr
	into.Running, into.RunningErr = n.reading.Running, n.reading.RunningErr
	into.Registered = n.reading.Registered
}
