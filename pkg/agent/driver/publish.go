// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
)

const (
	// sliceSyncDelay is how long after a slice was changed or deleted by somebody else it is put back. A kubelet
	// that starts deletes all slices of its node, and no pod can be scheduled to it meanwhile: kubeletplugin's own
	// publishing, with its 30 s, would leave a gap as long.
	sliceSyncDelay = time.Second

	// graceWithoutGPUs is how long GPUs may fail to be found before the slices of an earlier agent are
	// replaced by an empty pool: a driver that is being loaded anew is no reason to withdraw them.
	graceWithoutGPUs = 30 * time.Second

	// retryInterval is how long after the API server refused a slice, or was away, it is tried again. The controller's own
	// backoff grows to a quarter of an hour, for which a taint would be missing.
	retryInterval = 5 * time.Second

	// firstLookTime is how long publishing waits for the first looks at what is occupied and at who uses GPUs without a claim. What an agent
	// before has published stays meanwhile.
	firstLookTime = 30 * time.Second

	// nodeInterval is how often the Node is read although nothing tells that it was made anew.
	nodeInterval = time.Minute

	// After firstAnew a slice of which the API server dropped fields is written again, and then after pauses that double up to
	// lastAnew: while API servers of two versions answer, the next one may keep them, and one that is upgraded does in the
	// end. Each such write is a new generation.
	firstAnew, lastAnew = time.Minute, time.Hour

	// registeredPoll is how often it is looked whether the kubelet has registered the driver, while that is waited for.
	registeredPoll = 50 * time.Millisecond

	// settleTime is how long after an event of the hardware the node is looked at.
	settleTime = time.Second
)

// publisher finds the node's GPUs and keeps their ResourceSlices in the API server as they should be.
type publisher struct {
	nodeName string
	// lockPath is locked while publishing: of the two agents in a rolling update one leads, and two
	// versions that see a GPU differently do not change its slice in turns.
	lockPath string
	client   kubernetes.Interface
	hardware *Hardware
	// resources are the hardware's.
	resources func(pool string) (resources resourceslice.DriverResources, ok bool)
	status    *Status

	// changed tells that what should be published may have changed, or has to be written anew. What it
	// is, is computed by the one who takes it.
	changed chan struct{}
	// anew: it has to be written anew what was written before.
	anew atomic.Bool
	// withdrawn: while no GPUs are known an empty pool is published.
	withdrawn atomic.Bool
	// leads is closed when no other agent of this node publishes, or when that cannot be known.
	leads    chan struct{}
	leadOnce sync.Once
	// occupiedKnown is closed once it has been looked at what is occupied, and foreignKnown once it has
	// been looked who uses GPUs without a claim.
	occupiedKnown, foreignKnown chan struct{}
	// failed tells that a slice could not be written since the last try.
	failed atomic.Bool
	// dropped tells that the API server has dropped fields of a slice since that was last looked at.
	dropped atomic.Bool
	// unseen tells that the API server refuses to show the agent its slices.
	unseen atomic.Bool
	gap    *gapMeter
	server sliceWatch
	// keepWrites is how long the controller may not have seen what it wrote; its own default if nil.
	keepWrites *time.Duration
	// asked, if it is not nil, is signalled when the API server has answered for the first time, or for another Node.
	asked chan<- struct{}
}

func newPublisher(opts Options, status *Status) *publisher {
	gap := newGapMeter(clock.RealClock{})
	p := &publisher{
		nodeName:  opts.NodeName,
		lockPath:  filepath.Join(opts.StateDir, "publisher.lock"),
		client:    opts.Client,
		hardware:  opts.Hardware,
		resources: opts.Hardware.Resources,
		status:    status,
		changed:   make(chan struct{}, 1),

		leads:         make(chan struct{}),
		occupiedKnown: make(chan struct{}),
		foreignKnown:  make(chan struct{}),

		gap:    gap,
		server: sliceWatch{gap: gap, taints: map[string][]resourceapi.DeviceTaint{}, gone: make(chan struct{}, 1)},
	}
	p.server.answered = p.answered
	p.server.taken = func() { status.accepted(reasonSlicesInvalid) }
	return p
}

// run looks for GPUs and publishes what it finds, until ctx ends.
func (p *publisher) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "publisher"))
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { p.discover(ctx) })
	p.keepOn(ctx, p.publish)
}

// keepOn publishes, and begins anew with ever longer pauses where that was not possible: on a disk that is full there is no lock file.
func (p *publisher) keepOn(ctx context.Context, publish func(context.Context) error) {
	backoff := wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.1, Steps: 6, Cap: 30 * time.Second}
	for {
		err := publish(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		pause := backoff.Step()
		sliceErrors.WithLabelValues("other").Inc()
		p.status.fail(stagePublishes, reasonNotPublished, err.Error())
		utilruntime.HandleErrorWithContext(ctx, err, "ResourceSlices cannot be published, trying on", "after", pause)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// discover looks at the node for as long as the agent runs: until GPUs are found, and then for what changes. No driver is a state, not an
// error: one may be installed later.
func (p *publisher) discover(ctx context.Context) {
	logger := klog.FromContext(ctx)
	start := time.Now()
	found := start // when GPUs were last found
	first := wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.1, Steps: 6, Cap: 30 * time.Second}
	backoff := first
	said, withdrawn := "not looked yet", false
	for {
		node, err := p.look(ctx)
		pause := lookInterval
		switch {
		case err == nil:
			if said != "" {
				logger.Info("GPUs are found", "count", len(node.GPUs), "failed", len(node.Failures), "driverVersion", node.DriverVersion)
			}
			said, withdrawn, backoff, found = "", true, first, time.Now()
			if p.hardware.opts.Keeper.Why() == nil {
				p.status.set(stageGPUs, true)
			}
			p.refresh()
		case letGo(err):
			// Who steps aside says so. GPUs may be known of an earlier agent, and then they stay in the slices.
			said = ""
			p.refresh()
		case err.Error() != said:
			said = err.Error()
			logger.Info("No GPUs can be used now, trying on", "reason", said)
			fallthrough
		default:
			if p.status.set(stageGPUs, false); time.Since(found) > graceWithoutGPUs {
				p.status.fail(stageGPUs, reasonNoGPUs, err.Error())
			}
			pause = backoff.Step()
		}
		if !withdrawn && time.Since(start) > graceWithoutGPUs {
			withdrawn = true
			p.withdrawn.Store(true)
			p.refresh()
		}
		select {
		case <-ctx.Done():
			return
		case <-p.hardware.again:
			// One event seldom comes alone, and what is being changed is not yet what it will be.
			pause = min(pause, settleTime)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		case <-time.After(pause):
		}
	}
}

// look gives up waiting after lookInterval, because NVML may hang: then there are no GPUs, as without a driver.
func (p *publisher) look(ctx context.Context) (*discovery.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, lookInterval)
	defer cancel()
	return p.hardware.Discover(ctx)
}

// refresh publishes the GPUs as they are when that is done, if that is something else than before. It does not block.
func (p *publisher) refresh() { signal(p.changed) }

// writeAnew is refresh, and looks at the slices even if they should be as before. It does not block.
func (p *publisher) writeAnew() {
	p.anew.Store(true)
	p.refresh()
}

// signal does not block: one who has not looked yet will see what is new as well.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// wanted is what should be published now; nil while nothing is known of the node's GPUs.
func (p *publisher) wanted() *resourceslice.DriverResources {
	resources, ok := p.resources(p.nodeName)
	switch {
	case ok:
	case p.withdrawn.Load():
		resources = emptyPool(p.nodeName)
	default:
		return nil
	}
	p.server.keepAges(&resources)
	return &resources
}

// publish keeps in the API server what is wanted until ctx ends, after it has waited until something is known
// of the node's GPUs and until no other agent of the node publishes.
func (p *publisher) publish(ctx context.Context) error {
	for p.wanted() == nil {
		select {
		case <-ctx.Done():
			return nil
		case <-p.changed:
		}
	}
	unlock, err := p.lead(ctx)
	if err != nil {
		if ctx.Err() == nil {
			p.leading()
		}
		return err
	}
	p.leading()
	defer unlock()
	p.status.set(stagePublishes, true)
	defer p.status.set(stagePublishes, false)
	p.hardware.Lead(ctx)
	defer p.hardware.Follow()
	p.gap.want(len(p.wanted().Pools[p.nodeName].Slices))
	var group sync.WaitGroup
	defer group.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group.Go(func() { p.server.run(ctx, p.client, p.nodeName) })
	for ctx.Err() == nil {
		// The API server has answered then: what it alone can tell can be known.
		uid := p.awaitNode(ctx)
		signal(p.asked)
		if p.awaitFirstLooks(ctx); ctx.Err() != nil {
			break
		}
		if err := p.publishFor(ctx, uid); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// publishFor is publish for as long as the Node has that UID, which is the slices' owner: those of an owner that is
// gone are deleted as soon as they are made.
func (p *publisher) publishFor(ctx context.Context, uid types.UID) error {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	group.Go(func() {
		defer cancel()
		p.whileNode(ctx, uid)
	})
	resources := p.wanted()
	// It returns only when the API server has answered.
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName:   Name,
		KubeClient:   p.client,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.nodeName, UID: uid},
		Resources:    resources,
		SyncDelay:    ptr.To(sliceSyncDelay),
		ErrorHandler: p.handleError,

		MutationCacheTTL: p.keepWrites,
	})
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer controller.Stop()
	p.update(ctx, controller, resources)
	return nil
}

// awaitFirstLooks waits, for at most firstLookTime: what is published first must not take away a taint that an agent before
// has set for good reasons. When the agent returns with the driver pods wait for that, and a kubelet that has not
// registered it yet would let them wait on.
func (p *publisher) awaitFirstLooks(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstLookTime)
	defer cancel()
	for _, known := range []<-chan struct{}{p.occupiedKnown, p.foreignKnown} {
		select {
		case <-ctx.Done():
		case <-known:
		}
	}
	for p.hardware.opts.Keeper.Returned() && ctx.Err() == nil {
		if registered, _ := p.status.get(stageRegistered); registered {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(registeredPoll):
		}
	}
}

// update tells the controller what is wanted until ctx ends: what differs from what was told last, and all of it when it
// is to be written anew, could not be written, or was a while ago not taken as a whole. What the API server has instead is
// no reason: it may drop fields each time.
func (p *publisher) update(ctx context.Context, controller interface {
	Update(resources *resourceslice.DriverResources)
}, last *resourceslice.DriverResources,
) {
	retry, anew, pause := time.NewTicker(retryInterval), time.NewTimer(lastAnew), firstAnew
	defer retry.Stop()
	defer anew.Stop()
	for dropped := false; ; {
		again := false
		if p.dropped.Swap(false) {
			dropped = true
			anew.Reset(pause)
			pause = min(2*pause, lastAnew)
		}
		select {
		case <-ctx.Done():
			return
		case <-p.changed:
		case <-anew.C:
			if !dropped {
				pause = firstAnew
			}
			again, dropped = true, false
			anew.Reset(lastAnew)
		case <-retry.C:
			if !p.failed.Swap(false) {
				if !p.unseen.Load() {
					p.status.accepted(reasonForbidden)
				}
				continue
			}
			again = true
		}
		again = p.anew.Swap(false) || again
		resources := p.wanted()
		if !again && apiequality.Semantic.DeepEqual(last, resources) {
			continue
		}
		p.gap.want(len(resources.Pools[p.nodeName].Slices))
		controller.Update(resources)
		last = resources
	}
}

func (p *publisher) leading() { p.leadOnce.Do(func() { close(p.leads) }) }

// lead waits until no other agent of this node publishes.
func (p *publisher) lead(ctx context.Context) (unlock func(), err error) {
	soon, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if unlock, err = durable.Lock(soon, p.lockPath); err == nil || soon.Err() == nil || ctx.Err() != nil {
		return unlock, err
	}
	klog.FromContext(ctx).Info("Another agent of this node publishes its ResourceSlices, waiting for it to stop", "lock", p.lockPath)
	p.status.fail(stagePublishes, reasonOtherPublishes, fmt.Sprintf("since %s another agent of this node, of whichever namespace, holds %s, "+
		"and this one publishes once that has ended", time.Now().UTC().Format(time.RFC3339), p.lockPath))
	return durable.Lock(ctx, p.lockPath)
}

// answered takes note of an answer of the API server to who reads the slices.
func (p *publisher) answered(err error) {
	switch {
	case err == nil:
		// At once: an API server that has just started may refuse for a moment.
		if p.unseen.Swap(false) {
			p.status.accepted(reasonUnauthorized)
			if !p.failed.Load() {
				p.status.accepted(reasonForbidden)
			}
		}
	case refusal(err) == "forbidden":
		p.unseen.Store(true)
		p.status.refused(err)
		sliceErrors.WithLabelValues("forbidden").Inc()
	}
}

// handleError says what the API server did not take. The controller tries again after errors; dropped fields
// and invalid slices stay as they are until the agent or the cluster changes, so they are counted and named.
func (p *publisher) handleError(ctx context.Context, err error, msg string) {
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped):
		p.dropped.Store(true)
		sliceErrors.WithLabelValues("dropped_fields").Inc()
		utilruntime.HandleErrorWithContext(ctx, err, "The API server dropped fields of a ResourceSlice: feature gates of the cluster are off",
			"pool", dropped.PoolName, "slice", dropped.SliceIndex, "features", dropped.DisabledFeatures())
	case apierrors.IsInvalid(err):
		sliceErrors.WithLabelValues("invalid").Inc()
		p.anew.Store(true) // tried again with the next look
		p.server.unlessAny(func() {
			p.status.fail(stageAccepted, reasonSlicesInvalid, fmt.Sprintf("the API server takes none of the agent's ResourceSlices: %v", err))
		})
		utilruntime.HandleErrorWithContext(ctx, err, "The API server refuses a ResourceSlice as invalid: its devices cannot be scheduled")
	default:
		p.failed.Store(true)
		p.status.refused(err)
		sliceErrors.WithLabelValues(refusal(err)).Inc()
		utilruntime.HandleErrorWithContext(ctx, err, msg)
	}
}

// emptyPool says that the driver runs and has no devices.
func emptyPool(pool string) resourceslice.DriverResources {
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{pool: {Slices: []resourceslice.Slice{{}}}}}
}
