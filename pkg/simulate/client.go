// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"

	"stowage.dev/stowage/pkg/snapshot"
)

// writes are what plugins would have written that answers tell of.
type writes struct {
	mutex   sync.Mutex
	deleted []types.NamespacedName
	// claims are those that plugins have given back, as they would be then.
	claims []*resourceapi.ResourceClaim
}

// take returns what was written since it was last called.
func (w *writes) take() (deleted []types.NamespacedName, claims []*resourceapi.ResourceClaim) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	deleted, claims = w.deleted, w.claims
	w.deleted, w.claims = nil, nil
	return deleted, claims
}

// newClient returns a client that reads the objects. Its writes are answered as if they had succeeded, and change nothing, so that no watch
// tells of them.
func newClient(objects *snapshot.Objects) (kubernetes.Interface, *writes, error) {
	client, w := fake.NewSimpleClientset(), &writes{}
	by := map[schema.GroupVersionResource][]runtime.Object{}
	var last reflect.Type
	var resource schema.GroupVersionResource
	for object := range objects.All() { // kind by kind
		if t := reflect.TypeOf(object); t != last {
			kinds, _, err := scheme.Scheme.ObjectKinds(object)
			if err != nil {
				return nil, nil, fmt.Errorf("copy the cluster: %w", err)
			}
			resource, _ = meta.UnsafeGuessKindToResource(kinds[0])
			last = t
		}
		by[resource] = append(by[resource], object)
	}
	answer := func(action clienttesting.Action) (bool, runtime.Object, error) {
		w.mutex.Lock()
		defer w.mutex.Unlock()
		switch action := action.(type) {
		case clienttesting.DeleteAction:
			if action.GetResource().Resource == "pods" {
				w.deleted = append(w.deleted, types.NamespacedName{Namespace: action.GetNamespace(), Name: action.GetName()})
			}
			return true, nil, nil
		case clienttesting.UpdateAction: // and to create
			if claim, ok := action.GetObject().(*resourceapi.ResourceClaim); ok {
				w.claims = append(w.claims, claim)
			}
			return true, action.GetObject(), nil
		}
		return true, &v1.Pod{}, nil // patches, of a pod's status alone
	}
	for _, verb := range []string{"create", "update", "patch", "delete", "delete-collection"} {
		client.PrependReactor(verb, "*", answer)
	}
	// The fake's own store would copy each object as it comes and as it goes.
	client.PrependReactor("list", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		items, ok := by[action.GetResource()]
		if !ok {
			return false, nil, nil
		}
		list, err := listOf(items, action.(clienttesting.ListActionImpl).Kind, action.GetNamespace())
		return true, list, err
	})
	client.PrependReactor("get", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		name := action.(clienttesting.GetAction).GetName()
		for _, object := range by[action.GetResource()] {
			if o := object.(metav1.Object); o.GetNamespace() == action.GetNamespace() && o.GetName() == name {
				return true, object.DeepCopyObject(), nil // who reads one may be about to change it
			}
		}
		return false, nil, nil
	})
	return client, w, nil
}

// listOf is a list of the namespace's objects, of all without one. They share what they point to with the originals.
func listOf(items []runtime.Object, kind schema.GroupVersionKind, namespace string) (runtime.Object, error) {
	list, err := scheme.Scheme.New(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err != nil {
		return nil, err
	}
	if namespace != "" {
		items = slices.DeleteFunc(slices.Clone(items), func(o runtime.Object) bool { return o.(metav1.Object).GetNamespace() != namespace })
	}
	list.(metav1.ListInterface).SetResourceVersion(newest(items))
	return list, meta.SetList(list, items)
}

// newest is the resource version of a list of the objects.
func newest[T runtime.Object](objects []T) string {
	last := uint64(1)
	for _, o := range objects {
		if version, err := strconv.ParseUint(any(o).(metav1.Object).GetResourceVersion(), 10, 64); err == nil {
			last = max(last, version)
		}
	}
	return strconv.FormatUint(last, 10)
}
