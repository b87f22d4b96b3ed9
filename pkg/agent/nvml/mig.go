// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"math"
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Partitions is the part of Device that MIG needs.
type Partitions interface {
	// SetMIGMode asks for a mode. The error wraps ErrResetRequired if it is
	// pending until the GPU is reset, ErrInUse if the GPU must be idle first.
	SetMIGMode(enabled bool) error
	// MIGProfiles are the kinds of GPU instances that the GPU can have, in any
	// mode; none for a GPU that can't be partitioned.
	MIGProfiles() ([]MIGProfile, error)
	// GPUInstances lists those that there are, whoever made them, by ID; none
	// for a GPU that is not partitioned.
	GPUInstances() ([]GPUInstance, error)
	// CreateGPUInstance makes one, and no compute instance in it. The error
	// wraps ErrNoResources if something else is in that place.
	CreateGPUInstance(profile MIGProfile, at Placement) (id uint32, err error)
	// CreateComputeInstance makes one that is all of the GPU instance.
	CreateComputeInstance(gpuInstance uint32) (MIGDevice, error)
	// DestroyComputeInstance ends one. The error wraps ErrInUse while there are
	// processes in it, and ErrNotFound if there is none with that ID.
	DestroyComputeInstance(gpuInstance, computeInstance uint32) error
	// DestroyGPUInstance ends one. The error wraps ErrInUse while there are
	// compute instances in it, and ErrNotFound if there is none with that ID.
	DestroyGPUInstance(gpuInstance uint32) error
}

// MIGProfile is a kind of GPU instance.
type MIGProfile struct {
	// Name such as "1g.10gb" or "1g.10gb+me", as nvidia-smi has it.
	Name string
	// ID is the driver's.
	ID uint32
	// ComputeSlices it has, and how many instances of it fit on an empty GPU.
	ComputeSlices, Max uint32
	MemoryMiB          uint64
	// Units.
	Multiprocessors, CopyEngines, Decoders, Encoders, JPEGEngines, OFAEngines uint32
	// Placements that it may have, in memory slices.
	Placements []Placement
}

// Placement is a range of memory slices.
type Placement struct{ Start, Size uint32 }

// GPUInstance is one that exists.
type GPUInstance struct {
	ID, ProfileID uint32
	Placement     Placement
	// Devices are its compute instances.
	Devices []MIGDevice
}

// MIGDevice is a compute instance, as containers use it.
type MIGDevice struct {
	UUID                         string
	GPUInstance, ComputeInstance uint32
	// Compute is where it is among the compute slices of its GPU instance, with Size 0 where the driver does not tell.
	Compute Placement
	// Multiprocessors that are its own; memory and engines it shares with the others of its GPU instance. 0 where the driver does
	// not tell.
	Multiprocessors uint32
}

// maxMIGDevices is far more than any GPU has: an answer beyond it is none.
const maxMIGDevices = 64

func (d *device) SetMIGMode(enabled bool) error {
	mode := gonvml.DEVICE_MIG_DISABLE
	if enabled {
		mode = gonvml.DEVICE_MIG_ENABLE
	}
	activation, err := get(d.lib, "nvmlDeviceSetMigMode", func() (gonvml.Return, gonvml.Return) { return d.nvml.SetMigMode(mode) })
	if err == nil && activation != gonvml.SUCCESS {
		err = &CallError{Call: "nvmlDeviceSetMigMode (activation)", Return: activation}
	}
	return err
}

func (d *device) MIGProfiles() ([]MIGProfile, error) {
	var total uint64 // asked for only if there is a profile
	var profiles []MIGProfile
	err := d.eachProfile(func(number int, info gonvml.GpuInstanceProfileInfo) error {
		if total == 0 {
			var err error
			if total, err = d.MemoryBytes(); err != nil {
				return err
			}
		}
		placements, err := get(d.lib, "nvmlDeviceGetGpuInstancePossiblePlacements", func() ([]gonvml.GpuInstancePlacement, gonvml.Return) {
			return d.nvml.GetGpuInstancePossiblePlacements(&info)
		})
		if err != nil {
			return err
		}
		p := MIGProfile{
			Name: profileName(number, info, total), ID: info.Id, ComputeSlices: info.SliceCount, Max: info.InstanceCount,
			MemoryMiB:       info.MemorySizeMB,
			Multiprocessors: info.MultiprocessorCount, CopyEngines: info.CopyEngineCount, Decoders: info.DecoderCount,
			Encoders: info.EncoderCount, JPEGEngines: info.JpegCount, OFAEngines: info.OfaCount,
		}
		for _, at := range placements {
			p.Placements = append(p.Placements, Placement{Start: at.Start, Size: at.Size})
		}
		profiles = append(profiles, p)
		return nil
	})
	return profiles, err
}

// eachProfile visits the profiles that the GPU has.
func (d *device) eachProfile(visit func(number int, info gonvml.GpuInstanceProfileInfo) error) error {
	for number := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, err := get(d.lib, "nvmlDeviceGetGpuInstanceProfileInfo", func() (gonvml.GpuInstanceProfileInfo, gonvml.Return) {
			return d.nvml.GetGpuInstanceProfileInfo(number)
		})
		// An older driver does not know the later numbers.
		if lacks(err) || errors.Is(err, gonvml.ERROR_INVALID_ARGUMENT) {
			continue
		}
		if err == nil {
			err = visit(number, info)
		}
		if err != nil {
			return fmt.Errorf("GPU instance profile %d: %w", number, err)
		}
	}
	return nil
}

var profileSuffixes = map[int]string{
	gonvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1:   "+me",
	gonvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:   "+me",
	gonvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: "+me.all",
	gonvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: "+me.all",
	gonvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME:  "-me",
	gonvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:  "-me",
	gonvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX:    "+gfx",
	gonvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX:    "+gfx",
	gonvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX:    "+gfx",
	gonvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:    "+gfx",
}

// profileName is made as NVIDIA's tools do: the share of the memory in eighths,
// rounded up, of the GPU's size in whole GiB, rounded up.
func profileName(number int, info gonvml.GpuInstanceProfileInfo, totalBytes uint64) string {
	const gib = 1 << 30
	share := 1.0
	if totalBytes > 0 {
		share = math.Ceil(float64(info.MemorySizeMB)*(1<<20)/float64(totalBytes)*8) / 8
	}
	size := math.Round(share * math.Ceil(float64(totalBytes)/gib))
	return fmt.Sprintf("%dg.%.0fgb%s", info.SliceCount, size, profileSuffixes[number])
}

func (d *device) GPUInstances() ([]GPUInstance, error) {
	if mode, err := d.MIGMode(); err != nil || !mode.Enabled {
		return nil, err
	}
	devices, err := d.migDevices()
	if err != nil {
		return nil, err
	}
	var found []GPUInstance
	err = d.eachProfile(func(_ int, profile gonvml.GpuInstanceProfileInfo) error {
		instances, err := get(d.lib, "nvmlDeviceGetGpuInstances", func() ([]gonvml.GpuInstance, gonvml.Return) {
			return d.nvml.GetGpuInstances(&profile)
		})
		if err != nil {
			return err
		}
		for _, i := range instances {
			if i == nil {
				return &CallError{Call: "nvmlDeviceGetGpuInstances", Return: gonvml.ERROR_UNKNOWN}
			}
			info, err := get(d.lib, "nvmlGpuInstanceGetInfo", i.GetInfo)
			if errors.Is(err, ErrNotFound) {
				continue // destroyed meanwhile
			}
			if err != nil {
				return err
			}
			instance := GPUInstance{
				ID: info.Id, ProfileID: info.ProfileId, Placement: Placement{Start: info.Placement.Start, Size: info.Placement.Size},
			}
			for _, m := range devices {
				if m.GPUInstance == info.Id {
					instance.Devices = append(instance.Devices, m)
				}
			}
			found = append(found, instance)
		}
		return nil
	})
	slices.SortFunc(found, func(a, b GPUInstance) int { return int(int64(a.ID) - int64(b.ID)) })
	return found, err
}

// migDevices lists the MIG devices of all GPU instances.
func (d *device) migDevices() (devices []MIGDevice, err error) {
	err = d.eachMIGDevice(func(handle gonvml.Device) error {
		m, err := d.migDevice(handle)
		if err == nil {
			devices = append(devices, m)
		}
		return err
	})
	return devices, err
}

// eachMIGDevice visits the MIG devices of all GPU instances. One that is destroyed meanwhile, as ErrNotFound says, is none.
func (d *handle) eachMIGDevice(visit func(handle gonvml.Device) error) error {
	most, err := get(d.lib, "nvmlDeviceGetMaxMigDeviceCount", d.nvml.GetMaxMigDeviceCount)
	if err != nil {
		return err
	}
	for index := range min(most, maxMIGDevices) {
		handle, err := get(d.lib, "nvmlDeviceGetMigDeviceHandleByIndex", func() (gonvml.Device, gonvml.Return) {
			return d.nvml.GetMigDeviceHandleByIndex(index)
		})
		if errors.Is(err, ErrNotFound) || errors.Is(err, gonvml.ERROR_INVALID_ARGUMENT) {
			continue
		}
		if err != nil {
			return err
		}
		if handle == nil {
			err = &CallError{Call: "nvmlDeviceGetMigDeviceHandleByIndex", Return: gonvml.ERROR_UNKNOWN}
		} else {
			err = visit(handle)
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			return fmt.Errorf("MIG device %d: %w", index, err)
		}
	}
	return nil
}

// migIdentity asks a MIG device who it is.
func (d *handle) migIdentity(handle gonvml.Device) (uuid string, instance Instance, err error) {
	uuid, err = get(d.lib, "nvmlDeviceGetUUID", handle.GetUUID)
	if err != nil {
		return "", Instance{}, err
	}
	gpu, err := get(d.lib, "nvmlDeviceGetGpuInstanceId", handle.GetGpuInstanceId)
	if err != nil {
		return "", Instance{}, err
	}
	compute, err := get(d.lib, "nvmlDeviceGetComputeInstanceId", handle.GetComputeInstanceId)
	return uuid, Instance{GPU: uint32(gpu), Compute: uint32(compute)}, err
}

func (d *device) migDevice(handle gonvml.Device) (MIGDevice, error) {
	uuid, instance, err := d.migIdentity(handle)
	if err != nil {
		return MIGDevice{}, err
	}
	m := MIGDevice{UUID: uuid, GPUInstance: instance.GPU, ComputeInstance: instance.Compute}
	attributes, err := get(d.lib, "nvmlDeviceGetAttributes", handle.GetAttributes)
	if err != nil && !lacks(err) {
		return MIGDevice{}, err
	}
	m.Multiprocessors = attributes.MultiprocessorCount
	m.Compute, err = d.computePlacement(m.GPUInstance, m.ComputeInstance)
	return m, err
}

// computePlacement is unknown for a driver that does not tell.
func (d *device) computePlacement(gpuInstance, computeInstance uint32) (Placement, error) {
	compute, err := d.computeInstance(gpuInstance, computeInstance)
	if err != nil {
		return Placement{}, optional(err)
	}
	info, err := get(d.lib, "nvmlComputeInstanceGetInfo", compute.GetInfo)
	return Placement{Start: info.Placement.Start, Size: info.Placement.Size}, optional(err)
}

// optional is nil for an error that says that the driver does not tell.
func optional(err error) error {
	if lacks(err) {
		return nil
	}
	return err
}

func (d *device) CreateGPUInstance(profile MIGProfile, at Placement) (uint32, error) {
	made, err := get(d.lib, "nvmlDeviceCreateGpuInstanceWithPlacement", func() (gonvml.GpuInstance, gonvml.Return) {
		return d.nvml.CreateGpuInstanceWithPlacement(&gonvml.GpuInstanceProfileInfo{Id: profile.ID},
			&gonvml.GpuInstancePlacement{Start: at.Start, Size: at.Size})
	})
	if err != nil {
		return 0, fmt.Errorf("create %s at slice %d: %w", profile.Name, at.Start, err)
	}
	if made == nil {
		return 0, &CallError{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", Return: gonvml.ERROR_UNKNOWN}
	}
	info, err := get(d.lib, "nvmlGpuInstanceGetInfo", made.GetInfo)
	return info.Id, err
}

func (d *device) CreateComputeInstance(gpuInstance uint32) (MIGDevice, error) {
	instance, err := d.gpuInstance(gpuInstance)
	if err != nil {
		return MIGDevice{}, err
	}
	whole, err := d.wholeCompute(instance)
	if err != nil {
		return MIGDevice{}, fmt.Errorf("GPU instance %d: %w", gpuInstance, err)
	}
	made, err := get(d.lib, "nvmlGpuInstanceCreateComputeInstance", func() (gonvml.ComputeInstance, gonvml.Return) {
		return instance.CreateComputeInstance(&whole)
	})
	if err != nil {
		return MIGDevice{}, fmt.Errorf("GPU instance %d: %w", gpuInstance, err)
	}
	if made == nil {
		return MIGDevice{}, &CallError{Call: "nvmlGpuInstanceCreateComputeInstance", Return: gonvml.ERROR_UNKNOWN}
	}
	info, err := get(d.lib, "nvmlComputeInstanceGetInfo", made.GetInfo)
	if err != nil {
		return MIGDevice{}, err
	}
	devices, err := d.migDevices()
	if err != nil {
		return MIGDevice{}, err
	}
	i := slices.IndexFunc(devices, func(m MIGDevice) bool { return m.GPUInstance == gpuInstance && m.ComputeInstance == info.Id })
	if i < 0 {
		return MIGDevice{}, fmt.Errorf("GPU instance %d, compute instance %d: made, and not listed: %w", gpuInstance, info.Id, ErrNotFound)
	}
	return devices[i], nil
}

// wholeCompute is the profile of the compute instance that has all slices.
func (d *device) wholeCompute(instance gonvml.GpuInstance) (whole gonvml.ComputeInstanceProfileInfo, err error) {
	for number := range gonvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		info, err := get(d.lib, "nvmlGpuInstanceGetComputeInstanceProfileInfo", func() (gonvml.ComputeInstanceProfileInfo, gonvml.Return) {
			return instance.GetComputeInstanceProfileInfo(number, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		})
		if lacks(err) || errors.Is(err, gonvml.ERROR_INVALID_ARGUMENT) {
			continue
		}
		if err != nil {
			return whole, err
		}
		if info.SliceCount > whole.SliceCount {
			whole = info
		}
	}
	if whole.SliceCount == 0 {
		return whole, fmt.Errorf("no compute instance profile: %w", ErrNotSupported)
	}
	return whole, nil
}

func (d *device) DestroyComputeInstance(gpuInstance, computeInstance uint32) error {
	compute, err := d.computeInstance(gpuInstance, computeInstance)
	if err == nil {
		err = ask(d.lib, "nvmlComputeInstanceDestroy", compute.Destroy)
	}
	if err != nil {
		return fmt.Errorf("GPU instance %d, compute instance %d: %w", gpuInstance, computeInstance, err)
	}
	return nil
}

func (d *device) computeInstance(gpuInstance, id uint32) (gonvml.ComputeInstance, error) {
	instance, err := d.gpuInstance(gpuInstance)
	if err != nil {
		return nil, err
	}
	compute, err := get(d.lib, "nvmlGpuInstanceGetComputeInstanceById", func() (gonvml.ComputeInstance, gonvml.Return) {
		return instance.GetComputeInstanceById(int(id))
	})
	if err == nil && compute == nil {
		err = &CallError{Call: "nvmlGpuInstanceGetComputeInstanceById", Return: gonvml.ERROR_UNKNOWN}
	}
	return compute, err
}

func (d *device) DestroyGPUInstance(gpuInstance uint32) error {
	instance, err := d.gpuInstance(gpuInstance)
	if err == nil {
		err = ask(d.lib, "nvmlGpuInstanceDestroy", instance.Destroy)
	}
	if err != nil {
		return fmt.Errorf("GPU instance %d: %w", gpuInstance, err)
	}
	return nil
}

func (d *device) gpuInstance(id uint32) (gonvml.GpuInstance, error) {
	instance, err := get(d.lib, "nvmlDeviceGetGpuInstanceById", func() (gonvml.GpuInstance, gonvml.Return) {
		return d.nvml.GetGpuInstanceById(int(id))
	})
	if err == nil && instance == nil {
		err = &CallError{Call: "nvmlDeviceGetGpuInstanceById", Return: gonvml.ERROR_UNKNOWN}
	}
	return instance, err
}
