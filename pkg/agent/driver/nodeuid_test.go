// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// collector deletes slices whose owner is not there, as the garbage collector does, in that interval until ctx ends.
func collector(t *testing.T, api *apiServer, interval time.Duration) func(context.Context) {
	return func(ctx context.Context) {
		for ctx.Err() == nil {
			time.Sleep(interval)
			uid := types.UID("")
			if node, err := api.CoreV1().Nodes().Get(ctx, "node-1", metav1.GetOptions{}); err == nil {
				uid = node.UID
			} else if !apierrors.IsNotFound(err) {
				continue
			}
			list, err := api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
			if err != nil {
				continue
			}
			for i := range list.Items {
				slice := &list.Items[i]
				if len(slice.OwnerReferences) == 1 && slice.OwnerReferences[0].UID == uid {
					continue
				}
				if err := api.ResourceV1().ResourceSlices().Delete(ctx, slice.Name, metav1.DeleteOptions{}); err != nil && !errors.Is(err, errAway) {
					t.Error(err)
				}
			}
		}
	}
}

// publishing is publisher.run for hours: the library's controller would look for ever, in a bubble, at the very time at which it forgets what it wrote.
func (a *Agent) publishing(ctx context.Context) (stop func()) {
	a.publisher.keepWrites = ptr.To(1000 * time.Hour)
	return background(ctx, a.publisher.run)
}

// owners counts the slices that were made, by the UID of their owner.
func owners(api *apiServer) func() map[types.UID]int {
	var mu sync.Mutex
	made := map[types.UID]int{}
	api.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		if !api.away.Load() { // which refuses it
			made[action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice).OwnerReferences[0].UID]++
		}
		return false, nil, nil
	})
	return func() map[types.UID]int {
		mu.Lock()
		defer mu.Unlock()
		now := map[types.UID]int{}
		for uid, n := range made {
			now[uid] = n
		}
		return now
	}
}

// TestANodeThatIsMadeAnewOwnsItsSlices: those of one that is gone are collected as soon as they are made.
func TestANodeThatIsMadeAnewOwnsItsSlices(t *testing.T) {
	registerMetrics()
	node := func(uid types.UID) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: uid}}
	}
	tests := map[string]struct {
		// absent is for how long there is no Node.
		absent time.Duration
		// away is for how long the API server is when the Node is gone.
		away time.Duration
		// kubelet deletes all slices when it starts.
		kubelet bool
	}{
		"at once":                          {},
		"after a while":                    {absent: 10 * time.Minute},
		"by a kubelet that starts":         {absent: time.Minute, kubelet: true},
		"while the API server was away":    {absent: time.Minute, away: 5 * time.Minute},
		"at once, and the API server went": {away: 5 * time.Minute},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				api := namingServer()
				made := owners(api)
				agent := newRig(t, "t4").agent(ctx, api)
				defer background(ctx, agent.watch)()
				defer agent.publishing(ctx)()
				defer background(ctx, collector(t, api, 100*time.Millisecond))()
				time.Sleep(time.Minute)
				const slices = 4
				if got := made(); got["node-uid"] != slices || len(got) != 1 {
					t.Errorf("slices were made for %v, want %d for the Node", got, slices)
				}
				for _, uid := range []types.UID{"second-uid", "third-uid"} {
					nodes := api.CoreV1().Nodes()
					if err := nodes.Delete(ctx, "node-1", metav1.DeleteOptions{}); err != nil {
						t.Fatal(err)
					}
					make := func() {
						if _, err := nodes.Create(ctx, node(uid), metav1.CreateOptions{}); err != nil {
							t.Error(err)
						}
					}
					if tc.absent > 0 {
						time.Sleep(tc.absent)
					}
					make()
					if tc.kubelet {
						deleteSlices(ctx, t, api)
						agent.publisher.writeAnew() // it registers the driver
					}
					if tc.away > 0 {
						api.away.Store(true)
						time.Sleep(tc.away)
						api.away.Store(false)
					}
					time.Sleep(2 * time.Minute)
					list, err := api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
					owned := 0
					for i := range list.Items {
						if list.Items[i].OwnerReferences[0].UID == uid {
							owned++
						}
					}
					if err != nil || len(list.Items) != slices || owned != slices {
						t.Errorf("%d slices, %d of which Node %s owns, %v; want %d", len(list.Items), owned, uid, err, slices)
					}
				}
				// They may have been made once more before it was known.
				for uid, n := range made() {
					if n > 2*slices {
						t.Errorf("%d slices were made for Node %s", n, uid)
					}
				}
			})
		})
	}
}

// TestWithoutANodeNothingIsPublished, and soon after there is one everything.
func TestWithoutANodeNothingIsPublished(t *testing.T) {
	registerMetrics()
	gone := apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, "node-1")
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "node-1", nil)
	for name, tc := range map[string]struct {
		err    error
		reason string
	}{
		"there is none":     {gone, ""},
		"it cannot be read": {forbidden, reasonForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				api := namingServer()
				there := false
				var mu sync.Mutex
				api.PrependReactor("get", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
					mu.Lock()
					defer mu.Unlock()
					return !there, nil, tc.err
				})
				agent := newRig(t, "t4").agent(ctx, api)
				for _, st := range []stage{stageLedger, stageFolders, stageServing, stageRegistered} {
					agent.status.set(st, true)
				}
				defer background(ctx, agent.watch)()
				defer agent.publishing(ctx)()
				time.Sleep(10 * time.Minute)
				reason := ""
				if notReady := agent.status.notReady(); notReady != nil {
					reason = notReady.reason
				}
				if n := len(writes(api)); n > 0 || reason != tc.reason {
					t.Errorf("%d slices are written, not ready because of %q; want none, and %q", n, reason, tc.reason)
				}
				mu.Lock()
				there = true
				mu.Unlock()
				time.Sleep(time.Minute)
				if n := len(writes(api)); n == 0 || agent.status.notReady() != nil {
					t.Errorf("afterwards: %d slices are written, not ready: %+v", n, agent.status.notReady())
				}
			})
		})
	}
}

// TestWhatTheAPIServerDropsIsNotWrittenAgainAndAgain: nothing has changed, and each write would be a new generation of the pool. But it is written
// again soon, because the next API server may be of another version, and ever more seldom.
func TestWhatTheAPIServerDropsIsNotWrittenAgainAndAgain(t *testing.T) {
	registerMetrics()
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		api := namingServer()
		var mu sync.Mutex
		drops := true
		api.PrependReactor("*", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
			mu.Lock()
			defer mu.Unlock()
			if write, ok := action.(clienttesting.CreateAction); ok && drops { // updates have the same methods
				devices := write.GetObject().(*resourceapi.ResourceSlice).Spec.Devices
				for i := range devices {
					devices[i].Taints = nil
				}
			}
			return false, nil, nil
		})
		r := newRig(t, "t4")
		r.do(&nvmlsim.SetRecovery{GPU: "0", Action: nvmlsim.RecoveryReset})
		agent := r.agent(ctx, api)
		defer background(ctx, agent.watch)()
		defer agent.publishing(ctx)()
		time.Sleep(50 * time.Second)
		before := len(writes(api))
		if before == 0 {
			t.Error("nothing is written at the start")
		}
		for _, tc := range []struct {
			in          time.Duration
			least, most int
		}{
			{in: 2 * time.Minute, least: 1, most: 2},  // after a minute
			{in: 14 * time.Minute, least: 2, most: 3}, // after 2, 4 and 8 more
			{in: 48 * time.Minute, least: 1, most: 2}, // after 16 and 32 more
			{in: 2 * time.Hour, least: 1, most: 2},    // and each hour
		} {
			n := -len(writes(api))
			time.Sleep(tc.in)
			if n += len(writes(api)); n < tc.least || n > tc.most {
				t.Errorf("%d slices are written in %s without a change, want %d to %d", n, tc.in, tc.least, tc.most)
			}
		}
		before = len(writes(api))
		// A change is written, and the rest at last, when the server may have learned to keep it.
		r.do(&nvmlsim.SetRecovery{GPU: "1", Action: nvmlsim.RecoveryReset})
		time.Sleep(time.Minute)
		if n := len(writes(api)) - before; n == 0 {
			t.Error("a change is not written")
		}
		mu.Lock()
		drops = false
		mu.Unlock()
		time.Sleep(time.Hour)
		list, err := api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		if err != nil || len(list.Items) == 0 || len(list.Items[0].Spec.Devices[0].Taints) != 1 {
			t.Errorf("%d slices, %v; want the taint that was dropped on the first", len(list.Items), err)
		}
		// When nothing was dropped for some time, it is the first time again.
		time.Sleep(130 * time.Minute)
		mu.Lock()
		drops = true
		mu.Unlock()
		r.do(&nvmlsim.SetRecovery{GPU: "2", Action: nvmlsim.RecoveryReset})
		time.Sleep(time.Minute)
		mu.Lock()
		drops = false
		mu.Unlock()
		time.Sleep(2 * time.Minute)
		list, err = api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		tainted := 0
		for _, slice := range list.Items {
			for _, device := range slice.Spec.Devices {
				tainted += len(device.Taints)
			}
		}
		if tainted != 3 {
			t.Errorf("%d taints, want that of the third GPU, too, which was dropped a moment before", tainted)
		}
	})
}

// TestAnAPIServerThatIsAwayAtTheStart: what is published when it is back has the taints of what claims hold that are not allocated any more, and none
// of what claims have that are.
func TestAnAPIServerThatIsAwayAtTheStart(t *testing.T) {
	registerMetrics()
	for name, away := range map[string]time.Duration{"for a moment": 5 * time.Second, "for some time": 7*time.Minute + 20*time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				const left, has = "gpu-0000-00-1b-0", "gpu-0000-00-1c-0"
				claim := allocatedClaim("has", has)
				r, api := newRig(t, "t4"), namingServer(claim)
				before := r.agent(ctx, api)
				for uid, err := range before.claims.PrepareAll(ctx, []*resourceapi.ResourceClaim{allocatedClaim("left", left), claim}) {
					if err.Err != nil {
						t.Fatal(uid, err.Err)
					}
				}
				background(ctx, before.watch)() // it ends
				api.away.Store(true)
				agent := r.blindAgent(ctx, api)
				defer background(ctx, agent.watch)()
				defer agent.publishing(ctx)()
				time.Sleep(away)
				api.ClearActions()
				api.away.Store(false)
				time.Sleep(2 * time.Minute)
				n := 0
				for _, slice := range writes(api) {
					for _, device := range slice.Spec.Devices {
						taint := ""
						if len(device.Taints) > 0 {
							taint = device.Taints[0].Key
						}
						want := map[string]string{left: TaintKey(reasonOccupied)}[device.Name]
						if n++; taint != want {
							t.Errorf("written of %s: taint %q, want %q", device.Name, taint, want)
						}
					}
				}
				if n == 0 {
					t.Error("nothing was published")
				}
			})
		})
	}
}
