// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// xidFallenOff is the XID of a GPU that has fallen off the bus.
const xidFallenOff = 79

// LoseGPU makes a GPU fall off the bus: XID 79, then every call answers ERROR_GPU_IS_LOST.
type LoseGPU struct {
	GPU string `json:"gpu"`
}

// Name implements Command.
func (*LoseGPU) Name() string { return "gpu lose" }

func (c *LoseGPU) do(m *Machine, s *State) (Result, error) {
	i, g, err := m.findOnBus(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	g.Lost = true
	s.emit(Event{GPU: i, Type: nvml.EventTypeXidCriticalError, Data: xidFallenOff})
	return Result{}, nil
}

// RestoreGPU brings a lost GPU back, as after a power cycle of its slot.
type RestoreGPU struct {
	GPU string `json:"gpu"`
}

// Name implements Command.
func (*RestoreGPU) Name() string { return "gpu restore" }

func (c *RestoreGPU) do(m *Machine, s *State) (Result, error) {
	i, g, err := m.find(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case !g.Lost:
		return Result{}, fmt.Errorf("gpu: %q: the GPU is not lost", c.GPU)
	}
	g.Lost = false
	g.powerOn(m.profile, i)
	return Result{}, nil
}

// powerOn is the state of a GPU that had no power: the driver's settings, no
// instances, no processes.
func (g *GPUState) powerOn(p *Profile, i int) {
	fresh := newState(p, "").GPUs[i]
	g.ComputeMode, g.Persistence, g.PowerLimitMilliwatts = fresh.ComputeMode, fresh.Persistence, fresh.PowerLimitMilliwatts
	g.Instances, g.Processes, g.Hung, g.TimeSlice, g.LeakedMiB = nil, nil, false, TimeSliceDefault, 0
	g.activateMIG(p, i)
	g.Health.reset()
}

// HangGPU makes calls about a GPU not return.
type HangGPU struct {
	GPU string `json:"gpu"`
}

// Name implements Command.
func (*HangGPU) Name() string { return "gpu hang" }

func (c *HangGPU) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.findOnBus(s, c.GPU)
	if err == nil {
		g.Hung = true
	}
	return Result{}, err
}

// UnhangGPU lets them return.
type UnhangGPU struct {
	GPU string `json:"gpu"`
}

// Name implements Command.
func (*UnhangGPU) Name() string { return "gpu unhang" }

func (c *UnhangGPU) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.find(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case !g.Hung:
		return Result{}, fmt.Errorf("gpu: %q: the GPU does not hang", c.GPU)
	}
	g.Hung = false
	return Result{}, nil
}

// SlowGPU makes each call that asks a GPU take that long, as on a node under
// load: NVIDIA's DRA driver has seen 10 seconds for a handle, and caches it.
type SlowGPU struct {
	GPU          string       `json:"gpu"`
	Milliseconds Milliseconds `json:"milliseconds"`
}

// Name implements Command.
func (*SlowGPU) Name() string { return "gpu slow" }

func (c *SlowGPU) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.find(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case c.Milliseconds > 60_000:
		return Result{}, fmt.Errorf("milliseconds: %d: want at most 60000", c.Milliseconds)
	}
	g.Slow = c.Milliseconds
	return Result{}, nil
}

// ResetGPU is nvidia-smi --gpu-reset: it needs an idle GPU and, where the machine
// has a folder, that no process has a session open. It ends MIG instances, and
// makes a pending MIG mode the current one.
type ResetGPU struct {
	GPU string `json:"gpu"`
}

// Name implements Command.
func (*ResetGPU) Name() string { return "gpu reset" }

func (c *ResetGPU) do(m *Machine, s *State) (Result, error) {
	i, g, err := m.findThere(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case len(g.Processes) > 0:
		return Result{}, fmt.Errorf("gpu: %q: in use by process %d", c.GPU, g.Processes[0].PID)
	case len(s.ClientsOf(i)) > 0:
		client := s.ClientsOf(i)[0]
		return Result{}, fmt.Errorf("gpu: %q: in use by process %d (%s)", c.GPU, client.PID, client.Command)
	}
	if users := m.keepers(); len(users) > 0 {
		return Result{}, fmt.Errorf("gpu: %q: in use by process %d, which has a session open", c.GPU, users[0])
	}
	g.Instances, g.Hung, g.ComputeMode, g.TimeSlice, g.LeakedMiB = nil, false, ComputeDefault, TimeSliceDefault, 0
	g.switchMIG(s, i)
	g.Health.reset()
	return Result{}, nil
}

// RemoveGPU takes a GPU off the bus.
type RemoveGPU struct {
	GPU string `json:"gpu"`
}

// Name implements Command.
func (*RemoveGPU) Name() string { return "gpu remove" }

func (c *RemoveGPU) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.find(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case g.Absent:
		return Result{}, fmt.Errorf("gpu: %q: there is none in that place", c.GPU)
	}
	g.Absent, g.Lost, g.Hung, g.Instances, g.Processes, g.Functions = true, false, false, nil, nil, nil
	return Result{}, nil
}

// AddGPU puts a GPU that was removed into its place again. Sessions that are
// open do not see it.
type AddGPU struct {
	GPU string `json:"gpu"`
}

// Name implements Command.
func (*AddGPU) Name() string { return "gpu add" }

func (c *AddGPU) do(m *Machine, s *State) (Result, error) {
	i, g, err := m.find(s, c.GPU)
	switch {
	case err != nil:
		return Result{}, err
	case !g.Absent:
		return Result{}, fmt.Errorf("gpu: %q: there is one in that place", c.GPU)
	}
	g.Absent = false
	g.powerOn(m.profile, i)
	return Result{}, nil
}

// AddProcess starts a process on a GPU or, if it is partitioned, on a MIG device.
type AddProcess struct {
	GPU string `json:"gpu"`
	Process
}

// Name implements Command.
func (*AddProcess) Name() string { return "proc add" }

func (c *AddProcess) do(m *Machine, s *State) (Result, error) {
	if c.Kind == ProcessVM {
		_, g, err := m.find(s, c.GPU)
		if err != nil {
			return Result{}, err
		}
		return Result{}, g.addVM(c)
	}
	_, g, err := m.findThere(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	if c.PID == 0 {
		return Result{}, errors.New("pid: 0: want the process's ID")
	}
	if !slices.Contains([]ProcessKind{ProcessCompute, ProcessGraphics, ProcessMPS}, c.Kind) {
		return Result{}, fmt.Errorf("kind: %q: want %s, %s or %s", c.Kind, ProcessCompute, ProcessGraphics, ProcessMPS)
	}
	if slices.ContainsFunc(g.Processes, func(p Process) bool { return p.PID == c.PID }) {
		return Result{}, fmt.Errorf("pid: %d: the process is on the GPU already", c.PID)
	}
	if other := g.otherUser(s, &c.Process); other != nil {
		return Result{}, fmt.Errorf("user: %d: the MPS daemon of the GPU serves user %d, and another one when process %d has ended",
			c.User, other.User, other.PID)
	}
	room := m.profile.GPU.MemoryMiB - m.profile.GPU.ReservedMiB - g.usedMiB(func(Process) bool { return true })
	switch {
	case g.MIG && c.Instance == nil:
		return Result{}, errors.New("instance: none: the GPU has MIG enabled, want a GPU instance and a compute instance")
	case !g.MIG && c.Instance != nil:
		return Result{}, fmt.Errorf("instance: %d/%d: the GPU does not have MIG enabled", c.Instance.GPU, c.Instance.Compute)
	case c.Instance != nil:
		inst := g.instance(c.Instance.GPU)
		if inst == nil || inst.compute(c.Instance.Compute) == nil {
			return Result{}, fmt.Errorf("instance: %d/%d: there is no such compute instance", c.Instance.GPU, c.Instance.Compute)
		}
		room = m.profile.GPU.MIG.table().byName(inst.Profile).memoryMiB -
			g.usedMiB(func(p Process) bool { return p.Instance.GPU == c.Instance.GPU })
	case g.ComputeMode == ComputeProhibited && c.Kind != ProcessGraphics:
		return Result{}, fmt.Errorf("kind: %q: the GPU's compute mode is %s", c.Kind, g.ComputeMode)
	case g.ComputeMode == ComputeExclusiveProcess && c.Kind == ProcessCompute: // clients of a daemon are its server to the GPU
		if other := slices.IndexFunc(g.Processes, func(p Process) bool { return p.Kind == ProcessCompute }); other >= 0 {
			return Result{}, fmt.Errorf("pid: %d: the GPU's compute mode is %s, and process %d has it", c.PID, g.ComputeMode, g.Processes[other].PID)
		}
	}
	if c.MemoryMiB > room {
		return Result{}, fmt.Errorf("memoryMiB: %d: only %d are free", c.MemoryMiB, room)
	}
	g.Processes = append(g.Processes, c.Process)
	return Result{}, nil
}

// otherUser is a client of the daemon that serves the process, of another user, if the daemon serves one at a time: the newcomer's
// cuInit does not return before that one has ended (seen on an H100, docs/simulation.md).
func (g *GPUState) otherUser(s *State, newcomer *Process) *Process {
	if newcomer.Kind != ProcessMPS {
		return nil
	}
	server := slices.IndexFunc(g.Processes, func(p Process) bool { return p.Daemon != "" && sameInstance(p.Instance, newcomer.Instance) })
	if server < 0 {
		return nil
	}
	for _, daemon := range s.Daemons {
		if daemon.Name == g.Processes[server].Daemon && daemon.MultiUser {
			return nil
		}
	}
	for i := range g.Processes {
		if p := &g.Processes[i]; p.Kind == ProcessMPS && sameInstance(p.Instance, newcomer.Instance) && p.User != newcomer.User {
			return p
		}
	}
	return nil
}

func sameInstance(a, b *Instance) bool { return a == b || a != nil && b != nil && *a == *b }

// RemoveProcess ends a process.
type RemoveProcess struct {
	GPU string `json:"gpu"`
	PID uint32 `json:"pid"`
}

// Name implements Command.
func (*RemoveProcess) Name() string { return "proc rm" }

func (c *RemoveProcess) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.find(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	i := slices.IndexFunc(g.Processes, func(p Process) bool { return p.PID == c.PID })
	if i < 0 {
		return Result{}, fmt.Errorf("pid: %d: the GPU has no such process", c.PID)
	}
	g.Processes = slices.Delete(g.Processes, i, i+1)
	return Result{}, nil
}

// AddClient starts a program that has GPUs open without using any.
type AddClient struct{ Client }

// Name implements Command.
func (*AddClient) Name() string { return "client add" }

func (c *AddClient) do(_ *Machine, s *State) (Result, error) {
	switch {
	case !s.Driver.Loaded:
		return Result{}, errors.New("the driver is not loaded: there is nothing to open")
	case c.PID == 0:
		return Result{}, errors.New("pid: 0: want the process's ID")
	case slices.ContainsFunc(s.Clients, func(other Client) bool { return other.PID == c.PID }):
		return Result{}, fmt.Errorf("pid: %d: the process is there already", c.PID)
	}
	for _, gpu := range c.GPUs {
		if gpu < 0 || gpu >= len(s.GPUs) {
			return Result{}, fmt.Errorf("gpus: %d: want an index from 0 to %d", gpu, len(s.GPUs)-1)
		}
	}
	s.Clients = append(s.Clients, c.Client)
	return Result{}, nil
}

// RemoveClient ends it.
type RemoveClient struct {
	PID uint32 `json:"pid"`
}

// Name implements Command.
func (*RemoveClient) Name() string { return "client rm" }

func (c *RemoveClient) do(_ *Machine, s *State) (Result, error) {
	left := slices.DeleteFunc(slices.Clone(s.Clients), func(client Client) bool { return client.PID == c.PID })
	if len(left) == len(s.Clients) {
		return Result{}, fmt.Errorf("pid: %d: there is no such client", c.PID)
	}
	s.Clients = left
	return Result{}, nil
}

var (
	// ErrNoPersistenced means that no nvidia-persistenced runs.
	ErrNoPersistenced = errors.New("nvidia-persistenced does not run")
	// ErrPersistencedRefuses means that the one that runs does not do it.
	ErrPersistencedRefuses = errors.New("nvidia-persistenced refuses")
)

// AskPersistenced is a call of nvidia-persistenced through its socket, as nvidia-smi makes it: to keep a GPU open or
// to let go of it.
type AskPersistenced struct {
	GPU  string `json:"gpu"`
	Keep bool   `json:"keep"`
}

// Name implements Command.
func (*AskPersistenced) Name() string { return "persistenced" }

func (c *AskPersistenced) do(m *Machine, s *State) (Result, error) {
	gpu, g, err := m.find(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	daemon := s.persistenced()
	switch {
	case daemon == nil:
		return Result{}, ErrNoPersistenced
	case len(daemon.GPUs) > 0 && !slices.Contains(daemon.GPUs, gpu):
		return Result{}, fmt.Errorf("gpu: %q: %w: process %d was started without it", c.GPU, ErrPersistencedRefuses, daemon.PID)
	case daemon.has(gpu) == c.Keep:
		return Result{}, nil
	case daemon.Persistence.Refuses, c.Keep && g.gone():
		return Result{}, fmt.Errorf("gpu: %q: %w: the driver failed process %d", c.GPU, ErrPersistencedRefuses, daemon.PID)
	}
	now := *daemon.Persistence
	now.LetGo = slices.DeleteFunc(slices.Clone(now.LetGo), func(other int) bool { return other == gpu })
	if !c.Keep {
		now.LetGo = append(now.LetGo, gpu)
		slices.Sort(now.LetGo)
	}
	if len(now.LetGo) == 0 {
		now.LetGo = nil
	}
	daemon.Persistence = &now
	return Result{}, nil
}

// SetPersistence is nvidia-smi --persistence-mode: the daemon is asked if it runs, and else the driver's own mode is switched.
type SetPersistence struct {
	GPU     string `json:"gpu"`
	Enabled bool   `json:"enabled"`
}

// Name implements Command.
func (*SetPersistence) Name() string { return "persistence" }

func (c *SetPersistence) do(m *Machine, s *State) (Result, error) {
	result, err := (&AskPersistenced{GPU: c.GPU, Keep: c.Enabled}).do(m, s)
	if !errors.Is(err, ErrNoPersistenced) {
		return result, err
	}
	_, g, err := m.findThere(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	if g.refuses(SettingPersistence) {
		return Result{}, refused("enabled", c.Enabled, nvml.ERROR_NOT_SUPPORTED)
	}
	g.Persistence = c.Enabled
	return Result{}, nil
}

// persistenced is the daemon that is asked; nil for none.
func (s *State) persistenced() *Client {
	if i := slices.IndexFunc(s.Clients, func(c Client) bool { return c.Persistence != nil }); i >= 0 {
		return &s.Clients[i]
	}
	return nil
}

// KeptOpen is the process of the nvidia-persistenced that keeps the GPU open; 0 for none. The GPU is named as in commands.
func (m *Machine) KeptOpen(gpu string) uint32 {
	s := m.State()
	i, _, err := m.find(s, gpu)
	if err != nil {
		return 0
	}
	if daemon := s.persistenced(); daemon != nil && daemon.has(i) {
		return daemon.PID
	}
	return 0
}

// SetComputeMode is nvidia-smi --compute-mode.
type SetComputeMode struct {
	GPU  string      `json:"gpu"`
	Mode ComputeMode `json:"mode"`
}

// Name implements Command.
func (*SetComputeMode) Name() string { return "compute-mode" }

func (c *SetComputeMode) do(m *Machine, s *State) (Result, error) {
	_, g, err := m.findThere(s, c.GPU)
	if err != nil {
		return Result{}, err
	}
	if _, ok := computeModes[c.Mode]; !ok {
		return Result{}, fmt.Errorf("mode: %q: want one of %s", c.Mode, words(computeModes))
	}
	if g.MIG && c.Mode != ComputeDefault || g.refuses(SettingComputeMode) {
		return Result{}, refused("mode", c.Mode, nvml.ERROR_NOT_SUPPORTED)
	}
	g.ComputeMode = c.Mode
	return Result{}, nil
}
