// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/internal/hostile"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
)

// FuzzRequests: whatever claim the kubelet asks for, and whatever stands in it, each gets an answer; nothing outside of the agent's folders is
// touched; and when it has been unprepared nothing is left.
func FuzzRequests(f *testing.F) {
	seed := func(claim *resourceapi.ResourceClaim) {
		data, err := json.Marshal(claim)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	seed(&resourceapi.ResourceClaim{})
	seed(allocatedClaim("claim", "gpu-0000-00-1b-0"))
	seed(allocatedClaim("../../escape", "gpu-0000-00-1b-0"))
	seed(allocatedClaim("claim", "gpu-of-nobody"))
	twice := allocatedClaim("twice", "gpu-0000-00-1b-0")
	twice.Status.Allocation.Devices.Results = append(twice.Status.Allocation.Devices.Results, twice.Status.Allocation.Devices.Results[0])
	seed(twice)
	shared := allocatedClaim("shared", "gpu-0000-00-1c-0")
	shared.Status.Allocation.Devices.Results[0].ShareID = new(types.UID("not a UUID"))
	shared.Status.Allocation.Devices.Results[0].Request = "a/b/c"
	shared.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	seed(shared)
	configured := allocatedClaim("configured", "gpu-0000-00-1b-0")
	configured.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: Name}},
	}}
	seed(configured)
	f.Add([]byte(`{"status":{"allocation":{"devices":{"results":[{"driver":"gpu.nvidia.com","pool":"node-1"}]}}}}`))
	// The API's extremes: in what a scheduler writes, in names, and in all else that a claim may ask for.
	for _, text := range hostile.Quantities {
		extreme := shared.DeepCopy()
		extreme.Status.Allocation.Devices.Results[0].AdminAccess = nil
		extreme.Status.Allocation.Devices.Results[0].Request = "a"
		extreme.Status.Allocation.Devices.Results[0].ShareID = new(types.UID("8f3c2f3e-0d43-4a6d-9e8a-0a3d1c0f6b11"))
		extreme.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{
			discovery.CapacityMemory: resource.MustParse(text), discovery.CapacityCompute: resource.MustParse(text),
		}
		seed(extreme)
	}
	for _, text := range append(slices.Clone(hostile.Strings), "../../../escape") {
		named := allocatedClaim(text, "gpu-0000-00-1b-0")
		named.UID = "named-uid"
		named.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: text}
		named.Status.Allocation.Devices.Results[0].Request = text
		seed(named)
	}
	g := hostile.New(1, "default", "node-1")
	g.Classes = []string{"gpu.nvidia.com"}
	for range 20 {
		drawn := g.Claim()
		drawn.UID, drawn.Status = types.UID(drawn.Name+"-uid"), *allocatedClaim("", "gpu-0000-00-1b-0").Status.DeepCopy()
		for _, config := range drawn.Spec.Devices.Config {
			config.Opaque.Driver = Name
			drawn.Status.Allocation.Devices.Config = append(drawn.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
				Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: config.DeviceConfiguration,
			})
		}
		seed(drawn)
	}

	ctx := klog.NewContext(context.Background(), klog.Logger{})
	f.Fuzz(func(t *testing.T, data []byte) {
		var claim resourceapi.ResourceClaim
		if json.Unmarshal(data, &claim) != nil {
			return
		}
		r := newRig(t, "t4")
		agent := r.agent(ctx, newAPIServer())
		defer agent.reporter.events.Shutdown()
		defer agent.reporter.queue.ShutDown()
		p := agent.newPlugin(func(err error) { t.Errorf("the agent ends: %v", err) })
		results, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{&claim})
		if _, answered := results[claim.UID]; err != nil || !answered || len(results) != 1 {
			t.Fatalf("prepare: %v, %v; want one result", results, err)
		}
		for _, device := range results[claim.UID].Devices {
			if device.PoolName != "node-1" || agent.opts.Hardware.Health(device.DeviceName).Status != health.Healthy || len(device.CDIDeviceIDs) == 0 {
				t.Errorf("prepared: %+v", device)
			}
		}
		released, err := p.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{UID: claim.UID}})
		if err != nil || released[claim.UID] != nil {
			t.Fatalf("unprepare: %v, %v", released, err)
		}
		for _, folder := range []string{"claims", "cdi"} {
			if left, err := os.ReadDir(filepath.Join(r.state, folder)); len(left) > 0 {
				t.Errorf("left in %s: %v, %v", folder, left, err)
			}
		}
		if stray, _ := filepath.Glob(filepath.Join(filepath.Dir(r.state), "*escape*")); len(stray) > 0 {
			t.Errorf("written outside: %v", stray)
		}
	})
}
