// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"stowage.dev/stowage/internal/hostile"
)

func gpu(fields string) string { return object(KindGPU, fields) }
func mig(fields string) string { return object(KindMIG, fields) }

func object(kind Kind, fields string) string {
	if fields != "" {
		fields = "," + fields
	}
	return `{"apiVersion":"` + APIVersion + `","kind":"` + string(kind) + `"` + fields + `}`
}

func TestMemoryLimitsOfDevices(t *testing.T) {
	uuids := []string{"GPU-a", "GPU-b"}
	limits := Limits{MemoryMiB: 10, PerDevice: map[string]int64{"1": 20}}
	got, err := limits.MemoryOf(uuids)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int64{10, 20}, got); diff != "" {
		t.Errorf("limits (-want +got):\n%s", diff)
	}
	for name, keys := range map[string]map[string]int64{
		"no such index":      {"2": 1},
		"no such UUID":       {"GPU-c": 1},
		"one device by both": {"0": 1, "GPU-a": 2},
	} {
		wrong := Limits{PerDevice: keys}
		if _, err := wrong.MemoryOf(uuids); err == nil || !strings.Contains(err.Error(), "defaultPerDevicePinnedMemoryLimit[") {
			t.Errorf("%s: error %v, want one that names the field", name, err)
		}
	}
}

const driverName = "gpu.nvidia.com"

func from(source resourceapi.AllocationConfigSource, raw string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(raw)},
		}},
	}
}

func TestPrecedence(t *testing.T) {
	const class, claim = resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim
	interval := func(i Interval) string {
		return gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"` + string(i) + `"}}`)
	}
	foreign := from(claim, `{"anything":1}`)
	foreign.Opaque.Driver = "nic.example.com"
	type list = []resourceapi.DeviceAllocationConfiguration
	tests := map[string]struct {
		configs list
		request string
		kind    Kind // KindGPU if empty
		want    Settings
		err     string
	}{
		"none":                      {request: "a"},
		"of another driver":         {configs: list{foreign}, request: "a"},
		"for all requests":          {configs: list{from(claim, interval(IntervalLong))}, request: "a", want: sliced(IntervalLong)},
		"for another request":       {configs: list{from(claim, interval(IntervalLong), "b")}, request: "a"},
		"the claim over the class":  {configs: list{from(claim, interval(IntervalLong)), from(class, interval(IntervalShort), "a")}, request: "a", want: sliced(IntervalLong)},
		"later over earlier, class": {configs: list{from(class, interval(IntervalLong)), from(class, interval(IntervalShort))}, request: "a", want: sliced(IntervalShort)},
		"later over earlier, claim": {configs: list{from(claim, interval(IntervalLong)), from(claim, interval(IntervalShort))}, request: "a", want: sliced(IntervalShort)},
		"a later one for another request changes nothing": {
			configs: list{from(claim, interval(IntervalLong)), from(claim, interval(IntervalShort), "b")}, request: "a", want: sliced(IntervalLong),
		},
		"a request's is its alternatives'": {configs: list{from(claim, interval(IntervalLong), "a")}, request: "a/first", want: sliced(IntervalLong)},
		"one alternative's is not another's": {
			configs: list{from(claim, interval(IntervalLong), "a/first"), from(claim, interval(IntervalShort), "a/second")},
			request: "a/first", want: sliced(IntervalLong),
		},
		"for all requests, of another kind": {configs: list{from(claim, interval(IntervalLong))}, request: "a", kind: KindMIG},
		"for all alternatives, of another kind": {
			configs: list{from(claim, interval(IntervalLong), "a"), from(claim, mig(`"sharing":{"strategy":"TimeSlicing"}`), "a")},
			request: "a/mig", kind: KindMIG, want: Settings{Strategy: TimeSlicing},
		},
		"for this request, of another kind": {
			configs: list{from(claim, interval(IntervalLong), "a")}, request: "a", kind: KindMIG,
			err: "status.allocation.devices.config[0].opaque.parameters (from the claim): kind: GpuConfig is not for the device of request a",
		},
		"invalid, although for another request": {
			configs: list{foreign, from(class, gpu(`"x":1`), "b")}, request: "a",
			err: `status.allocation.devices.config[1].opaque.parameters (from the class): GpuConfig: unknown field "x"`,
		},
		"from nowhere": {configs: list{from("FromNode", gpu(""))}, request: "a", err: `status.allocation.devices.config[0].source: "FromNode"`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var got Settings
			set, err := Read(driverName, tc.configs)
			if err == nil {
				kind := tc.kind
				if kind == "" {
					kind = KindGPU
				}
				got, err = set.For(tc.request, kind)
			}
			if tc.err != "" || err != nil {
				if err == nil || tc.err == "" || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("error %v, want %q", err, tc.err)
				}
				return
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
		})
	}
}

// Parameters that a claim has for its devices, and that none of them takes, would be without any effect.
func TestAClaimsParametersThatNoDeviceTakesAreRefused(t *testing.T) {
	const class, claim = resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim
	mps, migMPS := gpu(`"sharing":{"strategy":"MPS"}`), mig(`"sharing":{"strategy":"MPS"}`)
	const path = "status.allocation.devices.config[0].opaque.parameters (from the claim): "
	type list = []resourceapi.DeviceAllocationConfiguration
	tests := map[string]struct {
		configs list
		devices []Device
		err     string // none if empty
	}{
		"of MIG devices, for a whole GPU": {
			list{from(claim, migMPS)},
			[]Device{{Request: "a", Kind: KindGPU}},
			path + "kind: MigDeviceConfig is not for any device of the claim: that of request a takes a GpuConfig",
		},
		"of whole GPUs, for partitions": {
			list{from(claim, mps)},
			[]Device{{Request: "a", Kind: KindMIG}, {Request: "b", Kind: KindMIG}},
			path + "kind: GpuConfig is not for any device of the claim: that of request a takes a MigDeviceConfig",
		},
		"of nothing but their kind": {
			list{from(claim, mig(""))},
			[]Device{{Request: "a", Kind: KindVFIO}},
			path + "kind: MigDeviceConfig is not for any device of the claim: that of request a takes a VfioDeviceConfig",
		},
		"for one device of two": {configs: list{from(claim, migMPS)}, devices: []Device{{Request: "a", Kind: KindGPU}, {Request: "b", Kind: KindMIG}}},
		"by name, for a device that takes others": {
			list{from(claim, migMPS, "a")},
			[]Device{{Request: "a", Kind: KindGPU}, {Request: "b", Kind: KindMIG}},
			path + "kind: MigDeviceConfig is not for the device of request a, which takes a GpuConfig",
		},
		"by name, for a request that has devices of other drivers": {configs: list{from(claim, migMPS, "nic")}, devices: []Device{{Request: "a", Kind: KindGPU}}},
		"of the class, for other claims of it":                     {configs: list{from(class, migMPS)}, devices: []Device{{Request: "a", Kind: KindGPU}}},
		"of the class, which one request of two is of":             {configs: list{from(class, migMPS, "a"), from(class, mps, "a")}, devices: []Device{{Request: "a", Kind: KindGPU}}},
		"of the class, which has none for the device": {
			list{from(class, migMPS, "a")},
			[]Device{{Request: "a", Kind: KindGPU}},
			"status.allocation.devices.config[0].opaque.parameters (from the class): kind: MigDeviceConfig is not for the device of request a, which takes a GpuConfig",
		},
		"overridden by later ones of the same kind": {configs: list{from(claim, gpu("")), from(claim, mps)}, devices: []Device{{Request: "a", Kind: KindGPU}}},
		"for alternatives that were not chosen":     {configs: list{from(claim, migMPS)}, devices: []Device{{Request: "a/gpu", Kind: KindGPU}}},
		"for an alternative by name": {
			list{from(claim, migMPS, "a/gpu")},
			[]Device{{Request: "a/gpu", Kind: KindGPU}},
			path + "kind: MigDeviceConfig is not for the device of request a/gpu, which takes a GpuConfig",
		},
		"for all alternatives, and another request": {configs: list{from(claim, migMPS)}, devices: []Device{{Request: "a/gpu", Kind: KindGPU}, {Request: "b", Kind: KindGPU}}},
		"for a device with admin access": {
			list{from(claim, mps)},
			[]Device{{Request: "a", Kind: KindGPU, AdminAccess: true}},
			path + `sharing.strategy: "MPS": the device of request a has admin access, which leaves it as it is`,
		},
		"for devices one of which has admin access": {
			configs: list{from(claim, mps)}, devices: []Device{{Request: "a", Kind: KindGPU, AdminAccess: true}, {Request: "b", Kind: KindGPU}},
		},
		"that ask for nothing, for a device with admin access": {configs: list{from(claim, gpu(""))}, devices: []Device{{Request: "a", Kind: KindGPU, AdminAccess: true}}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			set, err := Read(driverName, tc.configs)
			if err != nil {
				t.Fatal(err)
			}
			for _, device := range tc.devices {
				if err == nil {
					_, err = set.For(device.Request, device.Kind)
				}
			}
			if err == nil {
				err = set.Check(tc.devices)
			}
			var refused *Error
			if got := ""; err != nil {
				if got = err.Error(); got != tc.err || !errors.As(err, &refused) {
					t.Errorf("error %q (%T), want %q", got, err, tc.err)
				}
			} else if tc.err != "" {
				t.Errorf("no error, want %q", tc.err)
			}
		})
	}
}

// A scheduler leaves out the names where they name all. So what was named is looked up in the claim.
func TestTheNamesThatTheClaimHasComeBack(t *testing.T) {
	const class, claim = resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim
	spec := func(raw string, requests ...string) resourceapi.DeviceClaimConfiguration {
		return resourceapi.DeviceClaimConfiguration{Requests: requests, DeviceConfiguration: from(claim, raw).DeviceConfiguration}
	}
	result := func(request string) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driverName}
	}
	type list = []resourceapi.DeviceAllocationConfiguration
	tests := map[string]struct {
		spec    []resourceapi.DeviceClaimConfiguration
		results []resourceapi.DeviceRequestAllocationResult
		configs list
		want    [][]string
	}{
		"all of one request": {
			spec: []resourceapi.DeviceClaimConfiguration{spec(gpu(""), "a")}, results: []resourceapi.DeviceRequestAllocationResult{result("a")},
			configs: list{from(class, gpu("")), from(claim, gpu(""))}, want: [][]string{nil, {"a"}},
		},
		"all of two, beside one for all": {
			spec:    []resourceapi.DeviceClaimConfiguration{spec(gpu("")), spec(mig(""), "a", "b")},
			results: []resourceapi.DeviceRequestAllocationResult{result("a"), result("b")},
			configs: list{from(claim, gpu("")), from(claim, mig(""))}, want: [][]string{nil, {"a", "b"}},
		},
		"one for an alternative that was not chosen is not in the allocation": {
			spec:    []resourceapi.DeviceClaimConfiguration{spec(gpu(""), "a/gpu"), spec(mig(""), "a/mig")},
			results: []resourceapi.DeviceRequestAllocationResult{result("a/mig")},
			configs: list{from(claim, mig(""))}, want: [][]string{{"a/mig"}},
		},
		"an allocation that is not of this claim stays as it is": {
			spec: []resourceapi.DeviceClaimConfiguration{spec(gpu(""), "a")}, results: []resourceapi.DeviceRequestAllocationResult{result("a")},
			configs: list{from(claim, gpu("")), from(claim, gpu(""))}, want: [][]string{nil, nil},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			object := &resourceapi.ResourceClaim{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Config: tc.spec}}}
			object.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: tc.results, Config: tc.configs}}
			before := object.DeepCopy()
			var got [][]string
			for _, c := range Allocated(object) {
				got = append(got, c.Requests)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, object); diff != "" {
				t.Errorf("the claim has changed (-want +got):\n%s", diff)
			}
		})
	}
}

func sliced(i Interval) Settings { return Settings{Strategy: TimeSlicing, Interval: i} }

// FuzzDecode: whatever the bytes, the answer is valid settings or an error that is not empty.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		"", "{}", gpu(""), mig(""), gpu(`"sharing":{"strategy":"Exclusive"}`),
		gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Medium"}}`),
		gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"1Gi","defaultPerDevicePinnedMemoryLimit":{"0":"2Gi","GPU-1":1e3}}}`),
		gpu(`"sharing":{"strategy":"MPS","mpsConfig":null}`), mig(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"9e999999999Gi"}}`),
	} {
		f.Add([]byte(seed))
	}
	add := func(format string, text string) {
		value, err := json.Marshal(text)
		if err != nil {
			f.Fatal(err)
		}
		f.Add([]byte(gpu(`"sharing":{"strategy":"MPS","mpsConfig":{` + fmt.Sprintf(format, value) + `}}`)))
	}
	for _, text := range hostile.Quantities {
		add(`"defaultPinnedDeviceMemoryLimit":%s`, text)
		add(`"defaultPerDevicePinnedMemoryLimit":{"0":%s}`, text)
		f.Add([]byte(gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":` + text + `}}`)))
	}
	for _, text := range hostile.Strings {
		add(`"defaultPerDevicePinnedMemoryLimit":{%s:"1Gi"}`, text)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		kind, settings, err := Decode(raw)
		if err != nil {
			if err.Error() == "" || settings.Strategy != "" || settings.MPS != nil {
				t.Errorf("error %q with settings %+v", err, settings)
			}
			return
		}
		if kind != KindGPU && kind != KindMIG && kind != KindVFIO {
			t.Errorf("kind %q", kind)
		}
		if (settings.MPS != nil) != (settings.Strategy == MPS) {
			t.Errorf("strategy %q with limits %v", settings.Strategy, settings.MPS)
		}
		if (settings.Interval != "") != (settings.Strategy == TimeSlicing && kind == KindGPU) {
			t.Errorf("%s, strategy %q, with interval %q", kind, settings.Strategy, settings.Interval)
		}
		if settings.MPS != nil {
			if settings.MPS.MemoryMiB < 0 || settings.MPS.ActiveThreadPercentage < 0 || settings.MPS.ActiveThreadPercentage > 100 {
				t.Errorf("limits %+v", settings.MPS)
			}
			for device, limit := range settings.MPS.PerDevice {
				if limit < 1 || strings.Contains(device, "..") {
					t.Errorf("limit %d for %q", limit, device)
				}
			}
		}
	})
}
