// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// lastUpdate is what the controller was told last.
type lastUpdate struct {
	mu   sync.Mutex
	last resourceslice.DriverResources
}

func (u *lastUpdate) Update(resources *resourceslice.DriverResources) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.last = *resources
}

// tainted are the devices that it was told to have a taint of that key.
func (u *lastUpdate) tainted(key string) (n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, slice := range u.last.Pools["node-1"].Slices {
		for _, device := range slice.Devices {
			for _, taint := range device.Taints {
				if taint.Key == key {
					n++
				}
			}
		}
	}
	return n
}

// TestGPUsThatFailAtOneTickAreAllPublished: each tells of itself, and none with a look at the others that is older than theirs.
func TestGPUsThatFailAtOneTickAreAllPublished(t *testing.T) {
	const rounds = 50
	worst := 8
	for range rounds {
		synctest.Test(t, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			r := newRig(t, "dgx-h100")
			agent := r.agent(ctx, namingServer())
			told := &lastUpdate{}
			defer background(ctx, func(ctx context.Context) { agent.publisher.update(ctx, told, nil) })()
			defer background(ctx, agent.watch)()
			time.Sleep(time.Second)
			for i := range 8 {
				r.do(&nvmlsim.LoseGPU{GPU: fmt.Sprint(i)})
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			worst = min(worst, told.tainted(TaintKey("gpu-lost")))
		})
		if worst < 8 {
			break
		}
	}
	if worst < 8 {
		t.Errorf("of 8 GPUs that were lost at one tick %d have the taint, in the worst of %d rounds", worst, rounds)
	}
}
