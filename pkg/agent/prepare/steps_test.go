// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestEachFileThatIsMissingIsPutBack, and counted, whichever of a claim's it is.
func TestEachFileThatIsMissingIsPutBack(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	n.prepared(m, claim("train", "a="+gpu0, "b="+gpu1))
	metadata := filepath.Join(n.metadataDir(), "train-uid")
	specs, err := filepath.Glob(filepath.Join(n.cdiDir(), "*"))
	if err != nil || len(specs) != 1 {
		t.Fatalf("specifications %v, %v", specs, err)
	}
	for _, path := range []string{filepath.Join(metadata, "a.json"), filepath.Join(metadata, "b.json"), specs[0]} {
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		recovery, err := m.Reconcile(n.ctx)
		if err != nil || recovery.Restored != 1 {
			t.Errorf("without %s: recovery %+v, %v; want one restored", path, recovery, err)
		}
		if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
			t.Errorf("%s: %v, %s", path, err, after)
		}
	}
}

// TestWhatIsLeftByPolicyIsNotWaitedFor: nobody ends it.
func TestWhatIsLeftByPolicyIsNotWaitedFor(t *testing.T) {
	for device, left := range map[string]*nvmlsim.AddProcess{gpu0: process(70, "pod-1"), vm0: vm(70, "pod-1")} {
		synctest.Test(t, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			n.options.Leftovers, n.options.EndTimeout = prepare.QuarantineLeftovers, 20*time.Second
			m := n.manager()
			n.prepared(m, reservedFor(claim("train", result("gpu="+device)), "pod-1"))
			n.do(left)
			begun := time.Now()
			n.unprepare(m, "train-uid")
			if took := time.Since(begun); took > time.Second {
				t.Errorf("%s: it took %s", device, took)
			}
			if list, err := m.Quarantined(); err != nil || len(list) != 1 || list[0].GPU != gpu0 {
				t.Errorf("%s: in quarantine %+v, %v", device, list, err)
			}
		})
	}
}

// TestMIGModeThatIsOnIsNotSwitched: the GPU may refuse that by now.
func TestMIGModeThatIsOnIsNotSwitched(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.prepared(n.manager(), claim("first", "part="+gpu0+"-mig-1g10gb-0"))
	n.hardware.wrap = func(d nvml.Device) nvml.Device { return unchangeable{Device: d, mig: errors.New("in use")} }
	for place, name := range map[string]string{"1": "second", "2": "third"} {
		n.prepared(n.manager(), claim(name, result("part="+gpu0+"-mig-1g10gb-"+place)))
	}
}

// startedDaemons note as what daemons are started.
type startedDaemons struct {
	sharing.Daemons
	mu      sync.Mutex
	started map[string]sharing.MultiUser
}

func (d *startedDaemons) Start(ctx context.Context, daemon sharing.Daemon) error {
	d.mu.Lock()
	d.started[daemon.Name] = daemon.MultiUser
	d.mu.Unlock()
	return d.Daemons.Start(ctx, daemon)
}

// TestADaemonOfAnOlderAgentServesSeveralUsers, if it is one of shares: once it has died it is started by the record.
func TestADaemonOfAnOlderAgentServesSeveralUsers(t *testing.T) {
	for name, tc := range map[string]struct {
		recorded, whole, share sharing.MultiUser
	}{
		"recorded before there was a choice": {sharing.MultiUserNo, sharing.MultiUserNo, sharing.MultiUserIfPossible},
		"by default of shares":               {sharing.MultiUserIfPossible, sharing.MultiUserIfPossible, sharing.MultiUserIfPossible},
		"asked for":                          {sharing.MultiUserYes, sharing.MultiUserYes, sharing.MultiUserYes},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.rules.Shares = config.MPS
			daemons := &startedDaemons{Daemons: n.tools.Daemons, started: map[string]sharing.MultiUser{}}
			n.tools.Daemons = daemons
			m := n.manager()
			n.prepared(m, withConfig(claim("train", "gpu="+gpu1), driverName, underMPS))
			n.prepared(m, sharedBy("share", "20Gi:25", ""))
			for _, uid := range []types.UID{"train-uid", "share-uid"} {
				records, record := n.recordOf(uid)
				for i := range record.Entry.Undo {
					if record.Entry.Undo[i].Daemon != nil {
						record.Entry.Undo[i].Daemon.MultiUser = string(tc.recorded)
					}
				}
				if err := records.Put(record.Entry); err != nil {
					t.Fatal(err)
				}
			}
			n.do(&nvmlsim.StopMPS{Daemon: "train-uid"}, &nvmlsim.StopMPS{Daemon: gpu0})
			if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Restarted != 2 {
				t.Errorf("recovery %+v, %v; want two started again", recovery, err)
			}
			if diff := cmp.Diff(map[string]sharing.MultiUser{"train-uid": tc.whole, gpu0: tc.share}, daemons.started); diff != "" {
				t.Errorf("started (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAnOverrideOfAnAdministratorIsPutBack: one that is for the function's own driver.
func TestAnOverrideOfAnAdministratorIsPutBack(t *testing.T) {
	n := newNodeOf(t, withSound)
	if err := n.hardware.kernel.Write("bus/pci/devices/"+sound0+"/driver_override", "snd_hda_intel"); err != nil {
		t.Fatal(err)
	}
	before := n.driverOf(bus0) + " " + n.driverOf(sound0)
	n.prepared(n.manager(), claim("machine", "vm="+vm0))
	_, record := n.recordOf("machine-uid")
	want := []ledger.Step{
		{Kind: ledger.StepPCIDriver, GPU: gpu0, Target: bus0, Before: "nvidia", Want: "vfio-pci"},
		{Kind: ledger.StepPCIDriver, GPU: gpu0, Target: sound0, Before: "snd_hda_intel", Want: "vfio-pci", Override: "snd_hda_intel"},
	}
	of := slices.DeleteFunc(record.Entry.Undo, func(s ledger.Step) bool { return s.Kind != ledger.StepPCIDriver })
	if diff := cmp.Diff(want, of); diff != "" {
		t.Errorf("recorded (-want +got):\n%s", diff)
	}
	if got := n.driverOf(sound0); got != "vfio-pci/vfio-pci" {
		t.Errorf("for the machine it is with %s", got)
	}
	n.unprepare(n.manager(), "machine-uid")
	if got := n.driverOf(bus0) + " " + n.driverOf(sound0); got != before || !strings.HasSuffix(got, "/snd_hda_intel") {
		t.Errorf("the group is with %s, before %s", got, before)
	}
}

// TestNVMLIsClosedForFunctionsOfItsDriverAlone: all questions wait meanwhile. Two GPUs with two functions each.
func TestNVMLIsClosedForFunctionsOfItsDriverAlone(t *testing.T) {
	n := newNodeOf(t, withSound)
	n.prepared(n.manager(), claim("machine", "a="+vm0, result("b="+gpu1+"-vfio")))
	if got := n.hardware.aparts.Load(); got != 2 {
		t.Errorf("NVML was closed %d times, want twice", got)
	}
}

// TestPersistenceThatCannotBeSwitchedOffKeepsAGPUFromAMachine: NVIDIA's daemon would have it open.
func TestPersistenceThatCannotBeSwitchedOffKeepsAGPUFromAMachine(t *testing.T) {
	n := newNodeOf(t, withSound)
	n.do(&nvmlsim.Refuse{GPU: "0", Settings: []nvmlsim.Setting{nvmlsim.SettingPersistence}})
	m := n.manager()
	before := n.state()
	if _, err := m.Prepare(n.ctx, claim("machine", "vm="+vm0)); err == nil || !strings.Contains(err.Error(), "NoPersistence") {
		t.Errorf("error %v", err)
	}
	if diff := before.diff(n.state()); diff != "" {
		t.Errorf("(-before the claim +after it):\n%s", diff)
	}
	n.prepared(m, claim("machine", result("vm="+gpu1+"-vfio")))
}

// TestWhatABootDoesNotEndIsUndoneAfterIt: files, and what is left of daemons.
func TestWhatABootDoesNotEndIsUndoneAfterIt(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	daemons := &leftDaemons{Daemons: n.tools.Daemons}
	n.tools.Daemons = daemons
	m := n.manager()
	n.prepared(m, withConfig(claim("train", "gpu="+gpu0), driverName, underMPS))
	n.prepared(m, withConfig(claim("infer", "gpu="+gpu1), driverName, sharingConfig("GpuConfig", "Exclusive", "")))
	n.do(&nvmlsim.Reboot{}, &nvmlsim.SetComputeMode{GPU: "1", Mode: nvmlsim.ComputeProhibited}) // an administrator's, of this boot
	n.hardware.discover(t, dynamic)
	m = n.manager()
	n.unprepare(m, "train-uid")
	n.unprepare(m, "infer-uid")
	if left := n.files(); len(left) > 0 || !n.empty(n.metadataDir()) {
		t.Errorf("left: %v", left)
	}
	if diff := cmp.Diff([]string{"train-uid"}, daemons.stopped); diff != "" {
		t.Errorf("stopped (-want +got):\n%s", diff)
	}
	if got := n.gpu(1).ComputeMode; got != nvmlsim.ComputeProhibited {
		t.Errorf("compute mode %s", got)
	}
}

// TestAPartThatWasDividedAnewIsAnother: a compute instance is in its very place, and of that size.
func TestAPartThatWasDividedAnewIsAnother(t *testing.T) {
	for name, device := range map[string]string{"of another size": part0, "at another slice": part1} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.inParts(t)
			four := uint32(4)
			n.do(&nvmlsim.DestroyMIG{GPU: "0", Instance: 2}, &nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &four, Compute: []uint32{2, 1}})
			before := n.hardware.machine.State().GPUs
			_, err := n.manager().Prepare(n.ctx, claim("one", result("mig="+device)))
			if err == nil || !strings.Contains(err.Error(), "there is no MIG device 1c.3g.40gb at slice 4") {
				t.Errorf("error %v", err)
			}
			if diff := cmp.Diff(before, n.hardware.machine.State().GPUs, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("the agent has changed the GPU (-before +after):\n%s", diff)
			}
		})
	}
}

// TestAProcessOfAPartThatIsGoneIsNobodys: an administrator has taken the compute instances away under their claims.
func TestAProcessOfAPartThatIsGoneIsNobodys(t *testing.T) {
	n := newNode(t)
	n.inParts(t)
	m := n.manager()
	for name, device := range map[string]string{"one": part0, "two": part1} {
		n.prepared(m, reservedFor(claim(name, result("mig="+device)), types.UID("pod-"+name)))
	}
	instance := n.gpu(0).Instances[0].ID
	for compute, pod := range []string{"pod-one", "pod-two"} {
		n.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{
			PID: uint32(1 + compute), Kind: nvmlsim.ProcessCompute, Pod: pod, Instance: &nvmlsim.Instance{GPU: instance, Compute: uint32(compute)},
		}})
	}
	n.hardware.wrap = func(d nvml.Device) nvml.Device { return withoutParts{d} }
	for _, name := range []types.UID{"one-uid", "two-uid"} {
		n.unprepare(m, name)
	}
	if list, err := m.Quarantined(); err != nil || len(list) > 0 || !slices.Equal(n.pids(), []uint32{1, 2}) {
		t.Errorf("in quarantine %+v, %v; processes %v", list, err, n.pids())
	}
	if len(n.files()) > 0 {
		t.Errorf("left: %v", n.files())
	}
}
