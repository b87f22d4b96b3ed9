// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// FuzzNVMLAnswers: a library may answer anything (a driver in trouble does), and
// the agent must live. Each answer is taken from the input, byte by byte.
func FuzzNVMLAnswers(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{0, 255, 0, 128, 0, 1, 0, 2, 0, 3, 0, 127, 0, 64, 0, 0, 0, 9})
	f.Add([]byte("\x00\x01\x00\x02\x00\x07\x00\x00\x00\x05\x00\x06\x00\xfe\x03\x01\x00\x02"))
	f.Fuzz(func(t *testing.T, input []byte) {
		lib := Adapt(&strange{answers: &answers{input: input}, Interface: nothing()}, "strange")
		if lib.Init() != nil {
			return
		}
		start := time.Now()
		lib.DriverVersion()
		lib.CUDADriverVersion()
		if n, err := lib.DeviceCount(); err == nil && (n < 0 || n > maxDevices) {
			t.Errorf("%d devices", n)
		}
		d, err := lib.Device(0)
		if err != nil {
			return
		}
		d.UUID()
		d.Name()
		d.Brand()
		d.Architecture()
		d.PCIBusID()
		d.MIGMode()
		d.NVLinks()
		d.Fabric()
		d.Processes()
		d.ComputeMode()
		d.SetMIGMode(true)
		d.Readings()
		if u, err := d.Usage(); err == nil {
			for _, percent := range []*uint32{u.KernelPercent, u.MemoryPercent, u.EncoderPercent, u.DecoderPercent} {
				if percent != nil && *percent > 100 {
					t.Errorf("%d percent", *percent)
				}
			}
		}
		if devices, err := d.MIGUsage(); err == nil && len(devices) > maxMIGDevices {
			t.Errorf("%d MIG devices", len(devices))
		}
		if s, err := d.Sample(nil); err == nil {
			s.Since(s)
			s.Close()
		}
		if profiles, err := d.MIGProfiles(); err == nil && len(profiles) > gonvml.GPU_INSTANCE_PROFILE_COUNT {
			t.Errorf("%d profiles", len(profiles))
		}
		d.GPUInstances()
		d.CreateGPUInstance(MIGProfile{}, Placement{})
		d.CreateComputeInstance(1)
		d.DestroyComputeInstance(1, 1)
		d.DestroyGPUInstance(1)
		if w, err := d.Watch(); err == nil {
			w.Wait(0)
			w.Close()
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("an absurd answer took %v", took)
		}
	})
}

// answers are what the input says, zeros after its end.
type answers struct{ input []byte }

func (a *answers) next() int64 {
	if len(a.input) == 0 {
		return 0
	}
	b := a.input[0]
	a.input = a.input[1:]
	switch b {
	case 255:
		return -1
	case 254:
		return 1 << 31
	case 253:
		return -1 << 62
	}
	return int64(b)
}

// ret is success half of the time: else nothing would be looked at.
func (a *answers) ret() gonvml.Return {
	if n := a.next(); n > 127 || n < 0 {
		return gonvml.Return(n % 30)
	}
	return gonvml.SUCCESS
}

func (a *answers) int() (int, gonvml.Return)       { return int(a.next()), a.ret() }
func (a *answers) uint32() (uint32, gonvml.Return) { return uint32(a.next()), a.ret() }
func (a *answers) uint64() (uint64, gonvml.Return) { return uint64(a.next()), a.ret() }

func (a *answers) string() (string, gonvml.Return) {
	return []string{"", "GPU-\x00\xff", "MIG-", "N/A"}[uint64(a.next())%4], a.ret()
}

// list is a few of something, nil among them.
func list[T any](a *answers, one func() T) ([]T, gonvml.Return) {
	var all []T
	for range uint64(a.next()) % 40 {
		all = append(all, one())
	}
	return all, a.ret()
}

// nothing answers what strange leaves out.
func nothing() gonvml.Interface {
	sim, err := nvmlsim.New("t4", "node-a")
	if err != nil {
		panic(err)
	}
	return sim
}

// strange is a library that answers from the input.
type strange struct {
	*answers
	gonvml.Interface
}

func (s *strange) InitWithFlags(uint32) gonvml.Return                  { return gonvml.SUCCESS }
func (s *strange) DeviceGetCount() (int, gonvml.Return)                { return s.int() }
func (s *strange) SystemGetDriverVersion() (string, gonvml.Return)     { return s.string() }
func (s *strange) SystemGetCudaDriverVersion_v2() (int, gonvml.Return) { return s.int() }

func (s *strange) DeviceGetHandleByIndex(int) (gonvml.Device, gonvml.Return) { return s.device() }

func (s *strange) device() (gonvml.Device, gonvml.Return) {
	if s.next() == 1 {
		return nil, gonvml.SUCCESS
	}
	other, _ := s.Interface.DeviceGetHandleByIndex(0)
	return &strangeGPU{strange: s, Device: other}, s.ret()
}

func (s *strange) EventSetCreate() (gonvml.EventSet, gonvml.Return) {
	if s.next() == 1 {
		return nil, gonvml.SUCCESS
	}
	none, _ := s.Interface.EventSetCreate()
	return &strangeSet{s, none}, s.ret()
}

func (s *strange) GpmSampleAlloc() (gonvml.GpmSample, gonvml.Return) {
	if s.next() == 1 {
		return nil, gonvml.SUCCESS
	}
	none, _ := s.Interface.GpmSampleAlloc()
	return none, s.ret()
}

func (s *strange) GpmMetricsGet(get *gonvml.GpmMetricsGetType) gonvml.Return {
	for i := range get.Metrics[:get.NumMetrics] {
		get.Metrics[i].Value, get.Metrics[i].NvmlReturn = float64(s.next()), uint32(s.next())
	}
	return s.ret()
}

type strangeSet struct {
	*strange
	gonvml.EventSet
}

func (s *strangeSet) Wait(uint32) (gonvml.EventData, gonvml.Return) {
	return gonvml.EventData{EventType: uint64(s.next()), EventData: uint64(s.next()), GpuInstanceId: uint32(s.next())}, s.ret()
}

func (s *strangeSet) Free() gonvml.Return { return s.ret() }

type strangeGPU struct {
	*strange
	gonvml.Device
}

func (g *strangeGPU) GetUUID() (string, gonvml.Return) { return g.string() }
func (g *strangeGPU) GetName() (string, gonvml.Return) { return g.string() }

func (g *strangeGPU) GetBrand() (gonvml.BrandType, gonvml.Return) {
	return gonvml.BrandType(g.next()), g.ret()
}

func (g *strangeGPU) GetArchitecture() (gonvml.DeviceArchitecture, gonvml.Return) {
	return gonvml.DeviceArchitecture(g.next()), g.ret()
}

func (g *strangeGPU) GetPciInfo() (info gonvml.PciInfo, ret gonvml.Return) {
	for i := range info.BusId {
		info.BusId[i] = int8(g.next())
	}
	return info, g.ret()
}

func (g *strangeGPU) GetMemoryInfo() (gonvml.Memory, gonvml.Return) {
	return gonvml.Memory{Total: uint64(g.next()), Used: uint64(g.next())}, g.ret()
}

func (g *strangeGPU) GetMigMode() (int, int, gonvml.Return) {
	return int(g.next()), int(g.next()), g.ret()
}

func (g *strangeGPU) SetMigMode(int) (gonvml.Return, gonvml.Return) { return g.ret(), g.ret() }

func (g *strangeGPU) GetNvLinkState(int) (gonvml.EnableState, gonvml.Return) {
	return gonvml.EnableState(g.next()), g.ret()
}

func (g *strangeGPU) GetNvLinkVersion(int) (uint32, gonvml.Return) { return g.uint32() }

func (g *strangeGPU) GetNvLinkRemoteDeviceType(int) (gonvml.IntNvLinkDeviceType, gonvml.Return) {
	return gonvml.IntNvLinkDeviceType(g.next()), g.ret()
}

func (g *strangeGPU) GetGpuFabricInfo() (gonvml.GpuFabricInfo, gonvml.Return) {
	return gonvml.GpuFabricInfo{State: uint8(g.next()), Status: uint32(g.next())}, g.ret()
}

func (g *strangeGPU) processes() ([]gonvml.ProcessInfo, gonvml.Return) {
	return list(g.answers, func() gonvml.ProcessInfo {
		return gonvml.ProcessInfo{Pid: uint32(g.next()), UsedGpuMemory: uint64(g.next()), GpuInstanceId: uint32(g.next()), ComputeInstanceId: uint32(g.next())}
	})
}

func (g *strangeGPU) GetComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return g.processes()
}

func (g *strangeGPU) GetGraphicsRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return g.processes()
}

func (g *strangeGPU) GetMPSComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return g.processes()
}

func (g *strangeGPU) GetComputeMode() (gonvml.ComputeMode, gonvml.Return) {
	return gonvml.ComputeMode(g.next()), g.ret()
}

func (g *strangeGPU) GetFieldValues(values []gonvml.FieldValue) gonvml.Return {
	for i := range values {
		values[i].NvmlReturn, values[i].Value[0] = uint32(g.next()), byte(g.next())
	}
	return g.ret()
}

func (g *strangeGPU) GetTotalEccErrors(gonvml.MemoryErrorType, gonvml.EccCounterType) (uint64, gonvml.Return) {
	return g.uint64()
}

func (g *strangeGPU) GetUtilizationRates() (gonvml.Utilization, gonvml.Return) {
	return gonvml.Utilization{Gpu: uint32(g.next()), Memory: uint32(g.next())}, g.ret()
}

func (g *strangeGPU) GetEncoderUtilization() (uint32, uint32, gonvml.Return) {
	return uint32(g.next()), uint32(g.next()), g.ret()
}

func (g *strangeGPU) GetPcieThroughput(gonvml.PcieUtilCounter) (uint32, gonvml.Return) {
	return g.uint32()
}

func (g *strangeGPU) GpmQueryDeviceSupport() (gonvml.GpmSupport, gonvml.Return) {
	return gonvml.GpmSupport{IsSupportedDevice: uint32(g.next())}, g.ret()
}

func (g *strangeGPU) GpmSampleGet(gonvml.GpmSample) gonvml.Return { return g.ret() }

func (g *strangeGPU) GetTemperature(gonvml.TemperatureSensors) (uint32, gonvml.Return) {
	return g.uint32()
}
func (g *strangeGPU) GetMaxMigDeviceCount() (int, gonvml.Return)      { return g.int() }
func (g *strangeGPU) GetGpuInstanceId() (int, gonvml.Return)          { return g.int() }
func (g *strangeGPU) GetComputeInstanceId() (int, gonvml.Return)      { return g.int() }
func (g *strangeGPU) GetSupportedEventTypes() (uint64, gonvml.Return) { return g.uint64() }

func (g *strangeGPU) RegisterEvents(uint64, gonvml.EventSet) gonvml.Return { return g.ret() }

func (g *strangeGPU) GetMigDeviceHandleByIndex(int) (gonvml.Device, gonvml.Return) { return g.device() }

func (g *strangeGPU) GetGpuInstanceProfileInfo(int) (gonvml.GpuInstanceProfileInfo, gonvml.Return) {
	return gonvml.GpuInstanceProfileInfo{Id: uint32(g.next()), SliceCount: uint32(g.next()), MemorySizeMB: uint64(g.next())}, g.ret()
}

func (g *strangeGPU) GetGpuInstancePossiblePlacements(*gonvml.GpuInstanceProfileInfo) ([]gonvml.GpuInstancePlacement, gonvml.Return) {
	return list(g.answers, func() gonvml.GpuInstancePlacement { return gonvml.GpuInstancePlacement{Start: uint32(g.next())} })
}

func (g *strangeGPU) instance() gonvml.GpuInstance {
	if g.next() == 1 {
		return nil
	}
	none, _ := g.Device.GetGpuInstanceById(0)
	return &strangeInstance{g, none}
}

func (g *strangeGPU) GetGpuInstances(*gonvml.GpuInstanceProfileInfo) ([]gonvml.GpuInstance, gonvml.Return) {
	return list(g.answers, g.instance)
}

func (g *strangeGPU) GetGpuInstanceById(int) (gonvml.GpuInstance, gonvml.Return) {
	return g.instance(), g.ret()
}

func (g *strangeGPU) CreateGpuInstanceWithPlacement(*gonvml.GpuInstanceProfileInfo, *gonvml.GpuInstancePlacement) (gonvml.GpuInstance, gonvml.Return) {
	return g.instance(), g.ret()
}

type strangeInstance struct {
	*strangeGPU
	gonvml.GpuInstance
}

func (i *strangeInstance) GetInfo() (gonvml.GpuInstanceInfo, gonvml.Return) {
	return gonvml.GpuInstanceInfo{Id: uint32(i.next())}, i.ret()
}

func (i *strangeInstance) Destroy() gonvml.Return { return i.ret() }

func (i *strangeInstance) GetComputeInstanceProfileInfo(int, int) (gonvml.ComputeInstanceProfileInfo, gonvml.Return) {
	return gonvml.ComputeInstanceProfileInfo{SliceCount: uint32(i.next())}, i.ret()
}

func (i *strangeInstance) compute() (gonvml.ComputeInstance, gonvml.Return) {
	if i.next() == 1 {
		return nil, gonvml.SUCCESS
	}
	none, _ := i.GpuInstance.GetComputeInstanceById(0)
	return none, i.ret()
}

func (i *strangeInstance) CreateComputeInstance(*gonvml.ComputeInstanceProfileInfo) (gonvml.ComputeInstance, gonvml.Return) {
	return i.compute()
}

func (i *strangeInstance) GetComputeInstanceById(int) (gonvml.ComputeInstance, gonvml.Return) {
	return i.compute()
}
