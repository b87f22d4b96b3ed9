// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// bases are the generated types, one for each interface that stands for an
// object behind NVML, and the library itself.
var bases = []any{
	unsupportedInterface{},
	unsupportedDevice{},
	unsupportedGpuInstance{},
	unsupportedComputeInstance{},
	unsupportedEventSet{},
	unsupportedGpmSample{},
	unsupportedUnit{},
	unsupportedVgpuInstance{},
	unsupportedVgpuTypeId{},
}

func TestEveryGeneratedMethodAnswersNotSupported(t *testing.T) {
	called := 0
	for _, base := range bases {
		forEachMethod(base, func(name string, call func(handle handleArgs) []reflect.Value) {
			called++
			for _, result := range call(withHandles) {
				if ret, ok := result.Interface().(nvml.Return); ok && ret != nvml.ERROR_NOT_SUPPORTED {
					t.Errorf("%T.%s answers %v, want %v", base, name, ret, nvml.ERROR_NOT_SUPPORTED)
				}
				if result.Kind() == reflect.Interface && result.IsNil() && !isError(result) {
					t.Errorf("%T.%s returns a nil %s: a caller that goes on with it would crash", base, name, result.Type())
				}
			}
		})
	}
	if called < 600 {
		t.Errorf("called %d methods, want all of go-nvml's, more than 600", called)
	}
}

func TestAFlatFunctionWithoutHandleAnswersInvalidArgument(t *testing.T) {
	forEachMethod(unsupportedInterface{}, func(name string, call func(handleArgs) []reflect.Value) {
		if !strings.HasPrefix(name, "DeviceGet") || strings.HasPrefix(name, "DeviceGetHandle") || name == "DeviceGetCount" {
			return
		}
		for _, result := range call(withoutHandles) {
			if ret, ok := result.Interface().(nvml.Return); ok && ret != nvml.ERROR_INVALID_ARGUMENT {
				t.Errorf("%s without a device answers %v, want %v", name, ret, nvml.ERROR_INVALID_ARGUMENT)
			}
		}
	})
}

func TestBeforeInitNothingIsAnswered(t *testing.T) {
	lib := mustNew(t, "dgx-h100")
	for _, object := range []any{lib, lib.devices[0]} {
		forEachMethod(object, func(name string, call func(handleArgs) []reflect.Value) {
			if strings.HasPrefix(name, "Init") {
				return
			}
			for _, result := range call(withHandles) {
				ret, ok := result.Interface().(nvml.Return)
				if ok && ret != nvml.ERROR_UNINITIALIZED && ret != nvml.ERROR_NOT_SUPPORTED {
					t.Errorf("%T.%s answers %v, want %v", object, name, ret, nvml.ERROR_UNINITIALIZED)
				}
			}
		})
	}
}

func TestNoMethodOfAnyProfilePanics(t *testing.T) {
	for _, profile := range Profiles() {
		lib := open(t, mustNew(t, profile))
		// Shutdown among the methods ends the session: one more is open.
		lib.Init()
		callEverything(lib, lib.devices[0])
	}
}

// TestNoMethodOfAnyHandlePanics is the same for what is on a partitioned GPU,
// alive and destroyed.
func TestNoMethodOfAnyHandlePanics(t *testing.T) {
	for name := range migTables {
		lib, d := machineWith(t, name)
		lib.Init()
		p := migTables[name].profiles[0]
		do(t, lib.machine, &CreateMIG{GPU: "0", Profile: p.name})
		info := p.info()
		instances, _ := d.GetGpuInstances(&info)
		compute, _ := instances[0].GetComputeInstanceById(0)
		mig, _ := d.GetMigDeviceHandleByIndex(0)
		set, _ := lib.EventSetCreate()
		for range 2 {
			callEverything(mig, compute, instances[0], set)
		}
		if got := len(lib.machine.State().GPUs[0].Instances); got != 0 {
			t.Errorf("%s: %d instances left after every method, Destroy among them", name, got)
		}
	}
}

func callEverything(objects ...any) {
	for _, object := range objects {
		forEachMethod(object, func(_ string, call func(handleArgs) []reflect.Value) {
			call(withHandles)
			call(withoutHandles)
		})
	}
}

func TestFlatFunctionsReachTheSimulatedDevice(t *testing.T) {
	lib := open(t, mustNew(t, "t4"))
	device, _ := lib.DeviceGetHandleByIndex(2)
	want, _ := device.GetUUID()
	if got, ret := lib.DeviceGetUUID(device); got != want || ret != nvml.SUCCESS {
		t.Errorf("DeviceGetUUID = %q, %v, want what the device's own method returns, %q", got, ret, want)
	}
}

// handleArgs says what stands for the handles among a call's arguments.
type handleArgs bool

const (
	withHandles    handleArgs = true
	withoutHandles handleArgs = false
)

// forEachMethod calls visit for each method of object with a function that
// calls it with zero values and such handles.
func forEachMethod(object any, visit func(name string, call func(handleArgs) []reflect.Value)) {
	v := reflect.ValueOf(object)
	for i := range v.NumMethod() {
		name, method := v.Type().Method(i).Name, v.Method(i)
		if notInInterfaces(name) {
			continue
		}
		visit(name, func(handles handleArgs) []reflect.Value {
			args := make([]reflect.Value, method.Type().NumIn())
			for i := range args {
				args[i] = argument(method.Type().In(i), handles)
			}
			return method.Call(args)
		})
	}
}

// notInInterfaces names the methods that NVML does not have.
func notInInterfaces(name string) bool {
	return slices.Contains([]string{"Profile", "Sysfs", "Machine"}, name)
}

func argument(t reflect.Type, handles handleArgs) reflect.Value {
	if handles == withHandles && t.Kind() == reflect.Interface {
		for _, base := range bases {
			if reflect.TypeOf(base).Implements(t) {
				return reflect.ValueOf(base)
			}
		}
	}
	return reflect.Zero(t)
}

func isError(v reflect.Value) bool { return v.Type() == reflect.TypeFor[error]() }

func mustNew(t *testing.T, profile string) *Library {
	t.Helper()
	lib, err := New(profile, "node-a")
	if err != nil {
		t.Fatal(err)
	}
	return lib
}

// open starts a session that ends with the test.
func open(t *testing.T, lib *Library) *Library {
	t.Helper()
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	t.Cleanup(func() { lib.Shutdown() })
	return lib
}
