// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"
)

// TestAnAgentThatTheAPIServerRefusesIsNotReady: a token that is refused and a right that is missing each last until the API server takes what
// it refused; an API server that is away refuses nothing.
func TestAnAgentThatTheAPIServerRefusesIsNotReady(t *testing.T) {
	unauthorized := apierrors.NewUnauthorized("expired")
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "slice", errors.New("no right"))
	for name, tc := range map[string]struct {
		err          error
		reason, ends string
	}{
		"a token":    {unauthorized, "Unauthorized", reasonUnauthorized},
		"a right":    {forbidden, "Forbidden", reasonForbidden},
		"it is away": {errors.New("away"), "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStatus()
			for _, st := range []stage{stageLedger, stageFolders, stageServing, stageRegistered} {
				s.set(st, true)
			}
			p := newPublisher(Options{NodeName: "node-1"}, s)
			p.handleError(t.Context(), tc.err, "publish")
			switch notReady := s.notReady(); {
			case tc.reason == "" && notReady != nil:
				t.Errorf("not ready: %+v", notReady)
			case tc.reason != "" && (notReady == nil || notReady.reason != tc.reason):
				t.Errorf("%+v, want it not ready because of %s", notReady, tc.reason)
			}
			for _, other := range []string{reasonUnauthorized, reasonForbidden} {
				if other != tc.ends {
					s.accepted(other)
				}
			}
			if tc.reason != "" && s.notReady() == nil {
				t.Error("ready, because something else was accepted")
			}
			s.accepted(tc.ends)
			if notReady := s.notReady(); notReady != nil {
				t.Errorf("not ready in the end: %+v", notReady)
			}
		})
	}
}

// TestAnAgentThatMayNotListItsSlicesIsNotReady: none is written then, which could be refused.
func TestAnAgentThatMayNotListItsSlicesIsNotReady(t *testing.T) {
	registerMetrics()
	for reason, refused := range map[string]error{
		reasonForbidden:    apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "", errors.New("no role")),
		reasonUnauthorized: apierrors.NewUnauthorized("expired"),
	} {
		t.Run(reason, func(t *testing.T) { mayNotList(t, reason, refused) })
	}
}

func mayNotList(t *testing.T, reason string, refused error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		api := namingServer()
		var refuses atomic.Bool
		refuses.Store(true)
		api.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) { return refuses.Load(), nil, refused })
		api.PrependWatchReactor("resourceslices", func(clienttesting.Action) (bool, watch.Interface, error) { return refuses.Load(), nil, refused })
		agent := newRig(t, "t4").agent(ctx, api)
		for _, st := range []stage{stageLedger, stageFolders, stageServing, stageRegistered} {
			agent.status.set(st, true)
		}
		defer background(ctx, agent.watch)()
		defer background(ctx, agent.publisher.run)()
		time.Sleep(time.Minute)
		for range 60 {
			if notReady := agent.status.notReady(); notReady == nil || notReady.reason != reason {
				t.Fatalf("while it is refused: %+v, want it not ready because of %s", notReady, reason)
			}
			time.Sleep(time.Second)
		}
		refuses.Store(false)
		time.Sleep(time.Minute)
		if notReady := agent.status.notReady(); notReady != nil || len(writes(api)) == 0 {
			t.Errorf("afterwards: %+v, %d slices written; want it ready, and slices", notReady, len(writes(api)))
		}
	})
}

// TestAnAgentWhoseSlicesAreAllInvalidIsNotReady: nothing of the node can be scheduled. One that was taken before is there still.
func TestAnAgentWhoseSlicesAreAllInvalidIsNotReady(t *testing.T) {
	registerMetrics()
	earlier := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "earlier", UID: "earlier-uid"}}
	earlier.Spec = resourceapi.ResourceSliceSpec{Driver: Name, NodeName: ptr.To("node-1"), Pool: resourceapi.ResourcePool{Name: "node-1", ResourceSliceCount: 1}}
	for name, tc := range map[string]struct {
		has    []runtime.Object
		reason string
	}{
		"none was ever taken":            {nil, reasonSlicesInvalid},
		"one of an earlier agent is had": {[]runtime.Object{earlier}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				api := namingServer(tc.has...)
				var refuses atomic.Bool
				refuses.Store(true)
				for _, verb := range []string{"create", "update"} {
					api.PrependReactor(verb, "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
						return refuses.Load(), nil, apierrors.NewInvalid(schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}, "", nil)
					})
				}
				agent := newRig(t, "t4").agent(ctx, api)
				for _, st := range []stage{stageLedger, stageFolders, stageServing, stageRegistered} {
					agent.status.set(st, true)
				}
				defer background(ctx, agent.watch)()
				defer background(ctx, agent.publisher.run)()
				time.Sleep(time.Minute)
				reason := ""
				if notReady := agent.status.notReady(); notReady != nil {
					reason = notReady.reason
				}
				if reason != tc.reason {
					t.Fatalf("while all are refused: not ready because of %q, want %q", reason, tc.reason)
				}
				refuses.Store(false)
				agent.publisher.refresh()
				time.Sleep(10 * time.Second)
				if notReady := agent.status.notReady(); notReady != nil {
					t.Errorf("afterwards: %+v", notReady)
				}
			})
		})
	}
}
