package config

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func TestParametersForVirtualMachines(t *testing.T) {
	tests := map[string]struct {
		fields string
		want   VFIO
		err    string
	}{
		"none":                 {"", VFIO{}, ""},
		"no wishes":            {`,"iommu":{}`, VFIO{}, ""},
		"NVIDIA's for libvirt": {`,"iommu":{"backendPolicy":"LegacyOnly","enableAPIDevice":true}`, VFIO{}, ""},
		"iommufd":              {`,"iommu":{"backendPolicy":"PreferIommuFD"}`, VFIO{PreferIOMMUFD: true}, ""},
		"no API device":        {`,"iommu":{"enableAPIDevice":false}`, VFIO{NoAPIDevice: true}, ""},
		"a wrong backend":      {`,"iommu":{"backendPolicy":"iommufd"}`, VFIO{}, `VfioDeviceConfig: iommu.backendPolicy: "iommufd": want one of LegacyOnly, PreferIommuFD`},
		"a wrong case":         {`,"iommu":{"BackendPolicy":"LegacyOnly"}`, VFIO{}, `unknown field "iommu.BackendPolicy"`},
		"another kind's":       {`,"sharing":{"strategy":"MPS"}`, VFIO{}, `unknown field "sharing"`},
		"a wrong type":         {`,"iommu":{"enableAPIDevice":"yes"}`, VFIO{}, "enableAPIDevice"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			kind, settings, err := Decode([]byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig"` + test.fields + `}`))
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("error %v, want one with %q", err, test.err)
				}
				return
			}
			if err != nil || kind != KindVFIO || settings != (Settings{VFIO: test.want}) {
				t.Errorf("%s, %+v, %v", kind, settings, err)
			}
		})
	}
}

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
