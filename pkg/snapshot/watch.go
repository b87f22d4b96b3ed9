package snapshot

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// pause is how long changes are collected before they are told.
const pause = 500 * time.Millisecond

// Watch calls fn with the devices and claims of a cluster, and again whenever they have changed, until ctx ends or fn fails. The
// snapshots have slices, claims and taint rules alone. It needs the right to list and watch these.
func Watch(ctx context.Context, client kubernetes.Interface, fn func(*Snapshot) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(withoutManagedFields))
	defer factory.Shutdown()
	defer cancel()
	resources := factory.Resource().V1()
	changed := make(chan struct{}, 1)
	tell := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	watched := []cache.SharedIndexInformer{resources.ResourceSlices().Informer(), resources.ResourceClaims().Informer()}
	_, rulesErr := client.ResourceV1().DeviceTaintRules().List(ctx, metav1.ListOptions{Limit: 1})
	if rulesErr == nil {
		watched = append(watched, resources.DeviceTaintRules().Informer())
	}
	for _, informer := range watched {
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { tell() }, UpdateFunc: func(any, any) { tell() }, DeleteFunc: func(any) { tell() },
		}); err != nil {
			return fmt.Errorf("watch: %w", err)
		}
	}
	factory.Start(ctx.Done())
	for _, informer := range watched {
		if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
			return context.Cause(ctx)
		}
	}
	for {
		var o Objects
		var err error
		if o.ResourceSlices, err = resources.ResourceSlices().Lister().List(labels.Everything()); err != nil {
			return err
		}
		if o.ResourceClaims, err = resources.ResourceClaims().Lister().List(labels.Everything()); err != nil {
			return err
		}
		if rulesErr == nil {
			if o.DeviceTaintRules, err = resources.DeviceTaintRules().Lister().List(labels.Everything()); err != nil {
				return err
			}
		}
		s := New(o)
		s.Taken = metav1.Now()
		if err := fn(s); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// withoutManagedFields is a cache.TransformFunc.
func withoutManagedFields(object any) (any, error) {
	if o, ok := object.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return object, nil
}
