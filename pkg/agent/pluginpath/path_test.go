// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginpath

import (
	"context"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// twoGPUs are a node's hardware.
type twoGPUs struct{}

func (twoGPUs) Node() *discovery.Node {
	return &discovery.Node{GPUs: []discovery.GPU{{Name: "gpu-1"}, {Name: "gpu-2"}}}
}

func (twoGPUs) Resources(pool string) (resourceslice.DriverResources, bool) {
	return resourcesOf(pool, "gpu-1", "gpu-2"), true
}

func resourcesOf(pool string, names ...string) resourceslice.DriverResources {
	var devices []resourceapi.Device
	for _, name := range names {
		devices = append(devices, resourceapi.Device{Name: name})
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{pool: {Slices: []resourceslice.Slice{{Devices: devices}}}}}
}

// whenRead is a disk that calls somebody when a folder is read.
type whenRead struct {
	durable.OS
	call func()
}

func (w *whenRead) ReadDir(path string) ([]fs.DirEntry, error) {
	w.call()
	return w.OS.ReadDir(path)
}

// TestAGPULeavesTheAPIBeforeAnythingWasOffered: an agent that starts looks what there is while it reads in the Node that all GPUs are for
// claims. A pod has one of two, and ends before the next look.
func TestAGPULeavesTheAPIBeforeAnythingWasOffered(t *testing.T) {
	disk := &whenRead{call: func() {}}
	records := ledger.At(disk, t.TempDir())
	of := ledger.PluginDevice{Resource: GPUResource, ID: "GPU-1"}
	if err := records.Put(&ledger.Entry{
		Claim: ledger.Claim{UID: hold.UID(of), Name: "held", Plugin: of}, State: ledger.PrepareCompleted,
		Devices: []ledger.Device{{Pool: "node-1", Device: "gpu-1", GPU: "gpu-1", UUID: "GPU-1", CDIDeviceIDs: []string{"a/b=c"}}},
	}); err != nil {
		t.Fatal(err)
	}
	p := New(Options{
		Driver: "gpu.nvidia.com", Node: "node-1", KubeletRoot: t.TempDir(), Hardware: twoGPUs{}, Records: records,
		Devices: func(context.Context, bool) ([]ledger.PluginDevice, error) { return nil, nil },
		Pods:    func(context.Context) ([]corev1.Pod, error) { return nil, nil },
		Failed:  func(string, error) bool { return false },
		Tell:    func(string, string, string) {},
	})
	paths, err := advertise.Parse("device-plugin")
	if err != nil {
		t.Fatal(err)
	}
	p.Advertise(Advertised{Paths: paths})
	p.HeldChanged()
	disk.call = sync.OnceFunc(func() {
		p.NodeRead(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{Annotation: "dra"}}})
	})
	p.Step(t.Context())
	forClaims := func() (names []string) {
		resources, _ := p.ForClaims("node-1")
		for _, device := range resources.Pools["node-1"].Slices[0].Devices {
			names = append(names, device.Name)
		}
		return names
	}
	if got := forClaims(); !slices.Equal(got, []string{"gpu-2"}) {
		t.Errorf("a pod has a GPU, and claims are offered %v", got)
	}

	if err := records.Remove(hold.UID(of)); err != nil {
		t.Fatal(err)
	}
	p.HeldChanged()
	for range 2 { // as Run does
		if p.usesAPI() {
			p.Step(t.Context())
		}
	}
	if got := forClaims(); !slices.Equal(got, []string{"gpu-1", "gpu-2"}) || p.usesAPI() {
		t.Errorf("the pod has ended, and claims are offered %v; the API is used still: %t", got, p.usesAPI())
	}
}

// unseen is a node on which vfio-pci has the second GPU while bound is true. Then nobody knows its UUID.
type unseen struct{ bound *bool }

const secondGPU, secondUUID = "gpu-0000-43-00-0", "GPU-8a1b2c3d-0000-4000-8000-00000000000a"

func (u unseen) Node() *discovery.Node {
	second := discovery.GPU{Name: secondGPU, UUID: secondUUID}
	if *u.bound {
		second.UUID, second.Passthrough = "", &discovery.Passthrough{Bound: true}
	}
	return &discovery.Node{GPUs: []discovery.GPU{{Name: "gpu-1", UUID: "GPU-1"}, second}}
}

func (u unseen) Resources(pool string) (resourceslice.DriverResources, bool) {
	return resourcesOf(pool, "gpu-1", secondGPU+"-vfio"), true
}

// TestAGPUThatIsKeptFromAllStaysSo when its administrator gives it to vfio-pci, by which NVML does not know its UUID any more: no claim for a
// virtual machine gets it.
func TestAGPUThatIsKeptFromAllStaysSo(t *testing.T) {
	bound := false
	var reasons []string
	p := New(Options{
		Driver: "gpu.nvidia.com", Node: "node-1", KubeletRoot: t.TempDir(), Hardware: unseen{&bound},
		Records: ledger.At(durable.OS{}, t.TempDir()),
		Devices: func(context.Context, bool) ([]ledger.PluginDevice, error) { return nil, nil },
		Failed: func(_ string, err error) bool {
			if err != nil {
				reasons = append(reasons, err.Error())
			}
			return false
		},
		Tell: func(string, string, string) {},
	})
	paths, err := advertise.Parse("dra," + secondUUID + "=none")
	if err != nil {
		t.Fatal(err)
	}
	p.Advertise(Advertised{Paths: paths})
	for _, bound = range []bool{false, true, false} {
		reasons = nil
		p.Step(t.Context())
		resources, _ := p.ForClaims("node-1")
		devices := resources.Pools["node-1"].Slices[0].Devices
		if len(devices) != 1 || devices[0].Name != "gpu-1" || len(devices[0].Taints) > 0 {
			t.Errorf("vfio-pci has the second GPU: %t; claims are offered %+v", bound, devices)
		}
		if told := strings.Contains(strings.Join(reasons, "\n"), "address"); told != bound {
			t.Errorf("vfio-pci has the second GPU: %t; what is told is %q", bound, reasons)
		}
	}
}
