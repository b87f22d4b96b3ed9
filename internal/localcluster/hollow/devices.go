// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/ptr"
)

// checkpointName is the kubelet's own, beside the sockets of device plugins (pkg/kubelet/cm/devicemanager/checkpoint).
const checkpointName = "kubelet_internal_checkpoint"

// deviceManager serves device plugins under the kubelet's rules (pkg/kubelet/cm/devicemanager): sockets that are there when it
// starts are deleted; a pod's devices are allocated when it is admitted, those of an init container again to the next ones of the
// pod; a device without a stream is unhealthy; and what was allocated is kept on disk with the plugin's answer.
type deviceManager struct {
	pluginapi.UnimplementedRegistrationServer
	folder string
	// changed is called, with no lock held, when a resource has other devices.
	changed func()

	server *grpc.Server
	ctx    context.Context //nolint:containedctx // of the streams
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu        sync.Mutex
	resources map[string]*pluginResource
	allocated []*allocation
}

// pluginResource is what one device plugin offers.
type pluginResource struct {
	client  pluginapi.DevicePluginClient
	conn    *grpc.ClientConn
	options *pluginapi.DevicePluginOptions
	healthy map[string]bool // by ID
}

// allocation of a container, as it is on disk.
type allocation struct {
	PodUID                      types.UID
	ContainerName, ResourceName string
	// DeviceIDs by NUMA node.
	DeviceIDs map[int64][]string
	// AllocResp is the plugin's answer.
	AllocResp *pluginapi.ContainerAllocateResponse
}

func (a *allocation) ids() (ids []string) {
	for _, list := range a.DeviceIDs {
		ids = append(ids, list...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// checkpoint is the form of the file. Nobody looks at the checksum.
type checkpoint struct {
	Data struct {
		PodDeviceEntries  []*allocation
		RegisteredDevices map[string][]string
	}
	Checksum uint64
}

// newDeviceManager deletes the sockets. Nothing is served before serve.
func newDeviceManager(ctx context.Context, root string, changed func()) (*deviceManager, error) {
	m := &deviceManager{
		folder: filepath.Join(root, "device-plugins"), changed: changed, resources: map[string]*pluginResource{}, server: grpc.NewServer(),
	}
	if err := os.MkdirAll(m.folder, 0o755); err != nil {
		return nil, err
	}
	if err := m.restore(); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(m.folder)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		if entry.Type()&fs.ModeSocket != 0 {
			if err := os.Remove(filepath.Join(m.folder, entry.Name())); err != nil {
				return nil, err
			}
		}
	}
	m.ctx, m.cancel = context.WithCancel(ctx)
	return m, nil
}

func (m *deviceManager) serve() error {
	listener, err := net.Listen("unix", filepath.Join(m.folder, "kubelet.sock"))
	if err != nil {
		return fmt.Errorf("listening for device plugins: %w", err)
	}
	pluginapi.RegisterRegistrationServer(m.server, m)
	m.done.Go(func() { _ = m.server.Serve(listener) })
	return nil
}

func (m *deviceManager) stop() {
	m.cancel()
	m.server.Stop()
	m.done.Wait()
}

// Register implements the kubelet's side of the registration.
func (m *deviceManager) Register(_ context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if request.GetVersion() != pluginapi.Version {
		return nil, fmt.Errorf("device plugin of %s has version %q, want %s", request.GetResourceName(), request.GetVersion(), pluginapi.Version)
	}
	socket := filepath.Join(m.folder, request.GetEndpoint())
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("device plugin of %s: %w", request.GetResourceName(), err)
	}
	r := &pluginResource{client: pluginapi.NewDevicePluginClient(conn), conn: conn, options: request.GetOptions(), healthy: map[string]bool{}}
	m.done.Go(func() { m.watch(request.GetResourceName(), r) })
	return &pluginapi.Empty{}, nil
}

// watch takes what the plugin offers until its stream ends.
func (m *deviceManager) watch(resource string, r *pluginResource) {
	logger := klog.FromContext(m.ctx)
	defer r.conn.Close()
	defer func() {
		m.mu.Lock()
		for id := range r.healthy {
			r.healthy[id] = false
		}
		m.mu.Unlock()
		m.changed()
	}()
	options, err := r.client.GetDevicePluginOptions(m.ctx, &pluginapi.Empty{})
	if err != nil {
		logger.Info("A device plugin does not answer", "resource", resource, "err", err)
		return
	}
	stream, err := r.client.ListAndWatch(m.ctx, &pluginapi.Empty{})
	for err == nil {
		var answer *pluginapi.ListAndWatchResponse
		if answer, err = stream.Recv(); err != nil {
			break
		}
		healthy := map[string]bool{}
		for _, device := range answer.GetDevices() {
			healthy[device.GetID()] = device.GetHealth() == pluginapi.Healthy
		}
		m.mu.Lock()
		r.options, r.healthy = options, healthy
		m.resources[resource] = r // in the place of the one before, whose devices are these
		m.mu.Unlock()
		m.changed()
	}
	logger.V(2).Info("The stream of a device plugin has ended", "resource", resource, "err", err)
}

// capacity is how many devices there are of each resource, and how many are healthy.
func (m *deviceManager) capacity() (all, healthy map[string]int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all, healthy = map[string]int64{}, map[string]int64{}
	for name, r := range m.resources {
		all[name], healthy[name] = int64(len(r.healthy)), 0
		for _, ok := range r.healthy {
			if ok {
				healthy[name]++
			}
		}
	}
	return all, healthy
}

// admit allocates what the pod's containers ask for. Its error is the pod's end.
func (m *deviceManager) admit(ctx context.Context, pod *corev1.Pod, active sets.Set[types.UID]) error {
	m.mu.Lock()
	m.allocated = slices.DeleteFunc(m.allocated, func(a *allocation) bool { return !active.Has(a.PodUID) })
	m.mu.Unlock()
	if pod.Status.Phase == corev1.PodRunning && len(m.of(pod.UID)) > 0 {
		return nil // by a kubelet before, and its containers run
	}
	reusable := map[string]sets.Set[string]{}
	for i, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for name, quantity := range container.Resources.Limits {
			resource := string(name)
			if !m.offers(resource) {
				continue
			}
			ids, err := m.allocate(ctx, pod.UID, container.Name, resource, int(quantity.Value()), reusable[resource])
			if err != nil {
				return fmt.Errorf("container %s: %w", container.Name, err)
			}
			isInit := i < len(pod.Spec.InitContainers) && ptr.Deref(container.RestartPolicy, "") != corev1.ContainerRestartPolicyAlways
			if reusable[resource] == nil {
				reusable[resource] = sets.New[string]()
			}
			if isInit {
				reusable[resource].Insert(ids...)
			} else {
				reusable[resource].Delete(ids...)
			}
		}
	}
	return nil
}

func (m *deviceManager) offers(resource string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.resources[resource] != nil
}

// allocate is for one container. One that has its devices keeps them, if they are healthy.
func (m *deviceManager) allocate(
	ctx context.Context, pod types.UID, container, resource string, count int, reusable sets.Set[string],
) ([]string, error) {
	m.mu.Lock()
	r := m.resources[resource]
	free := sets.New[string]()
	for id, healthy := range r.healthy {
		if healthy {
			free.Insert(id)
		}
	}
	taken := sets.New[string]()
	for _, a := range m.allocated {
		if a.ResourceName != resource {
			continue
		}
		if a.PodUID == pod && a.ContainerName == container {
			m.mu.Unlock()
			if !free.HasAll(a.ids()...) {
				return nil, fmt.Errorf("previously allocated devices of %s are no longer healthy", resource)
			}
			return a.ids(), nil
		}
		taken.Insert(a.ids()...)
	}
	m.mu.Unlock()
	must := sets.List(free.Intersection(reusable))
	must = must[:min(count, len(must))]
	available := sets.List(free.Difference(taken).Insert(must...))
	if len(available) < count {
		return nil, fmt.Errorf("requested number of devices unavailable for %s: requested %d, available %d", resource, count, len(available))
	}
	ids := slices.Compact(slices.Concat(must, slices.DeleteFunc(slices.Clone(available), sets.New(must...).Has)))[:count]
	if r.options.GetGetPreferredAllocationAvailable() && count > len(must) {
		request := &pluginapi.ContainerPreferredAllocationRequest{
			AvailableDeviceIDs: available, MustIncludeDeviceIDs: must, AllocationSize: int32(count),
		}
		answer, err := r.client.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{request},
		})
		if err != nil {
			return nil, fmt.Errorf("preferred devices of %s: %w", resource, err)
		}
		if of := answer.GetContainerResponses(); len(of) == 1 && len(of[0].GetDeviceIDs()) == count {
			ids = of[0].GetDeviceIDs()
		}
	}
	answer, err := r.client.Allocate(ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return nil, fmt.Errorf("allocating devices of %s: %w", resource, err)
	}
	responses := answer.GetContainerResponses()
	if len(responses) != 1 {
		return nil, fmt.Errorf("allocating devices of %s: the plugin has answered for %d containers, want 1", resource, len(responses))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.allocated = append(m.allocated, &allocation{
		PodUID: pod, ContainerName: container, ResourceName: resource, DeviceIDs: map[int64][]string{-1: ids}, AllocResp: responses[0],
	})
	return ids, m.save()
}

// start tells the plugins that the container is about to start, and returns what it gets: names of CDI devices, and variables.
func (m *deviceManager) start(ctx context.Context, pod types.UID, container string) (devices []string, env map[string]string, err error) {
	env = map[string]string{}
	for _, a := range m.of(pod) {
		if a.ContainerName != container {
			continue
		}
		m.mu.Lock()
		r := m.resources[a.ResourceName]
		m.mu.Unlock()
		if r == nil {
			return nil, nil, fmt.Errorf("no device plugin of %s is registered", a.ResourceName)
		}
		if r.options.GetPreStartRequired() {
			if _, err := r.client.PreStartContainer(ctx, &pluginapi.PreStartContainerRequest{DevicesIds: a.ids()}); err != nil {
				return nil, nil, fmt.Errorf("before container %s starts: %w", container, err)
			}
		}
		for _, device := range a.AllocResp.GetCdiDevices() {
			devices = append(devices, device.GetName())
		}
		maps.Copy(env, a.AllocResp.GetEnvs())
	}
	return devices, env, nil
}

// of are the allocations of a pod.
func (m *deviceManager) of(pod types.UID) (all []*allocation) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range m.allocated {
		if a.PodUID == pod {
			all = append(all, a)
		}
	}
	return all
}

// save needs the lock.
func (m *deviceManager) save() error {
	var content checkpoint
	content.Data.PodDeviceEntries, content.Data.RegisteredDevices = m.allocated, map[string][]string{}
	for name, r := range m.resources {
		content.Data.RegisteredDevices[name] = slices.Sorted(maps.Keys(r.healthy))
	}
	text, err := json.Marshal(content)
	if err != nil {
		return err
	}
	path := filepath.Join(m.folder, checkpointName)
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return fmt.Errorf("writing the checkpoint: %w", err)
	}
	return os.Rename(path+".new", path)
}

func (m *deviceManager) restore() error {
	text, err := os.ReadFile(filepath.Join(m.folder, checkpointName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var content checkpoint
	if err == nil {
		err = json.Unmarshal(text, &content)
	}
	if err != nil {
		return fmt.Errorf("reading the checkpoint: %w", err)
	}
	m.allocated = content.Data.PodDeviceEntries
	for name := range content.Data.RegisteredDevices {
		m.resources[name] = &pluginResource{healthy: map[string]bool{}} // until its plugin is back
	}
	return nil
}
