// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"path"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// lockedSysfs is a kernel in which somebody has the lock of every PCI function, as one that removes it and does not come to an end: what
// takes that lock to be read does not return.
type lockedSysfs struct {
	vfio.Sysfs
	// names of the files that are read under the lock.
	names    map[string]bool
	released <-chan struct{}
}

func (s lockedSysfs) ReadFile(name string) ([]byte, error) {
	if s.names[path.Base(name)] {
		<-s.released
	}
	return s.Sysfs.(interface {
		ReadFile(name string) ([]byte, error)
	}).ReadFile(name)
}

// TestALookNeedsNoLockOfAPCIFunction: one function of which nothing can be read must not cost the node all of its GPUs.
func TestALookNeedsNoLockOfAPCIFunction(t *testing.T) {
	for _, name := range []string{"driver_override", "sriov_numvfs"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newPassthroughNode(t)
				released := make(chan struct{})
				defer close(released)
				h := NewHardware(HardwareOptions{
					Open: func() (*nvml.Handle, error) {
						lib := n.machine.NVML()
						sysfs := lockedSysfs{lib.Sysfs(), map[string]bool{name: true}, released}
						return &nvml.Handle{Library: nvml.Adapt(lib, "sim"), Raw: lib, Sysfs: sysfs, Machine: n.machine, Simulated: true}, nil
					},
					Clock: clock.RealClock{}, StateDir: n.state, Users: vfio.Simulated{Machine: n.machine},
				})
				h.Offer(discovery.Policy{Passthrough: true, Dynamic: true})
				ctx, cancel := context.WithTimeout(n.ctx, time.Minute)
				defer cancel()
				node, err := h.Discover(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if got, want := len(node.GPUs), len(n.machine.State().GPUs); got != want {
					t.Errorf("%d GPUs, want %d", got, want)
				}
				for _, gpu := range node.GPUs {
					if gpu.NoPassthrough != "" {
						t.Errorf("GPU %s is not offered to virtual machines: %s", gpu.Name, gpu.NoPassthrough)
					}
				}
			})
		})
	}
}
