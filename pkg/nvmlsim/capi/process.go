// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capi

// #include <stdlib.h>
// extern const char *nvmlsimDriverVersion(void);
import "C"

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// The environment variables that name the machine.
const (
	EnvSocket  = nvmlsim.EnvSocket
	EnvProfile = nvmlsim.EnvProfile
	EnvNode    = nvmlsim.EnvNode
)

// AnyDriver is the version of a library that serves every kernel driver.
const AnyDriver = "any"

// process is the library: a process loads it once.
var process library

// library is the state of the simulated libnvidia-ml.so in this process.
type library struct {
	handles handles

	mu       sync.RWMutex
	sim      *nvmlsim.Library // nil before the first session
	machine  settings         // that sim is of
	sessions int
}

// settings name a machine.
type settings struct{ socket, profile, node string }

// environment is C's: a program may have set it after this library was loaded.
func environment() settings {
	get := func(name string) string {
		n := C.CString(name)
		defer C.free(unsafe.Pointer(n))
		return C.GoString(C.getenv(n))
	}
	return settings{socket: get(EnvSocket), profile: get(EnvProfile), node: get(EnvNode)}
}

// driverVersion is the one that this file was installed as.
func driverVersion() string { return C.GoString(C.nvmlsimDriverVersion()) }

// init opens a session. Which machine it is on can change between sessions, not during one.
func (l *library) init(flags uint32, s settings, version string) nvml.Return {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sessions == 0 && (l.sim == nil || l.machine != s) {
		machine, err := s.open()
		if err != nil {
			// NVML has no words for it, and nobody would look for the reason elsewhere.
			fmt.Fprintf(os.Stderr, "simulated NVML: %v\n", err)
			return nvml.ERROR_UNKNOWN
		}
		l.sim, l.machine = machine.NVML(), s
		l.handles.dropAll()
	}
	if s := l.sim.Machine().State(); s.Driver.Loaded && version != AnyDriver && version != l.sim.Machine().DriverVersion() {
		return nvml.ERROR_LIB_RM_VERSION_MISMATCH
	}
	ret := l.sim.InitWithFlags(flags)
	if ret == nvml.SUCCESS {
		l.sessions++
	}
	return ret
}

// shutdown closes a session. With the last one, handles of what can be made and destroyed end; those of GPUs are the same in the next.
func (l *library) shutdown() nvml.Return {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sim == nil {
		return nvml.ERROR_UNINITIALIZED
	}
	ret := l.sim.Shutdown()
	if ret == nvml.SUCCESS {
		if l.sessions--; l.sessions == 0 {
			l.handles.dropTemporary()
		}
	}
	return ret
}

// open returns the library while a session is open.
func (l *library) open() (*nvmlsim.Library, nvml.Return) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.sessions == 0 {
		return nil, nvml.ERROR_UNINITIALIZED
	}
	return l.sim, nvml.SUCCESS
}

func (s settings) open() (*nvmlsim.Machine, error) {
	if s.socket == "" {
		if s.profile == "" {
			return nil, fmt.Errorf("%s and %s: neither is set: want the control socket of a machine, or the profile of one", EnvSocket, EnvProfile)
		}
		p, err := nvmlsim.LoadProfile(s.profile)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", EnvProfile, err)
		}
		node, err := s.nodeName()
		if err != nil {
			return nil, err
		}
		return nvmlsim.NewMachine(p, node), nil
	}
	folder := filepath.Dir(s.socket)
	profile, node, err := nvmlsim.SavedMachine(folder)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", EnvSocket, err)
	}
	if s.profile != "" {
		profile = s.profile
	}
	if profile == "" {
		return nil, fmt.Errorf("%s: %s: no machine is there, and %s is not set, which says what to make", EnvSocket, folder, EnvProfile)
	}
	p, err := nvmlsim.LoadProfile(profile)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", EnvProfile, err)
	}
	if node = cmp.Or(s.node, node); node == "" {
		if node, err = s.nodeName(); err != nil {
			return nil, err
		}
	}
	return nvmlsim.OpenMachine(p, node, folder)
}

func (s settings) nodeName() (string, error) {
	if s.node != "" {
		return s.node, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", errors.Join(fmt.Errorf("%s is not set", EnvNode), err)
	}
	return name, nil
}
