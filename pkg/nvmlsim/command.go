// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"strconv"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Command is something that happens to the machine: a fault, an act of an
// administrator, a process that starts. The types below are all there are; the
// control socket takes the same. GPUs are named by index in the profile or by UUID.
type Command interface {
	// Name is the command's on the control socket, "gpu lose" for one.
	Name() string
	do(m *Machine, s *State) (Result, error)
}

// Result of a command.
type Result struct {
	// MIG is the device that was made.
	MIG *MIGDevice `json:"mig,omitempty"`
	// State that was asked for.
	State *State `json:"state,omitempty"`
	// GPUs of that state, in its order.
	GPUs []GPUName `json:"gpus,omitempty"`
}

// GPUName is how commands, and the agent's devices, name a GPU.
type GPUName struct {
	Index   int    `json:"index"`
	UUID    string `json:"uuid"`
	Address string `json:"address"` // on the PCI bus
}

// MIGDevice is a GPU instance with one compute instance that is all of it.
type MIGDevice struct {
	UUID     string   `json:"uuid"`
	Instance Instance `json:"instance"`
}

// Do runs a command. Its error names the field and the value that is wrong, and
// then nothing has changed.
func (m *Machine) Do(c Command) (Result, error) {
	if show, ok := c.(*ShowState); ok {
		return show.do(m, m.State())
	}
	var result Result
	err := m.update(func(s *State) (err error) {
		result, err = c.do(m, s)
		return err
	})
	if err != nil {
		return Result{}, fmt.Errorf("%s: %w", c.Name(), err)
	}
	return result, nil
}

// commands makes an empty command of each kind.
var commands = []func() Command{
	func() Command { return &LoseGPU{} },
	func() Command { return &RestoreGPU{} },
	func() Command { return &HangGPU{} },
	func() Command { return &UnhangGPU{} },
	func() Command { return &SlowGPU{} },
	func() Command { return &ResetGPU{} },
	func() Command { return &AddGPU{} },
	func() Command { return &RemoveGPU{} },
	func() Command { return &RaiseXID{} },
	func() Command { return &CountECC{} },
	func() Command { return &SetTemperature{} },
	func() Command { return &SetPower{} },
	func() Command { return &SetPCIe{} },
	func() Command { return &SetThrottle{} },
	func() Command { return &SetLoad{} },
	func() Command { return &SetRecovery{} },
	func() Command { return &RemapRows{} },
	func() Command { return &AddProcess{} },
	func() Command { return &RemoveProcess{} },
	func() Command { return &AddClient{} },
	func() Command { return &AskPersistenced{} },
	func() Command { return &RemoveClient{} },
	func() Command { return &SetComputeMode{} },
	func() Command { return &SetPersistence{} },
	func() Command { return &SetTimeSlice{} },
	func() Command { return &Refuse{} },
	func() Command { return &LeakMemory{} },
	func() Command { return &StartMPS{} },
	func() Command { return &StopMPS{} },
	func() Command { return &SetMIG{} },
	func() Command { return &CreateMIG{} },
	func() Command { return &DestroyMIG{} },
	func() Command { return &UnloadDriver{} },
	func() Command { return &LoadDriver{} },
	func() Command { return &Reboot{} },
	func() Command { return &ShowState{} },
}

// ShowState returns the state.
type ShowState struct{}

// Name implements Command.
func (*ShowState) Name() string { return "state" }

func (*ShowState) do(m *Machine, s *State) (Result, error) {
	return Result{State: s, GPUs: m.names()}, nil
}

func (m *Machine) names() []GPUName {
	names := make([]GPUName, len(m.profile.GPUs))
	for i := range names {
		names[i] = GPUName{Index: i, UUID: gpuUUID(m.node, i), Address: path.Base(m.profile.GPUs[i].PCI)}
	}
	return names
}

// UnloadDriver removes the driver from the kernel, which needs idle GPUs and, where the machine has a folder, that no process has a
// session open.
type UnloadDriver struct{}

// Name implements Command.
func (*UnloadDriver) Name() string { return "driver unload" }

func (*UnloadDriver) do(m *Machine, s *State) (Result, error) {
	if !s.Driver.Loaded {
		return Result{}, errors.New("the driver is not loaded")
	}
	if len(s.Clients) > 0 {
		return Result{}, fmt.Errorf("the driver is in use: process %d (%s) has it open", s.Clients[0].PID, s.Clients[0].Command)
	}
	for i := range s.GPUs {
		if processes := s.GPUs[i].Processes; len(processes) > 0 {
			return Result{}, fmt.Errorf("the driver is in use: GPU %d has process %d", i, processes[0].PID)
		}
	}
	if users := m.keepers(); len(users) > 0 {
		return Result{}, fmt.Errorf("the driver is in use: process %d has a session open", users[0])
	}
	s.Driver.Loaded = false
	return Result{}, nil
}

// LoadDriver loads it again, or another version of it. What the driver kept is forgotten.
type LoadDriver struct {
	// Version such as "580.65.06"; empty for the one that was loaded last.
	Version string `json:"version,omitempty"`
}

// Name implements Command.
func (*LoadDriver) Name() string { return "driver load" }

func (c *LoadDriver) do(m *Machine, s *State) (Result, error) {
	if s.Driver.Loaded {
		return Result{}, errors.New("the driver is loaded already")
	}
	if c.Version != "" && !driverVersion.MatchString(c.Version) {
		return Result{}, fmt.Errorf("version: %q: want one such as %s", c.Version, m.profile.System.DriverVersion)
	}
	s.Driver.Version = cmp.Or(c.Version, s.Driver.Version)
	s.loadDriver(m.profile)
	return Result{}, nil
}

// Reboot restarts the machine: processes, settings and MIG instances are gone,
// lost GPUs are back, the boot ID is another one.
type Reboot struct{}

// Name implements Command.
func (*Reboot) Name() string { return "reboot" }

func (*Reboot) do(m *Machine, s *State) (Result, error) {
	s.reboot(m.profile)
	return Result{}, nil
}

// find returns the GPU that the field gpu names, and its index.
func (m *Machine) find(s *State, gpu string) (int, *GPUState, error) {
	index := -1
	if i, err := strconv.Atoi(gpu); err == nil {
		index = i
	} else {
		for i := range m.profile.GPUs {
			if gpuUUID(m.node, i) == gpu || path.Base(m.profile.GPUs[i].PCI) == gpu {
				index = i
			}
		}
	}
	if index < 0 || index >= len(s.GPUs) {
		return 0, nil, fmt.Errorf("gpu: %q: want an index from 0 to %d, or a UUID such as %s", gpu, len(s.GPUs)-1, gpuUUID(m.node, 0))
	}
	return index, &s.GPUs[index], nil
}

// findOnBus is find for a GPU that is on the bus and answers.
func (m *Machine) findOnBus(s *State, gpu string) (int, *GPUState, error) {
	i, g, err := m.find(s, gpu)
	if err == nil && (g.Lost || g.Absent) {
		err = fmt.Errorf("gpu: %q: the GPU is lost or removed", gpu)
	}
	return i, g, err
}

// findThere is findOnBus for a GPU that the driver has.
func (m *Machine) findThere(s *State, gpu string) (int, *GPUState, error) {
	i, g, err := m.findOnBus(s, gpu)
	if err == nil && g.Detached() {
		err = fmt.Errorf("gpu: %q: the NVIDIA driver does not have the GPU", gpu)
	}
	return i, g, err
}

// refused explains an answer of the rules.
func refused(field string, value any, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return fmt.Errorf("%s: %v: %w", field, value, ret)
}
