package deviceclaims

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// claimAPI is the API server's side of ResourceClaims: resource versions, optimistic concurrency, and a watch
// that can be held back. The fake clientset's own tracker has neither of these.
type claimAPI struct {
	t *testing.T

	mutex    sync.Mutex
	version  int
	claims   map[types.NamespacedName]*resourceapi.ResourceClaim
	watchers []*watch.FakeWatcher
	held     []watch.Event
	holding  bool
	// writes are the accepted writes, as "verb/subresource name".
	writes []string
	// fault is asked before each request, as "verb/subresource"; an error is the answer. after is asked when
	// a write has taken effect: an error is the answer although it has.
	fault, after func(request string) error
}

func newClaimAPI(t *testing.T, client *fake.Clientset) *claimAPI {
	api := &claimAPI{t: t, version: 100, claims: map[types.NamespacedName]*resourceapi.ResourceClaim{}}
	client.PrependReactor("*", "resourceclaims", api.react)
	client.PrependWatchReactor("resourceclaims", func(clienttesting.Action) (bool, watch.Interface, error) {
		api.mutex.Lock()
		defer api.mutex.Unlock()
		watcher := watch.NewFakeWithChanSize(1000, false)
		api.watchers = append(api.watchers, watcher)
		return true, watcher, nil
	})
	return api
}

func (api *claimAPI) react(action clienttesting.Action) (bool, runtime.Object, error) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	request := action.GetVerb() + "/" + action.GetSubresource()
	if api.fault != nil {
		if err := api.fault(request); err != nil {
			return true, nil, err
		}
	}
	switch action := action.(type) {
	case clienttesting.UpdateAction:
		updated, err := api.update(action.GetObject().(*resourceapi.ResourceClaim), action.GetSubresource() == "status")
		if err == nil {
			api.writes = append(api.writes, request+" "+updated.Name)
			if api.after != nil {
				err = api.after(request)
			}
		}
		return true, updated, err
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

func (api *claimAPI) update(claim *resourceapi.ResourceClaim, status bool) (*resourceapi.ResourceClaim, error) {
	name := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	known := api.claims[name]
	switch {
	case known == nil:
		return nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), claim.Name)
	case claim.UID != known.UID || claim.ResourceVersion != known.ResourceVersion:
		return nil, apierrors.NewConflict(resourceapi.Resource("resourceclaims"), claim.Name, fmt.Errorf("version %s is outdated", claim.ResourceVersion))
	}
	updated := known.DeepCopy()
	if status {
		updated.Status = *claim.Status.DeepCopy()
	} else {
		updated.ObjectMeta = *claim.ObjectMeta.DeepCopy()
	}
	api.store(updated, watch.Modified)
	return updated.DeepCopy(), nil
}

// store gives the claim a new version and tells the watchers.
func (api *claimAPI) store(claim *resourceapi.ResourceClaim, kind watch.EventType) {
	api.version++
	claim.ResourceVersion = strconv.Itoa(api.version)
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
	for _, watcher := range api.watchers {
		watcher.Action(event.Type, event.Object)
	}
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

// create stores a new claim, as kubectl or the controller would.
func (api *claimAPI) create(claim *resourceapi.ResourceClaim) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.store(claim.DeepCopy(), watch.Added)
}

// change changes a claim, as another component would.
func (api *claimAPI) change(name string, fn func(*resourceapi.ResourceClaim)) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	claim := api.claims[types.NamespacedName{Namespace: testNamespace, Name: name}].DeepCopy()
	fn(claim)
	api.store(claim, watch.Modified)
}

func (api *claimAPI) delete(name string) {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	api.store(api.claims[types.NamespacedName{Namespace: testNamespace, Name: name}].DeepCopy(), watch.Deleted)
}

// get returns what is stored.
func (api *claimAPI) get(name string) *resourceapi.ResourceClaim {
	api.mutex.Lock()
	defer api.mutex.Unlock()
	return api.claims[types.NamespacedName{Namespace: testNamespace, Name: name}].DeepCopy()
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
		known, err := h.plugin.known(context.Background(), &resourceapi.ResourceClaim{ObjectMeta: meta(name)})
		if stored == nil || err != nil {
			return stored == nil && apierrors.IsNotFound(err)
		}
		return known.ResourceVersion == stored.ResourceVersion
	})
}
