// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

// listless is a world whose API server cannot list claims until the returned function is called. The channel tells that
// it was asked.
func listless(t *testing.T) (h *harness, asked <-chan struct{}, up func()) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("holder", allocated("node-a", "gpu-0"))}
	client, api := newAPI(t, w)
	var isUp atomic.Bool
	lists := make(chan struct{}, 1)
	api.onRequest(func(request string) error {
		if request != "list/" || isUp.Load() {
			return nil
		}
		select {
		case lists <- struct{}{}:
		default:
		}
		return errServer
	})
	h = launchHarness(t, w, client, api)
	<-lists
	h.eventually("the devices are known", func() bool { return h.plugin.shared.account.Source.HasSynced() })
	return h, lists, func() { isUp.Store(true) }
}

// Until the claims are listed every device seems to be free.
func TestFirstPreFilterWaitsForTheTracker(t *testing.T) {
	h, asked, up := listless(t)
	attempts := make(chan *attempt, 1)
	go func() { attempts <- h.filterAll(pod("p", "wanted")) }()
	<-asked // once more, while PreFilter is running or about to
	select {
	case a := <-attempts:
		t.Fatalf("PreFilter did not wait: %v", a.preFilter)
	default:
	}
	up()
	a := <-attempts
	if !a.preFilter.IsSuccess() {
		t.Errorf("PreFilter: %v", a.preFilter)
	}
	if diff := cmp.Diff([]string{"node-b"}, a.fits()); diff != "" {
		t.Errorf("nodes differ (-want +got):\n%s", diff)
	}
}

// The pod whose attempt ends before that is told what it was waiting for, and tried again.
func TestPreFilterEndsWithoutTheTracker(t *testing.T) {
	h, _, _ := listless(t)
	ctx, cancel := context.WithCancelCause(h.ctx)
	cancel(errors.New("the attempt is over"))
	_, status := h.plugin.PreFilter(ctx, framework.NewCycleState(), pod("p", "wanted"), h.nodes)
	if status.IsSuccess() || status.IsRejected() || !strings.Contains(status.Message(), "first list of ResourceClaims") {
		t.Errorf("PreFilter: %v", status)
	}
}

// Of a pod that was deleted while the informer did not hear there is only how it was last known. One that was made anew under its name is
// another pod.
func TestPodsEndAlsoWhileTheInformerDoesNotHear(t *testing.T) {
	p, q := pod("p"), pod("q")
	anew := p.DeepCopy()
	anew.UID = "anew"
	for name, tc := range map[string]struct {
		happens func(cache.ResourceEventHandler)
		want    []string
	}{
		"deleted": {
			happens: func(h cache.ResourceEventHandler) { h.OnDelete(p); h.OnDelete(q) },
			want:    []string{"gone " + string(p.UID), "gone " + string(q.UID)},
		},
		"deleted unheard": {
			happens: func(h cache.ResourceEventHandler) {
				h.OnDelete(cache.DeletedFinalStateUnknown{Key: "team-a/p", Obj: p})
				h.OnDelete(cache.DeletedFinalStateUnknown{Key: "team-a/q", Obj: q})
			},
			want: []string{"gone " + string(p.UID), "gone " + string(q.UID)},
		},
		"updated":   {happens: func(h cache.ResourceEventHandler) { h.OnUpdate(p, p) }, want: []string{"now " + string(p.UID)}},
		"made anew": {happens: func(h cache.ResourceEventHandler) { h.OnUpdate(p, anew) }, want: []string{"gone " + string(p.UID), "new anew"}},
	} {
		t.Run(name, func(t *testing.T) {
			var told []string
			tell := func(what string, obj any) { told = append(told, what+" "+string(obj.(*v1.Pod).UID)) }
			tc.happens(byUID{cache.ResourceEventHandlerFuncs{
				AddFunc:    func(obj any) { tell("new", obj) },
				UpdateFunc: func(_, obj any) { tell("now", obj) },
				DeleteFunc: func(obj any) { tell("gone", obj) },
			}})
			if diff := cmp.Diff(tc.want, told); diff != "" {
				t.Errorf("what is told differs (-want +got):\n%s", diff)
			}
		})
	}
}
