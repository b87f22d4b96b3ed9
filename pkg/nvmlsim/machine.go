// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
)

// Machine is the simulated hardware: it outlives the processes that use it if it
// has a folder, and it changes by [Machine.Do] and through the NVML libraries
// made by [Machine.NVML]. It is safe for concurrent use, also by several
// processes on one folder.
type Machine struct {
	profile *Profile
	node    string
	file    *stateFile // nil for a machine held in memory

	// writing is held while the state is changed.
	writing sync.Mutex

	mu      sync.Mutex
	current *State
	seen    stamp         // of current's file
	changed chan struct{} // closed and replaced with current

	// open are the libraries of this process with a session.
	open atomic.Int64
}

// opened notes that a library of this process has a session, also for other processes on the folder; closed is to be called at
// its end, for which somebody may wait.
func (m *Machine) opened() (closed func(), err error) {
	end := func() {}
	if m.file != nil {
		if end, err = m.file.openSession(); err != nil {
			return nil, err
		}
	}
	m.open.Add(1)
	return func() {
		end()
		m.open.Add(-1)
		m.mu.Lock()
		defer m.mu.Unlock()
		m.set(m.current, m.seen)
	}, nil
}

// Users are the processes that have a library with an open session, which has every GPU of the driver open, in order.
func (m *Machine) Users() []uint32 {
	switch {
	case m.file != nil:
		return m.file.sessions()
	case m.open.Load() > 0:
		return []uint32{uint32(os.Getpid())}
	}
	return nil
}

// keepers are the users that the kernel does not take a GPU or the driver from. A machine in memory, which no other process has, has
// none: how a program takes it that its driver is gone could not be tried otherwise.
func (m *Machine) keepers() []uint32 {
	if m.file == nil {
		return nil
	}
	return m.Users()
}

// InUse tells whether a library has a session open.
func (m *Machine) InUse() bool { return m.open.Load() > 0 || len(m.Users()) > 0 }

// pollInterval is how often who waits looks for what another process has changed.
const pollInterval = 20 * time.Millisecond

// NewMachine returns a new machine of that profile, held in memory.
func NewMachine(p *Profile, node string) *Machine {
	return &Machine{profile: p, node: node, current: newState(p, node), changed: make(chan struct{})}
}

// OpenMachine returns the machine whose state is kept in a folder (mode 0700),
// a new one if there is none. A folder that holds the state of another profile
// or node is refused.
func OpenMachine(p *Profile, node, folder string) (*Machine, error) {
	file, err := openStateFile(folder)
	if err != nil {
		return nil, fmt.Errorf("simulated machine in %s: %w", folder, err)
	}
	m := &Machine{profile: p, node: node, file: file, changed: make(chan struct{})}
	if err := m.start(); err != nil {
		return nil, fmt.Errorf("simulated machine in %s: %w", folder, err)
	}
	return m, nil
}

// start reads the state or makes it. It reboots the machine if the one that it
// is simulated on was rebooted.
func (m *Machine) start() error {
	hostBoot, err := hostBootID()
	if err != nil {
		return err
	}
	unlock, err := m.file.lock()
	if err != nil {
		return err
	}
	defer unlock()
	s, seen, err := m.file.load()
	switch {
	case err != nil:
		return err
	case s == nil:
		s = newState(m.profile, m.node)
	case s.Profile != m.profile.Name:
		return fmt.Errorf("profile: the state is of %q, not %q: remove it, or use another folder", s.Profile, m.profile.Name)
	case s.Node != m.node:
		return fmt.Errorf("node: the state is of %q, not %q: remove it, or use another folder", s.Node, m.node)
	case len(s.GPUs) != len(m.profile.GPUs):
		return fmt.Errorf("gpus: the state has %d, profile %q %d: remove it, or use another folder", len(s.GPUs),
			m.profile.Name, len(m.profile.GPUs))
	case s.HostBootID != hostBoot:
		s.reboot(m.profile)
	default:
		m.publish(s, seen)
		return nil
	}
	s.HostBootID = hostBoot
	if seen, err = m.file.save(s); err != nil {
		return err
	}
	m.publish(s, seen)
	return nil
}

// Profile returns the machine's description; not to be changed.
func (m *Machine) Profile() *Profile { return m.profile }

// State returns a snapshot.
func (m *Machine) State() *State {
	s, _ := m.look()
	return s
}

// BootID is a new one after each reboot.
func (m *Machine) BootID() string { return m.State().BootID }

// DriverVersion is that of the kernel driver, loaded or not.
func (m *Machine) DriverVersion() string { return m.State().driverVersion(m.profile) }

// look returns the state, and a channel that is closed when this process learns of another.
func (m *Machine) look() (*State, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.file != nil {
		// A file that cannot be read now leaves the hardware as it was known.
		if s, seen, err := m.file.loadChanged(m.seen); err == nil && s != nil {
			m.set(s, seen)
		}
	}
	return m.current, m.changed
}

// publish makes s the state that everyone sees.
func (m *Machine) publish(s *State, seen stamp) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.set(s, seen)
}

func (m *Machine) set(s *State, seen stamp) {
	m.current, m.seen = s, seen
	close(m.changed)
	m.changed = make(chan struct{})
}

// errUnchanged is returned by a change that decided against itself.
var errUnchanged = errors.New("nothing to change")

// update changes the state by one step that nobody sees half of. What f returns
// leaves the state as it was.
func (m *Machine) update(f func(*State) error) error {
	m.writing.Lock()
	defer m.writing.Unlock()
	if m.file != nil {
		unlock, err := m.file.lock()
		if err != nil {
			return err
		}
		defer unlock()
	}
	s := m.State().clone()
	if err := f(s); err != nil {
		return err
	}
	var seen stamp
	if m.file != nil {
		var err error
		if seen, err = m.file.save(s); err != nil {
			return fmt.Errorf("keep the simulated machine's state: %w", err)
		}
	}
	m.publish(s, seen)
	return nil
}

// await returns when the state is not the one of that channel any more or, with other processes on the folder, may not be.
func (m *Machine) await(changed <-chan struct{}) {
	tick, stop := m.poll()
	defer stop()
	select {
	case <-changed:
	case <-tick:
		m.look()
	}
}

// poll returns a channel that ticks while another process may change the
// state, nil if none can. stop ends it.
func (m *Machine) poll() (tick <-chan time.Time, stop func()) {
	if m.file == nil {
		return nil, func() {}
	}
	t := time.NewTicker(pollInterval)
	return t.C, t.Stop
}

func newBootID() string { return uuid.NewString() }
