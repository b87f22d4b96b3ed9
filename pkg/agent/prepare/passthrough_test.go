// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// withSound is a machine whose GPUs have a second function, which is in the same IOMMU group.
const withSound = "with-sound"

const (
	vm0    = gpu0 + "-vfio"
	bus0   = "0000:1b:00.0"
	sound0 = "0000:1b:00.1"
)

var passthrough = scenario{
	profile: withSound,
	// One GPU goes to a virtual machine, another one stays with the driver.
	claim: func() *resourceapi.ResourceClaim { return claim("machine", "vm="+vm0, "host="+gpu1) },
	// An administrator's setting, which the GPU forgets when it leaves its driver.
	before: []nvmlsim.Command{&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess}},
	other:  "gpu=" + gpu0,
}

// besidePersistenced gives two GPUs that NVIDIA's daemon keeps open to a virtual machine.
var besidePersistenced = scenario{
	profile: withSound,
	claim:   func() *resourceapi.ResourceClaim { return claim("machine", "a="+vm0, "b="+vm1) },
	before:  keptOpen(&nvmlsim.Persistenced{}),
	other:   "gpu=" + gpu1,
}

const vm1 = gpu1 + "-vfio"

// keptOpen are two GPUs that the daemon keeps open, and that have no persistence mode without it.
func keptOpen(daemon *nvmlsim.Persistenced) []nvmlsim.Command {
	return []nvmlsim.Command{
		&nvmlsim.SetPersistence{GPU: "0"}, &nvmlsim.SetPersistence{GPU: "1"},
		&nvmlsim.AddClient{Client: nvmlsim.Client{PID: 804, Command: "nvidia-persiste", Persistence: daemon}},
	}
}

// writeProfile makes the file of a machine with sound.
func writeProfile(root string) (path string, err error) {
	profile, err := nvmlsim.LoadProfile(twoGPUs)
	if err != nil {
		return "", err
	}
	profile.GPU.Functions = []nvmlsim.Function{{Class: "0x040300", Device: "0x22ba", Driver: "snd_hda_intel"}}
	data, err := yaml.Marshal(profile)
	if err != nil {
		return "", err
	}
	path = filepath.Join(root, "profile.yaml")
	return path, os.WriteFile(path, data, 0o600)
}

// driverOf a function, with its override.
func (n *node) driverOf(address string) string {
	n.t.Helper()
	f, err := vfio.ReadFunction(n.hardware.kernel, address)
	if err != nil {
		n.t.Fatal(err)
	}
	override, err := vfio.NewBinder(n.hardware.kernel).Override(n.t.Context(), address)
	if err != nil {
		n.t.Fatal(err)
	}
	return f.Driver + "/" + override
}

func vm(pid uint32, pod string) *nvmlsim.AddProcess {
	return &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: pid, Kind: nvmlsim.ProcessVM, Pod: pod}}
}

// TestAGPUIsPassedThroughAndComesBack follows one through: what the host, NVML, the container, the slices and other claims see.
func TestAGPUIsPassedThroughAndComesBack(t *testing.T) {
	n := newNodeOf(t, withSound)
	n.hardware.discover(t, n.hardware.policy)
	offered, uuid := n.offers(), n.hardware.uuid(gpu0)
	m := n.manager()
	prepared, err := m.Prepare(n.ctx, claim("machine", "vm="+vm0))
	if err != nil {
		t.Fatal(err)
	}
	if got := n.driverOf(bus0) + " " + n.driverOf(sound0); got != "vfio-pci/vfio-pci vfio-pci/vfio-pci" {
		t.Errorf("the group is with %s", got)
	}
	container := n.container(prepared)
	var nodes []string
	for _, device := range container.Linux.Devices {
		nodes = append(nodes, device.Path)
	}
	if want := []string{"/dev/vfio/20", "/dev/vfio/vfio"}; !slices.Equal(want, nodes) {
		t.Errorf("the container has the nodes %v, want %v", nodes, want)
	}
	if want := []string{"STOWAGE_GPU_0000_1B_00_0_VFIO=" + bus0, "NVIDIA_VISIBLE_DEVICES=void"}; !slices.Equal(want, container.Process.Env) {
		t.Errorf("the container has the variables %v, want %v", container.Process.Env, want)
	}
	if len(container.Mounts) != 1 || !strings.HasSuffix(container.Mounts[0].Source, "vm.json") {
		t.Errorf("the container has the mounts %v, want the metadata file alone", container.Mounts)
	}
	for path, file := range n.told(prepared) {
		if got := file.Requests[0].Devices[0].Attributes["uuid"]; got.StringValue == nil || *got.StringValue != uuid {
			t.Errorf("%s has the UUID %+v, want that of the GPU, %s", path, got, uuid)
		}
	}
	if now := n.offers(); !slices.Equal(offered, now) {
		t.Errorf("the node offers %v, before the claim %v", now, offered)
	}
	if got := n.hardware.Health(vm0); len(got.Faults) > 0 {
		t.Errorf("faults %v of a GPU that is with a virtual machine", got.Faults)
	}
	var held *prepare.HeldError
	if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); !errors.As(err, &held) {
		t.Errorf("the GPU for another claim: %v", err)
	}
	if _, err := m.Prepare(n.ctx, claim("machine", "gpu="+gpu0)); !errors.Is(err, discovery.ErrBound) {
		t.Errorf("the GPU for a container of the claim itself: %v", err)
	}
	held = nil
	if _, err := m.Prepare(n.ctx, claim("watch", "gpu="+gpu0+"+admin")); !errors.Is(err, discovery.ErrBound) || errors.As(err, &held) {
		t.Errorf("the GPU for an administrator, who waits for nobody: %v", err)
	}
	if _, err := m.Prepare(n.ctx, claim("another", "vm="+vm0)); !errors.As(err, &held) {
		t.Errorf("the same device for another claim: %v", err)
	}
	if _, err := m.Prepare(n.ctx, claim("beside", "gpu="+gpu1)); err != nil {
		t.Errorf("another GPU: %v", err)
	}
	again, err := m.Prepare(n.ctx, claim("machine", "vm="+vm0))
	if diff := cmp.Diff(prepared, again); diff != "" || err != nil {
		t.Errorf("prepared again: %v\n%s", err, diff)
	}
	if err := m.Unprepare(n.ctx, "machine-uid"); err != nil {
		t.Fatal(err)
	}
	if got := n.driverOf(bus0) + " " + n.driverOf(sound0); got != "nvidia/ snd_hda_intel/" {
		t.Errorf("given back, the group is with %s", got)
	}
	if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); err != nil {
		t.Errorf("the GPU for the next claim: %v", err)
	}
}

func TestNodesForAVirtualMachine(t *testing.T) {
	const head = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig"`
	tests := map[string]struct {
		config string
		want   []string
		err    string
		hides  string // what the kernel has not
	}{
		"by default":                           {"", []string{"/dev/vfio/20", "/dev/vfio/vfio"}, "", ""},
		"legacy":                               {head + `,"iommu":{"backendPolicy":"LegacyOnly","enableAPIDevice":true}}`, []string{"/dev/vfio/20", "/dev/vfio/vfio"}, "", ""},
		"without the API's node":               {head + `,"iommu":{"enableAPIDevice":false}}`, []string{"/dev/vfio/20"}, "", ""},
		"iommufd, of each function":            {head + `,"iommu":{"backendPolicy":"PreferIommuFD"}}`, []string{"/dev/iommu", "/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1"}, "", ""},
		"without iommufd":                      {head + `,"iommu":{"backendPolicy":"PreferIommuFD"}}`, []string{"/dev/vfio/20", "/dev/vfio/vfio"}, "", "class/misc/iommu"},
		"iommufd without the functions' nodes": {head + `,"iommu":{"backendPolicy":"PreferIommuFD"}}`, nil, "device " + vm0 + ": device node of PCI function " + bus0, "vfio-dev"},
		"another backend":                      {head + `,"iommu":{"backendPolicy":"Best"}}`, nil, `iommu.backendPolicy: "Best": want one of LegacyOnly, PreferIommuFD`, ""},
		"an unknown field":                     {head + `,"sharing":{}}`, nil, `unknown field "sharing"`, ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			if test.hides != "" {
				n.pci = partialKernel{n.hardware.kernel, test.hides}
			}
			c := claim("machine", "vm="+vm0)
			if test.config != "" {
				c = withConfig(c, driverName, test.config)
			}
			prepared, err := n.manager().Prepare(n.ctx, c)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("error %v, want one with %q", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var nodes []string
			for _, device := range n.container(prepared).Linux.Devices {
				nodes = append(nodes, device.Path)
			}
			slices.Sort(nodes)
			if diff := cmp.Diff(test.want, nodes); diff != "" {
				t.Errorf("nodes (-want +got):\n%s", diff)
			}
		})
	}
}

// partialKernel lacks a file or folder.
type partialKernel struct {
	vfio.Sysfs
	hides string
}

func (k partialKernel) Open(name string) (fs.File, error) {
	if strings.HasSuffix(name, k.hides) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return k.Sysfs.Open(name)
}

// TestWhatKeepsAGPUFromBeingPassedThrough: it is refused before anything is done to it.
func TestWhatKeepsAGPUFromBeingPassedThrough(t *testing.T) {
	tests := map[string]struct {
		before []nvmlsim.Command
		then   func(n *node)
		claim  *resourceapi.ResourceClaim
		want   string
	}{
		"a process of the host": {
			before: []nvmlsim.Command{&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 70, Kind: nvmlsim.ProcessCompute}}},
			want:   "is open in process 70",
		},
		"the driver asks for a reset": {
			before: []nvmlsim.Command{&nvmlsim.SetRecovery{GPU: "0", Action: "gpu-reset"}}, want: "reset the GPU",
		},
		"MIG mode": {
			before: []nvmlsim.Command{&nvmlsim.SetMIG{GPU: "0", Enabled: true}}, want: "MIG mode is enabled",
		},
		"parameters for another device": {
			claim: func() *resourceapi.ResourceClaim {
				c := withConfig(claim("machine", "vm="+vm0), driverName, sharingConfig("GpuConfig", "TimeSlicing", ""))
				c.Status.Allocation.Devices.Config[0].Requests = []string{"vm"}
				return c
			}(),
			want: "GpuConfig is not for the device of request vm, which takes a VfioDeviceConfig",
		},
		"the same GPU twice in a claim": {claim: claim("machine", "vm="+vm0, "gpu="+gpu0), want: "overlap"},
		"passthrough was switched off": {
			then: func(n *node) { n.hardware.discover(n.t.(*testing.T), discovery.Policy{}) }, want: "does not offer it",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			n.do(test.before...)
			if test.then != nil {
				test.then(n)
			}
			c := test.claim
			if c == nil {
				c = claim("machine", "vm="+vm0)
			}
			m := n.manager()
			before := n.state()
			if _, err := m.Prepare(n.ctx, c); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
			if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("refused, and changed (-before +after):\n%s", diff)
			}
		})
	}
}

// TestSomebodyWhoOpensTheGPULateIsFound: after it was decided what to do, and before the driver is asked to let go, which would hang.
func TestSomebodyWhoOpensTheGPULateIsFound(t *testing.T) {
	n := newNodeOf(t, withSound)
	late := &lateKernel{Sysfs: n.hardware.kernel, f: func() {
		n.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 70, Kind: nvmlsim.ProcessCompute}})
	}}
	n.pci = late
	// Sound comes after the GPU, so the other order would not notice.
	before := n.state()
	_, err := n.manager().Prepare(n.ctx, claim("machine", "vm="+vm0))
	var used *prepare.InUseError
	if !errors.As(err, &used) || used.PID != 70 {
		t.Errorf("error %v, want that process 70 has the GPU open", err)
	}
	n.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 70})
	if diff := cmp.Diff(before.GPUs, n.state().GPUs, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("refused, and changed (-before +after):\n%s", diff)
	}
}

// lateKernel calls f when the drivers of a group are read for the last time before one is changed.
type lateKernel struct {
	vfio.Sysfs
	reads int
	f     func()
}

func (k *lateKernel) ReadLink(name string) (string, error) {
	// Of the GPU: when it is decided, and when it is to be taken.
	if strings.HasSuffix(name, bus0+"/driver") {
		if k.reads++; k.reads == 2 {
			k.f()
		}
	}
	return k.Sysfs.ReadLink(name)
}

// TestAnAdministratorsGPUStaysWithVFIO: what had the driver vfio-pci before the claim keeps it, and the rest of the group is given back.
func TestAnAdministratorsGPUStaysWithVFIO(t *testing.T) {
	n := newNodeOf(t, withSound)
	if err := n.hardware.Apart(n.ctx, func(ctx context.Context) error { return vfio.NewBinder(n.hardware.kernel).Take(ctx, bus0) }); err != nil {
		t.Fatal(err)
	}
	n.hardware.discover(t, n.hardware.policy)
	if got := n.offers(); slices.Contains(got, gpu0) || !slices.Contains(got, vm0) {
		t.Errorf("the node offers %v", got)
	}
	m := n.manager()
	before := n.state()
	if _, err := m.Prepare(n.ctx, claim("machine", "vm="+vm0)); err != nil {
		t.Fatal(err)
	}
	if got := n.driverOf(bus0) + " " + n.driverOf(sound0); got != "vfio-pci/vfio-pci vfio-pci/vfio-pci" {
		t.Errorf("the group is with %s", got)
	}
	if err := m.Unprepare(n.ctx, "machine-uid"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("(-before the claim +after it):\n%s", diff)
	}
	n.hardware.discover(t, discovery.Policy{})
	if got := n.offers(); slices.Contains(got, vm0) {
		t.Errorf("without the policy the node offers %v", got)
	}
}

// TestAVirtualMachineThatIsLeft: the group is not taken from whoever has it open. A process of the claim's pod is ended, or by policy left.
func TestAVirtualMachineThatIsLeft(t *testing.T) {
	const pod, uid = "11111111-1111-1111-1111-111111111111", "machine-uid"
	tests := map[string]struct {
		policy prepare.Leftovers
		left   *nvmlsim.AddProcess
		stays  bool
	}{
		"of the claim's pod":                   {left: vm(70, pod)},
		"of the claim's pod, by policy":        {left: vm(70, pod), policy: prepare.QuarantineLeftovers, stays: true},
		"of another pod":                       {left: vm(70, "22222222-2222-2222-2222-222222222222"), stays: true},
		"of nobody's":                          {left: vm(70, ""), stays: true},
		"of the claim's pod, and does not end": {left: &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 70, Kind: nvmlsim.ProcessVM, Pod: pod, Stuck: true}}, stays: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			n.options = prepare.Options{Leftovers: test.policy}
			if test.stays {
				n.options.EndTimeout = 60 * time.Millisecond // what does not end is waited for in vain
			}
			m := n.manager()
			before := n.state()
			if _, err := m.Prepare(n.ctx, reservedFor(claim("machine", "vm="+vm0), pod)); err != nil {
				t.Fatal(err)
			}
			n.do(test.left)
			if processes, err := n.hardware.Processes(n.ctx, gpu0); processes != 1 || err != nil {
				t.Errorf("%d processes are on the GPU, %v", processes, err)
			}
			if err := m.Unprepare(n.ctx, uid); err != nil {
				t.Fatal(err)
			}
			left, err := m.Quarantined()
			if err != nil || (len(left) == 1) != test.stays {
				t.Fatalf("quarantine %+v, %v, want one: %t", left, err, test.stays)
			}
			if test.stays {
				if reason := left[0].Reason; !strings.Contains(reason, "process 70") || strings.Contains(reason, "cannot be ended") {
					t.Errorf("in quarantine because of %q, and nothing kept it from being ended", reason)
				}
				if got := n.driverOf(bus0); got != "vfio-pci/vfio-pci" {
					t.Errorf("the GPU is with %s while a virtual machine has it", got)
				}
				if got := n.offers(); !slices.Contains(got, gpu0) {
					t.Errorf("in quarantine, the GPU is offered as %v", got)
				}
				var quarantined *prepare.QuarantinedError
				if _, err := m.Prepare(n.ctx, claim("next", "vm="+vm0)); !errors.As(err, &quarantined) {
					t.Errorf("the next claim: %v", err)
				}
				n.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 70})
				if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined > 0 {
					t.Errorf("once the virtual machine is gone: %+v, %v", recovery, err)
				}
			}
			if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("(-before the claim +after it):\n%s", diff)
			}
		})
	}
}

// TestADriverThatIsGoneKeepsTheGPUInQuarantine until it is loaded again.
func TestADriverThatIsGoneKeepsTheGPUInQuarantine(t *testing.T) {
	n := newNodeOf(t, withSound)
	m := n.manager()
	if _, err := m.Prepare(n.ctx, claim("machine", "vm="+vm0)); err != nil {
		t.Fatal(err)
	}
	n.do(&nvmlsim.UnloadDriver{})
	n.options.GPUTimeout = 300 * time.Millisecond // the driver is waited for in vain
	if err := n.manager().Unprepare(n.ctx, "machine-uid"); err != nil {
		t.Fatal(err)
	}
	if left, _ := m.Quarantined(); len(left) != 1 || !strings.Contains(left[0].Reason, "the driver nvidia: it is not loaded") {
		t.Errorf("quarantine %+v", left)
	}
	n.do(&nvmlsim.LoadDriver{})
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined > 0 {
		t.Errorf("with the driver: %+v, %v", recovery, err)
	}
	if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); err != nil {
		t.Error(err)
	}
}

// TestAfterARebootTheGPUIsTakenAgain: a reboot has given it back to its driver.
func TestAfterARebootTheGPUIsTakenAgain(t *testing.T) {
	n := newNodeOf(t, withSound)
	m := n.manager()
	before := n.state()
	prepared, err := m.Prepare(n.ctx, claim("machine", "vm="+vm0))
	if err != nil {
		t.Fatal(err)
	}
	n.do(&nvmlsim.Reboot{})
	n.hardware.discover(t, n.hardware.policy)
	again, err := n.manager().Prepare(n.ctx, claim("machine", "vm="+vm0))
	if diff := cmp.Diff(prepared, again); err != nil || diff != "" {
		t.Errorf("after the reboot: %v\n%s", err, diff)
	}
	if got := n.driverOf(bus0) + " " + n.driverOf(sound0); got != "vfio-pci/vfio-pci vfio-pci/vfio-pci" {
		t.Errorf("the group is with %s", got)
	}
	if err := m.Unprepare(n.ctx, "machine-uid"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before.GPUs, n.state().GPUs, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("(-before the claim +after it):\n%s", diff)
	}
	n.do(&nvmlsim.Reboot{})
	if err := m.Unprepare(n.ctx, "machine-uid"); err != nil {
		t.Error(err)
	}
}

func TestWithoutABusNothingIsPassedThrough(t *testing.T) {
	n := newNodeOf(t, withSound)
	n.noBus = true
	if _, err := n.manager().Prepare(n.ctx, claim("machine", "vm="+vm0)); err == nil || !strings.Contains(err.Error(), "no access to the PCI bus") {
		t.Errorf("error %v", err)
	}
	if got := fmt.Sprint(n.files()); got != "[]" {
		t.Errorf("files %s are left", got)
	}
}

// TestAGPUThatDoesNotComeBackIsLookedForEverLess: each look is one at the whole node.
func TestAGPUThatDoesNotComeBackIsLookedForEverLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNodeOf(t, withSound)
		n.hardware.discover(t, n.hardware.policy)
		n.options.GPUTimeout = 3 * time.Second
		m := n.manager()
		n.prepared(m, claim("machine", "vm="+vm0))
		n.hardware.broken[gpu0] = nvml.ErrNotFound
		n.hardware.looks.Store(0)
		n.unprepare(m, "machine-uid")
		if looks := n.hardware.looks.Load(); looks < 2 || looks > 6 {
			t.Errorf("looked %d times in %s, want it looked for again, with growing pauses", looks, n.options.GPUTimeout)
		}
		if list, err := m.Quarantined(); err != nil || len(list) != 1 || list[0].GPU != gpu0 {
			t.Errorf("in quarantine: %+v, %v; want %s", list, err, gpu0)
		}
		clear(n.hardware.broken)
		if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 0 {
			t.Errorf("recovery %+v, %v", recovery, err)
		}
		n.prepared(m, claim("next", "gpu="+gpu0))
	})
}
