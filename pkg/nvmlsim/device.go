package nvmlsim

import "github.com/NVIDIA/go-nvml/pkg/nvml"

// device is one simulated GPU; the pointer is its NVML handle.
type device struct {
	unsupportedDevice

	// Fixed at creation.
	lib    *Library
	index  int
	gpu    *GPU
	model  *Model
	uuid   string
	serial string
	path   pciPath
	links  []link

	// Guarded by lib.mu.
	computeMode nvml.ComputeMode
	persistence nvml.EnableState
	powerLimit  uint32 // milliwatts
	migMode     int
}

var _ nvml.Device = (*device)(nil)

// newDevice makes GPU index of a validated profile.
func newDevice(l *Library, index int) *device {
	gpu, model := &l.profile.GPUs[index], &l.profile.GPU
	path, err := parsePCIPath(gpu.PCI)
	if err != nil {
		panic("profile not validated: " + err.Error())
	}
	board := index
	if gpu.Board != nil {
		board = *gpu.Board
	}
	d := &device{
		lib: l, index: index, gpu: gpu, model: model,
		uuid:        gpuUUID(l.nodeName, index),
		serial:      boardSerial(l.nodeName, board),
		path:        path,
		links:       makeLinks(l.profile, index),
		persistence: nvml.FEATURE_ENABLED,
		powerLimit:  1000 * model.Power.DefaultWatts,
	}
	if migEnabled(gpu, model) {
		d.migMode = nvml.DEVICE_MIG_ENABLE
	}
	return d
}

func migEnabled(gpu *GPU, model *Model) bool {
	switch {
	case model.MIG == nil:
		return false
	case gpu.MIGEnabled != nil:
		return *gpu.MIGEnabled
	}
	return model.MIG.Enabled
}

// answer is the value in a session, or why there is none.
func answer[T any](d *device, value T) (T, nvml.Return) {
	if ret := d.lib.ready(); ret != nvml.SUCCESS {
		var none T
		return none, ret
	}
	return value, nvml.SUCCESS
}

// answerIf is answer for what only some GPUs support.
func answerIf[T any](d *device, supported bool, value T) (T, nvml.Return) {
	if !supported {
		var none T
		if ret := d.lib.ready(); ret != nvml.SUCCESS {
			return none, ret
		}
		return none, nvml.ERROR_NOT_SUPPORTED
	}
	return answer(d, value)
}

// Identity.

func (d *device) GetIndex() (int, nvml.Return)       { return answer(d, d.index) }
func (d *device) GetName() (string, nvml.Return)     { return answer(d, d.model.ProductName) }
func (d *device) GetUUID() (string, nvml.Return)     { return answer(d, d.uuid) }
func (d *device) GetSerial() (string, nvml.Return)   { return answer(d, d.serial) }
func (d *device) GetMinorNumber() (int, nvml.Return) { return answer(d, d.lib.profile.minor(d.index)) }

func (d *device) GetBoardId() (uint32, nvml.Return) {
	a := d.path.address
	return answer(d, a.domain<<16|a.bus<<8|a.device<<3|a.function)
}

func (d *device) GetBrand() (nvml.BrandType, nvml.Return) {
	return answer(d, brands[d.model.Brand])
}

func (d *device) GetArchitecture() (nvml.DeviceArchitecture, nvml.Return) {
	return answer(d, architectures[d.model.Architecture])
}

func (d *device) GetCudaComputeCapability() (int, int, nvml.Return) {
	major, minor := splitVersion(d.model.CUDAComputeCapability)
	_, ret := answer(d, 0)
	if ret != nvml.SUCCESS {
		return 0, 0, ret
	}
	return major, minor, ret
}

func (d *device) GetNumGpuCores() (int, nvml.Return) { return answer(d, d.model.CUDACores) }

func (d *device) GetAddressingMode() (nvml.DeviceAddressingMode, nvml.Return) {
	mode, ok := addressingModes[d.model.AddressingMode]
	return answerIf(d, ok, nvml.DeviceAddressingMode{Value: uint32(mode)})
}

// Partitions. Instances are not simulated yet: an enabled GPU has none.

func (d *device) IsMigDeviceHandle() (bool, nvml.Return) { return answer(d, false) }

func (d *device) GetMigMode() (current, pending int, ret nvml.Return) {
	d.lib.mu.RLock()
	mode := d.migMode
	d.lib.mu.RUnlock()
	mode, ret = answerIf(d, d.model.MIG != nil, mode)
	return mode, mode, ret
}

func (d *device) GetMaxMigDeviceCount() (int, nvml.Return) {
	if d.model.MIG == nil {
		return answer(d, 0)
	}
	return answer(d, d.model.MIG.MaxDevices)
}

func (d *device) GetMigDeviceHandleByIndex(index int) (nvml.Device, nvml.Return) {
	ret := d.lib.ready()
	switch {
	case ret != nvml.SUCCESS:
	case d.model.MIG == nil:
		ret = nvml.ERROR_NOT_SUPPORTED
	case index < 0 || index >= d.model.MIG.MaxDevices:
		ret = nvml.ERROR_INVALID_ARGUMENT
	default:
		ret = nvml.ERROR_NOT_FOUND
	}
	return unsupportedDevice{}, ret
}
