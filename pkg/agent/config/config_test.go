package config

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func gpu(fields string) string { return object(KindGPU, fields) }
func mig(fields string) string { return object(KindMIG, fields) }

func object(kind Kind, fields string) string {
	if fields != "" {
		fields = "," + fields
	}
	return `{"apiVersion":"` + APIVersion + `","kind":"` + string(kind) + `"` + fields + `}`
}

func TestDecode(t *testing.T) {
	tests := map[string]struct {
		raw      string
		kind     Kind
		settings Settings
	}{
		"nothing asked for": {raw: gpu(""), kind: KindGPU},
		"time-slicing as it is": {
			raw: gpu(`"sharing":{"strategy":"TimeSlicing"}`), kind: KindGPU,
			settings: Settings{Strategy: TimeSlicing, Interval: IntervalDefault},
		},
		"an empty configuration is the default": {
			raw: gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`), kind: KindGPU,
			settings: Settings{Strategy: TimeSlicing, Interval: IntervalDefault},
		},
		"long time slices": {
			raw: gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`), kind: KindGPU,
			settings: Settings{Strategy: TimeSlicing, Interval: IntervalLong},
		},
		"exclusive": {
			raw: gpu(`"sharing":{"strategy":"Exclusive"}`), kind: KindGPU, settings: Settings{Strategy: Exclusive},
		},
		"MPS without limits": {
			raw: gpu(`"sharing":{"strategy":"MPS"}`), kind: KindGPU, settings: Settings{Strategy: MPS, MPS: &Limits{}},
		},
		"MPS with limits": {
			raw: gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi",
				"defaultPerDevicePinnedMemoryLimit":{"0":"1.5Gi","GPU-1":1048576}}}`),
			kind: KindGPU,
			settings: Settings{Strategy: MPS, MPS: &Limits{
				ActiveThreadPercentage: 50, MemoryMiB: 10240, PerDevice: map[string]int64{"0": 1536, "GPU-1": 1},
			}},
		},
		"MPS on a MIG device": {
			raw: mig(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":100}}`), kind: KindMIG,
			settings: Settings{Strategy: MPS, MPS: &Limits{ActiveThreadPercentage: 100}},
		},
		"time-slicing on a MIG device": {
			raw: mig(`"sharing":{"strategy":"TimeSlicing"}`), kind: KindMIG, settings: Settings{Strategy: TimeSlicing},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			kind, settings, err := Decode([]byte(tc.raw))
			if err != nil {
				t.Fatal(err)
			}
			if kind != tc.kind {
				t.Errorf("kind %s, want %s", kind, tc.kind)
			}
			if diff := cmp.Diff(tc.settings, settings); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWhatIsNotUnderstoodIsNamed(t *testing.T) {
	mps := func(fields string) string { return gpu(`"sharing":{"strategy":"MPS","mpsConfig":{` + fields + `}}`) }
	tests := map[string]struct {
		raw  string
		want []string
	}{
		"empty":                       {"", []string{"not a JSON object"}},
		"no object":                   {"[]", []string{"not a JSON object"}},
		"no kind":                     {`{"apiVersion":"` + APIVersion + `"}`, []string{`kind: ""`, "GpuConfig, MigDeviceConfig"}},
		"another version":             {`{"apiVersion":"resource.nvidia.com/v1","kind":"GpuConfig"}`, []string{`apiVersion: "resource.nvidia.com/v1"`, APIVersion}},
		"another kind":                {object("ComputeDomainChannelConfig", ""), []string{`kind: "ComputeDomainChannelConfig"`}},
		"unknown field":               {gpu(`"shared":{}`), []string{`unknown field "shared"`}},
		"unknown field further down":  {mps(`"limit":1`), []string{`unknown field "sharing.mpsConfig.limit"`}},
		"another spelling of a field": {gpu(`"Sharing":{"strategy":"MPS"}`), []string{`unknown field "Sharing"`}},
		"a field twice":               {gpu(`"sharing":{"strategy":"MPS"},"sharing":{"strategy":"TimeSlicing"}`), []string{`duplicate field "sharing"`}},
		"a value of another type":     {mps(`"defaultActiveThreadPercentage":"half"`), []string{"defaultActiveThreadPercentage", `"half"`}},
		"no strategy":                 {gpu(`"sharing":{}`), []string{`sharing.strategy: ""`, "TimeSlicing, MPS, Exclusive"}},
		"unknown strategy":            {gpu(`"sharing":{"strategy":"Mps"}`), []string{`sharing.strategy: "Mps"`}},
		"exclusive MIG device":        {mig(`"sharing":{"strategy":"Exclusive"}`), []string{`sharing.strategy: "Exclusive"`, "TimeSlicing, MPS"}},
		"interval of a MIG device":    {mig(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`), []string{`unknown field "sharing.timeSlicingConfig"`}},
		"unknown interval":            {gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Forever"}}`), []string{`sharing.timeSlicingConfig.interval: "Forever"`, "Short"}},
		"parameters of MPS for slices": {
			gpu(`"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}`), []string{"sharing.mpsConfig", `"TimeSlicing"`},
		},
		"parameters of slices for MPS": {
			gpu(`"sharing":{"strategy":"MPS","timeSlicingConfig":{}}`), []string{"sharing.timeSlicingConfig", `"MPS"`},
		},
		"parameters of MPS for slices of a MIG device": {
			mig(`"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}`), []string{"sharing.mpsConfig", `"TimeSlicing"`},
		},
		"no threads":             {mps(`"defaultActiveThreadPercentage":0`), []string{"sharing.mpsConfig.defaultActiveThreadPercentage: 0"}},
		"too many threads":       {mps(`"defaultActiveThreadPercentage":101`), []string{"sharing.mpsConfig.defaultActiveThreadPercentage: 101"}},
		"limit that is none":     {mps(`"defaultPinnedDeviceMemoryLimit":"much"`), []string{`sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "much"`}},
		"limit with an exponent": {mps(`"defaultPinnedDeviceMemoryLimit":1e2147483647`), []string{`sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "1e2147483647"`}},
		"limit too small":        {mps(`"defaultPinnedDeviceMemoryLimit":"1023Ki"`), []string{`sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "1023Ki"`, "1Mi"}},
		"limit too large":        {mps(`"defaultPinnedDeviceMemoryLimit":"999999999999999Ti"`), []string{"defaultPinnedDeviceMemoryLimit"}},
		"limit for a path":       {mps(`"defaultPerDevicePinnedMemoryLimit":{"../x":"1Gi"}`), []string{`sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["../x"]`}},
		"limit for a device":     {mps(`"defaultPerDevicePinnedMemoryLimit":{"1":"-1Gi"}`), []string{`sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["1"]: "-1Gi"`}},
		"too long":               {strings.Repeat(" ", 10*1024) + gpu(""), []string{"bytes"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, err := Decode([]byte(tc.raw))
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

// A value of another JSON type is told as any other wrong value: the field as it is written, the value, and what is wanted.
func TestAValueOfAnotherTypeIsToldInTheUsersWords(t *testing.T) {
	mps := func(fields string) string { return gpu(`"sharing":{"strategy":"MPS","mpsConfig":{` + fields + `}}`) }
	tests := map[string]struct{ raw, want string }{
		"text for a number":       {mps(`"defaultActiveThreadPercentage":"half"`), `GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage: "half": want a whole number`},
		"a fraction for a number": {mps(`"defaultActiveThreadPercentage":1.5`), `GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage: 1.5: want a whole number`},
		"a word for a quantity": {
			mps(`"defaultPinnedDeviceMemoryLimit":true`),
			`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: true: want a number of bytes such as 512Mi or 10Gi`,
		},
		"a list for the quantity of a device": {
			mps(`"defaultPerDevicePinnedMemoryLimit":{"0":[1]}`),
			`GpuConfig: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["0"]: [1]: want a number of bytes such as 512Mi or 10Gi`,
		},
		"a list for the quantities": {
			mps(`"defaultPerDevicePinnedMemoryLimit":[]`), `GpuConfig: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit: []: want an object`,
		},
		"a number for a word":  {gpu(`"sharing":{"strategy":5}`), `GpuConfig: sharing.strategy: 5: want a string`},
		"a word for an object": {gpu(`"sharing":"MPS"`), `GpuConfig: sharing: "MPS": want an object`},
		"an object for a word": {
			gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":{"is":"Long"}}}`),
			`GpuConfig: sharing.timeSlicingConfig.interval: {"is":"Long"}: want a string`,
		},
		"a word for a truth":     {object(KindVFIO, `"iommu":{"enableAPIDevice":"yes"}`), `VfioDeviceConfig: iommu.enableAPIDevice: "yes": want true or false`},
		"a number for a version": {`{"apiVersion":3}`, `apiVersion: 3: want a string`},
		"a list for a kind":      {`{"apiVersion":"` + APIVersion + `","kind":["a"]}`, `kind: ["a"]: want a string`},
		"a list for all":         {`[1]`, `not a JSON object: [1]`},
		"a long value is cut": {
			gpu(`"sharing":"` + strings.Repeat("x", 100) + `"`), `GpuConfig: sharing: "` + strings.Repeat("x", 63) + `…: want an object`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if _, _, err := Decode([]byte(tc.raw)); err == nil || err.Error() != tc.want {
				t.Errorf("error %v, want %s", err, tc.want)
			}
		})
	}
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
