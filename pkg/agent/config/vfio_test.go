// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// TestParametersOfOneKindAreNotForADeviceOfAnother: those that name the request are an error, and those for all requests are for others.
func TestParametersOfOneKindAreNotForADeviceOfAnother(t *testing.T) {
	parameters := func(requests ...string) *Set {
		set, err := Read("d", []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim, Requests: requests,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: "d", Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`)},
			}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		return set
	}
	if settings, err := parameters().For("vm", KindVFIO); err != nil || settings != (Settings{}) {
		t.Errorf("for all requests: %+v, %v", settings, err)
	}
	if _, err := parameters("vm").For("vm", KindVFIO); err == nil || !strings.Contains(err.Error(), "GpuConfig is not for the device of request vm, which takes a VfioDeviceConfig") {
		t.Errorf("for this one: %v", err)
	}
}
