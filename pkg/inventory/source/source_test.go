// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
)

// defaults are the features that are on by default in Kubernetes 1.37.
var defaults = Options{DeviceTaintRules: true, ConsumableCapacity: true}

const driver = "gpu.example.com"

var node = &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}

func slice(name string, devices ...string) *resourceapi.ResourceSlice {
	s := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: ptr.To(node.Name), Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
		},
	}
	for _, device := range devices {
		s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: device})
	}
	return s
}

func class(name string) *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

func start(t *testing.T, ctx context.Context, opts Options, client *fake.Clientset) (*Source, *inventory.Store) {
	t.Helper()
	store := inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()})
	factory := informers.NewSharedInformerFactory(client, 0)
	source, err := New(ctx, client, factory.Resource().V1(), store, opts)
	if err != nil {
		t.Fatal(err)
	}
	factory.Start(ctx.Done())
	t.Cleanup(factory.Shutdown)
	if err := source.WaitForSync(ctx); err != nil {
		t.Fatal(err)
	}
	return source, store
}

// eventually waits for a condition on the newest view.
func eventually(t *testing.T, ctx context.Context, store *inventory.Store, what string, condition func(*inventory.View) bool) {
	t.Helper()
	if err := wait.PollUntilContextCancel(ctx, time.Millisecond, true, func(context.Context) (bool, error) {
		return condition(store.View()), nil
	}); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func deviceCount(view *inventory.View) int {
	n := 0
	for _, p := range view.ForNode(node).Pools {
		n += p.Len()
	}
	return n
}

func TestTheStoreFollowsTheAPIServer(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	client := fake.NewSimpleClientset(slice("pool", "d0", "d1"), class("gpu"))
	source, store := start(t, ctx, defaults, client)
	defer func() {
		cancel()
		<-source.Done()
	}()

	// What existed is there once synced.
	if n := deviceCount(store.View()); n != 2 || store.View().Class("gpu") == nil {
		t.Fatalf("after sync: %d devices, class %v", n, store.View().Class("gpu"))
	}
	if !source.HasSynced() {
		t.Error("HasSynced is false after WaitForSync")
	}

	// A taint rule reaches the device, and leaves it.
	rule := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "lost"}, Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: ptr.To(driver), Pool: ptr.To("pool"), Device: ptr.To("d1")},
		Taint:          resourceapi.DeviceTaint{Key: "lost", Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}}
	usable := func(view *inventory.View) int {
		m, err := view.Matcher(t.Context(), inventory.MatcherSpec{})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, p := range view.ForNode(node).Pools {
			match, err := m.On(context.Background(), p)
			if err != nil {
				t.Fatal(err)
			}
			n += match.Usable.Count()
		}
		return n
	}
	must(t)(client.ResourceV1().DeviceTaintRules().Create(ctx, rule, metav1.CreateOptions{}))
	eventually(t, ctx, store, "device is tainted", func(v *inventory.View) bool { return usable(v) == 1 })
	if err := client.ResourceV1().DeviceTaintRules().Delete(ctx, rule.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, ctx, store, "device is not tainted any more", func(v *inventory.View) bool { return usable(v) == 2 })

	// Updates and deletions.
	updated := slice("pool", "d0", "d1", "d2")
	if _, err := client.ResourceV1().ResourceSlices().Update(ctx, updated, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, ctx, store, "slice is updated", func(v *inventory.View) bool { return deviceCount(v) == 3 })
	if err := client.ResourceV1().ResourceSlices().Delete(ctx, "pool", metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	eventually(t, ctx, store, "slice is deleted", func(v *inventory.View) bool { return deviceCount(v) == 0 })
	if err := client.ResourceV1().DeviceClasses().Delete(ctx, "gpu", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, ctx, store, "class is deleted", func(v *inventory.View) bool { return v.Class("gpu") == nil })
}

func must(t *testing.T) func(any, error) {
	return func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestListenersHearOfWhatTheViewShows(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	client := fake.NewSimpleClientset(class("gpu"))
	source, store := start(t, ctx, Options{}, client)
	defer func() {
		cancel()
		<-source.Done()
	}()

	type heard struct {
		slice, class string
		deleted, old bool
	}
	var mu sync.Mutex
	var events []heard
	source.AddListener(func(e Event) {
		view := store.View()
		var h heard
		switch {
		case e.Slice != nil:
			h = heard{slice: e.Slice.Name, deleted: e.Deleted, old: e.OldSlice != nil}
			if shown := view.Pool(inventory.PoolID{Driver: driver, Pool: e.Slice.Name}) != nil; shown == e.Deleted {
				t.Errorf("slice %s: shown %v, deleted %v", h.slice, shown, e.Deleted)
			}
		case e.Class != nil:
			h = heard{class: e.Class.Name, deleted: e.Deleted}
			if shown := view.Class(e.Class.Name) != nil; shown == e.Deleted {
				t.Errorf("class %s: shown %v, deleted %v", h.class, shown, e.Deleted)
			}
		}
		// A listener may come back: no lock is held.
		source.AddListener(func(Event) {})
		mu.Lock()
		defer mu.Unlock()
		events = append(events, h)
	})

	slices := client.ResourceV1().ResourceSlices()
	must(t)(slices.Create(ctx, slice("pool", "d0"), metav1.CreateOptions{}))
	eventually(t, ctx, store, "slice is there", func(v *inventory.View) bool { return deviceCount(v) == 1 })
	must(t)(slices.Update(ctx, slice("pool", "d0", "d1"), metav1.UpdateOptions{}))
	eventually(t, ctx, store, "slice is updated", func(v *inventory.View) bool { return deviceCount(v) == 2 })
	must(t)(nil, slices.Delete(ctx, "pool", metav1.DeleteOptions{}))
	eventually(t, ctx, store, "slice is gone", func(v *inventory.View) bool { return deviceCount(v) == 0 })
	must(t)(client.ResourceV1().DeviceClasses().Update(ctx, &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu", Labels: map[string]string{"a": "b"}}}, metav1.UpdateOptions{}))
	must(t)(nil, client.ResourceV1().DeviceClasses().Delete(ctx, "gpu", metav1.DeleteOptions{}))

	want := []heard{{slice: "pool"}, {slice: "pool", old: true}, {slice: "pool", deleted: true}, {class: "gpu"}, {class: "gpu", deleted: true}}
	eventually(t, ctx, store, "all events are heard", func(*inventory.View) bool {
		mu.Lock()
		defer mu.Unlock()
		return len(events) == len(want)
	})
	for i := range want {
		if events[i] != want[i] {
			t.Errorf("event %d: got %+v, want %+v", i, events[i], want[i])
		}
	}
}

func TestWaitForSyncEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	client := fake.NewSimpleClientset()
	store := inventory.NewStore(inventory.Options{})
	factory := informers.NewSharedInformerFactory(client, 0)
	source, err := New(ctx, client, factory.Resource().V1(), store, defaults)
	if err != nil {
		t.Fatal(err)
	}
	// The factory is never started.
	cancel()
	if err := source.WaitForSync(ctx); err == nil {
		t.Error("WaitForSync says that informers which were never started have synced")
	}
	<-source.Done()
}
