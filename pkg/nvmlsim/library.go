// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Library is a simulated libnvidia-ml.so: one process's view of a [Machine]. It
// is safe for concurrent use.
type Library struct {
	unsupportedInterface

	machine  *Machine
	profile  *Profile
	nodeName string
	devices  []*device // by the index in the profile

	mu       sync.RWMutex
	sessions int // Init calls without their Shutdown
	// Of the session: the driver it was opened with, and the GPUs that were
	// there then, by NVML's index. A GPU added later needs another session.
	loads int
	found []int
	// over is closed when the last session ends, and closed is called.
	over   chan struct{}
	closed func()
}

var _ nvml.Interface = (*Library)(nil)

// New returns the simulated library of a new machine of the given profile, a
// built-in name or the path of a YAML file. UUIDs and serial numbers follow
// from nodeName: the same name has the same GPUs over restarts, another name
// has others.
func New(profile, nodeName string) (*Library, error) {
	p, err := LoadProfile(profile)
	if err != nil {
		return nil, err
	}
	return NewFromProfile(p, nodeName), nil
}

// NewFromProfile is New for a profile that is loaded already. The profile must
// not be changed afterwards.
func NewFromProfile(p *Profile, nodeName string) *Library { return NewMachine(p, nodeName).NVML() }

// NVML returns a library on the machine, with no session open. A process may
// have several.
func (m *Machine) NVML() *Library {
	l := &Library{machine: m, profile: m.profile, nodeName: m.node}
	for i := range m.profile.GPUs {
		l.devices = append(l.devices, newDevice(l, i))
	}
	return l
}

// Machine returns the hardware behind the library.
func (l *Library) Machine() *Machine { return l.machine }

// Profile returns the machine's description; not to be changed.
func (l *Library) Profile() *Profile { return l.profile }

// Init opens a session. As with the real library, each Init needs a Shutdown,
// and a machine without a GPU for it refuses: see [Library.InitWithFlags].
func (l *Library) Init() nvml.Return { return l.InitWithFlags(0) }

// InitWithFlags opens a session, with INIT_FLAG_NO_GPUS also where the driver
// has no GPU ("Don't fail nvmlInit() when no GPUs are found", nvml.h; with which
// error it fails is assumed).
func (l *Library) InitWithFlags(flags uint32) nvml.Return {
	s := l.machine.State()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !s.Driver.Loaded {
		return nvml.ERROR_DRIVER_NOT_LOADED
	}
	if l.sessions == 0 || l.loads != s.Driver.Loads {
		l.loads, l.found = s.Driver.Loads, nil
		for i := range s.GPUs {
			if !s.GPUs[i].Absent && !s.GPUs[i].Detached() {
				l.found = append(l.found, i)
			}
		}
	}
	if l.sessions == 0 && len(l.found) == 0 && flags&nvml.INIT_FLAG_NO_GPUS == 0 {
		return nvml.ERROR_DRIVER_NOT_LOADED
	}
	if l.sessions == 0 {
		closed, err := l.machine.opened()
		if err != nil {
			return nvml.ERROR_OPERATING_SYSTEM
		}
		l.over, l.closed = make(chan struct{}), closed
	}
	l.sessions++
	return nvml.SUCCESS
}

// Shutdown closes a session, or answers ERROR_UNINITIALIZED if none is open.
func (l *Library) Shutdown() nvml.Return {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sessions == 0 {
		return nvml.ERROR_UNINITIALIZED
	}
	if l.sessions--; l.sessions == 0 {
		close(l.over)
		l.closed()
	}
	return nvml.SUCCESS
}

// moment is what a call sees: the state, and what tells that there is another.
type moment struct {
	*State
	changed <-chan struct{}
	over    <-chan struct{} // closed at the end of the session
}

// now answers ERROR_UNINITIALIZED outside of any session, also in one that was
// opened with a driver since reloaded.
func (l *Library) now() (moment, nvml.Return) {
	s, changed := l.machine.look()
	l.mu.RLock()
	defer l.mu.RUnlock()
	switch {
	case l.sessions == 0:
		return moment{}, nvml.ERROR_UNINITIALIZED
	case !s.Driver.Loaded:
		return moment{}, nvml.ERROR_DRIVER_NOT_LOADED
	case l.loads != s.Driver.Loads:
		return moment{}, nvml.ERROR_UNINITIALIZED
	}
	return moment{s, changed, l.over}, nvml.SUCCESS
}

// ready tells whether calls are answered at all.
func (l *Library) ready() nvml.Return {
	_, ret := l.now()
	return ret
}

// gpus are the handles of the session, by NVML's index.
func (l *Library) gpus() ([]*device, nvml.Return) {
	if ret := l.ready(); ret != nvml.SUCCESS {
		return nil, ret
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	gpus := make([]*device, 0, len(l.found))
	for _, i := range l.found {
		gpus = append(gpus, l.devices[i])
	}
	return gpus, nvml.SUCCESS
}

// indexOf is the GPU's index in the session, -1 if it was not there when it was opened.
func (l *Library) indexOf(d *device) int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.Index(l.found, d.index)
}
