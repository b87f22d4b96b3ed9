// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"strings"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/nvmlsim"
)

func TestADeviceSaysInGoTermsWhatNVMLSays(t *testing.T) {
	type facts struct {
		UUID, Name, Brand, Architecture, PCIBusID string
		Capability                                Version
		Minor                                     int
		MemoryBytes                               uint64
		MIG                                       MIGMode
		Links                                     int
		FirstLink                                 NVLink
		Fabric                                    *Fabric
	}
	tests := map[string]facts{
		"dgx-h100": {
			Name: "NVIDIA H100 80GB HBM3", Brand: "Nvidia", Architecture: "Hopper", PCIBusID: "0000:43:00.0",
			Capability: Version{9, 0}, Minor: 1, MemoryBytes: 81559 << 20, MIG: MIGMode{Capable: true},
			Links: 18, FirstLink: NVLink{Version: 4, Remote: RemoteSwitch, RemotePCIBusID: "0000:05:00.0"},
			Fabric: &Fabric{State: "Completed"},
		},
		"gb200": {
			Name: "NVIDIA GB200", Brand: "Nvidia", Architecture: "Blackwell", PCIBusID: "0009:01:00.0",
			Capability: Version{10, 0}, Minor: 1, MemoryBytes: 189471 << 20, MIG: MIGMode{Capable: true},
			Links: 18, FirstLink: NVLink{Version: 5, Remote: RemoteSwitch},
			Fabric: &Fabric{State: "Completed", ClusterUUID: "5f6d2f3e-0c8b-4f0e-9d55-6a7f2b1c9e10", CliqueID: 2},
		},
		"l40s": {
			Name: "NVIDIA L40S", Brand: "Nvidia", Architecture: "Ada Lovelace", PCIBusID: "0000:19:00.0",
			Capability: Version{8, 9}, Minor: 1, MemoryBytes: 46068 << 20,
		},
	}
	for profile, want := range tests {
		t.Run(profile, func(t *testing.T) {
			lib := initialized(t, simulated(t, profile))
			d, err := lib.Device(1)
			if err != nil {
				t.Fatal(err)
			}
			var got facts
			var errs []error
			get := func(err error) { errs = append(errs, err) }
			got.UUID, err = d.UUID()
			get(err)
			got.Name, err = d.Name()
			get(err)
			got.Brand, err = d.Brand()
			get(err)
			got.Architecture, err = d.Architecture()
			get(err)
			got.PCIBusID, err = d.PCIBusID()
			get(err)
			got.Capability, err = d.CUDAComputeCapability()
			get(err)
			got.Minor, err = d.MinorNumber()
			get(err)
			got.MemoryBytes, err = d.MemoryBytes()
			get(err)
			got.MIG, err = d.MIGMode()
			get(err)
			links, err := d.NVLinks()
			get(err)
			if got.Links = len(links); got.Links > 0 {
				got.FirstLink = links[0]
			}
			got.Fabric, err = d.Fabric()
			get(err)
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			same, err := lib.DeviceAt(got.PCIBusID)
			if err != nil {
				t.Fatal(err)
			}
			if minor, _ := same.MinorNumber(); minor != got.Minor {
				t.Errorf("the device found by UUID has minor %d, want %d", minor, got.Minor)
			}
			want.UUID = got.UUID
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestVersionsOfTheDriver(t *testing.T) {
	lib := initialized(t, simulated(t, "dgx-a100"))
	driver, err := lib.DriverVersion()
	if err != nil || driver != "570.148.08" {
		t.Errorf("driver %q, %v, want 570.148.08", driver, err)
	}
	cuda, err := lib.CUDADriverVersion()
	if err != nil || cuda != (Version{12, 8}) {
		t.Errorf("CUDA %v, %v, want 12.8", cuda, err)
	}
}

func TestACallOutsideOfASessionIsRefusedBeforeTheLibraryIsTouched(t *testing.T) {
	// The real library: go-nvml would end the process.
	missing, err := Open(t.TempDir()+"/libnvidia-ml.so.1", OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	sim := simulated(t, "t4")
	if err := sim.Init(); err != nil {
		t.Fatal(err)
	}
	stale, err := sim.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Shutdown(); err != nil {
		t.Fatal(err)
	}
	calls := map[string]func() error{
		"DeviceCount":             func() error { _, err := missing.DeviceCount(); return err },
		"DriverVersion":           func() error { _, err := missing.DriverVersion(); return err },
		"CUDADriverVersion":       func() error { _, err := missing.CUDADriverVersion(); return err },
		"Device":                  func() error { _, err := missing.Device(0); return err },
		"DeviceAt":                func() error { _, err := missing.DeviceAt("0000:00:1b.0"); return err },
		"Shutdown":                missing.Shutdown,
		"a handle kept too long":  func() error { _, err := stale.UUID(); return err },
		"its links":               func() error { _, err := stale.NVLinks(); return err },
		"Shutdown a second time":  sim.Shutdown,
		"count after the session": func() error { _, err := sim.DeviceCount(); return err },
	}
	for name, call := range calls {
		err := call()
		var callError *CallError
		if !errors.As(err, &callError) || callError.Return != gonvml.ERROR_UNINITIALIZED || !strings.HasPrefix(callError.Call, "nvml") {
			t.Errorf("%s: error %v, want a *CallError with %v", name, err, gonvml.ERROR_UNINITIALIZED)
		}
	}
}

func TestErrorsOfCallsCanBeDecidedOn(t *testing.T) {
	lib := initialized(t, simulated(t, "t4"))
	if _, err := lib.DeviceAt("0000:99:00.0"); !errors.Is(err, ErrNotFound) {
		t.Errorf("error %v, want %v", err, ErrNotFound)
	}
	other := initialized(t, simulated(t, "t4"))
	a, _ := lib.Device(0)
	b, _ := other.Device(1)
	if _, err := a.ReachesOverNVLink(b); err == nil {
		t.Error("no error for the GPU of another library")
	}
}

func TestInitSaysWhatIsMissing(t *testing.T) {
	tests := map[string]struct {
		ret  gonvml.Return
		want error
		says string
	}{
		"library":                   {gonvml.ERROR_LIBRARY_NOT_FOUND, ErrLibraryNotFound, "tried /x/libnvidia-ml.so.1"},
		"driver":                    {gonvml.ERROR_DRIVER_NOT_LOADED, ErrDriverNotLoaded, "load the nvidia module"},
		"driver of another version": {gonvml.ERROR_LIB_RM_VERSION_MISMATCH, ErrVersionMismatch, "reboot"},
		"permission":                {gonvml.ERROR_NO_PERMISSION, gonvml.ERROR_NO_PERMISSION, "/x/libnvidia-ml.so.1"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			lib := Adapt(failingInit{ret: test.ret}, "/x/libnvidia-ml.so.1")
			err := lib.Init()
			if !errors.Is(err, test.want) || !errors.Is(err, test.ret) {
				t.Errorf("error %v, want %v and %v", err, test.want, test.ret)
			}
			if err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %q does not say %q", err, test.says)
			}
			if err := lib.Shutdown(); !errors.Is(err, gonvml.ERROR_UNINITIALIZED) {
				t.Errorf("Shutdown after a failed Init: %v, want %v", err, gonvml.ERROR_UNINITIALIZED)
			}
		})
	}
}

// failingInit is a library that does not start.
type failingInit struct {
	gonvml.Interface
	ret gonvml.Return
}

func (f failingInit) InitWithFlags(uint32) gonvml.Return { return f.ret }

func TestAddressesAreRewrittenAsTheKernelHasThem(t *testing.T) {
	tests := map[string]string{
		"00000000:1B:00.0": "0000:1b:00.0",
		"0000:1B:00.0":     "0000:1b:00.0",
		"00000018:01:00.0": "0018:01:00.0",
		"00010000:01:00.0": "10000:01:00.0", // such as behind an Intel VMD
		"":                 "",
		"FFFFFFFF":         "",
	}
	for nvmlID, want := range tests {
		info := gonvml.PciInfo{}
		for i := range nvmlID {
			info.BusId[i] = int8(nvmlID[i])
		}
		got, err := kernelBusID(info)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v, want %q", nvmlID, got, err, want)
		}
	}
}

func TestValuesOfANewerDriverGetAWord(t *testing.T) {
	if got := word(architectures, gonvml.DeviceArchitecture(77)); got != "Unknown77" {
		t.Errorf("architecture 77 is %q, want Unknown77", got)
	}
}

func simulated(t *testing.T, profile string) Library {
	t.Helper()
	p, err := nvmlsim.LoadProfile(profile)
	if err != nil {
		t.Fatal(err)
	}
	_, lib := seen(t, p)
	return lib
}

// initialized opens a session that ends with the test.
func initialized(t *testing.T, lib Library) Library {
	t.Helper()
	if err := lib.Init(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lib.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	return lib
}
