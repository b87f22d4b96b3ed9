// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/utils/clock"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
)

// TestWhatIsNotSetHasADefault, and what is set arrives where it is meant for.
func TestWhatIsNotSetHasADefault(t *testing.T) {
	type arrived struct {
		Locks, Undo, GPUs, PCI, TimeSlices, Daemons, Decider, Backend, End, Release time.Duration

		Leftovers Leftovers
		HostRoot  string
	}
	set := Options{
		LockTimeout: 1, GPUTimeout: 2, EndTimeout: 3, UndoTimeout: 4, Leftovers: QuarantineLeftovers, HostRoot: "/host",
		Handover: Handover{ReleaseTimeout: 5}, FS: durabletest.Unsynced{}, Clock: testingclock.NewFakePassiveClock(time.Time{}),
	}
	tests := map[string]struct {
		options Options
		want    arrived
		fs      durable.FS
		clock   clock.PassiveClock
	}{
		"nothing is set": {
			fs: durable.OS{}, clock: clock.RealClock{},
			want: arrived{
				Locks: 15 * time.Second, Undo: 25 * time.Second, End: 5 * time.Second, Release: 37 * time.Second,
				GPUs: 10 * time.Second, PCI: 10 * time.Second, TimeSlices: 10 * time.Second,
				Daemons: 10 * time.Second, Decider: 10 * time.Second, Backend: 10 * time.Second,
				Leftovers: EndLeftovers, HostRoot: "/",
			},
		},
		"all is set": {
			options: set, fs: set.FS, clock: set.Clock,
			want: arrived{
				Locks: 1, GPUs: 2, PCI: 2, TimeSlices: 2, Daemons: 2, Decider: 2, Backend: 2, End: 3, Undo: 4, Release: 5,
				Leftovers: QuarantineLeftovers, HostRoot: "/host",
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			m := New(tc.options)
			e := m.effects
			got := arrived{
				Locks: m.locks.Timeout, Undo: m.undoer.timeout, End: e.Ender.Timeout, Release: m.opts.ReleaseTimeout,
				GPUs: e.GPUs.Timeout, PCI: e.PCI.Timeout, TimeSlices: e.TimeSlices.GPUs.Timeout,
				Daemons: e.Daemons.Timeout, Decider: m.decider.gpus.Timeout, Backend: m.describer.backend.(patient).timeout,
				Leftovers: e.Ender.Policy, HostRoot: m.opts.HostRoot,
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			for what, fs := range map[string]durable.FS{"options": m.opts.FS, "files": e.Files.FS, "quarantine": m.quarantines.fs} {
				if fs != tc.fs {
					t.Errorf("disk of %s: %T, want %T", what, fs, tc.fs)
				}
			}
			if m.undoer.clock != tc.clock || m.opts.Clock != tc.clock {
				t.Errorf("clocks: %T and %T, want %T", m.undoer.clock, m.opts.Clock, tc.clock)
			}
			m.opts.Waiting(nil, nil) // nobody has to be told
		})
	}
}

// TestAnInstanceIsInItsVeryPlace: one with another profile, at another slice or of another size is somebody else's.
func TestAnInstanceIsInItsVeryPlace(t *testing.T) {
	instance := func(id, profile, start, size uint32) nvml.GPUInstance {
		return nvml.GPUInstance{ID: id, ProfileID: profile, Placement: nvml.Placement{Start: start, Size: size}}
	}
	at, beginning := ledger.Partition{ProfileID: 19, Start: 2, Size: 1}, ledger.Partition{ProfileID: 19, Size: 1}
	others := []nvml.GPUInstance{instance(1, 20, 2, 1), instance(2, 19, 3, 1), instance(3, 19, 2, 2)}
	tests := map[string]struct {
		at    ledger.Partition
		there []nvml.GPUInstance
		on    uint32 // the process's instance
		made  string
		is    bool
	}{
		"none":                       {at: at, on: 9, made: "Partition"},
		"the first":                  {at: at, there: []nvml.GPUInstance{instance(9, 19, 2, 1), others[0]}, on: 9, is: true},
		"the last":                   {at: at, there: []nvml.GPUInstance{others[1], instance(9, 19, 2, 1)}, on: 9, is: true},
		"it is there, and another":   {at: at, there: []nvml.GPUInstance{others[1], instance(9, 19, 2, 1)}, on: 2},
		"one of another profile":     {at: at, there: others[:1], on: 1, made: "Partition"},
		"one at another slice":       {at: at, there: others[1:2], on: 2, made: "Partition"},
		"one of another size":        {at: at, there: others[2:], on: 3, made: "Partition"},
		"all but its own":            {at: at, there: others, on: 3, made: "Partition"},
		"at the beginning, and none": {at: beginning, there: others, on: 2, made: "Partition"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			list, err := steps.Partition(&steps.Observed{Instances: tc.there}, &tc.at)
			if err != nil || kinds(list) != tc.made {
				t.Errorf("it is done: %q, %v; want %q", kinds(list), err, tc.made)
			}
			want := []ledger.Step{{Kind: ledger.StepPartition, Partition: &tc.at}}
			if diff := cmp.Diff(want, list, cmpopts.EquateEmpty()); tc.made != "" && diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
			process := nvml.Process{PID: 7, Instance: &nvml.Instance{GPU: tc.on}}
			if is := steps.IsIn(process, tc.there, &tc.at); is != tc.is {
				t.Errorf("a process of instance %d is in it: %v", tc.on, is)
			}
		})
	}
}
