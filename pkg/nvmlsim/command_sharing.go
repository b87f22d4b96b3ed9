package nvmlsim

import (
	"errors"
	"fmt"
	"slices"
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
		return Result{}, fmt.Errorf("time: %q: want %s, %s, %s, or nothing for the default", c.Time, TimeSliceShort, TimeSliceMedium, TimeSliceLong)
	}
	g.TimeSlice = c.Time
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
	for _, gpu := range c.GPUs {
		if !s.served(m, gpu) {
			return Result{}, fmt.Errorf("gpus: %q: there is no such GPU or MIG device", gpu)
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
	return Result{}, nil
}

// served tells whether there is a GPU or a MIG device with that UUID.
func (s *State) served(m *Machine, uuid string) bool {
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if g.gone() {
			continue
		}
		if gpuUUID(m.node, i) == uuid {
			return true
		}
		for _, instance := range g.Instances {
			for _, compute := range instance.Compute {
				if migUUID(gpuUUID(m.node, i), Instance{GPU: instance.ID, Compute: compute.ID}) == uuid {
					return true
				}
			}
		}
	}
	return false
}

// StopMPS ends a daemon.
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
	return Result{}, nil
}
