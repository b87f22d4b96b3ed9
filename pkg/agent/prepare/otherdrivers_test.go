// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// The tests of this file replay what has gone wrong in other drivers, see docs/known-bugs.md.

// TestRollBackLeavesWhatOtherDriversHave: a claim has a partition of ours, and a device of another driver that is called as one of ours is.
// Whatever becomes of ours, the GPU of that name stays as it is, with such a partition or without.
func TestRollBackLeavesWhatOtherDriversHave(t *testing.T) {
	for name, theirs := range map[string][]nvmlsim.Command{
		"there is such a partition": {&nvmlsim.SetMIG{GPU: "1", Enabled: true}, &nvmlsim.CreateMIG{GPU: "1", Profile: "7g.80gb"}},
		"there is none":             nil,
	} {
		s := scenario{
			claim: func() *resourceapi.ResourceClaim {
				c := claim("train", "ours="+gpu0+"-mig-1g10gb-0", "theirs="+gpu1+"-mig-7g80gb-0")
				c.Status.Allocation.Devices.Results[1].Driver = "other.example.com"
				return c
			},
			before: theirs,
			other:  "gpu=" + gpu0,
		}
		steps, before, after := s.undisturbed(t, preparing)
		for at := 1; at <= len(steps); at++ {
			for _, mode := range []durabletest.Mode{durabletest.Fail, durabletest.CrashAfter} {
				t.Run(fmt.Sprintf("%s/%v/%02d %s", name, mode, at, stepLabel(steps[at-1])), func(t *testing.T) {
					n := newNodeOf(t, s.machine())
					s.start(t, n, preparing)
					gpu := n.gpu(1)
					untouched := func(when string) {
						now := n.gpu(1)
						if diff := cmp.Diff(gpu.Instances, now.Instances); diff != "" || gpu.MIG != now.MIG {
							t.Errorf("%s: the other driver's GPU has MIG %v, instances (-before +now):\n%s", when, now.MIG, diff)
						}
					}
					n.disturb(&durabletest.Faulty{FS: durabletest.Unsynced{}, Mode: mode, At: at})
					err := s.run(n, preparing)
					untouched("after the fault")
					s.check(t, n, preparing, err, before, after, s.seeing)
					untouched("in the end")
				})
			}
		}
	}
}

// TestAPrepareThatWasGivenUpDoesNotComeTrueLater: it waits for a GPU, the kubelet gives it up and unprepares its claim, and then the GPU
// gets free. Nobody would ever unprepare what it prepared now.
func TestAPrepareThatWasGivenUpDoesNotComeTrueLater(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.options.UseOf = func(context.Context, *ledger.Entry) prepare.Use { return ending }
	waits := make(chan struct{}, 1)
	n.options.Waiting = func(*resourceapi.ResourceClaim, error) { waits <- struct{}{} }
	m := n.manager()
	empty := n.files()
	if _, err := m.Prepare(n.ctx, claim("first", "gpu="+gpu0)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := m.Prepare(ctx, claim("given-up", "gpu="+gpu0))
		done <- err
	}()
	<-waits
	cancel()
	unprepared := returned(t, "unprepare of the claim that was given up", func() error { return m.Unprepare(n.ctx, "given-up-uid") })
	if err := errors.Join(unprepared, m.Unprepare(n.ctx, "first-uid")); err != nil {
		t.Fatal(err)
	}
	if err := returned(t, "prepare", func() error { return <-done }); err == nil {
		t.Error("a prepare that was given up has succeeded")
	}
	if diff := cmp.Diff(empty, n.files()); diff != "" {
		t.Errorf("files (-before +after):\n%s", diff)
	}
	if _, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu0)); err != nil {
		t.Errorf("the next claim: %v", err)
	}
}
