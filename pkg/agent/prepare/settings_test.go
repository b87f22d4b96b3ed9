// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"errors"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// setting is what claims change on a GPU.
type setting struct {
	Compute nvmlsim.ComputeMode
	Slice   nvmlsim.TimeSlice
	MIG     bool
	Daemons []nvmlsim.Daemon
}

func (n *node) setting(index int) setting {
	g := n.gpu(index)
	daemons := slices.Clone(n.hardware.machine.State().Daemons)
	for i := range daemons {
		for j, uuid := range daemons[i].GPUs {
			daemons[i].GPUs = slices.Clone(daemons[i].GPUs)
			daemons[i].GPUs[j], _, _ = strings.Cut(uuid, "-") // GPU or MIG
		}
	}
	return setting{Compute: g.ComputeMode, Slice: g.TimeSlice, MIG: g.MIG, Daemons: daemons}
}

func TestSettingsAreMadeAndTakenBack(t *testing.T) {
	const idle, exclusive = nvmlsim.ComputeDefault, nvmlsim.ComputeExclusiveProcess
	partition := gpu0 + "-mig-2g20gb-2"
	tests := map[string]struct {
		before []nvmlsim.Command
		claim  *resourceapi.ResourceClaim
		want   setting
		env    []string // in the container
	}{
		"nothing asked for": {claim: claim("train", "gpu="+gpu0), want: setting{Compute: idle}},
		"time slices": {
			claim: withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "TimeSlicing", `,"timeSlicingConfig":{"interval":"Medium"}`)),
			want:  setting{Compute: idle, Slice: nvmlsim.TimeSliceMedium},
		},
		"exclusive": {
			claim: withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "Exclusive", "")),
			want:  setting{Compute: exclusive},
		},
		"what an administrator has set is no setting of the claim's": {
			before: []nvmlsim.Command{&nvmlsim.SetComputeMode{GPU: "0", Mode: exclusive}},
			claim:  claim("train", "gpu="+gpu0),
			want:   setting{Compute: idle},
		},
		"MPS": {
			claim: withConfig(claim("train", "gpu="+gpu0, "more="+gpu1), driverName,
				sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultActiveThreadPercentage":30,"defaultPinnedDeviceMemoryLimit":"2Gi","defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}`)),
			want: setting{Compute: exclusive, Daemons: []nvmlsim.Daemon{{
				Name: "train-uid", GPUs: []string{"GPU", "GPU"}, ActiveThreadPercentage: 30, MemoryMiB: []int64{2048, 1024},
			}}},
			env: []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"},
		},
		"MPS on a MIG device": {
			claim: withConfig(claim("train", "mig="+result(partition)), driverName, sharingConfig("MigDeviceConfig", "MPS", "")),
			want:  setting{Compute: idle, MIG: true, Daemons: []nvmlsim.Daemon{{Name: "train-uid", GPUs: []string{"MIG"}, MemoryMiB: []int64{0}}}},
			env:   []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"},
		},
		"MPS for several users": {
			claim: withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"multiUser":true}`)),
			want:  setting{Compute: exclusive, Daemons: []nvmlsim.Daemon{{Name: "train-uid", GPUs: []string{"GPU"}, MemoryMiB: []int64{0}, MultiUser: true}}},
		},
		"admin access changes nothing": {
			before: []nvmlsim.Command{&nvmlsim.SetComputeMode{GPU: "0", Mode: exclusive}},
			claim:  withConfig(claim("train", "gpu="+gpu0+"+admin"), driverName, sharingConfig("GpuConfig", "MPS", "")),
			want:   setting{Compute: exclusive},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.do(tc.before...)
			before := n.setting(0)
			m := n.manager()
			for range 2 { // the second time it is prepared already
				devices, err := m.Prepare(n.ctx, tc.claim)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(tc.want, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("setting (-want +got):\n%s", diff)
				}
				env := n.env(devices)
				for _, want := range tc.env {
					if !slices.Contains(env, want) {
						t.Errorf("environment %v lacks %s", env, want)
					}
				}
			}
			if err := m.Unprepare(n.ctx, tc.claim.UID); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("setting after unprepare (-before +after):\n%s", diff)
			}
		})
	}
}

// env is the environment of a container with the devices.
func (n *node) env(devices []ledger.Device) []string {
	n.t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(n.cdiDir()), cdilib.WithAutoRefresh(false))
	if err != nil {
		n.t.Fatal(err)
	}
	container := &oci.Spec{}
	for _, device := range devices {
		if _, err := cache.InjectDevices(container, device.CDIDeviceIDs...); err != nil {
			n.t.Fatal(err)
		}
	}
	return container.Process.Env
}

func TestSettingsThatCannotBe(t *testing.T) {
	mps := sharingConfig("GpuConfig", "MPS", "")
	small, large := gpu0+"-mig-1g10gb-6", gpu0+"-mig-3g40gb-0"
	tests := map[string]struct {
		profile string // dgx-h100 if empty
		before  []nvmlsim.Command
		claim   *resourceapi.ResourceClaim
		want    []string
		refused bool // the claim's parameters
	}{
		"a GPU that an administrator keeps free": {
			before: []nvmlsim.Command{&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeProhibited}},
			claim:  claim("train", "gpu="+gpu0), want: []string{"default/train", "compute mode is Prohibited"},
		},
		"a GPU that the driver wants reset": {
			before: []nvmlsim.Command{&nvmlsim.SetRecovery{GPU: "0", Action: nvmlsim.RecoveryReset}},
			claim:  claim("train", "gpu="+gpu0), want: []string{gpu0, "reset the GPU"},
		},
		"a whole GPU that was partitioned meanwhile": {
			before: []nvmlsim.Command{&nvmlsim.SetMIG{GPU: "0", Enabled: true}},
			claim:  claim("train", "gpu="+gpu0), want: []string{gpu0, "MIG mode is enabled"},
		},
		"two MIG devices under MPS": {
			claim: withConfig(claim("train", result("a="+small), result("b="+large)), driverName, sharingConfig("MigDeviceConfig", "MPS", "")),
			want:  []string{"request a", "sharing.strategy", "one MIG device"}, refused: true,
		},
		"two kinds of MPS": {
			claim: func() *resourceapi.ResourceClaim {
				c := withConfig(claim("train", "a="+gpu0, "b="+gpu1), driverName, mps)
				withConfig(c, driverName, sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultActiveThreadPercentage":10}`))
				c.Status.Allocation.Devices.Config[1].Requests = []string{"b"}
				return c
			}(),
			want: []string{"request b", "sharing.mpsConfig"}, refused: true,
		},
		"a limit for a device that the claim does not have": {
			claim: withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}`)),
			want:  []string{"request gpu", `defaultPerDevicePinnedMemoryLimit["1"]`}, refused: true,
		},
		"overlapping partitions in a claim": {
			claim: claim("train", result("a="+gpu0+"-mig-1g10gb-1"), result("b="+large)), want: []string{"overlap", "requests a and b"},
		},
		"a whole GPU and a part of it in a claim": {
			claim: claim("train", "a="+gpu0, result("b="+small)), want: []string{"overlap"},
		},
		"a partition that no GPU can have": {
			claim: claim("train", result("a="+gpu0+"-mig-3g40gb-2")), want: []string{"request a", "does not offer"},
		},
		"a partition for an administrator that nobody has made": {
			before: []nvmlsim.Command{&nvmlsim.SetMIG{GPU: "0", Enabled: true}},
			claim:  claim("train", result("a="+small+"+admin")), want: []string{"request a", "there is no MIG device 1g.10gb at slice 6"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.do(tc.before...)
			before := n.hardware.machine.State().GPUs
			_, err := n.manager().Prepare(n.ctx, tc.claim)
			if err == nil {
				t.Fatal("prepared")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			checkRefusal(t, err, tc.refused)
			if left := n.files(); len(left) > 0 {
				t.Errorf("left after the failure: %v", left)
			}
			if diff := cmp.Diff(before, n.hardware.machine.State().GPUs, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("GPUs (-before +after):\n%s", diff)
			}
		})
	}
}

// checkRefusal of a claim's parameters: they are the user's to mend, so the claim's status and an event of its pods tell of them.
func checkRefusal(t *testing.T, err error, want bool) {
	t.Helper()
	var refused *config.Error
	if errors.As(err, &refused) != want {
		t.Errorf("error %q (%T), want one about the claim's parameters: %t", err, err, want)
	}
	if n := strings.Count(err.Error(), "claim default/"); want && n != 1 {
		t.Errorf("error %q names the claim %d times", err, n)
	}
}

// TestAnAdministratorsPartitionsAreUsedAndNeverTouched: MIG devices that were there are handed out and stay.
func TestAnAdministratorsPartitionsAreUsedAndNeverTouched(t *testing.T) {
	n := newNode(t)
	n.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: new(uint32)})
	n.hardware.discover(t, dynamic)
	m := n.manager()
	before := n.gpu(0).Instances
	c := claim("train", result("given="+gpu0+"-mig-3g40gb-0"), result("made="+gpu0+"-mig-1g10gb-6"))
	devices, err := m.Prepare(n.ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	if got := len(n.gpu(0).Instances); got != 2 || len(n.visible(devices)) != 2 {
		t.Errorf("%d instances, container sees %v: want 2", got, n.visible(devices))
	}
	if err := m.Unprepare(n.ctx, c.UID); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, n.gpu(0).Instances); diff != "" || !n.gpu(0).MIG {
		t.Errorf("instances (-before +after), MIG is %v:\n%s", n.gpu(0).MIG, diff)
	}
	// One that somebody has made in the place meanwhile is in the way, and not ours to destroy.
	n.do(&nvmlsim.CreateMIG{GPU: "0", Profile: "1g.20gb", Start: &[]uint32{6}[0]})
	if _, err := m.Prepare(n.ctx, c); !errors.Is(err, nvml.ErrNoResources) {
		t.Errorf("error %v, want that there is no room", err)
	}
	if got := n.gpu(0).Instances; len(got) != 2 || len(n.files()) > 0 {
		t.Errorf("instances %v, files %v: want the two of the administrator, and none", got, n.files())
	}
}

// TestClaimsSideBySideOnOneGPU: the first to come switches MIG on, the last to go takes it back, in whatever order.
func TestClaimsSideBySideOnOneGPU(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	a, b := claim("a", result("x="+gpu0+"-mig-3g40gb-0")), claim("b", result("x="+gpu0+"-mig-3g40gb-4"))
	for _, c := range []*resourceapi.ResourceClaim{a, b} {
		if _, err := m.Prepare(n.ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	for name, other := range map[string]result{"whole": "x=" + gpu0, "overlapping": result("x=" + gpu0 + "-mig-1g10gb-5")} {
		var held *prepare.HeldError
		if _, err := m.Prepare(n.ctx, claim(name, other)); !errors.As(err, &held) {
			t.Errorf("%s: %v, want a HeldError", name, err)
		}
	}
	n.hardware.discover(t, discovery.Policy{Dynamic: true, Ours: m.Made}) // an agent that starts now
	if !slices.Contains(n.offers(), gpu0) {
		t.Error("the whole GPU, which the agent has partitioned itself, is not offered any more")
	}
	if err := m.Unprepare(n.ctx, a.UID); err != nil {
		t.Fatal(err)
	}
	if g := n.gpu(0); !g.MIG || len(g.Instances) != 1 {
		t.Errorf("MIG %v, instances %v after the first has gone", g.MIG, g.Instances)
	}
	if err := m.Unprepare(n.ctx, b.UID); err != nil {
		t.Fatal(err)
	}
	if g := n.gpu(0); g.MIG || len(g.Instances) != 0 {
		t.Errorf("MIG %v, instances %v after the last has gone", g.MIG, g.Instances)
	}
	if _, err := m.Prepare(n.ctx, claim("whole", "x="+gpu0)); err != nil {
		t.Error(err)
	}
}

// TestAGPUThatIsSwitchedByAReset is partitioned only if it is switched already.
func TestAGPUThatIsSwitchedByAReset(t *testing.T) {
	n := newNodeOf(t, "dgx-a100")
	gpus := n.offers()
	if len(gpus) != 8 {
		t.Fatalf("%d devices are offered, want the 8 GPUs", len(gpus))
	}
	n.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.ResetGPU{GPU: "0"})
	n.hardware.discover(t, dynamic)
	c := claim("train", result("x="+gpus[0]+"-mig-1g10gb-0"))
	m := n.manager()
	if _, err := m.Prepare(n.ctx, c); err != nil {
		t.Fatal(err)
	}
	if err := m.Unprepare(n.ctx, c.UID); err != nil {
		t.Fatal(err)
	}
	if g := n.gpu(0); !g.MIG || len(g.Instances) > 0 {
		t.Errorf("MIG %v, instances %v: want the administrator's mode, and none", g.MIG, g.Instances)
	}
	if offered := n.offers(); slices.Contains(offered, gpus[0]) || len(offered) <= 8 {
		t.Errorf("offered are %v: want partitions and not the GPU itself", offered)
	}
}

// TestAfterARebootAClaimIsMadeAnew: what was on the GPUs is gone, the pod is started again, and what is made for it
// now is undone in the end.
func TestAfterARebootAClaimIsMadeAnew(t *testing.T) {
	for name, again := range map[string]bool{"the pod comes back": true, "the pod is gone": false} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			s := scenarios["MIG"]
			n.do(s.before...)
			n.hardware.discover(t, dynamic)
			if _, err := n.manager().Prepare(n.ctx, s.claim()); err != nil {
				t.Fatal(err)
			}
			n.do(&nvmlsim.Reboot{})
			// An administrator's script makes one in a place that a claim of before had.
			n.do(&nvmlsim.SetMIG{GPU: "1", Enabled: true})
			if !again {
				n.do(&nvmlsim.CreateMIG{GPU: "1", Profile: "7g.80gb"})
			}
			n.hardware.discover(t, dynamic)
			m := n.manager()
			if _, err := m.Recover(n.ctx); err != nil {
				t.Fatal(err)
			}
			if again {
				devices, err := m.Prepare(n.ctx, s.claim())
				if err != nil {
					t.Fatal(err)
				}
				if sees := n.visible(devices); len(sees) != 3 || len(n.gpu(0).Instances) != 2 {
					t.Errorf("the container sees %v, instances %v", sees, n.gpu(0).Instances)
				}
			}
			if err := m.Unprepare(n.ctx, s.claim().UID); err != nil {
				t.Fatal(err)
			}
			if g := n.gpu(0); g.MIG || len(g.Instances) > 0 {
				t.Errorf("GPU 0: MIG %v, instances %v", g.MIG, g.Instances)
			}
			if got := len(n.gpu(1).Instances); (got == 1) == again {
				t.Errorf("GPU 1 has %d instances", got)
			}
		})
	}
}

// TestAGPUThatWasReplacedIsGivenAnew: the claim has another one in the same place after a reboot, and nothing of it is on that. Without a
// reboot, what was done to the one before is still to be undone.
func TestAGPUThatWasReplacedIsGivenAnew(t *testing.T) {
	for name, reboot := range map[string]bool{"while the machine was off": true, "while it was on": false} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			m := n.manager()
			c := withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "Exclusive", ""))
			if _, err := m.Prepare(n.ctx, c); err != nil {
				t.Fatal(err)
			}
			records, record := n.recordOf(c.UID)
			const before = "GPU-that-was-there"
			record.Entry.Devices[0].UUID = before
			for i := range record.Entry.Undo {
				if record.Entry.Undo[i].GPU != "" {
					record.Entry.Undo[i].Target = before
				}
			}
			if err := records.Put(record.Entry); err != nil {
				t.Fatal(err)
			}
			if reboot {
				n.do(&nvmlsim.Reboot{})
				n.hardware.discover(t, dynamic)
			}
			devices, err := m.Prepare(n.ctx, c)
			if !reboot {
				if err == nil || !strings.Contains(err.Error(), before) || !strings.Contains(err.Error(), n.hardware.uuid(gpu0)) {
					t.Errorf("error %v, want one that names both GPUs", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if sees := n.visible(devices); !slices.Equal(sees, []string{n.hardware.uuid(gpu0)}) {
				t.Errorf("the container sees %v", sees)
			}
			if err := m.Unprepare(n.ctx, c.UID); err != nil {
				t.Fatal(err)
			}
			if got := n.gpu(0).ComputeMode; got != nvmlsim.ComputeDefault {
				t.Errorf("compute mode %s is left", got)
			}
			if list, err := m.Quarantined(); err != nil || len(list) > 0 {
				t.Errorf("in quarantine: %+v, %v", list, err)
			}
		})
	}
}

// overtaken is a GPU on which somebody else makes an instance in the very place that the agent is about to use.
type overtaken struct {
	nvml.Device
	make func()
}

func (d overtaken) CreateGPUInstance(profile nvml.MIGProfile, at nvml.Placement) (uint32, error) {
	d.make()
	return d.Device.CreateGPUInstance(profile, at)
}

// keptRecords are not removed.
type keptRecords struct{ durable.FS }

func (f keptRecords) Remove(path string) error {
	if strings.HasSuffix(path, ".claim") {
		return &os.PathError{Op: "remove", Path: path, Err: syscall.EROFS}
	}
	return f.FS.Remove(path)
}

// TestAPartitionOfSomebodyFasterIsNotTouched, whenever they made it, and also if the record could not be removed at once. The next try gets theirs, and
// leaves it.
func TestAPartitionOfSomebodyFasterIsNotTouched(t *testing.T) {
	const before, late = "gpu-0000-1b-00-0-mig-1g10gb-0", "gpu-0000-1b-00-0-mig-3g40gb-4"
	start := uint32(4)
	theirs := &nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &start}
	for name, overtake := range map[string]func(n *node, d nvml.Device, once func()) nvml.Device{
		"before the agent looks what is there": func(_ *node, d nvml.Device, once func()) nvml.Device { return lookedAt{d, once} },
		"afterwards":                           func(_ *node, d nvml.Device, once func()) nvml.Device { return overtaken{d, once} },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
			n.hardware.discover(t, dynamic)
			done := false
			n.hardware.wrap = func(d nvml.Device) nvml.Device {
				return overtake(n, d, func() {
					if n.recorded("train-uid") && len(n.gpu(0).Instances) == 1 && !done { // the first of the two is made
						done = true
						n.do(theirs)
					}
				})
			}
			n.fsys = keptRecords{durable.OS{}}
			c := claim("train", "a="+before, "b="+late)
			if _, err := n.manager().Prepare(n.ctx, c); err == nil || !strings.Contains(err.Error(), "somebody else") || !errors.Is(err, syscall.EROFS) {
				t.Fatalf("prepare: %v, want that the place is taken, and that the record could not be removed", err)
			}
			n.hardware.wrap, n.fsys = nil, durable.OS{}
			left := func(what string) {
				t.Helper()
				if instances := n.gpu(0).Instances; len(instances) != 1 || instances[0].Start != start || len(n.files()) > 0 {
					t.Errorf("%s: instances %v, files %v; want the instance of whoever was faster", what, instances, n.files())
				}
			}
			m := n.manager()
			if _, err := m.Recover(n.ctx); err != nil {
				t.Fatal(err)
			}
			left("after the restart")
			n.prepared(m, c)
			n.unprepare(m, c.UID)
			left("after the next try")
		})
	}
}

// lookedAt is a GPU on which somebody does something before each look at its instances.
type lookedAt struct {
	nvml.Device
	do func()
}

func (d lookedAt) GPUInstances() ([]nvml.GPUInstance, error) {
	d.do()
	return d.Device.GPUInstances()
}

// recorded tells whether the claim has a record.
func (n *node) recorded(uid types.UID) bool {
	n.t.Helper()
	_, record := n.recordOf(uid)
	return record != nil
}

// noCompute is a GPU that has no room for compute instances.
type noCompute struct{ nvml.Device }

func (noCompute) CreateComputeInstance(uint32) (nvml.MIGDevice, error) {
	return nvml.MIGDevice{}, nvml.ErrNoResources
}

// TestAGPUInstanceThatGetsNoComputeInstanceDoesNotStay, with or without the agent that made it.
func TestAGPUInstanceThatGetsNoComputeInstanceDoesNotStay(t *testing.T) {
	for name, fsys := range map[string]durable.FS{"undone at once": durable.OS{}, "undone by the next agent": keptRecords{durable.OS{}}} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.manager()
			before := n.state()
			n.hardware.wrap = func(d nvml.Device) nvml.Device { return noCompute{d} }
			n.fsys = fsys
			if _, err := n.manager().Prepare(n.ctx, claim("train", "a="+gpu0+"-mig-1g10gb-0", "b="+gpu0+"-mig-3g40gb-4")); !errors.Is(err, nvml.ErrNoResources) {
				t.Fatalf("prepare: %v, want that there is no room", err)
			}
			n.fsys = durable.OS{}
			if _, err := n.manager().Recover(n.ctx); err != nil {
				t.Fatal(err)
			}
			if diff := before.diff(n.state()); diff != "" {
				t.Errorf("the machine (-before the claim +after):\n%s", diff)
			}
		})
	}
}

// TestWhatAGPUWasBeforeIsAsOfThisBoot: the next boot is another time, in which the GPU has other settings and less memory free.
func TestWhatAGPUWasBeforeIsAsOfThisBoot(t *testing.T) {
	exclusive, idle := nvmlsim.ComputeExclusiveProcess, nvmlsim.ComputeDefault
	tests := map[string]struct {
		claim         func(name string) *resourceapi.ResourceClaim
		was, is, want nvmlsim.ComputeMode // want while the claim has the GPU
	}{
		"an administrator's mode is gone":  {wholeWith(""), exclusive, idle, idle},
		"an administrator's mode has come": {wholeWith(""), idle, exclusive, idle},
		"what the claim wants was there":   {wholeWith(sharingConfig("GpuConfig", "Exclusive", "")), exclusive, idle, exclusive},
		"what the claim wants is there":    {wholeWith(sharingConfig("GpuConfig", "Exclusive", "")), idle, exclusive, exclusive},
		"of a share":                       {func(name string) *resourceapi.ResourceClaim { return sharedBy(name, "20Gi:25", "") }, exclusive, idle, idle},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.options.EndTimeout = 50 * time.Millisecond // memory that stays is waited for in vain
			set := func(mode nvmlsim.ComputeMode) { n.do(&nvmlsim.SetComputeMode{GPU: "0", Mode: mode}) }
			set(tc.was)
			c := tc.claim("train")
			n.prepared(n.manager(), c)
			for range 2 { // and another boot
				n.do(&nvmlsim.Reboot{}, &nvmlsim.LeakMemory{GPU: "0", MemoryMiB: 512})
				set(tc.is)
				n.hardware.discover(t, dynamic)
				m := n.manager()
				if _, err := m.Recover(n.ctx); err != nil {
					t.Fatal(err)
				}
				for range 2 { // the second pod of the claim
					n.prepared(m, c)
				}
				if got := n.gpu(0).ComputeMode; got != tc.want {
					t.Errorf("compute mode %s while the claim has the GPU, want %s", got, tc.want)
				}
			}
			m := n.manager()
			n.unprepare(m, c.UID)
			if list, err := m.Quarantined(); err != nil || len(list) > 0 {
				t.Errorf("in quarantine: %+v, %v", list, err)
			}
			if got := n.gpu(0).ComputeMode; got != tc.is {
				t.Errorf("compute mode %s in the end, want %s", got, tc.is)
			}
			n.prepared(m, claim("next", "gpu="+gpu0))
		})
	}
}

// TestAPlaceTakenAfterARebootIsHadOnceItIsFree: at boot an administrator's script was there first. The claim, which nobody can use any more, is
// not taken for one that has what it needs.
func TestAPlaceTakenAfterARebootIsHadOnceItIsFree(t *testing.T) {
	start := uint32(4)
	for name, devices := range map[string][]result{
		"the claim's only one": {"b=" + gpu0 + "-mig-3g40gb-4"},
		"after another one":    {"a=" + gpu0 + "-mig-1g10gb-0", "b=" + gpu0 + "-mig-3g40gb-4"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			c := claim("train", devices...)
			n.prepared(n.manager(), c)
			n.do(&nvmlsim.Reboot{}, &nvmlsim.SetMIG{GPU: "0", Enabled: true})
			n.hardware.discover(t, dynamic)
			m := n.manager()
			if _, err := m.Recover(n.ctx); err != nil {
				t.Fatal(err)
			}
			n.do(&nvmlsim.CreateMIG{GPU: "0", Profile: "1g.20gb", Start: &start})
			for range 2 {
				if _, err := m.Prepare(n.ctx, c); err == nil || len(n.files()) > 0 {
					t.Fatalf("where somebody else's instance is: %v, files %v", err, n.files())
				}
				if instances := n.gpu(0).Instances; !slices.ContainsFunc(instances, func(i nvmlsim.GPUInstance) bool { return i.Start == start && i.Profile == "1g.20gb" }) {
					t.Fatalf("instances %v, want the administrator's among them", instances)
				}
			}
			for _, instance := range n.gpu(0).Instances {
				if instance.Start == start {
					n.do(&nvmlsim.DestroyMIG{GPU: "0", Instance: instance.ID})
				}
			}
			n.hardware.discover(t, dynamic)
			n.prepared(m, c)
			n.unprepare(m, c.UID)
			if instances := n.gpu(0).Instances; len(instances) > 0 {
				t.Errorf("instances %v are left", instances)
			}
		})
	}
}
