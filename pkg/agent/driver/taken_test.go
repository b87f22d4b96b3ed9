// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// answered calls a function once when a look has all of NVML's answers.
type answered struct {
	nvml.Library
	then func()
}

func (a *answered) Shutdown() error {
	if then := a.then; then != nil {
		a.then = nil
		then()
	}
	return a.Library.Shutdown()
}

// TestAPartitionThatGoesDuringALookIsNoAdministrators: NVML has told of it, and the ledger knows nothing of it any more when it is decided what
// the GPU offers.
func TestAPartitionThatGoesDuringALookIsNoAdministrators(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		library := &answered{}
		r.wrap = func(lib nvml.Library) nvml.Library { library.Library = lib; return library }
		claim := allocatedClaim("goes", first+"-mig-3g40gb-4")
		agent := r.agent(ctx, newAPIServer(claim))
		h := agent.opts.Hardware
		defer background(ctx, agent.watch)()
		h.Offer(discovery.Policy{Dynamic: true, Ours: agent.claims.Made})
		look := func() []string {
			t.Helper()
			if _, err := h.Discover(ctx); err != nil {
				t.Fatal(err)
			}
			return published(t, h)
		}
		before := look()
		p := agent.newPlugin(func(error) {})
		if results, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{claim}); err != nil || results["goes-uid"].Err != nil {
			t.Fatalf("prepare: %v, %v", results, err)
		}
		var gone error
		library.then = func() {
			results, err := p.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{UID: "goes-uid"}})
			gone = errors.Join(err, results["goes-uid"])
		}
		now := look()
		if library.then != nil || gone != nil {
			t.Fatalf("unprepare during the look: %v", gone)
		}
		if made := agent.claims.Made(); len(made) > 0 {
			t.Errorf("made is still %v", made)
		}
		if len(now) != len(before) {
			t.Errorf("%d devices are published, before the claim it was %d", len(now), len(before))
		}
	})
}
