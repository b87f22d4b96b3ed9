package prepare

import (
	"context"
	"errors"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// Hardware answers for the node's physical GPUs.
type Hardware interface {
	// Find returns what is behind a published device, after NVML has answered for its GPU just now. The error
	// says what is wrong with it. Of a device whose GPU is with a virtual machine the GPU's name is returned beside it.
	Find(ctx context.Context, device string) (Target, error)
	// On runs f with the GPU of that name and UUID, and returns f's error. When ctx ends first it returns an error
	// at once: calls into NVML cannot be cancelled, so f goes on, and f's that come later for the same
	// GPU wait for it.
	On(ctx context.Context, gpu, uuid string, f func(nvml.Device) error) error
	// Look looks at the node anew: for GPUs that have come back.
	Look(ctx context.Context) error
	// Apart does f while NVML is closed, because a GPU that NVML has open does not leave its driver, and then is Look. It returns f's
	// error. All other questions and acts wait meanwhile.
	Apart(ctx context.Context, f func(context.Context) error) error
	// BootID is another one after each reboot of the machine.
	BootID() (string, error)
}

// Target is what is behind a published device.
type Target struct {
	// GPU is the physical one.
	GPU cdi.GPU
	// Partition is nil for a whole GPU.
	Partition *ledger.Partition
	// Attributes are what is published of the device.
	Attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute
	// MemoryBytes is all that the GPU has.
	MemoryBytes uint64
	// Passthrough: the whole GPU goes to a virtual machine. Then PCIBusID is where it is, as the kernel writes it.
	Passthrough bool
	PCIBusID    string
	// SwitchesMIG tells that the GPU's MIG mode can be changed without a reset.
	SwitchesMIG bool
}

func (t *Target) kind() config.Kind {
	if t.Passthrough {
		return config.KindVFIO
	}
	if t.Partition != nil {
		return config.KindMIG
	}
	return config.KindGPU
}

// ask is Hardware.On for a question. It waits no longer than Options.GPUTimeout.
func ask[T any](ctx context.Context, m *Manager, gpu, uuid string, f func(nvml.Device) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
	defer cancel()
	// Written by f, which may still run when On has given up; read only if it has not.
	answer := new(T)
	err := m.opts.Hardware.On(ctx, gpu, uuid, func(d nvml.Device) (err error) {
		*answer, err = f(d)
		return err
	})
	if err != nil {
		var none T
		return none, fmt.Errorf("GPU %s (%s): %w", gpu, uuid, err)
	}
	return *answer, nil
}

// act is ask without an answer.
func (m *Manager) act(ctx context.Context, gpu, uuid string, f func(nvml.Device) error) error {
	_, err := ask(ctx, m, gpu, uuid, func(d nvml.Device) (struct{}, error) { return struct{}{}, f(d) })
	return err
}

// observed is the state of a GPU that the steps depend on.
type observed struct {
	mig       nvml.MIGMode
	instances []nvml.GPUInstance
	processes []nvml.Process
	readings  nvml.Readings
	// usedBytes of memory.
	usedBytes uint64
	// compute and persistence are nil where the GPU has no such setting.
	compute     *nvml.ComputeMode
	persistence *bool
}

func observe(d nvml.Device) (o observed, err error) {
	if o.mig, err = d.MIGMode(); err != nil {
		return o, err
	}
	if o.instances, err = d.GPUInstances(); err != nil {
		return o, err
	}
	if o.processes, err = d.Processes(); err != nil {
		return o, err
	}
	if o.readings, err = d.Readings(); err != nil {
		return o, err
	}
	if o.usedBytes, err = d.MemoryUsedBytes(); err != nil {
		return o, err
	}
	if o.compute, err = optional(d.ComputeMode); err != nil {
		return o, err
	}
	o.persistence, err = optional(d.Persistence)
	return o, err
}

func optional[T any](ask func() (T, error)) (*T, error) {
	value, err := ask()
	if errors.Is(err, nvml.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &value, nil
}

// inPlace returns the instance in that very place, nil if there is none.
func inPlace(instances []nvml.GPUInstance, at *ledger.Partition) *nvml.GPUInstance {
	for i := range instances {
		found := &instances[i]
		if found.ProfileID == at.ProfileID && found.Placement.Start == at.Start && found.Placement.Size == at.Size {
			return found
		}
	}
	return nil
}

// migDeviceIn returns the MIG device of that very place.
func migDeviceIn(instances []nvml.GPUInstance, at *ledger.Partition) (*nvml.MIGDevice, error) {
	found := inPlace(instances, at)
	switch {
	case found == nil:
		return nil, fmt.Errorf("there is no MIG device %s", at)
	case at.ComputeSize == 0 && len(found.Devices) == 1:
		return &found.Devices[0], nil
	case at.ComputeSize == 0:
		return nil, fmt.Errorf("%s has %d compute instances now, and the device is one that has all of it", at, len(found.Devices))
	}
	for i, device := range found.Devices {
		if device.Compute.Start == at.ComputeStart && device.Compute.Size == at.ComputeSize {
			return &found.Devices[i], nil
		}
	}
	return nil, fmt.Errorf("there is no MIG device %s: %s has %d others", at, at.Profile, len(found.Devices))
}

// defaultGPUTimeout bounds the questions and acts of one kind on one GPU; making a MIG instance takes about a second.
const defaultGPUTimeout = 10 * time.Second
