// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/reconcile"
)

// stuckStart is a library whose sessions cannot be opened as long as it hangs.
type stuckStart struct {
	nvml.Library
	hangs <-chan struct{}
}

func (s stuckStart) Init() error {
	<-s.hangs
	return s.Library.Init()
}

// TestAReleaseEndsWhoeverDoesNotAnswer, and says who that is. With force the claim is released all the same.
func TestAReleaseEndsWhoeverDoesNotAnswer(t *testing.T) {
	const gpu = "gpu-0000-00-1b-0"
	tests := map[string]struct {
		kubelet, count, start bool // hangs
		force                 bool
		says                  string // before the answer
		want                  string // the beginning of the error; empty for none
		did                   string
	}{
		"the kubelet":             {kubelet: true, want: "not released: the kubelet does not tell what it runs: context deadline exceeded"},
		"a GPU":                   {count: true, want: "not released: NVML does not tell about processes: GPU " + gpu},
		"NVML":                    {start: true, says: "GPUs cannot be asked: wait for NVML: context deadline exceeded", want: "not released: NVML does not tell about processes: "},
		"the kubelet, with force": {kubelet: true, force: true, did: "passed over, because of --force: the kubelet does not tell what it runs: context deadline exceeded"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				// Without a limit of its own the release would take as long as its caller lets it.
				ctx, cancel := context.WithTimeout(ctx, time.Hour)
				defer cancel()
				r := newRig(t, "t4")
				first := r.found(ctx).inventory.node.GPUs[0]
				hangs := make(chan struct{})
				r.wrap = func(library nvml.Library) nvml.Library {
					switch {
					case tc.count:
						return deaf{Library: library, busID: first.PCIBusID, hangs: hangs, asked: new(atomic.Int32)}
					case tc.start:
						return stuckStart{library, hangs}
					}
					return library
				}
				agent := r.blindAgent(ctx, newAPIServer())
				defer background(ctx, agent.reporter.run)() // which ends what it has begun
				agent.registered.Store(time.Now().Add(-time.Hour).UnixNano())
				if tc.kubelet {
					agent.opts.Kubelet.Pods = func(ctx context.Context) ([]reconcile.KubeletPod, error) {
						<-ctx.Done()
						return nil, ctx.Err()
					}
				}
				entry := &ledger.Entry{
					Claim: ledger.Claim{UID: "held-uid", Namespace: "default", Name: "held"}, State: ledger.PrepareCompleted,
					Devices: []ledger.Device{{Device: gpu, GPU: gpu, UUID: first.UUID}},
				}
				if err := agent.reporter.ledger.Put(entry); err != nil {
					t.Fatal(err)
				}
				var said []string
				began := time.Now()
				done, err := agent.Release(ctx, "held-uid", tc.force, func(line string) { said = append(said, line) })
				if took := time.Since(began); took > 2*reconcile.Interval {
					t.Errorf("it took %s", took)
				}
				switch {
				case tc.want == "" && err != nil:
					t.Error(err)
				case tc.want != "" && (!errors.Is(err, prepare.ErrInUse) || !strings.HasPrefix(err.Error(), tc.want)):
					t.Errorf("error %v, want %s", err, tc.want)
				}
				if got := strings.Join(said, "\n"); got != tc.says {
					t.Errorf("said %q, want %q", got, tc.says)
				}
				if tc.did != "" && (len(done.Did) == 0 || done.Did[0] != tc.did) {
					t.Errorf("did %q, want %q first", done.Did, tc.did)
				}
				if held := HeldInLedger(r.state)(gpu); held != (tc.want != "") {
					t.Errorf("the GPU is held: %v", held)
				}
				close(hangs)
				synctest.Wait()
			})
		})
	}
}
