// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"context"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

const (
	// probeEvery is how often the API server is asked whether it is there, and probeWait how long it may take. A watch does not tell: over a
	// network that is cut it ends after a minute, and is begun anew without an error.
	probeEvery, probeWait = 3 * time.Second, 5 * time.Second
)

// Follower is told of objects as they come, change and go. Calls for objects of different kinds may be made at once.
type Follower interface {
	Put(metav1.Object)
	Delete(metav1.Object)
	// Reachable tells for a resource, "pods", that the API server does not answer, with its error, or that it does again. It is told often.
	Reachable(resource string, err error)
}

// Followed is what Follow tells.
type Followed struct {
	// PendingPods adds the pods that do not run yet.
	PendingPods bool
}

// followed is a kind that can be followed.
type followed struct {
	resource, group string
	optional        bool
	object          apiruntime.Object
	list            func(context.Context, metav1.ListOptions) (apiruntime.Object, error)
	watch           func(context.Context, metav1.ListOptions) (watch.Interface, error)
	fields          string
}

// Follow tells a follower of all slices, claims and taint rules of a cluster and of each of their changes, until ctx ends. It calls synced
// when all that were there are told, with the kinds that may not be read. Objects are trimmed as in a file, and read only.
func Follow(ctx context.Context, client kubernetes.Interface, what Followed, to Follower, synced func([]Missing)) error {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var missing []Missing
	var hasSynced []cache.InformerSynced
	for _, k := range followable(client, what) {
		switch err := k.allowed(ctx); {
		case err == nil:
		case k.optional && apierrors.IsNotFound(err):
			continue
		case k.optional && apierrors.IsForbidden(err):
			missing = append(missing, Missing{Resource: k.qualified(), Reason: "forbidden"})
			continue
		default:
			return err
		}
		informer := k.informer(client, to)
		hasSynced = append(hasSynced, informer.HasSynced)
		running.Go(func() { informer.RunWithContext(ctx) })
	}
	if !cache.WaitForCacheSync(ctx.Done(), hasSynced...) {
		return context.Cause(ctx)
	}
	synced(missing)
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(probeEvery):
			to.Reachable("version", probe(ctx, client))
		}
	}
}

// MayFollow is the error with which Follow would end at once: the API server does not answer, or a right is missing.
func MayFollow(ctx context.Context, client kubernetes.Interface, what Followed) error {
	for _, k := range followable(client, what) {
		err := k.allowed(ctx)
		if err != nil && !(k.optional && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err))) {
			return err
		}
	}
	return nil
}

// probe asks the API server for its version.
func probe(ctx context.Context, client kubernetes.Interface) error {
	rest := client.Discovery().RESTClient()
	if rest == nil { // a fake client has none
		return nil
	}
	return rest.Get().AbsPath("/version").Timeout(probeWait).Do(ctx).Error()
}

func followable(client kubernetes.Interface, what Followed) []*followed {
	api := client.ResourceV1()
	kinds := []*followed{
		followedKind("resourceslices", resourceapi.GroupName, &resourceapi.ResourceSlice{}, api.ResourceSlices().List,
			api.ResourceSlices().Watch),
		followedKind("resourceclaims", resourceapi.GroupName, &resourceapi.ResourceClaim{}, api.ResourceClaims(all).List,
			api.ResourceClaims(all).Watch),
		followedKind("devicetaintrules", resourceapi.GroupName, &resourceapi.DeviceTaintRule{},
			api.DeviceTaintRules().List, api.DeviceTaintRules().Watch),
	}
	kinds[2].optional = true
	if what.PendingPods {
		pods := followedKind("pods", "", &v1.Pod{}, client.CoreV1().Pods(all).List, client.CoreV1().Pods(all).Watch)
		pods.optional, pods.fields = true, "status.phase="+string(v1.PodPending)
		kinds = append(kinds, pods)
	}
	return kinds
}

func followedKind[L apiruntime.Object](
	resource, group string, object apiruntime.Object,
	list func(context.Context, metav1.ListOptions) (L, error), watchThem func(context.Context, metav1.ListOptions) (watch.Interface, error),
) *followed {
	return &followed{
		resource: resource, group: group, object: object, watch: watchThem,
		list: func(ctx context.Context, opts metav1.ListOptions) (apiruntime.Object, error) { return list(ctx, opts) },
	}
}

func (k *followed) qualified() string {
	return (&kind{resource: k.resource, group: k.group}).qualified()
}

// allowed asks for one object and for a watch: an informer without the rights would try for ever.
func (k *followed) allowed(ctx context.Context) error {
	if _, err := k.list(ctx, metav1.ListOptions{Limit: 1, FieldSelector: k.fields}); err != nil {
		return k.refused("list", err)
	}
	w, err := k.watch(ctx, metav1.ListOptions{FieldSelector: k.fields})
	if err != nil {
		return k.refused("watch", err)
	}
	w.Stop()
	return nil
}

// refused says where the right is that is missing, if one is.
func (k *followed) refused(verb string, err error) error {
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("%s %s (manifests/kubectl/reader.yaml has the rights that are needed): %w", verb, k.qualified(), err)
	}
	return fmt.Errorf("%s %s: %w", verb, k.qualified(), err)
}

func (k *followed) informer(client kubernetes.Interface, to Follower) cache.Controller {
	tell := func(err error) {
		if err == nil || !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) { // then it lists anew, at once
			to.Reachable(k.resource, err)
		}
	}
	source := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (apiruntime.Object, error) {
			opts.FieldSelector = k.fields
			list, err := k.list(ctx, opts)
			tell(err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			opts.FieldSelector = k.fields
			w, err := k.watch(ctx, opts)
			tell(err)
			return w, err
		},
	}, client)
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: source, ObjectType: k.object, Transform: trimForFollowers,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(object any) { to.Put(object.(metav1.Object)) },
			UpdateFunc: func(_, object any) { to.Put(object.(metav1.Object)) },
			DeleteFunc: func(object any) {
				if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
					object = unknown.Obj
				}
				to.Delete(object.(metav1.Object))
			},
		},
	})
	return informer
}

// trimForFollowers is a cache.TransformFunc.
func trimForFollowers(object any) (any, error) {
	if o, ok := object.(metav1.Object); ok {
		trimMeta(o)
	}
	switch object := object.(type) {
	case *v1.Pod:
		trimPod(object)
	case *resourceapi.ResourceClaim:
		trimClaim(object)
	}
	return object, nil
}
