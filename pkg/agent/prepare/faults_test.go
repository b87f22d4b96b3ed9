// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// askedDaemons answer otherwise whether a daemon is ready, and fail to stop or to say whether they run.
type askedDaemons struct {
	sharing.Daemons
	mu      sync.Mutex
	asked   int
	ready   func(nth int) (is bool, err error, known bool)
	started []string
	runs    error
	stops   error
}

func (d *askedDaemons) Ready(ctx context.Context, daemon sharing.Daemon) (bool, error) {
	d.mu.Lock()
	d.asked++
	is, err, known := d.ready(d.asked)
	d.mu.Unlock()
	if known {
		return is, err
	}
	return d.Daemons.Ready(ctx, daemon)
}

func (d *askedDaemons) Start(ctx context.Context, daemon sharing.Daemon) error {
	d.mu.Lock()
	d.started = append(d.started, daemon.Name)
	d.mu.Unlock()
	return d.Daemons.Start(ctx, daemon)
}

func (d *askedDaemons) Running(ctx context.Context, name string) (bool, error) {
	if d.runs != nil {
		return false, d.runs
	}
	return d.Daemons.Running(ctx, name)
}

func (d *askedDaemons) Stop(ctx context.Context, name string) error {
	return errors.Join(d.stops, d.Daemons.Stop(ctx, name))
}

func (d *askedDaemons) List() ([]string, error) {
	names, err := d.Daemons.List()
	return append(names, "lost-uid"), err
}

// TestADaemonIsStartedAgainOnce: it is looked at once more under the locks of its GPUs, as another agent may have started it meanwhile.
func TestADaemonIsStartedAgainOnce(t *testing.T) {
	unsure := errors.New("systemd does not answer")
	tests := map[string]struct {
		ready     func(nth int) (is bool, err error, known bool)
		started   []string
		restarted int
		want      error
	}{
		"it has ended":                 {ready: func(int) (bool, error, bool) { return false, nil, false }, started: []string{"train-uid"}, restarted: 1},
		"it runs":                      {ready: func(int) (bool, error, bool) { return true, nil, true }},
		"it is not known":              {ready: func(int) (bool, error, bool) { return false, unsure, true }, want: unsure},
		"somebody starts it meanwhile": {ready: func(nth int) (bool, error, bool) { return nth == 2, nil, true }},
		"then it is not known": {
			ready: func(nth int) (bool, error, bool) {
				if nth == 2 {
					return false, unsure, true
				}
				return false, nil, true
			},
			want: unsure,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			daemons := &askedDaemons{Daemons: n.tools.Daemons, ready: tc.ready}
			n.tools.Daemons = daemons
			m := n.manager()
			n.prepared(m, withConfig(claim("train", "gpu="+gpu0), driverName, underMPS))
			n.prepared(m, claim("beside", "gpu="+gpu1))
			n.do(&nvmlsim.StopMPS{Daemon: "train-uid"})
			daemons.started = nil
			recovery, err := m.Reconcile(n.ctx)
			if !errors.Is(err, tc.want) || recovery.Restarted != tc.restarted || recovery.Claims != 2 {
				t.Errorf("recovery %+v, %v; want %d started again, and error %v", recovery, err, tc.restarted, tc.want)
			}
			if diff := cmp.Diff(tc.started, daemons.started); diff != "" {
				t.Errorf("started (-want +got):\n%s", diff)
			}
		})
	}
}

// TestADaemonOfAClaimThatGoesIsNotStartedAgain: it was being unprepared, and its record could not be removed.
func TestADaemonOfAClaimThatGoesIsNotStartedAgain(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	stuck := &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
	daemons := &askedDaemons{Daemons: stuck, ready: func(int) (bool, error, bool) { return false, nil, false }}
	n.tools.Daemons = daemons
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(n.manager(), withConfig(claim(name, result("gpu="+gpu)), driverName, underMPS))
	}
	n.fsys = keptRecords{n.disk}
	if err := n.manager().Unprepare(n.ctx, "train-uid"); err == nil {
		t.Fatal("the record could not be removed, and there is no error")
	}
	n.fsys = n.disk
	n.do(&nvmlsim.StopMPS{Daemon: "train-uid"}, &nvmlsim.StopMPS{Daemon: "infer-uid"})
	daemons.started = nil
	recovery, err := n.manager().Reconcile(n.ctx)
	if err != nil || recovery.Restarted != 1 || !slices.Equal(daemons.started, []string{"infer-uid"}) {
		t.Errorf("recovery %+v, %v, started %v; want the other claim's alone", recovery, err, daemons.started)
	}
}

// TestWhatIsLeftOfADaemonIsNotForgotten: what cannot be found out or done is told, and done by the next start.
func TestWhatIsLeftOfADaemonIsNotForgotten(t *testing.T) {
	for name, fails := range map[string]func(d *askedDaemons, err error){
		"whether it runs": func(d *askedDaemons, err error) { d.runs = err },
		"to end it":       func(d *askedDaemons, err error) { d.stops = err },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			daemons := &askedDaemons{Daemons: n.tools.Daemons}
			n.tools.Daemons = daemons
			want := errors.New("systemd does not answer")
			fails(daemons, want)
			if err := recovered(n, n.manager()); !errors.Is(err, want) {
				t.Errorf("error %v, want %v", err, want)
			}
			fails(daemons, nil)
			if err := recovered(n, n.manager()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestWhatAQuarantineHasOfADaemonStays at the start: it is what is owed, or may be if that cannot be read.
func TestWhatAQuarantineHasOfADaemonStays(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	stuck := &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
	n.tools.Daemons = stuck
	n.prepared(n.manager(), withConfig(claim("owed", "gpu="+gpu0), driverName, underMPS))
	n.unprepare(n.manager(), "owed-uid")
	daemons := &leftDaemons{Daemons: n.tools.Daemons, left: []string{"unread-uid", gpu1, "owed-uid", "lost-uid", gpu0}}
	n.tools.Daemons = daemons
	n.write(n.quarantineDir()+"/"+gpu1+"_unread-uid.quarantine", "{")
	daemons.fails = errors.New("it does not end")
	if err := recovered(n, n.manager()); err == nil || strings.Contains(err.Error(), "owed-uid") || strings.Contains(err.Error(), gpu1) || strings.Contains(err.Error(), "unread-uid") {
		t.Errorf("error %v, want one of lost-uid and %s alone", err, gpu0)
	}
	daemons.fails, stuck.stuck = nil, false
	if err := recovered(n, n.manager()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"unread-uid", gpu1} {
		if slices.Contains(daemons.stopped, name) {
			t.Errorf("stopped %v, and %s may be owed", daemons.stopped, name)
		}
	}
	for _, name := range []string{"lost-uid", gpu0} {
		if !slices.Contains(daemons.stopped, name) {
			t.Errorf("stopped %v, want %s in it", daemons.stopped, name)
		}
	}
}

// knownProcesses say of some what they are asked, and fail to end some. They count what fails.
type knownProcesses struct {
	sharing.Processes
	gone, unknown, kept uint32
	failed              *int
}

func (p knownProcesses) PodOf(pid uint32) (types.UID, error) {
	switch pid {
	case p.gone:
		return "", fmt.Errorf("process %d: %w", pid, sharing.ErrNoProcess)
	case p.unknown:
		*p.failed++
		return "", fmt.Errorf("process %d: %w", pid, errReading)
	}
	return p.Processes.PodOf(pid)
}

func (p knownProcesses) End(pid uint32, pod types.UID) error {
	if pid == p.kept {
		*p.failed++
		return fmt.Errorf("process %d: no permission", pid)
	}
	return p.Processes.End(pid, pod)
}

// TestProcessesOfWhichNothingIsToldOrThatCannotBeEnded when a claim is unprepared: on a GPU of the host, and with one that a virtual machine has. One
// that has just ended is none. What fails is not tried again in the same call.
func TestProcessesOfWhichNothingIsToldOrThatCannotBeEnded(t *testing.T) {
	tests := map[string]struct {
		processes     knownProcesses
		host, machine string // in the reason; empty: the GPU is free
		failed        int
	}{
		"one has just ended":         {processes: knownProcesses{gone: 70}, machine: "is open in process 70"},
		"whose one is, is unknown":   {processes: knownProcesses{unknown: 70}, host: errReading.Error(), machine: "is open in process 70", failed: 1},
		"one of two cannot be ended": {processes: knownProcesses{kept: 71}, host: "is still on it, and cannot be ended: process 71: no permission", machine: ", and cannot be ended: process 71: no permission", failed: 1},
	}
	for name, tc := range tests {
		for device, want := range map[string]string{gpu0: tc.host, vm0: tc.machine} {
			t.Run(name+"/"+device, func(t *testing.T) {
				n := newNodeOf(t, withSound)
				n.options.EndTimeout = 200 * time.Millisecond // what does not end is waited for in vain
				failed, processes := 0, tc.processes
				processes.Processes, processes.failed = n.tools.Processes, &failed
				n.tools.Processes = processes
				m := n.manager()
				n.prepared(m, reservedFor(claim("train", result("gpu="+device)), "pod-1"))
				add := process
				if device == vm0 {
					add = vm
				}
				n.do(add(70, "pod-1"), add(71, "pod-1"))
				n.unprepare(m, "train-uid")
				list, err := m.Quarantined()
				if err != nil || (len(list) > 0) != (want != "") || want != "" && !strings.Contains(list[0].Reason, want) || failed != tc.failed {
					t.Errorf("in quarantine: %+v, %v, want %q; %d failed, want %d", list, err, want, failed, tc.failed)
				}
			})
		}
	}
}

// answers are what a GPU says instead of what it would; nil is what it would.
type answers struct {
	nvml.Device
	compute     func() (nvml.ComputeMode, error)
	persistence func() (bool, error)
	address     func() (string, error)
	instances   func([]nvml.GPUInstance, error) ([]nvml.GPUInstance, error)
}

func (a answers) ComputeMode() (nvml.ComputeMode, error) {
	if a.compute != nil {
		return a.compute()
	}
	return a.Device.ComputeMode()
}

func (a answers) Persistence() (bool, error) {
	if a.persistence != nil {
		return a.persistence()
	}
	return a.Device.Persistence()
}

func (a answers) PCIBusID() (string, error) {
	if a.address != nil {
		return a.address()
	}
	return a.Device.PCIBusID()
}

func (a answers) GPUInstances() ([]nvml.GPUInstance, error) {
	if a.instances != nil {
		return a.instances(a.Device.GPUInstances())
	}
	return a.Device.GPUInstances()
}

// TestAGPUWithoutASetting is used as it is, and refused to a claim that needs the setting.
func TestAGPUWithoutASetting(t *testing.T) {
	noCompute := answers{compute: func() (nvml.ComputeMode, error) { return "", nvml.ErrNotSupported }}
	noPersistence := answers{persistence: func() (bool, error) { return false, nvml.ErrNotSupported }}
	off := answers{persistence: func() (bool, error) { return false, nil }}
	strange := answers{compute: func() (nvml.ComputeMode, error) { return "Tenfold", nil }}
	exclusive := func(device string) *resourceapi.ResourceClaim {
		return withConfig(claim("train", result("gpu="+device)), driverName, sharingConfig("GpuConfig", "Exclusive", ""))
	}
	plain := func(device string) *resourceapi.ResourceClaim { return claim("train", result("gpu="+device)) }
	tests := map[string]struct {
		answers answers
		claim   *resourceapi.ResourceClaim
		want    string // in the error; empty: it is prepared
		steps   string // on the GPU
	}{
		"no compute mode":                         {answers: noCompute, claim: plain(gpu0), steps: "Processes "},
		"no compute mode, for exclusive use":      {answers: noCompute, claim: exclusive(gpu0), want: "the GPU has no compute modes"},
		"no compute mode, for a virtual machine":  {answers: noCompute, claim: plain(vm0), steps: "NoPersistence Hidden PCIDriver PCIDriver IOMMUGroup "},
		"persistence is off, for a machine":       {answers: off, claim: plain(vm0), steps: "Hidden PCIDriver PCIDriver IOMMUGroup "},
		"no persistence":                          {answers: noPersistence, claim: exclusive(gpu0), steps: "ComputeMode Processes "},
		"no persistence, for a virtual machine":   {answers: noPersistence, claim: plain(vm0), steps: "Hidden PCIDriver PCIDriver IOMMUGroup "},
		"a mode that is not known":                {answers: strange, claim: plain(gpu0), want: "compute mode is Tenfold, which this agent could not put back"},
		"a mode that is not known, for a machine": {answers: strange, claim: plain(vm0), want: "compute mode is Tenfold, which this agent could not put back"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			m := n.manager()
			before := n.state()
			n.hardware.wrap = func(d nvml.Device) nvml.Device {
				a := tc.answers
				a.Device = d
				return a
			}
			_, err := m.Prepare(n.ctx, tc.claim)
			if tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("error %v, want %q", err, tc.want)
				}
			} else {
				if err != nil {
					t.Fatal(err)
				}
				_, record := n.recordOf("train-uid")
				steps := ""
				for _, step := range record.Entry.Undo {
					if step.GPU != "" {
						steps += string(step.Kind) + " "
					}
				}
				if steps != tc.steps {
					t.Errorf("steps %q, want %q", steps, tc.steps)
				}
				n.unprepare(m, "train-uid")
			}
			if tc.answers.persistence != nil { // the machine has it all the same, and the driver forgets it when a GPU leaves
				before.GPUs[0].Persistence = n.gpu(0).Persistence
			}
			if diff := before.diff(n.state()); diff != "" {
				t.Errorf("(-before the claim +after it):\n%s", diff)
			}
		})
	}
}

// failingBackend does not know what a container needs: of all GPUs, or of one.
type failingBackend struct {
	cdi.Backend
	common, gpu error
}

func (b failingBackend) CommonEdits(ctx context.Context) (*specs.ContainerEdits, error) {
	if b.common != nil {
		return nil, b.common
	}
	return b.Backend.CommonEdits(ctx)
}

func (b failingBackend) GPUEdits(ctx context.Context, gpu cdi.GPU) (*specs.ContainerEdits, error) {
	if b.gpu != nil {
		return nil, b.gpu
	}
	return b.Backend.GPUEdits(ctx, gpu)
}

// unchangeable is a GPU of which MIG mode or instances cannot be changed.
type unchangeable struct {
	nvml.Device
	mig, instances error
}

func (d unchangeable) SetMIGMode(on bool) error {
	if d.mig != nil {
		return d.mig
	}
	return d.Device.SetMIGMode(on)
}

func (d unchangeable) CreateGPUInstance(profile nvml.MIGProfile, at nvml.Placement) (uint32, error) {
	if d.instances != nil {
		return 0, d.instances
	}
	return d.Device.CreateGPUInstance(profile, at)
}

// TestAPreparationThatFailsLeavesNothing, whatever fails late: the claim's error says what, and the GPUs are as they were.
func TestAPreparationThatFailsLeavesNothing(t *testing.T) {
	lost := errors.New("no answer")
	limits := func(limit string) string { return sharingConfig("MigDeviceConfig", "MPS", `,"mpsConfig":{`+limit+`}`) }
	part := func() *resourceapi.ResourceClaim { return claim("train", "part="+gpu0+"-mig-1g10gb-0") }
	tests := map[string]struct {
		claim *resourceapi.ResourceClaim
		spoil func(n *node)
		want  string
	}{
		"what containers need": {
			claim: claim("train", "gpu="+gpu0, "more="+gpu1), want: lost.Error(),
			spoil: func(n *node) {
				n.backend = func(b cdi.Backend) cdi.Backend { return failingBackend{Backend: b, common: lost} }
			},
		},
		"what containers need of a GPU": {
			claim: claim("train", "gpu="+gpu0, "more="+gpu1), want: lost.Error(),
			spoil: func(n *node) {
				n.backend = func(b cdi.Backend) cdi.Backend { return failingBackend{Backend: b, gpu: lost} }
			},
		},
		"where the GPU is": {
			claim: withConfig(claim("train", "gpu="+gpu0), driverName, longSlices), want: lost.Error(),
			spoil: func(n *node) {
				n.hardware.wrap = func(d nvml.Device) nvml.Device {
					return answers{Device: d, address: func() (string, error) { return "", lost }}
				}
			},
		},
		"what was made, for its daemon": {
			claim: withConfig(part(), driverName, limits("")), want: lost.Error(),
			spoil: func(n *node) {
				made := false // it is asked for once, and then there is no answer
				n.hardware.wrap = func(d nvml.Device) nvml.Device {
					return answers{Device: d, instances: func(list []nvml.GPUInstance, err error) ([]nvml.GPUInstance, error) {
						if len(list) > 0 && !made {
							made = true
							return nil, lost
						}
						return list, err
					}}
				}
			},
		},
		"to switch MIG mode on": {
			claim: part(), want: lost.Error(),
			spoil: func(n *node) {
				n.hardware.wrap = func(d nvml.Device) nvml.Device { return unchangeable{Device: d, mig: lost} }
			},
		},
		"to make an instance": {
			claim: part(), want: lost.Error(),
			spoil: func(n *node) {
				n.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
				n.hardware.discover(n.t.(*testing.T), dynamic)
				n.hardware.wrap = func(d nvml.Device) nvml.Device { return unchangeable{Device: d, instances: lost} }
			},
		},
		"a limit for a device that there is not": {
			claim: withConfig(part(), driverName, limits(`"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}`)), want: "request part: ",
		},
		"a limit for a device that there is not, of whole GPUs": {
			claim: withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}`)),
			want:  "request gpu: ",
		},
		"a daemon for a part and a GPU": {
			claim: func() *resourceapi.ResourceClaim {
				c := withConfig(withConfig(claim("train", "part="+gpu0+"-mig-1g10gb-0", "gpu="+gpu1), driverName, limits("")), driverName, underMPS)
				c.Status.Allocation.Devices.Config[0].Requests = []string{"part"}
				c.Status.Allocation.Devices.Config[1].Requests = []string{"gpu"}
				return c
			}(),
			want: "an MPS daemon serves one MIG device alone, and the claim has 2 devices for it",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			if _, err := n.tryManager(); err != nil { // the folders are part of the state before
				t.Fatal(err)
			}
			if tc.spoil != nil {
				tc.spoil(n)
			}
			before := n.state()
			if _, err := n.manager().Prepare(n.ctx, tc.claim); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
			if diff := before.diff(n.state()); diff != "" {
				t.Errorf("(-before the claim +after it):\n%s", diff)
			}
		})
	}
}

// TestAnAgentLeavesStepsThatItDoesNotKnow to a newer one: the GPU, or what is on no GPU, stays held.
func TestAnAgentLeavesStepsThatItDoesNotKnow(t *testing.T) {
	for name, gpu := range map[string]string{"on a GPU": gpu0, "on a GPU, before a reboot": gpu0, "elsewhere": ""} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			m := n.manager()
			n.prepared(m, claim("train", "gpu="+gpu0))
			n.prepared(m, claim("beside", "gpu="+gpu1))
			records, record := n.recordOf("train-uid")
			record.Entry.Undo = append([]ledger.Step{{Kind: "Telepathy", GPU: gpu}}, record.Entry.Undo...)
			if err := records.Put(record.Entry); err != nil {
				t.Fatal(err)
			}
			const unknown = "this agent does not know this kind of step"
			if strings.HasSuffix(name, "a reboot") {
				n.do(&nvmlsim.Reboot{})
				n.hardware.discover(t, dynamic)
			} else if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); err == nil || !strings.Contains(err.Error(), unknown) {
				t.Errorf("prepare: %v", err)
			}
			err := m.Unprepare(n.ctx, "train-uid")
			list, listErr := m.Quarantined()
			if listErr != nil {
				t.Fatal(listErr)
			}
			if gpu == "" {
				if err == nil || !strings.Contains(err.Error(), unknown) || len(list) > 0 || !n.recorded("train-uid") {
					t.Errorf("unprepare: %v, in quarantine %+v", err, list)
				}
				return
			}
			if err != nil || len(list) != 1 || !strings.Contains(list[0].Reason, unknown) || n.recorded("train-uid") {
				t.Errorf("unprepare: %v, in quarantine %+v", err, list)
			}
		})
	}
}

// goneInstances are removed by somebody else at the same time.
type goneInstances struct{ nvml.Device }

func (d goneInstances) DestroyComputeInstance(instance, compute uint32) error {
	return errors.Join(d.Device.DestroyComputeInstance(instance, compute), nvml.ErrNotFound)
}

func (d goneInstances) DestroyGPUInstance(instance uint32) error {
	return errors.Join(d.Device.DestroyGPUInstance(instance), nvml.ErrNotFound)
}

// TestAnInstanceThatSomebodyElseRemovesIsGone, and no debt.
func TestAnInstanceThatSomebodyElseRemovesIsGone(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	before := n.state()
	n.prepared(m, claim("train", "part="+gpu0+"-mig-1g10gb-0", "more="+gpu0+"-mig-1g10gb-1"))
	n.hardware.wrap = func(d nvml.Device) nvml.Device { return goneInstances{d} }
	n.unprepare(m, "train-uid")
	if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("(-before the claim +after it):\n%s", diff)
	}
}

// TestAClaimIsNotUnpreparedUnderAnInvalidName: nothing can have been prepared under it.
func TestAClaimIsNotUnpreparedUnderAnInvalidName(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	n.prepared(m, claim("train", "gpu="+gpu0))
	for _, uid := range []types.UID{"", "../train-uid", "train-uid_" + gpu0} {
		if done, err := m.UnprepareUnused(n.ctx, &ledger.Entry{Claim: ledger.Claim{UID: uid}}); done || err != nil {
			t.Errorf("claim %q: done %v, %v", uid, done, err)
		}
		if done, err := m.Release(n.ctx, uid, true, unused); err == nil || len(done.Did) > 0 {
			t.Errorf("claim %q is released: %+v, %v", uid, done, err)
		}
	}
	if !n.recorded("train-uid") {
		t.Error("another claim is unprepared")
	}
}
