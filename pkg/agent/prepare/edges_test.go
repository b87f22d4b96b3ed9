// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestAWaitIsToldOnce, however many have to go.
func TestAWaitIsToldOnce(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	plain := n.manager()
	for _, name := range []string{"one", "two"} {
		n.prepared(plain, sharedBy(name, "30Gi:40", ""))
	}
	var told atomic.Int32
	n.options.Waiting = func(*resourceapi.ResourceClaim, error) {
		told.Add(1)
		n.unprepare(plain, "one-uid")
	}
	n.options.UseOf = func(_ context.Context, held *ledger.Entry) prepare.Use {
		if held.Claim.UID == "two-uid" { // it is asked for once the first one is gone
			n.unprepare(plain, "two-uid")
		}
		return ending
	}
	err := returned(t, "prepare", func() error {
		_, err := n.manager().Prepare(n.ctx, sharedBy("next", "60Gi:90", ""))
		return err
	})
	if err != nil || told.Load() != 1 {
		t.Errorf("told %d times, error %v", told.Load(), err)
	}
}

// TestTheFirstOfTwoRefusalsIsTold: it is what its user mends first, and the next try tells the other one.
func TestTheFirstOfTwoRefusalsIsTold(t *testing.T) {
	for _, requests := range [][2]string{{"a", "b"}, {"b", "a"}} {
		n := newNodeOf(t, twoGPUs)
		n.rules.Allowed = nil
		c := fromClaim(withConfig(claim("train", result(requests[0]+"="+gpu0), result(requests[1]+"="+gpu1)), driverName, underMPS))
		_, err := n.manager().Prepare(n.ctx, c)
		if err == nil || !strings.Contains(err.Error(), "request "+requests[0]) || strings.Contains(err.Error(), "request "+requests[1]) {
			t.Errorf("error %v, want one about request %s", err, requests[0])
		}
	}
}

// TestAnOverrideThatWasLeftIsNotPutBack: somebody gave the function to vfio-pci and did not finish, so that its driver has it still.
func TestAnOverrideThatWasLeftIsNotPutBack(t *testing.T) {
	n := newNodeOf(t, withSound)
	if err := n.hardware.kernel.Write("bus/pci/devices/"+sound0+"/driver_override", "vfio-pci"); err != nil {
		t.Fatal(err)
	}
	m := n.manager()
	for range 2 {
		n.prepared(m, claim("machine", "vm="+vm0))
		n.unprepare(m, "machine-uid")
		if got := n.driverOf(bus0) + " " + n.driverOf(sound0); got != "nvidia/ snd_hda_intel/" {
			t.Errorf("the group is with %s", got)
		}
	}
}

// settingsOf notes what compute modes are set, by GPU.
type settingsOf struct {
	nvml.Device
	mu  *sync.Mutex
	set map[int][]nvml.ComputeMode
}

func (d settingsOf) SetComputeMode(mode nvml.ComputeMode) error {
	minor, err := d.MinorNumber()
	d.mu.Lock()
	d.set[minor] = append(d.set[minor], mode)
	d.mu.Unlock()
	return errors.Join(err, d.Device.SetComputeMode(mode))
}

// TestTwoGPUsArePassedThroughEachWithItsOwnState: the second one is prepared for it when the first one has left already.
func TestTwoGPUsArePassedThroughEachWithItsOwnState(t *testing.T) {
	n := newNodeOf(t, withSound)
	n.do(&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess}, &nvmlsim.SetComputeMode{GPU: "1", Mode: nvmlsim.ComputeExclusiveProcess})
	before := n.state()
	seen := settingsOf{mu: &sync.Mutex{}, set: map[int][]nvml.ComputeMode{}}
	n.hardware.wrap = func(d nvml.Device) nvml.Device { return settingsOf{d, seen.mu, seen.set} }
	m := n.manager()
	n.prepared(m, claim("machine", "a="+vm0, result("b="+gpu1+"-vfio")))
	want := map[int][]nvml.ComputeMode{0: {nvml.ComputeDefault}, 1: {nvml.ComputeDefault}}
	if diff := cmp.Diff(want, seen.set); diff != "" {
		t.Errorf("set before they leave (-want +got):\n%s", diff)
	}
	n.unprepare(m, "machine-uid")
	if diff := before.diff(n.state()); diff != "" {
		t.Errorf("(-before the claim +after it):\n%s", diff)
	}
}

// TestMemoryThatTheDriverKeepsIsNoDebt: 256 MiB, and not one more.
func TestMemoryThatTheDriverKeepsIsNoDebt(t *testing.T) {
	for memory, want := range map[uint64]int{256: 0, 257: 1} {
		t.Run(fmt.Sprint(memory, " MiB"), func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.options.EndTimeout = 50 * time.Millisecond // what is not freed is waited for in vain
			m := n.manager()
			bothPrepared(n, m)
			n.do(&nvmlsim.LeakMemory{GPU: "0", MemoryMiB: memory})
			n.unprepare(m, "train-uid")
			n.unprepare(m, "infer-uid")
			if list, err := m.Quarantined(); err != nil || len(list) != want {
				t.Errorf("in quarantine %+v, %v, want %d", list, err, want)
			}
		})
	}
}

// TestADaemonIsOnlyRefusedForItsOwnDebt: not for that of another claim, and not for what cannot be read.
func TestADaemonIsOnlyRefusedForItsOwnDebt(t *testing.T) {
	n := newNode(t)
	stuck := &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
	n.tools.Daemons = stuck
	m := n.manager()
	n.prepared(m, withConfig(claim("other", "gpu="+gpu1), driverName, underMPS))
	n.unprepare(m, "other-uid")
	n.write(n.quarantineDir()+"/"+gpu2+"_torn-uid.quarantine", "{")
	n.prepared(m, withConfig(claim("train", "gpu="+gpu0), driverName, underMPS))
	n.unprepare(m, "train-uid")
	stuck.stuck = false
	offers := n.offers()
	free := offers[len(offers)-1]
	var quarantined *prepare.QuarantinedError
	again := withConfig(claim("train", result("gpu="+free[:len(gpu0)])), driverName, underMPS)
	_, err := m.Prepare(n.ctx, again)
	if !errors.As(err, &quarantined) || quarantined.GPU != gpu0 {
		t.Fatalf("error %v, want that the claim's daemon on %s has not ended", err, gpu0)
	}
	if want := "the MPS daemon that the claim had on it has not ended"; quarantined.Claim.UID != "train-uid" || quarantined.Since.IsZero() || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v of claim %s since %s, want %q", err, quarantined.Claim, quarantined.Since, want)
	}
}

// TestALimitMayNameAPartByItsUUID, which is looked up once the part is known: of one that an administrator has made.
func TestALimitMayNameAPartByItsUUID(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	start := uint32(0)
	n.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "1g.10gb", Start: &start})
	n.hardware.discover(t, dynamic)
	device, err := n.hardware.handle.Library.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	instances, err := device.GPUInstances()
	if err != nil {
		t.Fatal(err)
	}
	uuid := instances[0].Devices[0].UUID
	part := func(uuid string) *resourceapi.ResourceClaim {
		return withConfig(claim("train", "part="+gpu0+"-mig-1g10gb-0"), driverName,
			sharingConfig("MigDeviceConfig", "MPS", `,"mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"`+uuid+`":"1Gi"}}`))
	}
	m := n.manager()
	if _, err := m.Prepare(n.ctx, part("MIG-00000000-0000-0000-0000-000000000000")); err == nil || len(n.hardware.machine.State().Daemons) > 0 {
		t.Errorf("error %v, want that there is no such device", err)
	}
	n.prepared(m, part(uuid))
	if daemons := n.hardware.machine.State().Daemons; len(daemons) != 1 || len(daemons[0].MemoryMiB) != 1 || daemons[0].MemoryMiB[0] != 1024 {
		t.Errorf("daemons %+v, want one with a limit of 1024 MiB", daemons)
	}
	n.unprepare(m, types.UID("train-uid"))
	if g := n.gpu(0); len(g.Instances) != 1 {
		t.Errorf("instances %v, want the administrator's", g.Instances)
	}
}

// TestAFolderThatCannotBeMadeIsTold: which one it is.
func TestAFolderThatCannotBeMadeIsTold(t *testing.T) {
	for dir, want := range map[string]string{"/claims": "mkdir claims", "/quarantine": "make the folder for quarantine", "/locks": "make the folder for locks", "/cdi": "make CDI folder"} {
		n := newNodeOf(t, twoGPUs)
		n.fsys = durabletest.Watched{FS: n.disk, Before: failing("mkdir", dir, 1)}
		m, err := n.tryManager()
		if !errors.Is(err, errDisk) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", dir, err, want)
		}
		remembered := dir == "/claims" || dir == "/quarantine"
		if err := m.MakeEmptyFolders(); remembered != (err == nil) {
			t.Errorf("%s, of what is not remembered: %v", dir, err)
		}
	}
}

// TestWhatIsRefusedForItsParametersIsNotBegun: a limit for a second device of a claim that has one.
func TestWhatIsRefusedForItsParametersIsNotBegun(t *testing.T) {
	for _, gpu := range bothGPUs {
		n := newNodeOf(t, twoGPUs)
		m := n.manager()
		written := 0
		n.fsys = durabletest.Watched{FS: n.disk, Before: func(op, _ string) error {
			if op == "create" {
				written++
			}
			return nil
		}}
		c := withConfig(claim("train", result("gpu="+gpu)), driverName, sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}`))
		if _, err := n.manager().Prepare(n.ctx, c); err == nil || written > 0 {
			t.Errorf("%s: error %v, and %d files were written", gpu, err, written)
		}
		n.prepared(m, claim("next", result("gpu="+gpu)))
	}
}

// TestWhoHasAGPUForAMachineIsTold with the device that was asked for, although NVML does not see it.
func TestWhoHasAGPUForAMachineIsTold(t *testing.T) {
	n := newNodeOf(t, withSound)
	m := n.manager()
	n.prepared(m, claim("machine", "vm="+vm0))
	for _, request := range []string{"gpu", "other"} {
		_, err := m.Prepare(n.ctx, claim("train", result(request+"="+gpu0)))
		var held *prepare.HeldError
		if !errors.As(err, &held) || held.Device != gpu0 || held.Request != request || held.Holder.UID != "machine-uid" || held.Claim.UID != "train-uid" {
			t.Errorf("error %v, %+v", err, held)
		}
	}
}

// TestADebtNamesTheGPUThatItIsKeptFor, also where a daemon served several.
func TestADebtNamesTheGPUThatItIsKeptFor(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.tools.Daemons = &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
	m := n.manager()
	n.prepared(m, withConfig(claim("train", "gpu="+gpu0, "more="+gpu1), driverName, underMPS))
	n.unprepare(m, "train-uid")
	list, err := m.Quarantined()
	if err != nil || len(list) != 2 {
		t.Fatalf("in quarantine %+v, %v", list, err)
	}
	for _, q := range list {
		for _, step := range q.Owed.Undo {
			if step.GPU != q.GPU {
				t.Errorf("on %s it is owed to undo %s on %s", q.GPU, step, step.GPU)
			}
		}
	}
}

// TestWhatAnotherClaimOwesIsNoneOfAPreparedOne: both have a part of the GPU.
func TestWhatAnotherClaimOwesIsNoneOfAPreparedOne(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	stays := claim("stays", "part="+gpu0+"-mig-1g10gb-0")
	n.prepared(m, stays)
	n.prepared(m, claim("goes", "part="+gpu0+"-mig-1g10gb-1"))
	n.hardware.broken[gpu0] = nvml.ErrGPULost
	n.unprepare(m, "goes-uid")
	clear(n.hardware.broken)
	before := n.gpu(0).Instances
	n.prepared(m, stays)
	if diff := cmp.Diff(before, n.gpu(0).Instances); diff != "" {
		t.Errorf("instances (-before +after):\n%s", diff)
	}
}

// TestADaemonThatRunsIsNotLockedFor: who looks at it waits for nobody who works on its GPU.
func TestADaemonThatRunsIsNotLockedFor(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(n.manager(), withConfig(claim(name, result("gpu="+gpu)), driverName, underMPS))
	}
	n.timeout = 30 * time.Millisecond // what is locked is waited for in vain
	unlock, err := prepare.LockGPU(n.manager(), gpu0)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if recovery, err := n.manager().Reconcile(n.ctx); err != nil || recovery.Claims != 2 {
		t.Errorf("recovery %+v, %v", recovery, err)
	}
}

// TestASharerOfTwoGPUsTellsOfEachItsOwn: what it found on one is not put back on the other.
func TestASharerOfTwoGPUsTellsOfEachItsOwn(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.do(&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess})
	m := n.manager()
	n.prepared(m, claim("both", "a="+gpu0+"+share:a:4Gi:10", "b="+gpu1+"+share:b:4Gi:10"))
	for name, gpu := range map[string]string{"one": gpu0, "two": gpu1} {
		n.prepared(m, claim(name, result("gpu="+gpu+"+share:"+name+":4Gi:10")))
	}
	for _, uid := range []types.UID{"both-uid", "one-uid", "two-uid"} {
		n.unprepare(m, uid)
	}
	if first, second := n.gpu(0).ComputeMode, n.gpu(1).ComputeMode; first != nvmlsim.ComputeExclusiveProcess || second != nvmlsim.ComputeDefault {
		t.Errorf("compute modes %s and %s", first, second)
	}
}

// TestAShareThatIsSetUpOtherwiseIsRefusedBecauseOfWhoHasIt.
func TestAShareThatIsSetUpOtherwiseIsRefusedBecauseOfWhoHasIt(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares = config.MPS
	for _, name := range []string{"one", "two"} {
		n.prepared(n.manager(), sharedBy(name, "20Gi:25", ""))
	}
	n.rules.Shares = config.TimeSlicing
	_, err := n.manager().Prepare(n.ctx, sharedBy("next", "20Gi:25", ""))
	var share *prepare.ShareError
	if !errors.As(err, &share) || share.Setup != string(config.MPS) || !strings.HasPrefix(share.Wants, string(config.TimeSlicing)) || len(share.Others) != 1 || share.Others[0].UID != "one-uid" {
		t.Errorf("error %v, %+v", err, share)
	}
}
