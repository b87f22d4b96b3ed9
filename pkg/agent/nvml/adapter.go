// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/uuid"
)

// Adapt returns the narrow view of a go-nvml library. The name stands in
// errors: the library's path, or what else the library is.
func Adapt(lib gonvml.Interface, name string) Library {
	return &library{nvml: lib, name: name}
}

// adaptReal is Adapt for a C library.
func adaptReal(lib gonvml.Interface, name string) Library {
	return &library{nvml: lib, name: name, lookup: func(function string) error { return lib.Extensions().LookupSymbol(function) }}
}

// library guards every call by the number of open sessions: go-nvml jumps into
// the C library whether or not it is loaded, which ends the process if not.
// No lock is held over a call, since a call may hang; who closes the last
// session sees to it that no call is under way.
//
// An older driver lacks functions, and a call of one that is missing ends the process as well.
type library struct {
	nvml     gonvml.Interface
	name     string
	sessions atomic.Int64
	// lookup returns an error for a function that the C library lacks; nil if there is no C library.
	lookup func(function string) error
	// found are the functions that it has, since it was opened.
	found sync.Map
	// samples are freed before the last session is closed.
	samples samples
}

// has tells whether a function can be called in an open session.
func (l *library) has(function string) bool {
	if l.lookup == nil {
		return true
	}
	if _, ok := l.found.Load(function); ok {
		return true
	}
	if l.lookup(function) != nil {
		return false
	}
	l.found.Store(function, nil)
	return true
}

// Init also begins on a machine whose GPUs are all with virtual machines. A library that is being installed would end the process.
func (l *library) Init() error {
	if l.sessions.Load() == 0 && filepath.IsAbs(l.name) {
		if err := CheckLibrary(l.name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %w", ErrLibraryNotFound, err)
		}
	}
	if err := initError(l.name, l.nvml.InitWithFlags(gonvml.INIT_FLAG_NO_GPUS)); err != nil {
		return err
	}
	if l.sessions.Load() == 0 {
		l.found.Clear() // it was opened anew, and may be another one
	}
	l.sessions.Add(1)
	return nil
}

func (l *library) Shutdown() error {
	if l.sessions.Load() == 1 {
		l.samples.free(true)
	}
	if err := ask(l, "nvmlShutdown", l.nvml.Shutdown); err != nil {
		return err
	}
	l.sessions.Add(-1)
	return nil
}

func (l *library) DriverVersion() (string, error) {
	return get(l, "nvmlSystemGetDriverVersion", l.nvml.SystemGetDriverVersion)
}

func (l *library) CUDADriverVersion() (Version, error) {
	v, err := get(l, "nvmlSystemGetCudaDriverVersion_v2", l.nvml.SystemGetCudaDriverVersion_v2)
	return Version{Major: v / 1000, Minor: v % 1000 / 10}, err
}

func (l *library) DeviceCount() (int, error) {
	n, err := get(l, "nvmlDeviceGetCount", l.nvml.DeviceGetCount)
	if err == nil && (n < 0 || n > maxDevices) {
		return 0, fmt.Errorf("nvmlDeviceGetCount: %d: want 0 to %d", n, maxDevices)
	}
	return n, err
}

// maxDevices is far more than any machine has: an answer beyond it is none.
const maxDevices = 1024

func (l *library) Device(index int) (Device, error) {
	return l.handle("nvmlDeviceGetHandleByIndex", func() (gonvml.Device, gonvml.Return) {
		return l.nvml.DeviceGetHandleByIndex(index)
	})
}

func (l *library) DeviceAt(busID string) (Device, error) {
	return l.handle("nvmlDeviceGetHandleByPciBusId_v2", func() (gonvml.Device, gonvml.Return) {
		return l.nvml.DeviceGetHandleByPciBusId(busID)
	})
}

func (l *library) handle(call string, f func() (gonvml.Device, gonvml.Return)) (Device, error) {
	d, err := get(l, call, f)
	if err != nil {
		return nil, err
	}
	if d == nil {
		return nil, &CallError{Call: call, Return: gonvml.ERROR_UNKNOWN}
	}
	return &device{handle{lib: l, nvml: d}}, nil
}

// get makes a call in an open session. Its error is a *CallError. The call is the C function that go-nvml jumps to first: it is not made if
// the library lacks it.
func get[T any](l *library, call string, f func() (T, gonvml.Return)) (T, error) {
	var value T
	err := ask(l, call, func() (ret gonvml.Return) {
		value, ret = f()
		return ret
	})
	return value, err
}

// ask is get for a call that returns nothing else.
func ask(l *library, call string, f func() gonvml.Return) error {
	ret := gonvml.ERROR_UNINITIALIZED
	if l.sessions.Load() > 0 {
		ret = gonvml.ERROR_FUNCTION_NOT_FOUND
		if l.has(call) {
			ret = f()
		}
	}
	if ret != gonvml.SUCCESS {
		return &CallError{Call: call, Return: ret}
	}
	return nil
}

// lacks tells that the GPU, the driver or the library doesn't have the feature.
func lacks(err error) bool {
	return errors.Is(err, ErrNotSupported) || errors.Is(err, gonvml.ERROR_FUNCTION_NOT_FOUND)
}

// device is one GPU.
type device struct{ handle }

// handle is what it is asked by. It has the questions about load, and about MIG devices one by one.
type handle struct {
	lib  *library
	nvml gonvml.Device
}

func (d *device) UUID() (string, error) { return get(d.lib, "nvmlDeviceGetUUID", d.nvml.GetUUID) }

func (d *device) Name() (string, error) { return get(d.lib, "nvmlDeviceGetName", d.nvml.GetName) }

func (d *device) Brand() (string, error) {
	brand, err := get(d.lib, "nvmlDeviceGetBrand", d.nvml.GetBrand)
	return word(brands, brand), err
}

func (d *device) Architecture() (string, error) {
	arch, err := get(d.lib, "nvmlDeviceGetArchitecture", d.nvml.GetArchitecture)
	return word(architectures, arch), err
}

func (d *device) CUDAComputeCapability() (Version, error) {
	return get(d.lib, "nvmlDeviceGetCudaComputeCapability", func() (Version, gonvml.Return) {
		major, minor, ret := d.nvml.GetCudaComputeCapability()
		return Version{Major: major, Minor: minor}, ret
	})
}

func (d *device) PCIBusID() (string, error) {
	info, err := get(d.lib, "nvmlDeviceGetPciInfo", d.nvml.GetPciInfo)
	if err != nil {
		return "", err
	}
	return kernelBusID(info)
}

func (d *device) MinorNumber() (int, error) {
	return get(d.lib, "nvmlDeviceGetMinorNumber", d.nvml.GetMinorNumber)
}

func (d *device) MemoryBytes() (uint64, error) {
	memory, err := get(d.lib, "nvmlDeviceGetMemoryInfo", d.nvml.GetMemoryInfo)
	return memory.Total, err
}

func (d *device) InVirtualMachine() (bool, error) {
	mode, err := get(d.lib, "nvmlDeviceGetVirtualizationMode", d.nvml.GetVirtualizationMode)
	return mode == gonvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH || mode == gonvml.GPU_VIRTUALIZATION_MODE_VGPU, err
}

func (d *device) AddressingMode() (string, error) {
	mode, err := get(d.lib, "nvmlDeviceGetAddressingMode", d.nvml.GetAddressingMode)
	if lacks(err) {
		return "", nil
	}
	return word(addressingModes, gonvml.DeviceAddressingModeType(mode.Value)), err
}

func (d *handle) MIGMode() (MIGMode, error) {
	mode, err := get(d.lib, "nvmlDeviceGetMigMode", func() (MIGMode, gonvml.Return) {
		current, pending, ret := d.nvml.GetMigMode()
		return MIGMode{
			Capable: true,
			Enabled: current == gonvml.DEVICE_MIG_ENABLE,
			Pending: pending == gonvml.DEVICE_MIG_ENABLE,
		}, ret
	})
	if lacks(err) {
		return MIGMode{}, nil
	}
	return mode, err
}

func (d *device) NVLinks() ([]NVLink, error) {
	var links []NVLink
	for i := range gonvml.NVLINK_MAX_LINKS {
		state, err := get(d.lib, "nvmlDeviceGetNvLinkState", func() (gonvml.EnableState, gonvml.Return) {
			return d.nvml.GetNvLinkState(i)
		})
		if lacks(err) || errors.Is(err, gonvml.ERROR_INVALID_ARGUMENT) {
			break // beyond the links that the GPU has
		}
		if err != nil {
			return nil, fmt.Errorf("NVLink %d: %w", i, err)
		}
		if state != gonvml.FEATURE_ENABLED {
			continue
		}
		link, err := d.nvLink(i)
		if err != nil {
			return nil, fmt.Errorf("NVLink %d: %w", i, err)
		}
		links = append(links, link)
	}
	return links, nil
}

// nvLink asks about an active link. Where the other end is hidden, as switches
// are from virtual machines, that is no error.
func (d *device) nvLink(index int) (NVLink, error) {
	version, err := get(d.lib, "nvmlDeviceGetNvLinkVersion", func() (uint32, gonvml.Return) {
		return d.nvml.GetNvLinkVersion(index)
	})
	if err != nil {
		return NVLink{}, err
	}
	remote, err := get(d.lib, "nvmlDeviceGetNvLinkRemoteDeviceType", func() (gonvml.IntNvLinkDeviceType, gonvml.Return) {
		return d.nvml.GetNvLinkRemoteDeviceType(index)
	})
	if lacks(err) {
		remote = gonvml.NVLINK_DEVICE_TYPE_UNKNOWN
	} else if err != nil {
		return NVLink{}, err
	}
	info, err := get(d.lib, "nvmlDeviceGetNvLinkRemotePciInfo", func() (gonvml.PciInfo, gonvml.Return) {
		return d.nvml.GetNvLinkRemotePciInfo(index)
	})
	if err != nil && !lacks(err) {
		return NVLink{}, err
	}
	// A hidden device has no address, or one that is none.
	address, _ := kernelBusID(info)
	return NVLink{
		Index: index, Version: nvlinkVersions[gonvml.NvlinkVersion(version)], Remote: remoteType(remote),
		RemotePCIBusID: address,
	}, nil
}

func remoteType(t gonvml.IntNvLinkDeviceType) RemoteType {
	switch t {
	case gonvml.NVLINK_DEVICE_TYPE_GPU:
		return RemoteGPU
	case gonvml.NVLINK_DEVICE_TYPE_SWITCH:
		return RemoteSwitch
	case gonvml.NVLINK_DEVICE_TYPE_UNKNOWN:
		return RemoteUnknown
	}
	return RemoteOther
}

func (d *device) ReachesOverNVLink(other Device) (bool, error) {
	peer, ok := other.(*device)
	if !ok || peer.lib != d.lib {
		return false, errors.New("the other GPU is not of this NVML library")
	}
	status, err := get(d.lib, "nvmlDeviceGetP2PStatus", func() (gonvml.GpuP2PStatus, gonvml.Return) {
		return d.nvml.GetP2PStatus(peer.nvml, gonvml.P2P_CAPS_INDEX_NVLINK)
	})
	return err == nil && status == gonvml.P2P_STATUS_OK, err
}

func (d *device) Fabric() (*Fabric, error) {
	info, err := get(d.lib, "nvmlDeviceGetGpuFabricInfo", d.nvml.GetGpuFabricInfo)
	switch {
	case lacks(err), err == nil && info.State == gonvml.GPU_FABRIC_STATE_NOT_SUPPORTED:
		return nil, nil
	case err != nil:
		return nil, err
	}
	fabric := &Fabric{
		CliqueID: info.CliqueId,
		State:    word(fabricStates, info.State),
		Err:      fabricError(info),
	}
	if id := uuid.UUID(info.ClusterUuid); id != uuid.Nil {
		fabric.ClusterUUID = id.String()
	}
	return fabric, nil
}

// fabricError is the outcome of the fabric manager's probe, once it has ended.
func fabricError(info gonvml.GpuFabricInfo) error {
	if ret := gonvml.Return(info.Status); info.State == gonvml.GPU_FABRIC_STATE_COMPLETED && ret != gonvml.SUCCESS {
		return &CallError{Call: "NVLink fabric probe", Return: ret}
	}
	return nil
}

var nvmlBusID = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$`)

// kernelBusID rewrites NVML's "00000000:1B:00.0" as the kernel's "0000:1b:00.0".
// The kernel has four digits for a domain, and more only where it needs them.
func kernelBusID(info gonvml.PciInfo) (string, error) {
	raw := make([]byte, 0, len(info.BusId))
	for _, c := range info.BusId {
		if c == 0 {
			break
		}
		raw = append(raw, byte(c))
	}
	m := nvmlBusID.FindStringSubmatch(strings.ToLower(string(raw)))
	if m == nil {
		return "", fmt.Errorf("nvmlDeviceGetPciInfo: %q is no PCI address", raw)
	}
	domain := m[1]
	for len(domain) > 4 && domain[0] == '0' {
		domain = domain[1:]
	}
	return fmt.Sprintf("%s:%s:%s.%s", domain, m[2], m[3], m[4]), nil
}
