// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestALeftoverUnderMPSIsReleased: the server of its daemon is no user of the GPU. A client of it is, and so is whoever else is there.
func TestALeftoverUnderMPSIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		gpus := []string{"gpu-0000-00-1b-0", "gpu-0000-00-1c-0"}
		claims := []*resourceapi.ResourceClaim{allocatedClaim("idle", gpus[0]), allocatedClaim("busy", gpus[1])}
		for _, claim := range claims {
			claim.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
				Source: resourceapi.AllocationConfigSourceClaim,
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver:     Name,
					Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`)},
				}},
			}}
		}
		api := newAPIServer(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}}, claims[0], claims[1])
		r.sharing = config.Rules{Node: "node-1", Allowed: []config.Strategy{config.MPS}}
		agent := r.agent(ctx, api)
		agent.registered.Store(time.Now().Add(-time.Hour).UnixNano())
		p := agent.newPlugin(func(error) {})
		defer background(ctx, agent.watch)()
		time.Sleep(10 * time.Second)
		results, err := p.PrepareResourceClaims(ctx, claims)
		if err != nil || results["idle-uid"].Err != nil || results["busy-uid"].Err != nil {
			t.Fatalf("prepare: %v, %v", results, err)
		}
		r.do(&nvmlsim.AddProcess{GPU: "1", Process: nvmlsim.Process{PID: 42, Kind: nvmlsim.ProcessMPS, MemoryMiB: 100}})
		for _, claim := range claims {
			if err := api.ResourceV1().ResourceClaims("default").Delete(ctx, claim.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		for _, step := range []struct {
			name string
			then func()
			want []string
		}{
			{"while one has a client", func() {}, []string{"busy-uid"}},
			{"without a client", func() { r.do(&nvmlsim.RemoveProcess{GPU: "1", PID: 42}) }, nil},
		} {
			step.then()
			time.Sleep(5 * time.Minute)
			var left, daemons []string
			records, err := agent.reporter.ledger.Records()
			if err != nil {
				t.Fatal(err)
			}
			for _, record := range records {
				left = append(left, string(record.UID))
			}
			for _, daemon := range r.machine.State().Daemons {
				daemons = append(daemons, daemon.Name)
			}
			if !slices.Equal(left, step.want) || !slices.Equal(daemons, step.want) {
				t.Errorf("%s: prepared are %v, daemons %v; want %v of both", step.name, left, daemons, step.want)
			}
		}
	})
}

// TestTheServersOfOurDaemonsAreNoUsers, each on its GPU. Whatever else is there is.
func TestTheServersOfOurDaemonsAreNoUsers(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRig(t, "t4")
	agent := r.agent(ctx, newAPIServer())
	gpus := agent.opts.Hardware.inventory.node.GPUs
	for i, name := range []string{"a", "b"} {
		r.do(&nvmlsim.StartMPS{Daemon: nvmlsim.Daemon{Name: name, GPUs: []string{gpus[i].UUID}}})
	}
	r.do(&nvmlsim.AddProcess{GPU: "1", Process: nvmlsim.Process{PID: 1, Kind: nvmlsim.ProcessMPS, Pod: "pod"}})
	r.do(&nvmlsim.AddProcess{GPU: "1", Process: nvmlsim.Process{PID: 2, Kind: nvmlsim.ProcessCompute, Command: "nvidia-cuda-mps"}})
	for i, want := range []int{0, 2} {
		all, err := agent.opts.Hardware.Processes(ctx, gpus[i].Name)
		if n, unknown := agent.processes(ctx, gpus[i].Name); n != want || all != want+1 || err != nil || unknown != nil {
			t.Errorf("%s: %d of %d processes count, %v, %v; want %d", gpus[i].Name, n, all, err, unknown, want)
		}
	}
	if _, err := agent.processes(context.WithoutCancel(ctx), "gpu-9"); err == nil || !strings.Contains(err.Error(), "gpu-9") {
		t.Errorf("a GPU that is not there: %v", err)
	}
}
