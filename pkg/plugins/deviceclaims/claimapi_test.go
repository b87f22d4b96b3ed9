// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// claimAPI is the API server's side of ResourceClaims: resource versions, optimistic concurrency, field managers, and
// a watch that can be held back or closed. The fake clientset's own tracker has none of these.
type claimAPI struct {
	t testing.TB

	mutex    sync.Mutex
	version  int
	claims   map[types.NamespacedName]*resourceapi.ResourceClaim
	owners   map[types.UID]statusOwners
	watchers []*claimWatch
	sent     []watch.Event // all events that watchers have got, or would have
	held     []watch.Event
	holding  bool
	// late are writes that have been answered and not been carried out.
	late []clienttesting.UpdateActionImpl
	// writes are the accepted writes, as "verb/subresource name".
	writes []string
	// fault is asked before each request, as "verb/subresource" for claims, and "verb pods"; an error is the answer.
	// errLate says that a write is carried out only by land. after is asked when a write has taken effect: an error
	// is the answer although it has.
	fault, after func(request string) error
}

func newClaimAPI(t testing.TB, client *fake.Clientset) *claimAPI {
	api := &claimAPI{
		t: t, version: 100,
		claims: map[types.NamespacedName]*resourceapi.ResourceClaim{}, owners: map[types.UID]statusOwners{},
	}
	client.PrependReactor("*", "resourceclaims", api.react)
	client.PrependReactor("get", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		api.mutex.Lock()
		defer api.mutex.Unlock()
		err := api.ask(action.GetVerb() + " pods")
		return err != nil, nil, err
	})
	client.PrependWatchReactor("resourceclaims", func(action clienttesting.Action) (bool, watch.Interface, error) {
		api.mutex.Lock()
		defer api.mutex.Unlock()
		watcher := &claimWatch{result: make(chan watch.Event, 10000), stopped: make(chan struct{})}
		api.watchers = append(api.watchers, watcher)
		since := action.(clienttesting.WatchAction).GetWatchRestrictions().ResourceVersion
		for _, event := range api.sent {
			if newerVersion(event.Object.(*resourceapi.ResourceClaim).ResourceVersion, since) {
				watcher.send(event)
			}
		}
		return true, watcher, nil
	})
	return api
}

// errLate lets a client believe that its write failed, although it is still on its way.
var errLate = errors.New("Client.Timeout exceeded while awaiting headers")

// ask returns what the test wants to be the answer to a request, nil if the true one.
func (api *claimAPI) ask(request string) error {
	if api.fault == nil {
		return nil
	}
	return api.fault(request)
}

func (api *claimAPI) react(action clienttesting.Action) (bool, runtime.Object, error) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	request := action.GetVerb() + "/" + action.GetSubresource()
	if err := api.ask(request); err != nil {
		if update, ok := action.(clienttesting.UpdateActionImpl); ok && errors.Is(err, errLate) {
			api.late = append(api.late, update)
		}
		return true, nil, err
	}
	// The interfaces include each other, so the verb comes first.
	if action.GetVerb() == "create" {
		created := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceClaim).DeepCopy()
		name := types.NamespacedName{Namespace: action.GetNamespace(), Name: created.Name}
		if created.Name == "" || api.claims[name] != nil {
			return true, nil, apierrors.NewAlreadyExists(resourceapi.Resource("resourceclaims"), created.Name)
		}
		created.Namespace, created.UID = action.GetNamespace(), types.UID(created.Name+"-uid")
		created.Status = resourceapi.ResourceClaimStatus{}
		api.store(created, watch.Added, action.(clienttesting.CreateActionImpl).CreateOptions.FieldManager)
		return api.accepted(request, created)
	}
	switch action := action.(type) {
	case clienttesting.DeleteActionImpl:
		known := api.claims[types.NamespacedName{Namespace: action.GetNamespace(), Name: action.GetName()}]
		if known == nil {
			return true, nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), action.GetName())
		}
		p := action.DeleteOptions.Preconditions
		switch {
		case p == nil || p.UID == nil || p.ResourceVersion == nil:
			return true, nil, fmt.Errorf("deletion of claim %s without preconditions", known.Name)
		case *p.UID != known.UID || *p.ResourceVersion != known.ResourceVersion:
			return true, nil, apierrors.NewConflict(resourceapi.Resource("resourceclaims"), known.Name, fmt.Errorf("version %s is outdated", *p.ResourceVersion))
		case len(known.Finalizers) > 0:
			return true, nil, fmt.Errorf("deletion of claim %s, which has finalizers %v", known.Name, known.Finalizers)
		}
		api.store(known.DeepCopy(), watch.Deleted, "")
		return api.accepted(request, known)
	case clienttesting.UpdateActionImpl:
		updated, err := api.update(action)
		if err != nil {
			return true, nil, err
		}
		return api.accepted(request, updated)
	case clienttesting.GetAction:
		claim := api.claims[types.NamespacedName{Namespace: action.GetNamespace(), Name: action.GetName()}]
		if claim == nil {
			return true, nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), action.GetName())
		}
		return true, claim.DeepCopy(), nil
	case clienttesting.ListAction:
		list := &resourceapi.ResourceClaimList{}
		list.ResourceVersion = strconv.Itoa(api.version)
		for _, claim := range api.claims {
			list.Items = append(list.Items, *claim)
		}
		return true, list, nil
	}
	return true, nil, fmt.Errorf("unexpected request %s", request)
}

// accepted is the answer to a write that has taken effect.
func (api *claimAPI) accepted(request string, claim *resourceapi.ResourceClaim) (bool, runtime.Object, error) {
	api.writes = append(api.writes, request+" "+claim.Name)
	if api.after != nil {
		if err := api.after(request); err != nil {
			return true, nil, err
		}
	}
	return true, claim.DeepCopy(), nil
}

func (api *claimAPI) update(action clienttesting.UpdateActionImpl) (*resourceapi.ResourceClaim, error) {
	claim := action.Object.(*resourceapi.ResourceClaim)
	name := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	known := api.claims[name]
	switch {
	case known == nil:
		return nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), claim.Name)
	case claim.UID != known.UID || claim.ResourceVersion != known.ResourceVersion:
		return nil, apierrors.NewConflict(resourceapi.Resource("resourceclaims"), claim.Name, fmt.Errorf("version %s is outdated", claim.ResourceVersion))
	}
	updated := known.DeepCopy()
	if action.Subresource == "status" {
		updated.Status = *claim.Status.DeepCopy()
	} else {
		updated.ObjectMeta = *claim.ObjectMeta.DeepCopy()
		updated.ManagedFields = known.ManagedFields
	}
	if updated.Status.Allocation == nil && len(updated.Status.ReservedFor) > 0 {
		return nil, apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), claim.Name, nil)
	}
	if apiequality.Semantic.DeepEqual(known, updated) {
		return known.DeepCopy(), nil // a write that changes nothing has no version
	}
	api.store(updated, watch.Modified, action.UpdateOptions.FieldManager)
	return updated.DeepCopy(), nil
}

// land carries out the writes that are still on their way.
func (api *claimAPI) land() {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	for _, action := range api.late {
		if _, err := api.update(action); err == nil {
			api.writes = append(api.writes, "late update/"+action.Subresource+" "+action.Object.(*resourceapi.ResourceClaim).Name)
		}
	}
	api.late = nil
}

// store gives the claim a new version and tells the watchers.
func (api *claimAPI) store(claim *resourceapi.ResourceClaim, kind watch.EventType, manager string) {
	api.version++
	claim.ResourceVersion = strconv.Itoa(api.version)
	api.owners[claim.UID] = api.owners[claim.UID].after(claim, manager)
	claim.ManagedFields = api.owners[claim.UID].managedFields()
	name := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	if kind == watch.Deleted {
		delete(api.claims, name)
	} else {
		api.claims[name] = claim
	}
	api.send(watch.Event{Type: kind, Object: claim.DeepCopy()})
}

func (api *claimAPI) send(event watch.Event) {
	if api.holding {
		api.held = append(api.held, event)
		return
	}
	api.sent = append(api.sent, event)
	for _, watcher := range api.watchers {
		watcher.send(event)
	}
}

// closeWatchesLocked ends all watches, as a restarting API server does. New ones begin where they ask to.
func (api *claimAPI) closeWatchesLocked() {
	for _, watcher := range api.watchers {
		close(watcher.result)
	}
	api.watchers = nil
}

// hold keeps events back until release.
func (api *claimAPI) hold() {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.holding = true
}

func (api *claimAPI) release() {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.holding = false
	for _, event := range api.held {
		api.send(event)
	}
	api.held = nil
}

// releaseAsList ends the watches because the events that were held are not kept any more, so that all that is heard of them is
// what there is in the end.
func (api *claimAPI) releaseAsList() {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.holding = false
	api.sent, api.held = append(api.sent, api.held...), nil
	expired := apierrors.NewResourceExpired("too old resource version").Status()
	for _, watcher := range api.watchers {
		watcher.send(watch.Event{Type: watch.Error, Object: &expired})
	}
	api.closeWatchesLocked()
}

// create stores a new claim, as kubectl or the controller would.
func (api *claimAPI) create(claim *resourceapi.ResourceClaim) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.store(claim.DeepCopy(), watch.Added, "kubectl")
}

// change changes a claim, as another component would.
func (api *claimAPI) change(name string, fn func(*resourceapi.ResourceClaim)) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.changeLocked(name, fn)
}

// changeLocked is change for functions that the API calls.
func (api *claimAPI) changeLocked(name string, fn func(*resourceapi.ResourceClaim)) {
	claim := api.claims[types.NamespacedName{Namespace: testNamespace, Name: name}].DeepCopy()
	fn(claim)
	api.store(claim, watch.Modified, "kubectl")
}

func (api *claimAPI) delete(name string) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.deleteLocked(name)
}

func (api *claimAPI) deleteLocked(name string) {
	if api.claims[types.NamespacedName{Namespace: testNamespace, Name: name}] == nil {
		return
	}
	api.store(api.claims[types.NamespacedName{Namespace: testNamespace, Name: name}].DeepCopy(), watch.Deleted, "kubectl")
}

// get returns what is stored.
func (api *claimAPI) get(name string) *resourceapi.ResourceClaim {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	return api.claims[types.NamespacedName{Namespace: testNamespace, Name: name}].DeepCopy() // nil if there is none
}

// written returns the writes since the last call.
func (api *claimAPI) written() []string {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	writes := api.writes
	api.writes = nil
	return writes
}

// onRequest has fn called before each request; an error is the answer to it.
func (api *claimAPI) onRequest(fn func(request string) error) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.fault = fn
}

// afterWrite has fn called after each write has taken effect; an error is the answer nevertheless.
func (api *claimAPI) afterWrite(fn func(request string) error) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.after = fn
}

// caughtUp waits until the tracker has seen the present version of a claim, or that it is gone.
func (h *harness) caughtUp(name string) {
	h.t.Helper()
	h.eventually("the tracker has seen claim "+name, func() bool {
		h.api.mutex.Lock()
		stored := h.api.claims[types.NamespacedName{Namespace: testNamespace, Name: name}]
		h.api.mutex.Unlock()
		known, err := h.plugin.binder.Known(context.Background(), &resourceapi.ResourceClaim{ObjectMeta: meta(name)})
		if stored == nil || err != nil {
			return stored == nil && apierrors.IsNotFound(err)
		}
		return known.ResourceVersion == stored.ResourceVersion
	})
}
