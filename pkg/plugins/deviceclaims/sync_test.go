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
	resourceapi "k8s.io/api/resource/v1"
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
