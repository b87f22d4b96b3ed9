// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// withOwnConfig adds opaque parameters of the claim's own, as a scheduler writes them into the allocation: without the requests if they name all.
func withOwnConfig(c *resourceapi.ResourceClaim, parameters string, requests ...string) *resourceapi.ResourceClaim {
	own := resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(parameters)}},
	}
	c.Spec.Devices.Config = append(c.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{Requests: requests, DeviceConfiguration: own})
	c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: own,
	})
	return c
}

// What a claim wants for its devices and does not get is an error before anything is done: no record, no file, no change of a GPU.
func TestParametersThatNoDeviceTakesAreRefusedBeforeAnythingIsDone(t *testing.T) {
	const partition = gpu0 + "-mig-1g10gb-0"
	const path = "claim default/train (train-uid): status.allocation.devices.config[0].opaque.parameters (from the claim): "
	tests := map[string]struct {
		claim *resourceapi.ResourceClaim
		want  string
	}{
		"MIG parameters for a whole GPU": {
			withOwnConfig(claim("train", "gpus="+gpu0), sharingConfig("MigDeviceConfig", "MPS", "")),
			"kind: MigDeviceConfig is not for any device of the claim: that of request gpus takes a GpuConfig",
		},
		"MPS of whole GPUs for a partition": {
			withOwnConfig(claim("train", "part="+partition), sharingConfig("GpuConfig", "MPS", "")),
			"kind: GpuConfig is not for any device of the claim: that of request part takes a MigDeviceConfig",
		},
		"named for the only request": {
			withOwnConfig(claim("train", "gpus="+gpu0), sharingConfig("MigDeviceConfig", "MPS", ""), "gpus"),
			"kind: MigDeviceConfig is not for the device of request gpus, which takes a GpuConfig",
		},
		"named for all requests, of which one does not take it": {
			withOwnConfig(claim("train", "gpus="+gpu1, "part="+partition), sharingConfig("GpuConfig", "TimeSlicing", ""), "gpus", "part"),
			"kind: GpuConfig is not for the device of request part, which takes a MigDeviceConfig",
		},
		"for admin access": {
			withOwnConfig(claim("train", "gpus="+gpu0+"+admin"), sharingConfig("GpuConfig", "Exclusive", "")),
			`sharing.strategy: "Exclusive": the device of request gpus has admin access, which leaves it as it is`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			m := n.manager()
			before := n.gpu(0)
			if _, err := m.Prepare(n.ctx, tc.claim); err == nil || err.Error() != path+tc.want {
				t.Errorf("error %v, want %s%s", err, path, tc.want)
			}
			if files := n.files(); len(files) > 0 {
				t.Errorf("files %v", files)
			}
			if now := n.gpu(0); now.ComputeMode != before.ComputeMode || now.MIG != before.MIG || len(now.Instances) > 0 {
				t.Errorf("GPU is %+v, was %+v", now, before)
			}
		})
	}
}

// TestAPreparedClaimKeepsParametersThatNoDeviceTakes: an agent before took them, its pod runs, and a kubelet that starts anew prepares it again.
func TestAPreparedClaimKeepsParametersThatNoDeviceTakes(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	want, err := m.Prepare(n.ctx, claim("train", "gpus="+gpu0))
	if err != nil {
		t.Fatal(err)
	}
	unused := withOwnConfig(claim("train", "gpus="+gpu0), sharingConfig("MigDeviceConfig", "MPS", ""))
	got, err := n.manager().Prepare(n.ctx, unused)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-before +now):\n%s", diff)
	}
	if err := m.Unprepare(n.ctx, unused.UID); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Prepare(n.ctx, unused); err == nil {
		t.Error("once it is unprepared it is prepared anew, with parameters that no device takes")
	}
}
