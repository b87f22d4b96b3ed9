// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

var timeSlices = map[TimeSlice]bool{TimeSliceDefault: true, TimeSliceShort: true, TimeSliceMedium: true, TimeSliceLong: true}

// SetTimeSlice is nvidia-smi compute-policy --set-timeslice.
type SetTimeSlice struct {
	GPU  string    `json:"gpu"`
	Time TimeSlice `json:"time"`
}

// Name implements Command.
func (*SetTimeSlice) Name() string { return "timeslice" }

func (c *SetTimeSlice) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.findThere(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	if !timeSlices[c.Time] {
		return Result{}, fmt.Errorf("time: %q: want %s, %s, %s, or nothing for the default", c.Time, TimeSliceShort,
			TimeSliceMedium, TimeSliceLong)
	}
	if g.refuses(SettingTimeSlice) {
		return Result{}, refused("time", c.Time, nvml.ERROR_NOT_SUPPORTED)
	}
	g.TimeSlice = c.Time
	return Result{}, nil
}

// Refuse makes a GPU refuse for ever that these settings are changed, instead of those that it refused before. They stay as they are.
type Refuse struct {
	GPU      string    `json:"gpu"`
	Settings []Setting `json:"settings,omitempty"`
}

// Name implements Command.
func (*Refuse) Name() string { return "refuse" }

func (c *Refuse) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.find(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	for _, setting := range c.Settings {
		if !settings[setting] {
			return Result{}, fmt.Errorf("settings: %q: want %s", setting, words(settings))
		}
	}
	g.Refused = slices.Clone(c.Settings)
	return Result{}, nil
}

// LeakMemory is memory in use that no process is listed for, as a driver leaves it now and then; a reset frees it.
type LeakMemory struct {
	GPU       string `json:"gpu"`
	MemoryMiB uint64 `json:"memoryMiB"`
}

// Name implements Command.
func (*LeakMemory) Name() string { return "leak" }

func (c *LeakMemory) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.findThere(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	used := m.profile.GPU.ReservedMiB + g.usedMiB(func(Process) bool { return true })
	if room := m.profile.GPU.MemoryMiB - used; c.MemoryMiB > room {
		return Result{}, fmt.Errorf("memoryMiB: %d: only %d are free", c.MemoryMiB, room)
	}
	g.LeakedMiB = c.MemoryMiB
	return Result{}, nil
}

// StartMPS starts a control daemon of the Multi-Process Service.
type StartMPS struct{ Daemon }

// Name implements Command.
func (*StartMPS) Name() string { return "mps start" }

func (c *StartMPS) do(m *Machine, s *State) (Result, error) {
	switch {
	case !s.Driver.Loaded:
		return Result{}, errors.New("the driver is not loaded")
	case c.Daemon.Name == "":
		return Result{}, errors.New("name: want one")
	case len(c.GPUs) == 0:
		return Result{}, errors.New("gpus: want at least one")
	case len(c.MemoryMiB) > len(c.GPUs):
		return Result{}, fmt.Errorf("memoryMiB: %d limits for %d GPUs", len(c.MemoryMiB), len(c.GPUs))
	case c.ActiveThreadPercentage < 0 || c.ActiveThreadPercentage > 100:
		return Result{}, fmt.Errorf("activeThreadPercentage: %d: want 0 to 100", c.ActiveThreadPercentage)
	}
	places := make([]served, len(c.GPUs))
	for i, gpu := range c.GPUs {
		var ok bool
		if places[i], ok = s.find(m, gpu); !ok {
			return Result{}, fmt.Errorf("gpus: %q: there is no such GPU or MIG device", gpu)
		}
		if s.GPUs[places[i].gpu].refuses(SettingMPS) {
			return Result{}, refused("gpus", gpu, nvml.ERROR_NOT_SUPPORTED)
		}
	}
	for _, other := range s.Daemons {
		if other.Name == c.Daemon.Name {
			return Result{}, fmt.Errorf("name: %q: the daemon is running already", other.Name)
		}
		for _, gpu := range c.GPUs {
			if slices.Contains(other.GPUs, gpu) {
				return Result{}, fmt.Errorf("gpus: %q: daemon %s has it", gpu, other.Name)
			}
		}
	}
	s.Daemons = append(s.Daemons, c.Daemon)
	server := s.newServer(c.Daemon.Name)
	for _, at := range places {
		server.Instance = at.instance
		s.GPUs[at.gpu].Processes = append(s.GPUs[at.gpu].Processes, server)
	}
	return Result{}, nil
}

const (
	serverCommand = "nvidia-cuda-mps" // as the kernel keeps it
	// serverMiB is what a server takes of each GPU: an assumption.
	serverMiB = 30
	// firstServer is more than a process ID of a real machine can be.
	firstServer = 1 << 22
)

// newServer is the process that a daemon starts for its clients, and that has its GPUs open. A real one comes with the first client; this
// one is there from the beginning, like a real one that has had a client.
func (s *State) newServer(daemon string) Process {
	server := Process{PID: firstServer, Kind: ProcessCompute, MemoryMiB: serverMiB, Command: serverCommand, Daemon: daemon}
	for slices.ContainsFunc(s.GPUs, func(g GPUState) bool {
		return slices.ContainsFunc(g.Processes, func(p Process) bool { return p.PID == server.PID })
	}) {
		server.PID++
	}
	return server
}

// served is a GPU or, if instance is not nil, a MIG device of it.
type served struct {
	gpu      int
	instance *Instance
}

// Refuses tells whether the GPU with that UUID, or with a MIG device that has it, refuses to have the setting changed.
func (m *Machine) Refuses(uuid string, setting Setting) bool {
	s := m.State()
	at, ok := s.find(m, uuid)
	return ok && s.GPUs[at.gpu].refuses(setting)
}

// find looks for the GPU or MIG device with that UUID.
func (s *State) find(m *Machine, uuid string) (at served, ok bool) {
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if g.gone() {
			continue
		}
		if gpuUUID(m.node, i) == uuid {
			return served{gpu: i}, true
		}
		for _, instance := range g.Instances {
			for _, compute := range instance.Compute {
				in := Instance{GPU: instance.ID, Compute: compute.ID}
				if migUUID(gpuUUID(m.node, i), in) == uuid {
					return served{gpu: i, instance: &in}, true
				}
			}
		}
	}
	return served{}, false
}

// StopMPS ends a daemon and its server. Its clients stay until they notice.
type StopMPS struct {
	Daemon string `json:"daemon"`
}

// Name implements Command.
func (*StopMPS) Name() string { return "mps stop" }

func (c *StopMPS) do(_ *Machine, s *State) (Result, error) {
	i := slices.IndexFunc(s.Daemons, func(d Daemon) bool { return d.Name == c.Daemon })
	if i < 0 {
		return Result{}, fmt.Errorf("daemon: %q: there is none with that name", c.Daemon)
	}
	s.Daemons = slices.Delete(s.Daemons, i, i+1)
	for i := range s.GPUs {
		s.GPUs[i].Processes = slices.DeleteFunc(s.GPUs[i].Processes, func(p Process) bool { return p.Daemon == c.Daemon })
	}
	return Result{}, nil
}
