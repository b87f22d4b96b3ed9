// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/klog/v2/ktesting"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/deviceplugin/kubelettest"
	"stowage.dev/stowage/pkg/topology"
)

const gpuResource, migResource, sharedResource = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"

// inventory is changed by the test.
type inventory struct {
	mu        sync.Mutex
	resources []deviceplugin.Resource
	changed   chan struct{}
}

func (i *inventory) Resources() ([]deviceplugin.Resource, <-chan struct{}) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.resources, i.changed
}

func (i *inventory) set(resources ...deviceplugin.Resource) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.resources = resources
	close(i.changed)
	i.changed = make(chan struct{})
}

// holder does what the test says, and takes note.
type holder struct {
	mu     sync.Mutex
	calls  []string
	answer func(call string) error
}

func (h *holder) note(call, resource string, devices []deviceplugin.Device) error {
	for _, device := range devices {
		call += " " + device.ID
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, resource+" "+call)
	if h.answer != nil {
		return h.answer(call)
	}
	return nil
}

func (h *holder) Allocated(_ context.Context, resource string, devices []deviceplugin.Device) error {
	return h.note("allocated", resource, devices)
}

func (h *holder) Starting(_ context.Context, resource string, devices []deviceplugin.Device) error {
	return h.note("starting", resource, devices)
}

func (h *holder) answers(f func(call string) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answer = f
}

// gpus are four healthy GPUs, in pairs that are linked: 0 and 3, 1 and 2.
func gpus(unhealthy ...int) deviceplugin.Resource {
	r := deviceplugin.Resource{Name: gpuResource}
	var where []topology.Device
	for i := range 4 {
		numa := i / 2
		r.Devices = append(r.Devices, deviceplugin.Device{
			ID: fmt.Sprintf("GPU-%d", i), Name: fmt.Sprintf("gpu-%d", i), UUID: fmt.Sprintf("GPU-%d", i), CDIName: fmt.Sprintf("k8s.gpu.nvidia.com/claim=uid-%d", i),
			Healthy: !slices.Contains(unhealthy, i), NUMANode: &numa, GPU: i,
		})
		where = append(where, topology.Device{NVLinks: map[int]int{3 - i: 4}})
	}
	r.Table = topology.NewTable(topology.NewMatrix(where))
	return r
}

func migs() deviceplugin.Resource {
	return deviceplugin.Resource{Name: migResource, Devices: []deviceplugin.Device{
		{ID: "MIG-1", UUID: "MIG-1", CDIName: "k8s.gpu.nvidia.com/claim=mig-1", Healthy: true},
		{ID: "MIG-2", UUID: "MIG-2", CDIName: "k8s.gpu.nvidia.com/claim=mig-2", Healthy: true},
	}}
}

// replicas are three of each of two GPUs.
func replicas(single bool) deviceplugin.Resource {
	r := deviceplugin.Resource{Name: sharedResource, Shared: true, Single: single}
	for _, gpu := range []string{"GPU-0", "GPU-1"} {
		for n := range 3 {
			id := fmt.Sprintf("%s::%d", gpu, n)
			r.Devices = append(r.Devices, deviceplugin.Device{ID: id, UUID: gpu, CDIName: "k8s.gpu.nvidia.com/claim=" + strings.ReplaceAll(id, "::", "-"), Healthy: true})
		}
	}
	return r
}

type fixture struct {
	dir       string
	inventory *inventory
	holder    *holder
}

// start runs a server until the test ends. Sockets have short paths: those of t.TempDir may be too long.
func start(t *testing.T, change func(*deviceplugin.Options)) *fixture {
	t.Helper()
	dir, err := os.MkdirTemp("", "plugins")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	f := &fixture{dir: dir, inventory: &inventory{changed: make(chan struct{})}, holder: &holder{}}
	f.inventory.set(gpus(), migs())
	opts := deviceplugin.Options{
		Dir: dir, Inventory: f.inventory, Holder: f.holder, Strategies: []deviceplugin.Strategy{deviceplugin.CDIByCRI},
		// Longer than a test takes on a machine that is busy, other than the one that waits for it.
		StreamGrace: time.Minute,
	}
	if change != nil {
		change(&opts)
	}
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		deviceplugin.New(opts).Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return f
}

func (f *fixture) kubelet(t *testing.T) *kubelettest.Kubelet {
	t.Helper()
	k := kubelettest.Start(t, f.dir)
	k.Await(t, gpuResource, 4)
	k.Await(t, migResource, 2)
	return k
}

func TestTheKubeletIsToldOfSeveralResources(t *testing.T) {
	f := start(t, nil)
	k := f.kubelet(t)
	if diff := cmp.Diff([]string{gpuResource, migResource}, k.Resources()); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
	device := func(id string, numa int64) *pluginapi.Device {
		return &pluginapi.Device{ID: id, Health: pluginapi.Healthy, Topology: &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: numa}}}}
	}
	want := []*pluginapi.Device{device("GPU-0", 0), device("GPU-1", 0), device("GPU-2", 1), device("GPU-3", 1)}
	if diff := cmp.Diff(want, k.Lists(gpuResource)[0].Devices, protocmp.Transform()); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if topology := k.Lists(migResource)[0].Devices[0].GetTopology(); topology != nil {
		t.Errorf("a device whose NUMA node is not known has the topology %v", topology)
	}
	if options := k.Options(gpuResource); !options.GetPreStartRequired() || !options.GetGetPreferredAllocationAvailable() {
		t.Errorf("options %v: the kubelet would not call before a container starts, or choose by itself", options)
	}
	// A resource that comes later is registered beside the others.
	f.inventory.set(gpus(), migs(), deviceplugin.Resource{Name: "nvidia.com/mig-2g.20gb", Devices: []deviceplugin.Device{{ID: "MIG-3", Healthy: true}}})
	k.Await(t, "nvidia.com/mig-2g.20gb", 1)
}

func TestHealthLeavesAndReturnsWithoutAnEmptyList(t *testing.T) {
	f := start(t, nil)
	k := f.kubelet(t)
	f.inventory.set(gpus(1, 3), migs())
	k.Await(t, gpuResource, 2)
	f.inventory.set(gpus(1, 3), migs()) // which is no news
	f.inventory.set(gpus(0, 1, 2, 3), migs())
	k.Await(t, gpuResource, 0)
	f.inventory.set(gpus(), migs())
	k.Await(t, gpuResource, 4)
	lists := k.Lists(gpuResource)
	if len(lists) != 4 {
		t.Errorf("%d lists, want one for each change: 4", len(lists))
	}
	for i, list := range lists {
		if len(list.Devices) != 4 {
			t.Errorf("list %d has %d devices: the node's capacity falls for a moment", i, len(list.Devices))
		}
	}
	if n := len(k.Lists(migResource)); n != 1 {
		t.Errorf("%d lists of a resource that did not change, want 1", n)
	}
}

func TestItIsRegisteredAgain(t *testing.T) {
	tests := map[string]func(t *testing.T, f *fixture, k *kubelettest.Kubelet) *kubelettest.Kubelet{
		"when the kubelet starts anew, and deletes all sockets": func(t *testing.T, f *fixture, k *kubelettest.Kubelet) *kubelettest.Kubelet {
			k.Stop()
			return kubelettest.Start(t, f.dir)
		},
		"when the plugin's socket is removed": func(t *testing.T, _ *fixture, k *kubelettest.Kubelet) *kubelettest.Kubelet {
			if err := os.Remove(k.Socket(gpuResource)); err != nil {
				t.Fatal(err)
			}
			return k
		},
		"when another file is in the place of the socket": func(t *testing.T, _ *fixture, k *kubelettest.Kubelet) *kubelettest.Kubelet {
			socket := k.Socket(gpuResource)
			if err := errors.Join(os.Remove(socket), os.WriteFile(socket, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			return k
		},
		"when the kubelet stops to listen": func(_ *testing.T, _ *fixture, k *kubelettest.Kubelet) *kubelettest.Kubelet {
			k.CutStream(gpuResource)
			return k
		},
		"when the kubelet has refused it": func(t *testing.T, f *fixture, k *kubelettest.Kubelet) *kubelettest.Kubelet {
			k.Stop()
			k = kubelettest.Start(t, f.dir)
			k.Refuse(errors.New("not now"))
			k.Stop()
			return kubelettest.Start(t, f.dir)
		},
	}
	for name, happen := range tests {
		t.Run(name, func(t *testing.T) {
			f := start(t, func(o *deviceplugin.Options) { o.StreamGrace = time.Second })
			k := f.kubelet(t)
			before := k.Socket(gpuResource)
			k = happen(t, f, k)
			k.AwaitAnother(t, gpuResource, before)
			k.Await(t, gpuResource, 4)
			k.Await(t, migResource, 2)
			// The end of the one before has not taken the devices away.
			f.inventory.set(gpus(2), migs())
			k.Await(t, gpuResource, 3)
			if _, err := k.Allocate(t.Context(), gpuResource, "GPU-0"); err != nil {
				t.Error(err)
			}
		})
	}
}

// The kubelet asks the same again: for an app container what its init container has, after its own restart, and at once from two
// places. The answer it keeps must be the one that it would get.
func TestTheSameDevicesGetTheSameAnswer(t *testing.T) {
	f := start(t, nil)
	k := f.kubelet(t)
	want := &pluginapi.ContainerAllocateResponse{CdiDevices: []*pluginapi.CDIDevice{{Name: "k8s.gpu.nvidia.com/claim=uid-1"}, {Name: "k8s.gpu.nvidia.com/claim=uid-3"}}}
	var group sync.WaitGroup
	for _, ids := range [][]string{{"GPU-1", "GPU-3"}, {"GPU-3", "GPU-1"}, {"GPU-1", "GPU-3"}} {
		group.Go(func() {
			got, err := k.Allocate(t.Context(), gpuResource, ids...)
			if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
				t.Errorf("%v: %v (-want +got):\n%s", ids, err, diff)
			}
		})
	}
	group.Wait()
	k.Stop()
	f.inventory.set(gpus(1), migs())
	k = kubelettest.Start(t, f.dir)
	k.Await(t, gpuResource, 3)
	got, err := k.Allocate(t.Context(), gpuResource, "GPU-1", "GPU-3")
	if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
		t.Errorf("after a restart, and one is unhealthy: %v (-want +got):\n%s", err, diff)
	}
	f.holder.mu.Lock()
	defer f.holder.mu.Unlock()
	if diff := cmp.Diff(slices.Repeat([]string{gpuResource + " allocated GPU-1 GPU-3"}, 4), f.holder.calls); diff != "" {
		t.Errorf("the holder was told (-want +got):\n%s", diff)
	}
}

func TestSeveralContainersOfOneCall(t *testing.T) {
	f := start(t, nil)
	k := f.kubelet(t)
	response, err := k.Client(gpuResource).Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{
		{DevicesIds: []string{"GPU-2"}}, {DevicesIds: []string{"GPU-0"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, container := range response.GetContainerResponses() {
		for _, device := range container.GetCdiDevices() {
			got = append(got, device.GetName())
		}
	}
	if diff := cmp.Diff([]string{"k8s.gpu.nvidia.com/claim=uid-2", "k8s.gpu.nvidia.com/claim=uid-0"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// An error of Allocate fails the pod for good, so only what must never be is one. PreStartContainer is asked again.
func TestWhatAllocateRefuses(t *testing.T) {
	taken, passes := fmt.Errorf("held by claim a/b: %w", deviceplugin.ErrRefused), errors.New("the last user's process is still there")
	tests := map[string]struct {
		ids             []string
		holder          error
		allocate, start codes.Code
		says            string
	}{
		"all is well":                    {ids: []string{"GPU-0"}},
		"what may pass is left to start": {ids: []string{"GPU-0"}, holder: passes, start: codes.FailedPrecondition, says: "process is still there"},
		"somebody else has it":           {ids: []string{"GPU-0"}, holder: taken, allocate: codes.FailedPrecondition, start: codes.FailedPrecondition, says: "claim a/b"},
		"there is no such device":        {ids: []string{"GPU-0", "GPU-9"}, allocate: codes.NotFound, start: codes.NotFound, says: `"GPU-9"`},
		"it is another resource's":       {ids: []string{"MIG-1"}, allocate: codes.NotFound, start: codes.NotFound, says: `"MIG-1"`},
		"none":                           {allocate: codes.InvalidArgument, start: codes.InvalidArgument, says: "0 devices of nvidia.com/gpu"},
		"more than there are":            {ids: []string{"GPU-0", "GPU-0", "GPU-1", "GPU-2", "GPU-3"}, allocate: codes.InvalidArgument, start: codes.InvalidArgument, says: "5 devices of nvidia.com/gpu, of which there are 4"},
	}
	f := start(t, nil)
	k := f.kubelet(t)
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			f.holder.answers(func(string) error { return test.holder })
			response, err := k.Allocate(t.Context(), gpuResource, test.ids...)
			if status.Code(err) != test.allocate || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("Allocate: %v, want %s and %q", err, test.allocate, test.says)
			}
			if err == nil && len(response.GetCdiDevices()) != len(test.ids) {
				t.Errorf("Allocate: %v", response)
			}
			if err := k.PreStart(t.Context(), gpuResource, test.ids...); status.Code(err) != test.start || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("PreStartContainer: %v, want %s and %q", err, test.start, test.says)
			}
		})
	}
}

// An error would fail the pod, so what makes no sense has no preference, and the kubelet chooses.
func TestPreferredAllocation(t *testing.T) {
	all := []string{"GPU-0", "GPU-1", "GPU-2", "GPU-3"}
	every := []string{"GPU-1::2", "GPU-1::1", "GPU-1::0", "GPU-0::2", "GPU-0::1", "GPU-0::0"}
	tests := map[string]struct {
		resource        string
		available, must []string
		size            int32
		want            []string
	}{
		"a linked pair":                     {available: []string{"GPU-1", "GPU-3", "GPU-2"}, size: 2, want: []string{"GPU-1", "GPU-2"}},
		"what must be in it decides":        {available: all, must: []string{"GPU-3"}, size: 2, want: []string{"GPU-0", "GPU-3"}},
		"what must be in it is not in both": {available: []string{"GPU-0", "GPU-1"}, must: []string{"GPU-3"}, size: 2, want: []string{"GPU-0", "GPU-3"}},
		"all":                               {available: all, must: all, size: 4, want: all},
		"more than are available":           {available: []string{"GPU-1"}, size: 2},
		"less than none":                    {available: all, size: -7},
		"a device that there is not":        {available: []string{"GPU-0", "GPU-9"}, size: 1},
		"one that there is not must be":     {available: all, must: []string{"GPU-9"}, size: 2},
		"without a table":                   {resource: migResource, available: []string{"MIG-1", "MIG-2"}, size: 1},
		"the first replica":                 {resource: sharedResource, available: every, size: 1, want: []string{"GPU-0::0"}},
		"of the GPU that nobody has":        {resource: sharedResource, available: []string{"GPU-0::1", "GPU-0::2", "GPU-1::0", "GPU-1::1", "GPU-1::2"}, size: 1, want: []string{"GPU-1::0"}},
		"of the GPU that fewer have":        {resource: sharedResource, available: []string{"GPU-0::1", "GPU-0::2", "GPU-1::2"}, size: 1, want: []string{"GPU-0::1"}},
		"replicas of both GPUs":             {resource: sharedResource, available: every, size: 3, want: []string{"GPU-0::0", "GPU-1::0", "GPU-0::1"}},
		"beside one that must be":           {resource: sharedResource, available: every, must: []string{"GPU-0::2"}, size: 2, want: []string{"GPU-0::2", "GPU-1::0"}},
		"all of a GPU are taken":            {resource: sharedResource, available: []string{"GPU-0::2"}, size: 1, want: []string{"GPU-0::2"}},
		"more replicas than there are":      {resource: sharedResource, available: []string{"GPU-0::2"}, size: 2},
		"a replica that there is not":       {resource: sharedResource, available: []string{"GPU-0::2", "GPU-0::3"}, size: 1},
		"fewer than must be":                {resource: sharedResource, available: every, must: []string{"GPU-0::2"}, size: 0},
	}
	f := start(t, nil)
	f.inventory.set(gpus(), migs(), replicas(false))
	k := f.kubelet(t)
	k.Await(t, sharedResource, 6)
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if test.resource == "" {
				test.resource = gpuResource
			}
			request := &pluginapi.ContainerPreferredAllocationRequest{AvailableDeviceIDs: test.available, MustIncludeDeviceIDs: test.must, AllocationSize: test.size}
			response, err := k.Client(test.resource).GetPreferredAllocation(t.Context(), &pluginapi.PreferredAllocationRequest{
				ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{request, request},
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(response.GetContainerResponses()) != 2 {
				t.Fatalf("%d responses for two containers", len(response.GetContainerResponses()))
			}
			for _, container := range response.GetContainerResponses() {
				if diff := cmp.Diff(test.want, container.GetDeviceIDs()); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}

// A container knows one MPS daemon, and each GPU has its own. Otherwise a container has the GPU of two replicas once.
func TestSeveralReplicasForAContainer(t *testing.T) {
	f := start(t, func(o *deviceplugin.Options) {
		o.Strategies = []deviceplugin.Strategy{deviceplugin.CDIByCRI, deviceplugin.ByEnvironment}
	})
	f.inventory.set(replicas(false))
	k := kubelettest.Start(t, f.dir)
	k.Await(t, sharedResource, 6)
	want := &pluginapi.ContainerAllocateResponse{
		CdiDevices: []*pluginapi.CDIDevice{{Name: "k8s.gpu.nvidia.com/claim=GPU-0-0"}, {Name: "k8s.gpu.nvidia.com/claim=GPU-0-1"}, {Name: "k8s.gpu.nvidia.com/claim=GPU-1-2"}},
		Envs:       map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"},
	}
	got, err := k.Allocate(t.Context(), sharedResource, "GPU-0::0", "GPU-0::1", "GPU-1::2")
	if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	f.inventory.set(replicas(true))
	for _, ids := range [][]string{{"GPU-0::0"}, {"GPU-0::0", "GPU-1::0"}} {
		_, err := k.Allocate(t.Context(), sharedResource, ids...)
		startErr := k.PreStart(t.Context(), sharedResource, ids...)
		if startErr != nil || len(ids) == 1 && err != nil { // it may have got two of them before
			t.Errorf("%v: %v, %v", ids, err, startErr)
		}
		if len(ids) == 2 && (status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "2 devices of nvidia.com/gpu.shared: a container can have one")) {
			t.Errorf("%v: %v", ids, err)
		}
	}
}

func TestStrategies(t *testing.T) {
	tests := map[string]*pluginapi.ContainerAllocateResponse{
		"cdi-cri": {CdiDevices: []*pluginapi.CDIDevice{{Name: "k8s.gpu.nvidia.com/claim=uid-0"}, {Name: "k8s.gpu.nvidia.com/claim=uid-2"}}},
		"cdi-annotations,envvar": {
			Annotations: map[string]string{"cdi.k8s.io/stowage_nvidia.com-gpu": "k8s.gpu.nvidia.com/claim=uid-0,k8s.gpu.nvidia.com/claim=uid-2"},
			Envs:        map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-2"},
		},
	}
	for list, want := range tests {
		t.Run(list, func(t *testing.T) {
			f := start(t, func(o *deviceplugin.Options) {
				var err error
				if o.Strategies, err = deviceplugin.ParseStrategies(list); err != nil {
					t.Fatal(err)
				}
			})
			got, err := f.kubelet(t).Allocate(t.Context(), gpuResource, "GPU-0", "GPU-2")
			if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
	for list, says := range map[string]string{"": `""`, "cdi": `"cdi"`, "cdi-cri,": `""`, "envvar,envvar": `"envvar" is there twice`} {
		if got, err := deviceplugin.ParseStrategies(list); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, %v; want an error with %s", list, got, err, says)
		}
	}
}

func TestSocketsOfAgentsThatAreGoneAreRemoved(t *testing.T) {
	dead, living := "stowage-gpu-00000000-1.sock", "stowage-gpu-11111111-1.sock"
	f := start(t, func(o *deviceplugin.Options) {
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(o.Dir, dead), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(false)
		if err := listener.Close(); err != nil {
			t.Fatal(err)
		}
		other, err := net.Listen("unix", filepath.Join(o.Dir, living))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = other.Close() })
	})
	listener, err := net.Listen("unix", filepath.Join(f.dir, "kubelet.sock")) // nobody answers
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := listener.Accept() // the server has begun to register, after it has swept
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := os.Lstat(filepath.Join(f.dir, dead)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket that nobody serves: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(f.dir, living)); err != nil {
		t.Errorf("the socket of another agent: %v", err)
	}
}

func TestNoSocketStaysAtTheEnd(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir) // for a short path that outlives the server
	if err := os.Mkdir("p", 0o700); err != nil {
		t.Fatal(err)
	}
	t.Run("a server that ends", func(t *testing.T) {
		start(t, func(o *deviceplugin.Options) { o.Dir = "p" })
		k := kubelettest.Start(t, "p")
		k.Await(t, gpuResource, 4)
		k.Await(t, migResource, 2)
		if sockets, _ := filepath.Glob("p/stowage-*.sock"); len(sockets) != 2 {
			t.Errorf("sockets %v, want one for each resource", sockets)
		}
	})
	if left, _ := filepath.Glob("p/*.sock"); len(left) > 0 {
		t.Errorf("sockets that stay: %v", left)
	}
}
