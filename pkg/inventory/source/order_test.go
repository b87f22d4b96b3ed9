// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
)

// bare is a source without informers.
func bare() *Source {
	return &Source{
		store:  inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()}),
		slices: make(map[string]*resourceapi.ResourceSlice),
	}
}

func taintRule(value string) *resourceapi.DeviceTaintRule {
	return &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "rule"}, Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: ptr.To(driver)},
		Taint:          resourceapi.DeviceTaint{Key: "key", Value: value, Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}}
}

// TestChangesThatOvertakeEachOther changes a slice and the taint rule that applies to it at the same time, of which different
// informers tell. In the end the store has the slice as it is, with the taint as it is, and listeners have heard of that last.
func TestChangesThatOvertakeEachOther(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client := fake.NewSimpleClientset(slice("pool", "d0"), taintRule(""))
	source, store := start(t, ctx, defaults, client)
	defer func() {
		cancel()
		<-source.Done()
	}()
	var heard atomic.Pointer[resourceapi.ResourceSlice]
	source.AddListener(func(e Event) {
		if before := heard.Swap(e.Slice); before != nil && before != e.OldSlice {
			t.Errorf("a change from version %v, but what was heard last is version %v", e.OldSlice, before)
		}
	})
	says := func(s *resourceapi.ResourceSlice, text string) bool {
		return s != nil && s.Spec.Devices[0].Attributes["text"].StringValue != nil && *s.Spec.Devices[0].Attributes["text"].StringValue == text &&
			len(s.Spec.Devices[0].Taints) == 1 && s.Spec.Devices[0].Taints[0].Value == text
	}
	for i := range 50 {
		text := fmt.Sprint(i)
		var both sync.WaitGroup
		both.Go(func() {
			next := slice("pool", "d0")
			next.Spec.Devices[0].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"text": {StringValue: &text}}
			must(t)(client.ResourceV1().ResourceSlices().Update(ctx, next, metav1.UpdateOptions{}))
		})
		both.Go(func() {
			must(t)(client.ResourceV1().DeviceTaintRules().Update(ctx, taintRule(text), metav1.UpdateOptions{}))
		})
		both.Wait()
		eventually(t, ctx, store, "the store has both changes "+text, func(v *inventory.View) bool {
			pools := v.ForNode(node).Pools
			return len(pools) == 1 && says(pools[0].SliceOf(0).Object, text) && says(heard.Load(), text)
		})
	}
}

// TestTheTrackerHandlesOneEventAtATime, whichever informer it is of. It needs the race detector.
func TestTheTrackerHandlesOneEventAtATime(t *testing.T) {
	var turn sync.Mutex
	var running atomic.Int32
	events := 0
	handle := func() {
		if running.Add(1) > 1 {
			t.Error("two events are handled at a time")
		}
		events++
		runtime.Gosched()
		running.Add(-1)
	}
	var group sync.WaitGroup
	slicesOf, rulesOf := &caller[*resourceapi.ResourceSlice]{}, &caller[*resourceapi.DeviceTaintRule]{}
	must(t)(inTurn[*resourceapi.ResourceSlice]{slicesOf, &turn}.AddTypedEventHandler(counting[*resourceapi.ResourceSlice](handle)))
	must(t)(inTurn[*resourceapi.DeviceTaintRule]{rulesOf, &turn}.AddTypedEventHandler(counting[*resourceapi.DeviceTaintRule](handle)))
	const times = 1000
	for _, call := range []func(){
		func() { slicesOf.handler.OnAdd(nil, false) },
		func() { slicesOf.handler.OnUpdate(nil, nil) },
		func() { slicesOf.handler.OnDelete(cache.DeletedObject[*resourceapi.ResourceSlice]{}) },
		func() { rulesOf.handler.OnAdd(nil, false) },
	} {
		group.Go(func() {
			for range times {
				call()
			}
		})
	}
	group.Wait()
	if events != 4*times {
		t.Errorf("%d events of %d were handled", events, 4*times)
	}
}

func counting[T cache.Object](handle func()) cache.TypedResourceEventHandler[T] {
	return cache.TypedResourceEventHandlerFuncs[T]{
		AddFunc: func(T) { handle() }, UpdateFunc: func(_, _ T) { handle() }, DeleteFunc: func(cache.DeletedObject[T]) { handle() },
	}
}

// caller is an informer of which the test calls the handler.
type caller[T cache.Object] struct {
	cache.TypedSharedIndexInformer[T]
	handler cache.TypedResourceEventHandler[T]
}

func (c *caller[T]) AddTypedEventHandler(handler cache.TypedResourceEventHandler[T], _ ...cache.HandlerOptions) (cache.ResourceEventHandlerRegistration, error) {
	c.handler = handler
	return nil, nil
}

// TestSlicesAndRulesTakeTurns: whichever informer a change is from, the turn is taken while it is handled.
func TestSlicesAndRulesTakeTurns(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	client := fake.NewSimpleClientset(slice("pool", "d0"), taintRule("before"))
	source, store := start(t, ctx, defaults, client)
	defer func() {
		cancel()
		<-source.Done()
	}()
	var heard atomic.Int32
	source.AddListener(func(Event) {
		if source.turn.TryLock() {
			source.turn.Unlock()
			t.Errorf("change %d is handled out of turn", heard.Load())
		}
		heard.Add(1)
	})
	for n, change := range []func(){
		func() {
			must(t)(client.ResourceV1().ResourceSlices().Update(ctx, slice("pool", "d0", "d1"), metav1.UpdateOptions{}))
		},
		func() {
			must(t)(client.ResourceV1().DeviceTaintRules().Update(ctx, taintRule("after"), metav1.UpdateOptions{}))
		},
	} {
		change()
		eventually(t, ctx, store, "the change is heard", func(*inventory.View) bool { return int(heard.Load()) == n+1 })
	}
}

// TestARuleThatChangesNothing: the tracker replaces the slices of a rule that changes and tells of it only if taints are others now. The
// change after that is one from what listeners know.
func TestARuleThatChangesNothing(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	client := fake.NewSimpleClientset(slice("pool", "d0"), slice("other", "d0"), taintRule("same"))
	source, store := start(t, ctx, defaults, client)
	defer func() {
		cancel()
		<-source.Done()
	}()
	var mu sync.Mutex
	var events []Event
	source.AddListener(func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, e)
	})
	before := store.View().Pool(inventory.PoolID{Driver: driver, Pool: "pool"})
	tracked := func() *resourceapi.ResourceSlice {
		slices, err := source.tracker.ListPatchedResourceSlices()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range slices {
			if s.Name == "pool" {
				return s
			}
		}
		return nil
	}
	was := tracked()
	source.order.Lock()
	known := source.slices["pool"] // another one if the tracker began with a silent change
	source.order.Unlock()
	rule := taintRule("same")
	rule.Status.Conditions = []metav1.Condition{{Type: "EvictionInProgress", Status: metav1.ConditionTrue}}
	must(t)(client.ResourceV1().DeviceTaintRules().Update(ctx, rule, metav1.UpdateOptions{}))
	eventually(t, ctx, store, "the tracker has replaced the slice", func(*inventory.View) bool { return tracked() != was })
	if store.View().Pool(inventory.PoolID{Driver: driver, Pool: "pool"}) != before {
		t.Error("the pool was made anew although nothing changed")
	}

	heard := func(n int) {
		t.Helper()
		eventually(t, ctx, store, fmt.Sprintf("%d changes are heard", n), func(*inventory.View) bool {
			mu.Lock()
			defer mu.Unlock()
			return len(events) == n
		})
	}
	must(t)(client.ResourceV1().ResourceSlices().Update(ctx, slice("pool", "d0", "d1"), metav1.UpdateOptions{}))
	heard(1)
	must(t)(nil, client.ResourceV1().ResourceSlices().Delete(ctx, "pool", metav1.DeleteOptions{}))
	heard(2)
	if first := events[0]; first.Deleted || first.OldSlice != known || len(first.Slice.Spec.Devices) != 2 {
		t.Errorf("heard of %v after %v, want a change of %v", first.Slice, first.OldSlice, known)
	}
	if second := events[1]; !second.Deleted || second.Slice != events[0].Slice {
		t.Errorf("heard of %v, deleted: %v; want the deletion of %v", second.Slice, second.Deleted, events[0].Slice)
	}
}

// TestListenersAreCalledOneAtATime, although changes come from the goroutines of several informers. It needs the race detector.
func TestListenersAreCalledOneAtATime(t *testing.T) {
	s := bare()
	var heard []string
	s.AddListener(func(e Event) {
		if e.Slice != nil {
			heard = append(heard, e.Slice.Name)
		} else {
			heard = append(heard, e.Class.Name)
		}
	})
	var group sync.WaitGroup
	for _, add := range []func(i int){
		func(i int) { s.sliceHandler().OnAdd(slice(fmt.Sprint("slice-", i)), false) },
		func(i int) { s.sliceHandler().OnAdd(slice(fmt.Sprint("tainted-", i)), false) },
		func(i int) { s.classHandler().OnAdd(class(fmt.Sprint("class-", i)), false) },
	} {
		group.Go(func() {
			for i := range 100 {
				add(i)
			}
		})
	}
	group.Wait()
	for _, kind := range []string{"slice-", "tainted-", "class-"} {
		of := slices.DeleteFunc(slices.Clone(heard), func(name string) bool { return !strings.HasPrefix(name, kind) })
		for i := range 100 {
			if i >= len(of) || of[i] != fmt.Sprint(kind, i) {
				t.Fatalf("%s: heard %v", kind, of)
			}
		}
	}
}
