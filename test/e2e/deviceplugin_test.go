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

	// A GPU that is lost leaves what can be allocated, and returns.
	control := filepath.Join(half.SimulationDir(), nvmlsim.ControlSocket)
	if _, err := nvmlsim.Control(t.Context(), control, &nvmlsim.LoseGPU{GPU: "3"}); err != nil {
		t.Fatal(err)
	}
	waitGPUs(t, halfName, halfGPUs, halfGPUs-1)
	if _, err := nvmlsim.Control(t.Context(), control, &nvmlsim.RestoreGPU{GPU: "3"}); err != nil {
		t.Fatal(err)
	}
	waitGPUs(t, halfName, halfGPUs, halfGPUs)

	byPlugin.delete()
	next.waitRunning()
	if sees := uuidsOf(next.report(half, "main")); len(sees) != 1 || !plugins.IsSuperset(sees) {
		t.Errorf("the next pod sees %v, the one before saw %v", sets.List(sees), sets.List(plugins))
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

// waitGPUs waits until the node has so many GPUs by the device plugin.
func waitGPUs(t *testing.T, node string, capacity, allocatable int64) {
	t.Helper()
	poll(t, fmt.Sprintf("the node has %d of %d nvidia.com/gpu", allocatable, capacity), func(ctx context.Context) error {
		object, err := cluster.AdminClient().CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		has, can := object.Status.Capacity["nvidia.com/gpu"], object.Status.Allocatable["nvidia.com/gpu"]
		if has.Value() != capacity || can.Value() != allocatable {
			return fmt.Errorf("it has %s, and %s can be allocated", has.String(), can.String())
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
