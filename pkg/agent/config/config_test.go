package config

import (
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
		"a value of another type":     {mps(`"defaultActiveThreadPercentage":"half"`), []string{"defaultActiveThreadPercentage", "string"}},
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
