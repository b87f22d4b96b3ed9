package driver

import (
	"context"
	"errors"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

const (
	// sliceSyncDelay is how long after a slice was changed or deleted by somebody else it is put back. A kubelet
	// that starts deletes all slices of its node, and no pod can be scheduled to it meanwhile: kubeletplugin's own
	// publishing, with its 30 s, would leave a gap as long.
	sliceSyncDelay = time.Second

	// graceWithoutGPUs is how long GPUs may fail to be found before the slices of an earlier agent are
	// replaced by an empty pool: a driver that is being loaded anew is no reason to withdraw them.
	graceWithoutGPUs = 30 * time.Second
)

// publisher finds the node's GPUs and keeps their ResourceSlices in the API server as they should be.
type publisher struct {
	nodeName string
	client   kubernetes.Interface
	hardware *Hardware
	status   *Status

	mu         sync.Mutex
	resources  *resourceslice.DriverResources // what should be published, nil as long as that is not known
	controller *resourceslice.Controller
}

// run looks for GPUs until there is an answer, then publishes it until ctx ends.
func (p *publisher) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "publisher"))
	p.discover(ctx)
	<-ctx.Done()
	p.mu.Lock()
	controller := p.controller
	p.mu.Unlock()
	controller.Stop()
}

// discover tries until GPUs are found. No driver is a state, not an error: one may be installed later.
func (p *publisher) discover(ctx context.Context) {
	logger := klog.FromContext(ctx)
	start := time.Now()
	backoff := wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.1, Steps: 6, Cap: 30 * time.Second}
	said, withdrawn := "", false
	for {
		node, err := p.hardware.Discover(ctx)
		if err == nil {
			for _, failure := range node.Failures {
				logger.Error(failure.Err, "GPU does not answer and is not published", "index", failure.Index, "pciBusID", failure.PCIBusID, "reason", failure.Reason)
			}
			logger.Info("GPUs are found", "count", len(node.GPUs), "driverVersion", node.DriverVersion)
			p.status.set(stageGPUs, true)
			p.publish(ctx, node.DriverResources(p.nodeName))
			return
		}
		if err.Error() != said {
			said = err.Error()
			logger.Info("No GPUs can be used yet, trying on", "reason", said)
		}
		if !withdrawn && time.Since(start) > graceWithoutGPUs {
			withdrawn = true
			p.publish(ctx, emptyPool(p.nodeName))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff.Step()):
		}
	}
}

// publish makes the resources what should be in the API server. It waits for the API server the first time.
func (p *publisher) publish(ctx context.Context, resources resourceslice.DriverResources) {
	p.mu.Lock()
	p.resources = &resources
	controller := p.controller
	p.mu.Unlock()
	if controller != nil {
		controller.Update(&resources)
		return
	}
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName:   Name,
		KubeClient:   p.client,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.nodeName},
		Resources:    &resources,
		SyncDelay:    ptr.To(sliceSyncDelay),
		ErrorHandler: p.handleError,
	})
	if err != nil {
		if ctx.Err() == nil {
			utilruntime.HandleErrorWithContext(ctx, err, "ResourceSlices cannot be published")
		}
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.controller = controller
}

// publishAgain checks the slices now instead of at the next event.
func (p *publisher) publishAgain() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.controller != nil {
		p.controller.Update(p.resources)
	}
}

// handleError says what the API server did not take. The controller tries again after errors; dropped fields
// and invalid slices stay as they are until the agent or the cluster changes, so they are counted and named.
func (p *publisher) handleError(ctx context.Context, err error, msg string) {
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped):
		sliceErrors.WithLabelValues("dropped_fields").Inc()
		utilruntime.HandleErrorWithContext(ctx, err, "The API server dropped fields of a ResourceSlice: feature gates of the cluster are off", "pool", dropped.PoolName, "slice", dropped.SliceIndex, "features", dropped.DisabledFeatures())
	case apierrors.IsInvalid(err):
		sliceErrors.WithLabelValues("invalid").Inc()
		utilruntime.HandleErrorWithContext(ctx, err, "The API server refuses a ResourceSlice as invalid: its devices cannot be scheduled")
	default:
		sliceErrors.WithLabelValues("other").Inc()
		utilruntime.HandleErrorWithContext(ctx, err, msg)
	}
}

// emptyPool says that the driver runs and has no devices.
func emptyPool(pool string) resourceslice.DriverResources {
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{pool: {Slices: []resourceslice.Slice{{}}}}}
}
