// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
)

// sliceWatch is what the API server has of the node's devices, or had last: a kubelet that starts deletes all slices.
type sliceWatch struct {
	gap *gapMeter
	// answered is told of each attempt to list or to watch. Without the right to, nothing is written that could be refused, either.
	answered func(error)
	// taken is told that the API server has a slice.
	taken func()
	// gone is signalled when a slice was deleted.
	gone chan struct{}
	// nodeRead, if it is not nil, is given the Node whenever it was read.
	nodeRead func(context.Context, *corev1.Node)

	mu     sync.Mutex
	taints map[string][]resourceapi.DeviceTaint // by device
	hasAny bool                                 // whether the API server has, or ever had, one of the node's slices
}

func (w *sliceWatch) read(ctx context.Context, node *corev1.Node) {
	if w.nodeRead != nil {
		w.nodeRead(ctx, node)
	}
}

// unlessAny does something if the API server has never had a slice of the node. None is taken note of meanwhile.
func (w *sliceWatch) unlessAny(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.hasAny {
		do()
	}
}

// slicesOf selects the slices of a node's GPUs.
func slicesOf(node string) string {
	return fields.Set{resourceapi.ResourceSliceSelectorNodeName: node, resourceapi.ResourceSliceSelectorDriver: Name}.String()
}

// run takes it from the API server until ctx ends.
func (w *sliceWatch) run(ctx context.Context, client kubernetes.Interface, node string) {
	api := client.ResourceV1().ResourceSlices()
	watcher := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = slicesOf(node)
			list, err := api.List(ctx, o)
			w.answered(err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = slicesOf(node)
			watch, err := api.Watch(ctx, o)
			w.answered(err)
			return watch, err
		},
	}
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(watcher, client),
		ObjectType:    &resourceapi.ResourceSlice{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { w.saw(ctx, o) },
			UpdateFunc: func(_, o any) { w.saw(ctx, o) },
			DeleteFunc: func(o any) {
				if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
					o = gone.Obj
				}
				if slice, ok := o.(*resourceapi.ResourceSlice); ok {
					w.gap.deleted(slice.UID)
					signal(w.gone)
				}
			},
		},
	})
	controller.RunWithContext(ctx)
}

func (w *sliceWatch) saw(ctx context.Context, o any) {
	slice, ok := o.(*resourceapi.ResourceSlice)
	if !ok {
		klog.FromContext(ctx).Error(nil, "The API server sent something that is no ResourceSlice", "object", o)
		return
	}
	poolGeneration.Set(float64(slice.Spec.Pool.Generation))
	w.gap.added(slice.UID)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, device := range slice.Spec.Devices {
		w.taints[device.Name] = device.Taints
	}
	w.hasAny = true
	w.taken()
}

// keepAges gives taints that do not say since when they are there the time that they were published with. Of slices that are changed
// the API server's is kept anyway, but not of such as were deleted.
func (w *sliceWatch) keepAges(resources *resourceslice.DriverResources) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, pool := range resources.Pools {
		for _, slice := range pool.Slices {
			for _, device := range slice.Devices {
				for i := range device.Taints {
					taint := &device.Taints[i]
					had := slices.IndexFunc(w.taints[device.Name], func(t resourceapi.DeviceTaint) bool { return sameTaint(&t, taint) })
					if taint.TimeAdded == nil && had >= 0 {
						taint.TimeAdded = w.taints[device.Name][had].TimeAdded
					}
				}
			}
		}
	}
}

// sameTaint compares all but the age.
func sameTaint(a, b *resourceapi.DeviceTaint) bool {
	return a.Key == b.Key && a.Value == b.Value && a.Effect == b.Effect
}
