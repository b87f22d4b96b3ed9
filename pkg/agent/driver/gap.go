package driver

import (
	"context"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// gapMeter measures for how long not all of the node's slices are in the API server. While they are not, nothing can be scheduled to the
// node's GPUs.
type gapMeter struct {
	clock clock.PassiveClock
	// observe gets the length of each gap.
	observe func(time.Duration)

	mu      sync.Mutex
	wanted  int
	present map[types.UID]bool
	// whole tells that all slices were there since the last change of what is wanted; only after that slices can be missed.
	whole bool
	since time.Time // the beginning of the gap, zero if there is none
}

func newGapMeter(c clock.PassiveClock) *gapMeter {
	return &gapMeter{
		clock:   c,
		observe: func(gap time.Duration) { sliceGapSeconds.Observe(gap.Seconds()) },
		present: map[types.UID]bool{},
	}
}

// want tells how many slices there should be. Slices that come and go because of that are no gap.
func (g *gapMeter) want(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if n != g.wanted {
		g.wanted, g.whole, g.since = n, false, time.Time{}
	}
	g.judge()
}

func (g *gapMeter) added(uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.present[uid] = true
	g.judge()
}

func (g *gapMeter) deleted(uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.present, uid)
	g.judge()
}

func (g *gapMeter) judge() {
	slicesPublished.Set(float64(len(g.present)))
	switch whole := len(g.present) >= g.wanted && g.wanted > 0; {
	case whole && !g.since.IsZero():
		g.observe(g.clock.Since(g.since))
		g.since = time.Time{}
	case whole:
		g.whole = true
	case g.whole && g.since.IsZero():
		g.since = g.clock.Now()
	}
}

// run feeds the meter from the API server until ctx ends.
func (g *gapMeter) run(ctx context.Context, client kubernetes.Interface, node string) {
	selector := fields.Set{resourceapi.ResourceSliceSelectorNodeName: node, resourceapi.ResourceSliceSelectorDriver: Name}.String()
	slices := client.ResourceV1().ResourceSlices()
	watcher := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = selector
			return slices.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = selector
			return slices.Watch(ctx, o)
		},
	}
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(watcher, client),
		ObjectType:    &resourceapi.ResourceSlice{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { g.saw(ctx, o) },
			UpdateFunc: func(_, o any) { g.saw(ctx, o) },
			DeleteFunc: func(o any) {
				if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
					o = gone.Obj
				}
				if slice, ok := o.(*resourceapi.ResourceSlice); ok {
					g.deleted(slice.UID)
				}
			},
		},
	})
	controller.RunWithContext(ctx)
}

func (g *gapMeter) saw(ctx context.Context, o any) {
	slice, ok := o.(*resourceapi.ResourceSlice)
	if !ok {
		klog.FromContext(ctx).Error(nil, "The API server sent something that is no ResourceSlice", "object", o)
		return
	}
	poolGeneration.Set(float64(slice.Spec.Pool.Generation))
	g.added(slice.UID)
}
