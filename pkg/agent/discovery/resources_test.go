// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/twopaths"
)

func TestSlicesKeepTheLimitsOfTheAPI(t *testing.T) {
	for _, profile := range nvmlsim.Profiles() {
		lib, sysfs := machine(t, profile)
		pools := discover(t, lib, sysfs).DriverResources("node-a").Pools
		if len(pools) != 1 {
			t.Errorf("%s: %d pools, want the node's only", profile, len(pools))
		}
		for i, slice := range pools["node-a"].Slices {
			if len(slice.Devices) != 1 {
				t.Errorf("%s: slice %d has %d devices, want one", profile, i, len(slice.Devices))
			}
			for _, d := range slice.Devices {
				checkDevice(t, d)
			}
		}
	}
}

func TestOddFactsStayInsideTheLimits(t *testing.T) {
	node := &Node{DriverVersion: "r595", CUDADriverVersion: "1.2.3.4", GPUs: []GPU{{
		Name: "gpu-10000-01-00-0", UUID: "GPU-1", PCIBusID: "10000:01:00.0",
		ProductName:           strings.Repeat("é", 40),
		CUDAComputeCapability: "9",
		NVLink:                &NVLink{Domain: strings.Repeat("d", 65)},
	}}}
	node.Offer(Policy{})
	d := node.DriverResources("node-a").Pools["node-a"].Slices[0].Devices[0]
	checkDevice(t, d)
	got := map[string]string{}
	for _, name := range []resourceapi.QualifiedName{
		AttributeProductName, AttributeDriverVersion, AttributeCUDADriverVersion, AttributeCUDAComputeCapability,
	} {
		a := d.Attributes[name]
		switch {
		case a.StringValue != nil:
			got[string(name)] = "string " + *a.StringValue
		case a.VersionValue != nil:
			got[string(name)] = "version " + *a.VersionValue
		}
	}
	want := map[string]string{
		"productName":           "string " + strings.Repeat("é", 32), // 64 bytes
		"driverVersion":         "string r595",
		"cudaDriverVersion":     "string 1.2.3.4",
		"cudaComputeCapability": "version 9.0.0",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestANodeWithoutGPUsPublishesAnEmptySlice(t *testing.T) {
	pool := (&Node{}).DriverResources("node-a").Pools["node-a"]
	if len(pool.Slices) != 1 || len(pool.Slices[0].Devices) != 0 {
		t.Errorf("%+v, want one empty slice: the driver runs and has nothing", pool)
	}
}

var semver = regexp.MustCompile(`^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$`)

// checkDevice applies the rules of the API's validation
// (k8s.io/kubernetes/pkg/apis/resource/validation) that a device can break.
func checkDevice(t *testing.T, d resourceapi.Device) {
	t.Helper()
	if faults := validation.IsDNS1123Label(d.Name); len(faults) > 0 {
		t.Errorf("device name %q: %v", d.Name, faults)
	}
	published := []resourceapi.Device{*d.DeepCopy()}
	twopaths.Mark(published, 0) // as the driver does
	if n := len(published[0].Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		t.Errorf("%s: %d attributes and capacities", d.Name, n)
	}
	for name, a := range d.Attributes {
		checkName(t, name)
		set := 0
		if a.StringValue != nil {
			set++
			if len(*a.StringValue) > resourceapi.DeviceAttributeMaxValueLength {
				t.Errorf("%s: %s: %q is longer than %d", d.Name, name, *a.StringValue, resourceapi.DeviceAttributeMaxValueLength)
			}
		}
		if a.VersionValue != nil {
			set++
			if !semver.MatchString(*a.VersionValue) || len(*a.VersionValue) > resourceapi.DeviceAttributeMaxValueLength {
				t.Errorf("%s: %s: %q is no semantic version", d.Name, name, *a.VersionValue)
			}
		}
		if a.IntValue != nil {
			set++
		}
		if a.BoolValue != nil {
			set++
		}
		if set != 1 {
			t.Errorf("%s: %s has %d values, want one", d.Name, name, set)
		}
	}
	for name, c := range d.Capacity {
		checkName(t, name)
		if c.Value.Sign() < 0 {
			t.Errorf("%s: capacity %s is %s", d.Name, name, c.Value.String())
		}
	}
}

func checkName(t *testing.T, name resourceapi.QualifiedName) {
	t.Helper()
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = "", string(name)
	}
	if qualified && (len(validation.IsDNS1123Subdomain(domain)) > 0 || len(domain) > resourceapi.DeviceMaxDomainLength) {
		t.Errorf("attribute %q: bad domain", name)
	}
	if len(validation.IsCIdentifier(id)) > 0 || len(id) > resourceapi.DeviceMaxIDLength {
		t.Errorf("attribute %q: bad name", name)
	}
}
