// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"stowage.dev/stowage/pkg/snapshot"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// follower notes what it is told.
type follower struct {
	mu   sync.Mutex
	told []string
	more chan struct{}
}

func (f *follower) note(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.told = append(f.told, what)
	select {
	case f.more <- struct{}{}:
	default:
	}
}

func (f *follower) Put(o metav1.Object)    { f.note("put " + snapshot.Reference(o)) }
func (f *follower) Delete(o metav1.Object) { f.note("delete " + snapshot.Reference(o)) }
func (f *follower) Reachable(resource string, err error) {
	if err != nil {
		f.note(resource + ": " + err.Error())
	}
}

// until waits until all of that is told.
func (f *follower) until(t *testing.T, want ...string) {
	t.Helper()
	for {
		f.mu.Lock()
		missing := slices.DeleteFunc(slices.Clone(want), func(s string) bool { return slices.Contains(f.told, s) })
		f.mu.Unlock()
		if len(missing) == 0 {
			return
		}
		select {
		case <-f.more:
		case <-t.Context().Done():
			t.Fatalf("not told: %v", missing)
		}
	}
}

func followed(t *testing.T) (*fake.Clientset, *follower) {
	t.Helper()
	c := snapshottest.New(1, 1)
	c.Pod("ns", "waits", 1, 0)
	var objects []runtime.Object
	for object := range c.All() {
		objects = append(objects, object)
	}
	return fake.NewSimpleClientset(objects...), &follower{more: make(chan struct{}, 1)}
}

func forbid(client *fake.Clientset, verb, resource string) {
	no := apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no"))
	client.PrependReactor(verb, resource, func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, no })
	client.PrependWatchReactor(resource, func(clienttesting.Action) (bool, watch.Interface, error) { return verb == "watch", nil, no })
}

// What is there is told, then that this is all, then what changes.
func TestFollow(t *testing.T) {
	client, f := followed(t)
	forbid(client, "list", "devicetaintrules")
	ctx, cancel := context.WithCancel(t.Context())
	synced := make(chan []snapshot.Missing, 1)
	done := make(chan error)
	go func() {
		done <- snapshot.Follow(ctx, client, snapshot.Followed{PendingPods: true}, f, func(m []snapshot.Missing) { synced <- m })
	}()
	if missing := <-synced; len(missing) != 1 || missing[0] != (snapshot.Missing{Resource: "devicetaintrules.resource.k8s.io", Reason: "forbidden"}) {
		t.Errorf("missing %v", missing)
	}
	f.until(t, "put worker-0-gpus", "put ns/waits")
	claims := client.ResourceV1().ResourceClaims("ns")
	if _, err := claims.Create(ctx, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "later"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	f.until(t, "put ns/later")
	if err := claims.Delete(ctx, "later", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	f.until(t, "delete ns/later")
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("it ends with %v", err)
	}
}

// A right without which there is no answer is named.
func TestFollowNamesTheRightThatIsMissing(t *testing.T) {
	for verb, want := range map[string]string{
		"list":  "list resourceslices.resource.k8s.io (manifests/kubectl/reader.yaml has the rights that are needed): ",
		"watch": "watch resourceslices.resource.k8s.io (manifests/kubectl/reader.yaml has the rights that are needed): ",
	} {
		client, f := followed(t)
		forbid(client, verb, "resourceslices")
		err := snapshot.Follow(t.Context(), client, snapshot.Followed{}, f, func([]snapshot.Missing) { t.Error("synced") })
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v", verb, err)
		}
		if before := snapshot.MayFollow(t.Context(), client, snapshot.Followed{}); before == nil || before.Error() != err.Error() {
			t.Errorf("%s: asked before: %v, want %v", verb, before, err)
		}
	}
}

// Rights that are not needed do not count, and an API server that does not answer is not one that forbids.
func TestMayFollow(t *testing.T) {
	client, _ := followed(t)
	forbid(client, "list", "devicetaintrules")
	if err := snapshot.MayFollow(t.Context(), client, snapshot.Followed{PendingPods: true}); err != nil {
		t.Error(err)
	}
	client.PrependReactor("list", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("connection refused")
	})
	err := snapshot.MayFollow(t.Context(), client, snapshot.Followed{})
	if want := "list resourceclaims.resource.k8s.io: connection refused"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// A failing watch is told, with its resource.
func TestFollowTellsOfErrors(t *testing.T) {
	client, f := followed(t)
	asked := 0
	client.PrependWatchReactor("resourceclaims", func(clienttesting.Action) (bool, watch.Interface, error) {
		if asked++; asked == 1 { // the first one is about rights
			return false, nil, nil
		}
		return true, nil, errors.New("no network")
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- snapshot.Follow(ctx, client, snapshot.Followed{}, f, func([]snapshot.Missing) {})
	}()
	f.until(t, "resourceclaims: no network")
	cancel()
	<-done
}
