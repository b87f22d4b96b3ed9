// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"stowage.dev/stowage/internal/localcluster/image/report"
	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/pkg/agent/podresources"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/test/lab"
)

const (
	halfName = "halves"
	// halfGPUs of four are on each path.
	halfGPUs = 2
)

// A node with half of its GPUs on each path: pods with a claim and pods with nvidia.com/gpu each have theirs, over a restart of the
// kubelet, and the loss of a GPU. Then a device plugin of somebody else comes with a GPU that claims have had.
func TestHalfOfTheGPUsByTheDevicePlugin(t *testing.T) {
	namespace := newNamespace(t) // which goes after the node
	half, err := cluster.StartRealNode(t.Context(), halfName, "sim:gb200", "--advertise=dra,0018:01:00.0=device-plugin,0019:01:00.0=device-plugin")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := half.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := cluster.WaitForSlices(t.Context(), halfName, halfGPUs); err != nil {
		t.Fatal(err)
	}
	waitGPUs(t, halfName, halfGPUs, halfGPUs)
	free := func(when string, want int) {
		t.Helper()
		waitFree(t, half, when, want)
	}
	free("before any pod", halfGPUs)
	pluginPod := func(name string, gpus int64) pod {
		t.Helper()
		object := extendedPod(name, gpus, gpus)
		object.Spec.NodeSelector[corev1.LabelHostname] = halfName
		if _, err := cluster.AdminClient().CoreV1().Pods(namespace).Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		return pod{t: t, namespace: namespace, name: name}
	}
	onHalf := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: halfName} }

	// The init container of the one pod has the same two as its app container.
	byPlugin := pluginPod("by-plugin", halfGPUs)
	createPod(t, namespace, "by-claim", halfGPUs, onHalf)
	byClaim := pod{t: t, namespace: namespace, name: "by-claim"}
	byPlugin.waitRunning()
	byClaim.waitRunning()
	was := byPlugin.container()
	plugins, claims := uuidsOf(byPlugin.report(half, "main")), uuidsOf(byClaim.report(half, "main"))
	if len(plugins) != halfGPUs || len(claims) != halfGPUs || len(plugins.Union(claims)) != 2*halfGPUs {
		t.Errorf("the pod of the device plugin sees %v, that of the claim %v", sets.List(plugins), sets.List(claims))
	}
	if initSaw := uuidsOf(byPlugin.report(half, "init")); !initSaw.Equal(plugins) {
		t.Errorf("the init container saw %v, the app container sees %v", sets.List(initSaw), sets.List(plugins))
	}
	if claimed := byPlugin.get().Status.ExtendedResourceClaimStatus; claimed != nil {
		t.Errorf("the pod of the device plugin has the claim %s", claimed.ResourceClaimName)
	}

	free("all are given away", 0)

	// All are given away on both paths.
	next := pluginPod("next", 1)
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"next"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}

	// The kubelet deletes the sockets of plugins when it starts, and forgets them.
	if err := half.RestartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitGPUs(t, halfName, halfGPUs, halfGPUs)
	if now := byPlugin.container(); now.ContainerID != was.ContainerID {
		t.Errorf("the pod's container is another one after a restart of the kubelet: %+v", now)
	}

	byPlugin.delete()
	next.waitRunning()
	sees := uuidsOf(next.report(half, "main"))
	if len(sees) != 1 || !plugins.IsSuperset(sees) {
		t.Errorf("the next pod sees %v, the one before saw %v", sets.List(sees), sets.List(plugins))
	}

	// A GPU that is lost leaves what can be allocated, and returns. What is free is what can be allocated less what pods have: also the one of the pod, which
	// is not free when it returns.
	control := filepath.Join(half.SimulationDir(), nvmlsim.ControlSocket)
	free("a pod has one of two", 1)
	for uuid := range plugins {
		left := 0
		if sees.Has(uuid) {
			left = 1
		}
		if _, err := nvmlsim.Control(t.Context(), control, &nvmlsim.LoseGPU{GPU: uuid}); err != nil {
			t.Fatal(err)
		}
		waitGPUs(t, halfName, halfGPUs, halfGPUs-1)
		free("GPU "+uuid+" is lost", left)
		if _, err := nvmlsim.Control(t.Context(), control, &nvmlsim.RestoreGPU{GPU: uuid}); err != nil {
			t.Fatal(err)
		}
		waitGPUs(t, halfName, halfGPUs, halfGPUs)
		free("GPU "+uuid+" is back", 1)
	}

	// Somebody else's plugin offers a GPU that is on the path of claims.
	foreign := sets.List(claims)[0]
	offerAsSomebodyElse(t, half, "nvidia.com/gpu.shared", foreign+"::0", foreign+"::1")
	poll(t, "the GPU has the taint", func(ctx context.Context) error {
		list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + halfName})
		if err != nil {
			return err
		}
		var found []string
		for _, slice := range list.Items {
			for _, device := range slice.Spec.Devices {
				for _, taint := range device.Taints {
					if taint.Key == "gpu.nvidia.com/in-use" && taint.Value == "device-plugin" && taint.Effect == resourceapi.DeviceTaintEffectNoSchedule {
						found = append(found, device.Name)
					}
				}
			}
		}
		if len(found) != 1 {
			return fmt.Errorf("tainted: %v", found)
		}
		return nil
	})
	if now := byClaim.container(); now.RestartCount != 0 || now.State.Running == nil {
		t.Errorf("the pod that has it by a claim: %+v", now)
	}
	byClaim.delete()
	next.delete()
}

// Two pods share a GPU by nvidia.com/gpu.shared, each with its limits under MPS, and a third one waits for one of them to end. No claim gets that
// GPU, and the exporter names both pods.
func TestTwoPodsShareAGPUByTheDevicePlugin(t *testing.T) {
	const (
		name     = "replicas"
		resource = "nvidia.com/gpu.shared"
	)
	namespace := newNamespace(t) // which goes after the node
	shared, err := cluster.StartRealNode(t.Context(), name, profile, "--share-gpus=0000:df:00.0", "--share-replicas=2", "--share-across-namespaces",
		"--share-strategy=mps", "--advertise=dra,0000:df:00.0=device-plugin", "--gpu-metrics-interval=1s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shared.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := cluster.WaitForSlices(t.Context(), name, gpuCount-1); err != nil {
		t.Fatal(err)
	}
	waitDevices(t, name, resource, 2, 2)
	node := &pluginNode{Node: shared, namespace: namespace}
	replicaPod := func(name string) pod {
		t.Helper()
		return node.create(t, name, 1, func(p *corev1.Pod) {
			limits := p.Spec.Containers[0].Resources.Limits
			limits[resource] = limits["nvidia.com/gpu"]
			delete(limits, "nvidia.com/gpu")
			// Its init container has the same replica.
			before := *p.Spec.Containers[0].DeepCopy()
			before.Name, before.Args = "init", []string{"once"}
			p.Spec.InitContainers = []corev1.Container{before}
		})
	}
	pods := []pod{replicaPod("one"), replicaPod("two")}
	saw := sets.New[string]()
	var want []series
	for _, p := range pods {
		p.waitRunning()
		sees, initSaw := p.report(shared, "main"), p.report(shared, "init")
		uuids := uuidsOf(sees)
		if len(uuids) != 1 || !uuidsOf(initSaw).Equal(uuids) {
			t.Fatalf("pod %s sees %v, its init container saw %v", p.name, sets.List(uuids), sets.List(uuidsOf(initSaw)))
		}
		// Half of the 81559 MiB, in whole ones.
		if memory, percent := sees.Env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], sees.Env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]; memory != "0=40779M" || percent != "50" {
			t.Errorf("pod %s has the limits %q and %q of its MPS daemon", p.name, memory, percent)
		}
		saw = saw.Union(uuids)
		want = append(want, series{UUID: sets.List(uuids)[0], Device: "gpu-0000-df-00-0", Namespace: namespace, Pod: p.name, Container: "main"})
	}
	if len(saw) != 1 {
		t.Errorf("the pods see %v, want one GPU", sets.List(saw))
	}
	waitSeries(t, shared, want)
	third := replicaPod("three")
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"three"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}
	createPod(t, namespace, "by-claims", gpuCount-1, func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: name} })
	byClaims := pod{t: t, namespace: namespace, name: "by-claims"}
	byClaims.waitRunning()
	if uuids := uuidsOf(byClaims.report(shared, "main")); len(uuids) != gpuCount-1 || uuids.HasAny(sets.List(saw)...) {
		t.Errorf("the pod with all claims sees %v", sets.List(uuids))
	}

	// All replicas of a GPU that is lost are ill, and those who have them stay.
	control := filepath.Join(shared.SimulationDir(), nvmlsim.ControlSocket)
	if _, err := nvmlsim.Control(t.Context(), control, &nvmlsim.LoseGPU{GPU: "7"}); err != nil {
		t.Fatal(err)
	}
	waitDevices(t, name, resource, 2, 0)
	if _, err := nvmlsim.Control(t.Context(), control, &nvmlsim.RestoreGPU{GPU: "7"}); err != nil {
		t.Fatal(err)
	}
	if err := shared.RestartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitDevices(t, name, resource, 2, 2)
	was := pods[1].container()
	pods[0].delete()
	third.waitRunning()
	if uuids := uuidsOf(third.report(shared, "main")); !uuids.Equal(saw) {
		t.Errorf("the third pod sees %v, the first ones saw %v", sets.List(uuids), sets.List(saw))
	}
	checkSameContainer(t, was, pods[1])
	byClaims.delete()
	pods[1].delete()
	third.delete()
}

// waitGPUs waits until the node has so many GPUs by the device plugin.
func waitGPUs(t *testing.T, node string, capacity, allocatable int64) {
	t.Helper()
	waitDevices(t, node, "nvidia.com/gpu", capacity, allocatable)
}

// waitDevices waits until the node has so many devices of a device plugin's resource.
func waitDevices(t *testing.T, node string, resource corev1.ResourceName, capacity, allocatable int64) {
	t.Helper()
	poll(t, fmt.Sprintf("the node has %d of %d %s", allocatable, capacity, resource), func(ctx context.Context) error {
		object, err := cluster.AdminClient().CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		has, can := object.Status.Capacity[resource], object.Status.Allocatable[resource]
		if has.Value() != capacity || can.Value() != allocatable {
			return fmt.Errorf("it has %s, and %s can be allocated", has.String(), can.String())
		}
		return nil
	})
}

// waitFree waits until so many GPUs of the device plugin are free, by the kubelet: those that it says can be allocated, less those that it lists with
// pods.
func waitFree(t *testing.T, n *node.Node, when string, want int) {
	t.Helper()
	kubelet := podresources.New(filepath.Join(n.KubeletDir(), "pod-resources", "kubelet.sock"))
	poll(t, fmt.Sprintf("%s: %d GPUs are free", when, want), func(ctx context.Context) error {
		allocatable, err := kubelet.Allocatable(ctx)
		if err != nil {
			return err
		}
		pods, err := kubelet.List(ctx)
		if err != nil {
			return err
		}
		free := sets.New[string]()
		ids := func(all []podresources.Devices) (ids []string) {
			for _, devices := range all {
				if devices.Resource == "nvidia.com/gpu" {
					ids = append(ids, devices.IDs...)
				}
			}
			return ids
		}
		free.Insert(ids(allocatable)...)
		for _, pod := range pods {
			for _, container := range pod.Containers {
				free.Delete(ids(container.Devices)...)
			}
		}
		if len(free) != want {
			return fmt.Errorf("free are %v", sets.List(free))
		}
		return nil
	})
}

// uuidsOf are the GPUs that the container was given.
func uuidsOf(r *report.Report) sets.Set[string] {
	uuids := sets.New[string]()
	for variable, value := range r.Env {
		if strings.HasPrefix(variable, "STOWAGE_") {
			uuids.Insert(value)
		}
	}
	return uuids
}

// somebodyElse is a device plugin that does not know of ours.
type somebodyElse struct {
	pluginapi.UnimplementedDevicePluginServer
	devices []*pluginapi.Device
}

func (*somebodyElse) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (s *somebodyElse) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: s.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// offerAsSomebodyElse registers a device plugin with the node's kubelet, as NVIDIA's does: sockets and IDs are named like its.
func offerAsSomebodyElse(t *testing.T, n *node.Node, resource string, ids ...string) {
	t.Helper()
	plugin := &somebodyElse{}
	for _, id := range ids {
		plugin.devices = append(plugin.devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
	}
	const endpoint = "nvidia-gpu.sock"
	dir := filepath.Join(n.KubeletDir(), "device-plugins")
	socket := filepath.Join(dir, endpoint)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, plugin)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		_ = os.Remove(socket)
	})
	conn, err := grpc.NewClient("unix:"+filepath.Join(dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := pluginapi.NewRegistrationClient(conn).Register(t.Context(), &pluginapi.RegisterRequest{Version: pluginapi.Version, Endpoint: endpoint, ResourceName: resource}); err != nil {
		t.Fatal(err)
	}
}
