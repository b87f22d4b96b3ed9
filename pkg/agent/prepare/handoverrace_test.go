// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// TestOneOfThoseThatWaitHasTheGPU, however many calls wait, also several for one claim: a kubelet that gave up calls again.
func TestOneOfThoseThatWaitHasTheGPU(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.options.UseOf = func(_ context.Context, held *ledger.Entry) prepare.Use {
		if held.Claim.UID == "first-uid" {
			return ending
		}
		return running
	}
	waits := make(chan struct{}, 10)
	n.options.Waiting = func(*resourceapi.ResourceClaim, error) { waits <- struct{}{} }
	agents := []*prepare.Manager{n.manager(), n.manager()} // in an update there are two
	if _, err := agents[0].Prepare(n.ctx, claim("first", "gpu="+gpu0)); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	var mu sync.Mutex
	prepared, refused := map[types.UID]int{}, map[types.UID]int{}
	for _, name := range []string{"second", "third"} {
		for _, m := range agents {
			group.Go(func() {
				c := claim(name, "gpu="+gpu0)
				_, err := m.Prepare(n.ctx, c)
				mu.Lock()
				defer mu.Unlock()
				var held *prepare.HeldError
				switch {
				case err == nil:
					prepared[c.UID]++
				case errors.As(err, &held):
					refused[c.UID]++
				default:
					t.Errorf("claim %s: %v", name, err)
				}
			})
		}
	}
	for range 4 {
		<-waits
	}
	if err := agents[1].Unprepare(n.ctx, "first-uid"); err != nil {
		t.Fatal(err)
	}
	group.Wait()
	if len(prepared) != 1 || len(refused) != 1 {
		t.Fatalf("prepared %v, refused %v", prepared, refused)
	}
	for uid, calls := range prepared {
		if calls != 2 || refused[uid] != 0 {
			t.Errorf("claim %s: %d calls prepared it, %d were refused", uid, calls, refused[uid])
		}
	}
}
