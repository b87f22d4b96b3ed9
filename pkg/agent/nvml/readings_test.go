// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestAnOlderDriverHasNoRecoveryAction: R550 does not know the field, and answers that its number is not valid.
func TestAnOlderDriverHasNoRecoveryAction(t *testing.T) {
	for version, known := range map[string]bool{"535.216.03": false, "550.163.01": false, "565.57.01": true, "580.105.08": true} {
		t.Run(version, func(t *testing.T) {
			profile, err := nvmlsim.LoadProfile("dgx-h100")
			if err != nil {
				t.Fatal(err)
			}
			profile.System.DriverVersion = version
			_, lib := seen(t, profile)
			d, err := initialized(t, lib).Device(0)
			if err != nil {
				t.Fatal(err)
			}
			r, err := d.Readings()
			if err != nil || r.Odd != nil || r.TemperatureC == nil || (r.RecoveryAction != nil) != known {
				t.Errorf("driver %s: %+v, %v: want all readings, and the recovery action: %v", version, r, err, known)
			}
		})
	}
}

// cLibrary is a simulated library that would end the process where a function is missing.
type cLibrary struct {
	*nvmlsim.Library
	missing map[string]bool
	lookups map[string]int
}

func (l cLibrary) Extensions() gonvml.ExtendedInterface { return l }

func (l cLibrary) LookupSymbol(name string) error {
	l.lookups[name]++
	if l.missing[name] {
		return errors.New("undefined symbol: " + name)
	}
	return nil
}

func (l cLibrary) DeviceGetHandleByIndex(i int) (gonvml.Device, gonvml.Return) {
	d, ret := l.Library.DeviceGetHandleByIndex(i)
	return cDevice{d, l}, ret
}

type cDevice struct {
	gonvml.Device
	lib cLibrary
}

func (d cDevice) GetCurrentClocksEventReasons() (uint64, gonvml.Return) {
	if d.lib.missing["nvmlDeviceGetCurrentClocksEventReasons"] {
		panic("symbol lookup error")
	}
	return d.Device.GetCurrentClocksEventReasons()
}

// TestAFunctionThatTheLibraryLacksIsNotCalled: nvmlDeviceGetCurrentClocksEventReasons is there since R535.
func TestAFunctionThatTheLibraryLacksIsNotCalled(t *testing.T) {
	sim, err := nvmlsim.New("dgx-h100", "node-a")
	if err != nil {
		t.Fatal(err)
	}
	const function = "nvmlDeviceGetCurrentClocksEventReasons"
	c := cLibrary{Library: sim, missing: map[string]bool{function: true}, lookups: map[string]int{}}
	lib := initialized(t, adaptReal(c, "c"))
	d, err := lib.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := d.Readings(); err != nil || r.Odd != nil || r.Throttle != nil || r.TemperatureC == nil {
		t.Errorf("%+v, %v: want all readings but one", r, err)
	}
	if _, err := d.Readings(); err != nil {
		t.Error(err)
	}
	if n := c.lookups["nvmlDeviceGetTemperature"]; n != 1 {
		t.Errorf("a function that is there was looked up %d times", n)
	}
	// Another driver is loaded, and the library opened anew.
	if err := lib.Shutdown(); err != nil {
		t.Fatal(err)
	}
	delete(c.missing, function)
	c.missing["nvmlDeviceGetTemperature"] = true
	initialized(t, lib)
	if r, err := d.Readings(); err != nil || r.Throttle == nil || r.TemperatureC != nil {
		t.Errorf("another library: %+v, %v", r, err)
	}
	if err := lib.Init(); err != nil { // for the first one's end
		t.Fatal(err)
	}
}

// TestCallsHaveTheNamesOfFunctions: one with another name would be taken for one that the library lacks.
func TestCallsHaveTheNamesOfFunctions(t *testing.T) {
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	header, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "pkg/nvml/nvml.h"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	names := 0
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`"(nvml[A-Z]\w*)"`).FindAllSubmatch(source, -1) {
			names++
			if !regexp.MustCompile(`DECLDIR ` + string(m[1]) + `\(`).Match(header) {
				t.Errorf("%s: NVML has no function %s", file, m[1])
			}
		}
	}
	if names < 60 {
		t.Errorf("found %d names", names)
	}
}

// TestOneReadingThatFailsIsNoGPUThatFails: what is about the GPU or the driver fails all, whichever question it answers.
func TestOneReadingThatFailsIsNoGPUThatFails(t *testing.T) {
	tests := map[string]struct {
		gpu         odd
		fails, told error
	}{
		"one is refused":                      {gpu: odd{temperature: gonvml.ERROR_NO_PERMISSION}, told: gonvml.ERROR_NO_PERMISSION},
		"an answer of a newer library":        {gpu: odd{temperature: 77}, told: gonvml.Return(77)},
		"the argument of the call is invalid": {gpu: odd{fields: gonvml.ERROR_INVALID_ARGUMENT}, told: gonvml.ERROR_INVALID_ARGUMENT},
		"a field is not ready":                {gpu: odd{field: gonvml.ERROR_NOT_READY}, told: gonvml.ERROR_NOT_READY},
		"a field is not known":                {gpu: odd{field: gonvml.ERROR_INVALID_ARGUMENT}},
		"one is lacked":                       {gpu: odd{temperature: gonvml.ERROR_NOT_SUPPORTED}},
		"lost":                                {gpu: odd{temperature: gonvml.ERROR_GPU_IS_LOST}, fails: ErrGPULost},
		"lost, by a field":                    {gpu: odd{field: gonvml.ERROR_GPU_IS_LOST}, fails: ErrGPULost},
		"a reset is required":                 {gpu: odd{temperature: gonvml.ERROR_RESET_REQUIRED}, fails: ErrResetRequired},
		"the driver was reloaded":             {gpu: odd{temperature: gonvml.ERROR_UNINITIALIZED}, fails: ErrNoSession},
		"the driver has gone":                 {gpu: odd{temperature: gonvml.ERROR_DRIVER_NOT_LOADED}, fails: ErrDriverNotLoaded},
		"the driver is another":               {gpu: odd{temperature: gonvml.ERROR_LIB_RM_VERSION_MISMATCH}, fails: ErrVersionMismatch},
		"an internal error of one sensor":     {gpu: odd{power: gonvml.ERROR_UNKNOWN}, told: gonvml.ERROR_UNKNOWN},
		"one sensor that does not answer":     {gpu: odd{power: gonvml.ERROR_TIMEOUT}, told: ErrTimeout},
		"internal errors of two":              {gpu: odd{power: gonvml.ERROR_UNKNOWN, temperature: gonvml.ERROR_UNKNOWN}, fails: gonvml.ERROR_UNKNOWN},
		"the GPU's firmware does not answer":  {gpu: odd{power: gonvml.ERROR_TIMEOUT, temperature: gonvml.ERROR_TIMEOUT}, fails: ErrTimeout},
		"no answer, and nothing else":         {gpu: odd{all: gonvml.ERROR_TIMEOUT}, fails: ErrTimeout},
		"interrupts do not arrive":            {gpu: odd{temperature: gonvml.ERROR_IRQ_ISSUE}, fails: gonvml.ERROR_IRQ_ISSUE},
		"nothing is answered":                 {gpu: odd{all: gonvml.ERROR_NO_PERMISSION}, fails: gonvml.ERROR_NO_PERMISSION},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			sim, err := nvmlsim.New("dgx-h100", "node-a")
			if err != nil {
				t.Fatal(err)
			}
			d, err := initialized(t, Adapt(oddLibrary{sim, tc.gpu}, "odd")).Device(0)
			if err != nil {
				t.Fatal(err)
			}
			r, err := d.Readings()
			if !errors.Is(err, tc.fails) || tc.fails == nil && (!errors.Is(r.Odd, tc.told) || r.Throttle == nil) {
				t.Errorf("%+v, error %v: want error %v, and told of %v", r, err, tc.fails, tc.told)
			}
			if asked := tc.gpu.temperature != gonvml.SUCCESS; tc.fails == nil && asked != (r.TemperatureC == nil) {
				t.Errorf("temperature %v", r.TemperatureC)
			}
		})
	}
}

// odd are the answers to single questions, where they are no success.
type odd struct{ temperature, power, fields, field, all gonvml.Return }

type oddLibrary struct {
	*nvmlsim.Library
	odd odd
}

func (l oddLibrary) DeviceGetHandleByIndex(i int) (gonvml.Device, gonvml.Return) {
	d, ret := l.Library.DeviceGetHandleByIndex(i)
	if l.odd.all != gonvml.SUCCESS {
		return mute{d, l.odd.all}, ret
	}
	return oddGPU{d, l.odd}, ret
}

type oddGPU struct {
	gonvml.Device
	odd odd
}

func (d oddGPU) GetTemperature(sensor gonvml.TemperatureSensors) (uint32, gonvml.Return) {
	if d.odd.temperature != gonvml.SUCCESS {
		return 0, d.odd.temperature
	}
	return d.Device.GetTemperature(sensor)
}

func (d oddGPU) GetPowerUsage() (uint32, gonvml.Return) {
	if d.odd.power != gonvml.SUCCESS {
		return 0, d.odd.power
	}
	return d.Device.GetPowerUsage()
}

func (d oddGPU) GetFieldValues(values []gonvml.FieldValue) gonvml.Return {
	if d.odd.fields != gonvml.SUCCESS {
		return d.odd.fields
	}
	ret := d.Device.GetFieldValues(values)
	if d.odd.field != gonvml.SUCCESS {
		values[0].NvmlReturn = uint32(d.odd.field)
	}
	return ret
}

// mute gives no reading.
type mute struct {
	gonvml.Device
	ret gonvml.Return
}

func (m mute) GetTemperature(gonvml.TemperatureSensors) (uint32, gonvml.Return) { return 0, m.ret }
func (m mute) GetTemperatureThreshold(gonvml.TemperatureThresholds) (uint32, gonvml.Return) {
	return 0, m.ret
}

func (m mute) GetMarginTemperature() (gonvml.MarginTemperature, gonvml.Return) {
	return gonvml.MarginTemperature{}, m.ret
}
func (m mute) GetPowerUsage() (uint32, gonvml.Return)                { return 0, m.ret }
func (m mute) GetCurrentClocksEventReasons() (uint64, gonvml.Return) { return 0, m.ret }
func (m mute) GetCurrPcieLinkGeneration() (int, gonvml.Return)       { return 0, m.ret }
func (m mute) GetTotalEccErrors(gonvml.MemoryErrorType, gonvml.EccCounterType) (uint64, gonvml.Return) {
	return 0, m.ret
}

func (m mute) GetRemappedRows() (int, int, bool, bool, gonvml.Return) {
	return 0, 0, false, false, m.ret
}
func (m mute) GetFieldValues([]gonvml.FieldValue) gonvml.Return { return m.ret }
