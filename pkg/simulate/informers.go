// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/tools/cache"

	"stowage.dev/stowage/pkg/snapshot"
)

// direct lists claims itself. The fake would copy each twice more.
type direct struct {
	*fake.Clientset
	claims []*resourceapi.ResourceClaim
}

// ResourceV1 implements [kubernetes.Interface].
func (d direct) ResourceV1() resourceclient.ResourceV1Interface {
	return directResource{d.Clientset.ResourceV1(), d.claims}
}

type directResource struct {
	resourceclient.ResourceV1Interface
	claims []*resourceapi.ResourceClaim
}

func (r directResource) ResourceClaims(namespace string) resourceclient.ResourceClaimInterface {
	return directClaims{r.ResourceV1Interface.ResourceClaims(namespace), namespace, r.claims}
}

type directClaims struct {
	resourceclient.ResourceClaimInterface
	namespace string
	claims    []*resourceapi.ResourceClaim
}

func (c directClaims) List(ctx context.Context, opts metav1.ListOptions) (*resourceapi.ResourceClaimList, error) {
	if c.namespace != metav1.NamespaceAll || opts.LabelSelector != "" {
		return c.ResourceClaimInterface.List(ctx, opts)
	}
	all := &resourceapi.ResourceClaimList{Items: make([]resourceapi.ResourceClaim, 0, len(c.claims))}
	all.ResourceVersion = newest(c.claims)
	for _, claim := range c.claims {
		all.Items = append(all.Items, *claim)
	}
	return all, nil
}

// newFactory returns informers of a client. Those of the kinds of which there are most have the objects themselves: on the way through a
// list of the API each would be copied three times, which takes a third of the memory of a simulation.
func newFactory(client kubernetes.Interface, objects *snapshot.Objects) informers.SharedInformerFactory {
	factory := informers.NewSharedInformerFactory(client, 0)
	register(factory, objects.Pods, cache.Indexers{}) // as a scheduler's
	register(factory, objects.Nodes, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	register(factory, objects.ResourceSlices, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	return factory
}

// register makes the informer of a kind one that has the objects, and is told of no change.
func register[T any, P interface {
	*T
	runtime.Object
}](factory informers.SharedInformerFactory, objects []P, indexers cache.Indexers) {
	factory.InformerFor(P(new(T)), func(client kubernetes.Interface, resync time.Duration) cache.SharedIndexInformer {
		all := &list[P]{Items: objects}
		all.ResourceVersion = newest(objects)
		return cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc:  func(context.Context, metav1.ListOptions) (runtime.Object, error) { return all, nil },
			WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return watch.NewFake(), nil },
		}, client), P(new(T)), resync, indexers)
	})
}

// list is one whose items are the objects, where those of the API have them by value.
type list[P runtime.Object] struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []P
}

// DeepCopyObject implements [runtime.Object]. The objects, which nobody changes, are the same.
func (l *list[P]) DeepCopyObject() runtime.Object {
	return &list[P]{l.TypeMeta, l.ListMeta, slices.Clone(l.Items)}
}
