// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// NewSimulated returns the tools for the GPUs of a simulated machine. There is nothing behind the daemons'
// sockets, so containers are told of them and given no folder.
func NewSimulated(machine *nvmlsim.Machine) Tools {
	s := &simulated{machine: machine}
	return Tools{TimeSlicer: s, Daemons: s, Processes: s, Persistenced: s}
}

// NewSimulatedWithFolders returns the same, with daemons that have the folder of a real one, which their clients' containers get. To mount
// it takes more rights than all else that is simulated.
func NewSimulatedWithFolders(machine *nvmlsim.Machine, opts DriverOptions) Tools {
	opts.ShmBytes = cmp.Or(opts.ShmBytes, DefaultShmBytes)
	tools := NewSimulated(machine)
	tools.Daemons = &withFolders{&simulated{machine: machine}, folders{opts}}
	return tools
}

// withFolders are simulated daemons with real folders.
type withFolders struct {
	*simulated
	folders folders
}

// Start implements Daemons.
func (w *withFolders) Start(ctx context.Context, daemon Daemon) error {
	if running, err := w.Running(ctx, daemon.Name); running || err != nil {
		return err
	}
	if err := w.folders.makeFolder(daemon.Name); err != nil {
		return fmt.Errorf("folder of MPS daemon %s: %w", daemon.Name, err)
	}
	return w.simulated.Start(ctx, daemon)
}

// Stop implements Daemons.
func (w *withFolders) Stop(ctx context.Context, name string) error {
	if err := w.simulated.Stop(ctx, name); err != nil {
		return err
	}
	if err := w.folders.removeFolder(name); err != nil {
		return fmt.Errorf("folder of MPS daemon %s: %w", name, err)
	}
	return nil
}

// List implements Daemons.
func (w *withFolders) List() ([]string, error) {
	running, err := w.simulated.List()
	if err != nil {
		return nil, err
	}
	made, err := w.folders.List()
	names := append(running, made...)
	slices.Sort(names)
	return slices.Compact(names), err
}

// Edits implements Daemons.
func (w *withFolders) Edits(name string) *specs.ContainerEdits { return w.folders.Edits(name) }

type simulated struct{ machine *nvmlsim.Machine }

// SetTimeSlice implements TimeSlicer.
func (s *simulated) SetTimeSlice(_ context.Context, gpu string, interval config.Interval) error {
	_, err := s.machine.Do(&nvmlsim.SetTimeSlice{
		GPU:  gpu,
		Time: nvmlsim.TimeSlice(strings.TrimPrefix(string(interval), string(config.IntervalDefault))),
	})
	return err
}

// Keeps implements PersistenceDaemon.
func (s *simulated) Keeps(_ context.Context, address string) (bool, uint32, error) {
	pid := s.machine.KeptOpen(address)
	return pid != 0, pid, nil
}

// Keep implements PersistenceDaemon.
func (s *simulated) Keep(_ context.Context, address string, on bool) error {
	if !on && s.machine.KeptOpen(address) == 0 {
		return nil
	}
	_, err := s.machine.Do(&nvmlsim.AskPersistenced{GPU: address, Keep: on})
	switch {
	case errors.Is(err, nvmlsim.ErrNoPersistenced):
		return ErrNoPersistenced
	case errors.Is(err, nvmlsim.ErrPersistencedRefuses):
		return fmt.Errorf("%w: %w", ErrPersistencedRefuses, err)
	}
	return err
}

// Check implements Daemons.
func (s *simulated) Check(_ context.Context, daemon Daemon) error {
	for _, gpu := range daemon.GPUs {
		if s.machine.Refuses(gpu, nvmlsim.SettingMPS) {
			return fmt.Errorf("no MPS daemon can serve %s", gpu)
		}
	}
	return nil
}

// Start implements Daemons.
func (s *simulated) Start(ctx context.Context, daemon Daemon) error {
	if running, err := s.Running(ctx, daemon.Name); running || err != nil {
		return err
	}
	_, err := s.machine.Do(&nvmlsim.StartMPS{Daemon: nvmlsim.Daemon{
		Name: daemon.Name, GPUs: daemon.GPUs, ActiveThreadPercentage: daemon.ActiveThreadPercentage, MemoryMiB: daemon.MemoryMiB,
		MultiUser: daemon.MultiUser != MultiUserNo,
	}})
	return err
}

// Stop implements Daemons.
func (s *simulated) Stop(ctx context.Context, name string) error {
	_, err := s.machine.Do(&nvmlsim.StopMPS{Daemon: name})
	if running, unknown := s.Running(ctx, name); unknown == nil && !running {
		return nil
	}
	return err
}

// Running implements Daemons.
func (s *simulated) Running(_ context.Context, name string) (bool, error) {
	return slices.ContainsFunc(s.machine.State().Daemons, func(d nvmlsim.Daemon) bool { return d.Name == name }), nil
}

// Ready implements Daemons.
func (s *simulated) Ready(ctx context.Context, daemon Daemon) (bool, error) {
	return s.Running(ctx, daemon.Name)
}

// List implements Daemons.
func (s *simulated) List() (names []string, err error) {
	for _, daemon := range s.machine.State().Daemons {
		names = append(names, daemon.Name)
	}
	return names, nil
}

// Edits implements Daemons.
func (s *simulated) Edits(string) *specs.ContainerEdits {
	return &specs.ContainerEdits{Env: []string{pipeEnv}}
}

// PodOf implements Processes.
func (s *simulated) PodOf(pid uint32) (types.UID, error) {
	_, process := s.find(pid)
	if process == nil {
		return "", fmt.Errorf("process %d: %w", pid, ErrNoProcess)
	}
	return types.UID(process.Pod), nil
}

// NameOf implements Processes.
func (s *simulated) NameOf(pid uint32) (string, error) {
	for _, client := range s.machine.State().Clients {
		if client.PID == pid {
			return client.Command, nil
		}
	}
	_, process := s.find(pid)
	if process == nil {
		return "", fmt.Errorf("process %d: %w", pid, ErrNoProcess)
	}
	if process.Command == "" && process.Kind == nvmlsim.ProcessMPS {
		return "nvidia-cuda-mps", nil
	}
	return process.Command, nil
}

// DaemonOf implements Processes.
func (s *simulated) DaemonOf(pid uint32) (string, error) {
	_, process := s.find(pid)
	if process == nil {
		return "", fmt.Errorf("process %d: %w", pid, ErrNoProcess)
	}
	return process.Daemon, nil
}

// End implements Processes.
func (s *simulated) End(pid uint32, pod types.UID) error {
	gpu, process := s.find(pid)
	if process == nil || types.UID(process.Pod) != pod || process.Stuck {
		return nil
	}
	_, err := s.machine.Do(&nvmlsim.RemoveProcess{GPU: gpu, PID: pid})
	return err
}

func (s *simulated) find(pid uint32) (gpu string, process *nvmlsim.Process) {
	state := s.machine.State()
	for i := range state.GPUs {
		for j := range state.GPUs[i].Processes {
			if p := &state.GPUs[i].Processes[j]; p.PID == pid {
				return fmt.Sprint(i), p
			}
		}
	}
	return "", nil
}
