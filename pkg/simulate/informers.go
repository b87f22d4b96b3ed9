// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"stowage.dev/stowage/pkg/snapshot"
)

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
		return cache.NewSharedIndexInformer(listWatch(client, objects), P(new(T)), resync, indexers)
	})
}

// listWatch lists the objects, and tells of no change.
func listWatch[P runtime.Object](client kubernetes.Interface, objects []P) cache.ListerWatcher {
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
			return &list[P]{Items: objects, ListMeta: metav1.ListMeta{ResourceVersion: newest(objects)}}, nil
		},
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return watch.NewFake(), nil },
	}, client)
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
