// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"cmp"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// State is all that changes on a simulated machine. What [Machine.State]
// returns is a snapshot: it is never written to again, nor may a caller.
type State struct {
	// Profile and Node are those that the machine was made for.
	Profile string `json:"profile"`
	Node    string `json:"node"`
	// BootID is a new one after each reboot, as /proc/sys/kernel/random/boot_id.
	BootID string `json:"bootID"`
	// HostBootID is that of the machine the simulation runs on: its reboot is
	// one of the simulated machine, too. Empty for a machine held in memory.
	HostBootID string `json:"hostBootID,omitempty"`
	Driver     Driver `json:"driver"`
	// GPUs by the index in the profile.
	GPUs []GPUState `json:"gpus"`
	// Events are the last ones, oldest first; LastEvent numbers them.
	Events    []Event `json:"events,omitempty"`
	LastEvent uint64  `json:"lastEvent"`
	// Daemons of the Multi-Process Service.
	Daemons []Daemon `json:"daemons,omitempty"`
	// Clients have GPUs open, and NVML lists them as processes of none.
	Clients []Client `json:"clients,omitempty"`
	// LastInstance numbers MIG instances: IDs are used again, these are not.
	LastInstance uint64 `json:"lastInstance"`
}

// Driver is the kernel driver.
type Driver struct {
	Loaded bool `json:"loaded"`
	// Loads counts how often it was loaded: sessions do not outlive a load.
	Loads int `json:"loads"`
	// Version of the driver that was loaded last; empty for the profile's.
	Version string `json:"version,omitempty"`
}

// GPUState is what changes on one GPU.
type GPUState struct {
	// Absent: not on the bus. Lost: on the bus, and not answering. Hung: calls
	// that ask the GPU do not return.
	Absent bool `json:"absent,omitempty"`
	Lost   bool `json:"lost,omitempty"`
	Hung   bool `json:"hung,omitempty"`
	// Slow is how long each call that asks the GPU takes.
	Slow Milliseconds `json:"slowMilliseconds,omitempty"`

	ComputeMode ComputeMode `json:"computeMode"`
	// TimeSlice is how long a process keeps the GPU; empty for the default.
	TimeSlice   TimeSlice `json:"timeSlice,omitempty"`
	Persistence bool      `json:"persistence"`
	// PowerLimitMilliwatts that was set.
	PowerLimitMilliwatts uint32 `json:"powerLimitMilliwatts"`

	MIG        bool          `json:"mig"`
	PendingMIG bool          `json:"pendingMIG"`
	Instances  []GPUInstance `json:"instances,omitempty"`
	Processes  []Process     `json:"processes,omitempty"`
	// Refused settings cannot be changed, as in a virtual machine or without the right to; see [Refuse].
	Refused []Setting `json:"refused,omitempty"`
	// LeakedMiB of memory are in use, and no process is listed that has them.
	LeakedMiB uint64 `json:"leakedMiB,omitempty"`

	Health Health `json:"health"`

	// Functions of the card, the GPU first; nil as they are after a boot.
	Functions []FunctionState `json:"functions,omitempty"`
}

// Milliseconds is a time.
type Milliseconds uint32

// GPUInstance is a MIG GPU instance.
type GPUInstance struct {
	ID      uint32 `json:"id"`
	Profile string `json:"profile"`
	// Start and Size are its memory slices.
	Start   uint32            `json:"start"`
	Size    uint32            `json:"size"`
	Compute []ComputeInstance `json:"compute,omitempty"`
	// Load is that of its own engines.
	Load Load `json:"load,omitzero"`
	// Number among all instances that there ever were.
	Number uint64 `json:"number"`
}

// ComputeInstance is a part of a GPU instance's compute slices.
type ComputeInstance struct {
	ID      uint32 `json:"id"`
	Profile int    `json:"profile"`
	Start   uint32 `json:"start"`
	Size    uint32 `json:"size"`
	Number  uint64 `json:"number"`
}

// Process uses a GPU or one MIG device of it.
type Process struct {
	PID       uint32      `json:"pid"`
	Kind      ProcessKind `json:"kind"`
	MemoryMiB uint64      `json:"memoryMiB"`
	// Instance is nil for a GPU that is not partitioned.
	Instance *Instance `json:"instance,omitempty"`
	// Pod that the process belongs to, by UID; empty for none.
	Pod string `json:"pod,omitempty"`
	// Command is the name of what it runs.
	Command string `json:"command,omitempty"`
	// User that it runs as, by number.
	User uint32 `json:"user,omitempty"`
	// Daemon of the Multi-Process Service whose server it is; empty for none.
	Daemon string `json:"daemon,omitempty"`
	// Stuck processes do not end when they are killed.
	Stuck bool `json:"stuck,omitempty"`
}

// Client is a program that has GPUs open without using any, which no list of NVML tells of: nvidia-persistenced, DCGM, a
// monitoring agent. As long as it has, the driver does not let go of the GPU (NVIDIA/gpu-operator 118,
// kubernetes-sigs/dra-driver-nvidia-gpu 1037), nor is the GPU reset or the driver unloaded (NVIDIA/gpu-operator 2570).
type Client struct {
	PID     uint32 `json:"pid"`
	Command string `json:"command"`
	// GPUs by their index in the profile; empty for all.
	GPUs []int `json:"gpus,omitempty"`
	// Watches: as DCGM does, so that MIG cannot be switched and instances cannot be destroyed: both are in use (NVIDIA/DCGM 95
	// and 276, kubernetes-sigs/dra-driver-nvidia-gpu pull 1411).
	Watches bool `json:"watches,omitempty"`
	// Persistence of nvidia-persistenced; nil for every other program, and for one whose socket nobody finds.
	Persistence *Persistenced `json:"persistence,omitempty"`
}

// Persistenced is a daemon that is asked through its socket to keep GPUs open or to let go of them; see [AskPersistenced]. It registers
// GPUs at its start alone, and persistence mode by NVML is none of its.
type Persistenced struct {
	// LetGo are the GPUs that it does not keep open, by their index in the profile.
	LetGo []int `json:"letGo,omitempty"`
	// Refuses: it keeps what it has, and opens nothing: as when the driver fails it.
	Refuses bool `json:"refuses,omitempty"`
	// Seen by NVML, which then tells persistence mode of a GPU that the daemon keeps; not so in a container, which has no socket of it.
	Seen bool `json:"seen,omitempty"`
}

// has tells whether the program has the GPU open.
func (c *Client) has(gpu int) bool {
	return (len(c.GPUs) == 0 || slices.Contains(c.GPUs, gpu)) && (c.Persistence == nil || !slices.Contains(c.Persistence.LetGo, gpu))
}

// clients of a GPU, all or those that watch it.
func (s *State) clients(gpu int, watching bool) (found []Client) {
	for _, c := range s.Clients {
		if c.has(gpu) && (c.Watches || !watching) {
			found = append(found, c)
		}
	}
	return found
}

func (s *State) watched(gpu int) bool { return len(s.clients(gpu, true)) > 0 }

// ClientsOf are those that have the GPU of that index open.
func (s *State) ClientsOf(gpu int) []Client { return s.clients(gpu, false) }

// Instance names a MIG device of a GPU.
type Instance struct {
	GPU     uint32 `json:"gpu"`
	Compute uint32 `json:"compute"`
}

// ProcessKind is the list in which NVML has a process.
type ProcessKind string

// The process lists of NVML.
const (
	ProcessCompute  ProcessKind = "compute"
	ProcessGraphics ProcessKind = "graphics"
	ProcessMPS      ProcessKind = "mps"
	// ProcessVM has a GPU that is passed through open; NVML knows nothing of it.
	ProcessVM ProcessKind = "vm"
)

// ComputeMode says who may compute on a GPU.
type ComputeMode string

// The compute modes, in nvidia-smi's words.
const (
	ComputeDefault          ComputeMode = "Default"
	ComputeProhibited       ComputeMode = "Prohibited"
	ComputeExclusiveProcess ComputeMode = "Exclusive_Process"
)

var computeModes = map[ComputeMode]nvml.ComputeMode{
	ComputeDefault:          nvml.COMPUTEMODE_DEFAULT,
	ComputeProhibited:       nvml.COMPUTEMODE_PROHIBITED,
	ComputeExclusiveProcess: nvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
}

// TimeSlice is how long a process keeps a GPU before the next one gets it.
type TimeSlice string

// The time slices, in the words of nvidia-smi compute-policy.
const (
	TimeSliceDefault TimeSlice = ""
	TimeSliceShort   TimeSlice = "Short"
	TimeSliceMedium  TimeSlice = "Medium"
	TimeSliceLong    TimeSlice = "Long"
)

// Setting is one that a GPU may refuse to have changed.
type Setting string

// The settings that can be refused. For MPS no daemon is started.
const (
	SettingComputeMode Setting = "compute-mode"
	SettingPersistence Setting = "persistence"
	SettingTimeSlice   Setting = "timeslice"
	SettingMPS         Setting = "mps"
)

var settings = map[Setting]bool{SettingComputeMode: true, SettingPersistence: true, SettingTimeSlice: true, SettingMPS: true}

// refuses tells whether the setting cannot be changed.
func (g *GPUState) refuses(s Setting) bool { return slices.Contains(g.Refused, s) }

// Daemon is a control daemon of the Multi-Process Service.
type Daemon struct {
	Name string `json:"name"`
	// GPUs or MIG devices that it serves, by UUID.
	GPUs []string `json:"gpus"`
	// ActiveThreadPercentage and MemoryMiB (of each GPU) are the limits of a client; 0 for none.
	ActiveThreadPercentage int     `json:"activeThreadPercentage,omitempty"`
	MemoryMiB              []int64 `json:"memoryMiB,omitempty"`
	// MultiUser is that clients of several users are served at once.
	MultiUser bool `json:"multiUser,omitempty"`
}

// Health is what a GPU reports about its condition. A nil value is that of an
// idle, sound GPU of the profile.
type Health struct {
	TemperatureC *uint32 `json:"temperatureC,omitempty"`
	PowerWatts   *uint32 `json:"powerWatts,omitempty"`
	PCIe         *PCIe   `json:"pcie,omitempty"`
	PCIeReplays  int     `json:"pcieReplays,omitempty"`
	// Throttle is NVML's mask of reasons.
	Throttle uint64 `json:"throttle,omitempty"`
	// Recovery is NVML's recovery action.
	Recovery Recovery `json:"recovery,omitempty"`
	// Volatile counts since the driver was loaded, Aggregate for ever.
	Volatile  ECCCounts `json:"volatile"`
	Aggregate ECCCounts `json:"aggregate"`
	Rows      Rows      `json:"rows"`
	// Load is none where nobody has set one.
	Load Load `json:"load,omitzero"`
}

// PCIe is the state of the link now.
type PCIe struct {
	Generation int `json:"generation"`
	Width      int `json:"width"`
}

// ECCCounts are memory errors.
type ECCCounts struct {
	Corrected   uint64 `json:"corrected"`
	Uncorrected uint64 `json:"uncorrected"`
}

// Rows of memory that were replaced by spare ones.
type Rows struct {
	Corrected   int `json:"corrected"`
	Uncorrected int `json:"uncorrected"`
	// Pending: one is replaced at the next reset. Failed: no spare was left.
	Pending bool `json:"pending"`
	Failed  bool `json:"failed"`
}

// Event is one that NVML reports.
type Event struct {
	Number uint64 `json:"number"`
	GPU    int    `json:"gpu"`
	// Type is NVML's EventType…, Data the XID for one.
	Type uint64 `json:"type"`
	Data uint64 `json:"data"`
	// Instance that it is about, nil for the whole GPU.
	Instance *Instance `json:"instance,omitempty"`
}

// keptEvents bounds the state: who waits later than that has missed the older ones.
const keptEvents = 512

// clone returns a state that may be changed. Pointers inside are to values that
// are replaced, never written to.
func (s *State) clone() *State {
	c := *s
	c.Events = slices.Clone(s.Events)
	c.GPUs = slices.Clone(s.GPUs)
	c.Daemons = slices.Clone(s.Daemons)
	c.Clients = slices.Clone(s.Clients)
	for i := range c.GPUs {
		g := &c.GPUs[i]
		g.Processes = slices.Clone(g.Processes)
		g.Instances = slices.Clone(g.Instances)
		for j := range g.Instances {
			g.Instances[j].Compute = slices.Clone(g.Instances[j].Compute)
		}
	}
	return &c
}

// emit adds an event.
func (s *State) emit(e Event) {
	s.LastEvent++
	e.Number = s.LastEvent
	s.Events = append(s.Events, e)
	if extra := len(s.Events) - keptEvents; extra > 0 {
		s.Events = slices.Delete(s.Events, 0, extra)
	}
}

// newInstance returns the number of the next instance.
func (s *State) newInstance() uint64 {
	s.LastInstance++
	return s.LastInstance
}

// newState is that of the machine when it is new.
func newState(p *Profile, node string) *State {
	s := &State{Profile: p.Name, Node: node, BootID: newBootID(), Driver: Driver{Loaded: true, Loads: 1}}
	for i := range p.GPUs {
		mig := migEnabled(&p.GPUs[i], &p.GPU)
		s.GPUs = append(s.GPUs, GPUState{
			ComputeMode: ComputeDefault, Persistence: !p.System.PersistenceOff, PowerLimitMilliwatts: 1000 * p.GPU.Power.DefaultWatts,
			MIG: mig, PendingMIG: mig,
		})
	}
	return s
}

// driverVersion is that of the kernel driver.
func (s *State) driverVersion(p *Profile) string {
	return cmp.Or(s.Driver.Version, p.System.DriverVersion)
}

// loadDriver resets what the driver and the GPUs keep only as long as the driver
// is loaded: settings, MIG instances, counters, and from Hopper on the MIG mode.
func (s *State) loadDriver(p *Profile) {
	s.Driver.Loaded = true
	s.Driver.Loads++
	s.Daemons = nil
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if g.Detached() {
			continue
		}
		g.ComputeMode, g.Persistence, g.PowerLimitMilliwatts = ComputeDefault, !p.System.PersistenceOff, 1000*p.GPU.Power.DefaultWatts
		g.Instances, g.Processes, g.TimeSlice, g.LeakedMiB = nil, nil, TimeSliceDefault, 0
		g.activateMIG(p, i)
		g.Health.reset()
	}
}

// activateMIG makes the pending mode the current one; what the GPU forgets is
// the profile's again.
func (g *GPUState) activateMIG(p *Profile, i int) {
	if t := p.GPU.MIG.table(); t != nil && !t.resetToSwitch {
		g.PendingMIG = migEnabled(&p.GPUs[i], &p.GPU)
	}
	g.MIG = g.PendingMIG
}

// reset is what a reset of the GPU heals.
func (h *Health) reset() {
	h.Volatile = ECCCounts{}
	h.Rows.Pending = false
	h.Recovery = RecoveryNone
	h.Throttle = 0
	h.Load = Load{}
}

// reboot is loadDriver after a power cycle: lost and hung GPUs answer again.
func (s *State) reboot(p *Profile) {
	s.BootID = newBootID()
	for i := range s.GPUs {
		g := &s.GPUs[i]
		g.Lost, g.Hung, g.Functions = false, false, nil
		g.Health.PCIeReplays = 0
	}
	s.Events, s.Clients = nil, nil
	s.loadDriver(p)
}

// instance returns the GPU instance with that ID, nil if there is none.
func (g *GPUState) instance(id uint32) *GPUInstance {
	for i := range g.Instances {
		if g.Instances[i].ID == id {
			return &g.Instances[i]
		}
	}
	return nil
}

func (i *GPUInstance) compute(id uint32) *ComputeInstance {
	for c := range i.Compute {
		if i.Compute[c].ID == id {
			return &i.Compute[c]
		}
	}
	return nil
}

// usedMiB is the memory of the processes for which in holds.
func (g *GPUState) usedMiB(in func(Process) bool) (used uint64) {
	for _, p := range g.Processes {
		if in(p) {
			used += p.MemoryMiB
		}
	}
	return used
}

// gone GPUs answer nothing to NVML.
func (g *GPUState) gone() bool { return g.Lost || g.Absent || g.Detached() }
