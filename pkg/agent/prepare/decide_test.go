// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// kinds are the steps in short: "kind" or "kind before>want".
func kinds(steps []ledger.Step) string {
	var list []string
	for _, step := range steps {
		text := string(step.Kind)
		if step.Before != "" || step.Want != "" {
			text += " " + step.Before + ">" + step.Want
		}
		list = append(list, text)
	}
	return strings.Join(list, ", ")
}

// TestWhatIsDoneToAWholeGPU depends on how it is found and on what its settings ask for.
func TestWhatIsDoneToAWholeGPU(t *testing.T) {
	tests := map[string]struct {
		settings config.Settings
		found    steps.Observed
		want     string
		err      string
	}{
		"nothing, if it is as it should be": {found: steps.Observed{Persistence: new(true), Compute: new(nvml.ComputeDefault), UsedBytes: 7}, want: "Processes 7>"},
		"settings that it does not have":    {found: steps.Observed{}, want: "Processes 0>"},
		"persistence":                       {found: steps.Observed{Persistence: new(false)}, want: "Persistence, Processes 0>"},
		"a compute mode that was left":      {found: steps.Observed{Compute: new(nvml.ComputeExclusiveProcess)}, want: "ComputeMode Exclusive_Process>Default, Processes 0>"},
		"exclusive":                         {settings: config.Settings{Strategy: config.Exclusive}, found: steps.Observed{Compute: new(nvml.ComputeDefault)}, want: "ComputeMode Default>Exclusive_Process, Processes 0>"},
		"exclusive, and it is":              {settings: config.Settings{Strategy: config.Exclusive}, found: steps.Observed{Compute: new(nvml.ComputeExclusiveProcess)}, want: "Processes 0>"},
		"MPS":                               {settings: config.Settings{Strategy: config.MPS}, found: steps.Observed{Compute: new(nvml.ComputeDefault)}, want: "ComputeMode Default>Exclusive_Process, Processes 0>"},
		"exclusive, without compute modes":  {settings: config.Settings{Strategy: config.Exclusive}, err: `sharing.strategy: "Exclusive": the GPU has no compute modes`},
		"kept off by an administrator":      {found: steps.Observed{Compute: new(nvml.ComputeProhibited)}, err: "an administrator keeps everybody off"},
		"a mode that cannot be put back":    {found: steps.Observed{Compute: new(nvml.ComputeMode("Unknown1"))}, err: "compute mode is Unknown1"},
		"partitioned":                       {found: steps.Observed{MIG: nvml.MIGMode{Enabled: true}}, err: "MIG mode is enabled"},
		"a time slice": {
			settings: config.Settings{Strategy: config.TimeSlicing, Interval: config.IntervalLong}, found: steps.Observed{}, want: "TimeSlice >Long, Processes 0>",
		},
		"the default time slice": {settings: config.Settings{Strategy: config.TimeSlicing, Interval: config.IntervalDefault}, want: "Processes 0>"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			list, err := wholeSteps(tc.settings, &tc.found)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("error %v, want %q", err, tc.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, kinds(list)); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAGPUThatCannotWorkIsRefused(t *testing.T) {
	action := func(n uint32) nvml.Readings { return nvml.Readings{RecoveryAction: &n} }
	for name, tc := range map[string]struct {
		readings nvml.Readings
		err      string
	}{
		"nothing is known":                   {},
		"nothing is to be done":              {readings: action(0)},
		"a reset":                            {readings: action(1), err: "reset the GPU"},
		"the last that is known":             {readings: action(4), err: "drain and reset the GPU"},
		"one that is not known":              {readings: action(5), err: "action 5"},
		"it is slow, and has had its errors": {readings: nvml.Readings{PCIe: &nvml.PCIeLink{Width: 1, MaxWidth: 16}, ECC: &nvml.ECCErrors{Uncorrected: 3}, Rows: &nvml.RemappedRows{Pending: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			err := checkCondition(t.Context(), "gpu-0", &tc.readings)
			if (err != nil) != (tc.err != "") || err != nil && !strings.HasSuffix(err.Error(), ": "+tc.err) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
		})
	}
}

// processes are the pods of processes; those that are missing have ended, and the error is for PID 666.
type processes map[uint32]types.UID

var errUnreadable = errors.New("unreadable")

func (p processes) PodOf(pid uint32) (types.UID, error) {
	pod, ok := p[pid]
	switch {
	case pid == 666:
		return "", errUnreadable
	case !ok:
		return "", sharing.ErrNoProcess
	}
	return pod, nil
}

func (processes) NameOf(uint32) (string, error) { return "", errUnreadable }

func (processes) DaemonOf(uint32) (string, error) { return "", errUnreadable }

func (processes) End(uint32, types.UID) error { return errors.New("not to be ended") }

// deciding has a ledger with these entries, and these processes.
func deciding(t *testing.T, known processes, entries ...*ledger.Entry) *decider {
	t.Helper()
	claims, err := ledger.Open(durable.OS{}, filepath.Join(t.TempDir(), "claims"))
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if err := claims.Put(entry); err != nil {
			t.Fatal(err)
		}
	}
	return &decider{holders: &holders{ledger: claims}, processes: known, quarantines: quarantines{fs: durable.OS{}, dir: t.TempDir()}}
}

// held is an entry of a claim with one device of a GPU.
func held(claim types.UID, bootID, gpu string, steps ...ledger.Step) *ledger.Entry {
	return &ledger.Entry{
		Claim: ledger.Claim{UID: claim, Namespace: "default", Name: string(claim)}, State: ledger.PrepareCompleted, BootID: bootID,
		Devices: []ledger.Device{{Request: "gpu", Device: gpu, GPU: gpu, UUID: "GPU-1"}}, Undo: steps, Pods: []types.UID{"pod-of-" + claim},
	}
}

// TestWhoMayBeOnAGPU: a process of a pod that has no claim for it keeps everybody else off.
func TestWhoMayBeOnAGPU(t *testing.T) {
	known := processes{1: "", 2: "pod-of-mine", 3: "pod-of-admin", 4: "stranger"}
	admin := held("admin", "boot", "gpu-0")
	admin.Devices[0].AdminAccess = true
	elsewhere := held("elsewhere", "boot", "gpu-1")
	elsewhere.Devices[0].AdminAccess = true
	holder := held("holder", "boot", "gpu-0") // without admin access it is no reason
	place := &ledger.Partition{ProfileID: 19, Start: 2, Size: 1}
	instance := nvml.GPUInstance{ID: 9, ProfileID: 19, Placement: nvml.Placement{Start: 2, Size: 1}}
	tests := map[string]struct {
		pids []uint32
		on   *nvml.Instance
		part *ledger.Partition
		err  string
	}{
		"nobody":                               {},
		"the host":                             {pids: []uint32{1}},
		"its own pod":                          {pids: []uint32{2}},
		"a pod with admin access":              {pids: []uint32{3, 3}},
		"one that has ended":                   {pids: []uint32{5}},
		"a stranger":                           {pids: []uint32{1, 2, 3, 4}, err: "claim default/mine (mine): GPU gpu-0 is in use by a process of another pod"},
		"one that cannot be known":             {pids: []uint32{666}, err: "who uses GPU gpu-0: unreadable"},
		"a stranger on its partition":          {pids: []uint32{4}, on: &nvml.Instance{GPU: 9}, part: place, err: "is in use by a process of another pod"},
		"a stranger on another partition":      {pids: []uint32{4}, on: &nvml.Instance{GPU: 8}, part: place},
		"a stranger on no partition, of all":   {pids: []uint32{4}, part: place},
		"a stranger on a partition of the GPU": {pids: []uint32{4}, on: &nvml.Instance{GPU: 8}, err: "is in use by a process of another pod"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			d := deciding(t, known, admin, elsewhere, holder)
			entry := held("mine", "boot", "gpu-0")
			entry.Devices[0].Partition = tc.part
			now := &steps.Observed{Instances: []nvml.GPUInstance{instance}}
			for _, pid := range tc.pids {
				now.Processes = append(now.Processes, nvml.Process{PID: pid, Instance: tc.on})
			}
			err := d.checkProcesses(&job{entry: entry}, "gpu-0", now)
			if (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
			// A device of another GPU, and one that is only looked at, are not concerned.
			for _, change := range []func(*ledger.Device){func(d *ledger.Device) { d.GPU = "gpu-7" }, func(d *ledger.Device) { d.AdminAccess = true }} {
				other := held("mine", "boot", "gpu-0")
				change(&other.Devices[0])
				if err := d.checkProcesses(&job{entry: other}, "gpu-0", now); err != nil {
					t.Errorf("a device that is not concerned: %v", err)
				}
			}
		})
	}
	for _, admins := range []string{"pod-of-elsewhere", "pod-of-holder"} {
		d := deciding(t, processes{6: types.UID(admins)}, elsewhere, holder)
		var busy *BusyError
		now := &steps.Observed{Processes: []nvml.Process{{PID: 6}}}
		if err := d.checkProcesses(&job{entry: held("mine", "boot", "gpu-0")}, "gpu-0", now); !errors.As(err, &busy) || busy.PID != 6 {
			t.Errorf("%s, which has no admin access to this GPU: %v", admins, err)
		}
	}
}

// TestWhoSwitchedMIGOn: only claims that have done so since the last boot give it back.
func TestWhoSwitchedMIGOn(t *testing.T) {
	mode := ledger.Step{Kind: ledger.StepMIGMode, Target: "GPU-1", GPU: "gpu-0"}
	place := &ledger.Partition{Profile: "1g.10gb", ProfileID: 19, Start: 2, Size: 1}
	tests := map[string]struct {
		holder   *ledger.Entry
		enabled  bool
		switches bool
		want     string
		err      string
	}{
		"it is off":                             {holder: held("x", "boot", "gpu-1"), switches: true, want: "MIGMode, Partition, Processes"},
		"it is off, and needs a reset":          {holder: held("x", "boot", "gpu-1"), err: "can only be enabled with a reset"},
		"an administrator has":                  {holder: held("x", "boot", "gpu-0"), enabled: true, want: "Partition, Processes"},
		"another claim has":                     {holder: held("x", "boot", "gpu-0", ledger.Step{Kind: ledger.StepCDIFile}, mode), enabled: true, want: "MIGMode, Partition, Processes"},
		"another claim has, before a reboot":    {holder: held("x", "earlier", "gpu-0", mode), enabled: true, want: "Partition, Processes"},
		"another claim has, on another GPU":     {holder: held("x", "boot", "gpu-0", ledger.Step{Kind: ledger.StepMIGMode, GPU: "gpu-1"}), enabled: true, want: "Partition, Processes"},
		"another claim has something else":      {holder: held("x", "boot", "gpu-0", ledger.Step{Kind: ledger.StepPersistence, GPU: "gpu-0"}), enabled: true, want: "Partition, Processes"},
		"another claim, which does not need to": {holder: held("x", "boot", "gpu-0", mode), enabled: true, switches: true, want: "MIGMode, Partition, Processes"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			d := deciding(t, nil, tc.holder)
			entry := held("mine", "boot", "gpu-0")
			entry.Devices[0].Partition = place
			j := &job{entry: entry, targets: []Target{{Partition: place, SwitchesMIG: tc.switches}}, settings: make([]config.Settings, 1)}
			list, err := d.stepsOn(j, "gpu-0", []int{0}, &steps.Observed{MIG: nvml.MIGMode{Capable: true, Enabled: tc.enabled}})
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("error %v, want %q", err, tc.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, kinds(list)); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
		})
	}
}
