// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	kubeletconfig "k8s.io/kubelet/config/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster/image"
	"stowage.dev/stowage/internal/localcluster/image/report"
	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/test/lab"
)

// A node whose GPUs are all offered by the device plugin API, four on each of two NUMA nodes, and whose kubelet gives a container
// what it asks for from one NUMA node only, CPUs included.
func TestANodeOfTheDevicePluginWithTwoNUMANodes(t *testing.T) {
	const name = "numa"
	namespace := newNamespace(t) // which goes after the node
	n, err := node.Start(t.Context(), cluster.Cluster, node.Options{
		Name:      name,
		NUMANodes: 2,
		Kubelet: func(c *kubeletconfig.KubeletConfiguration) {
			c.TopologyManagerPolicy = kubeletconfig.SingleNumaNodeTopologyManagerPolicy
			c.CPUManagerPolicy = "static"
			// All of the first NUMA node: what is left to be given away is on the second one.
			c.ReservedSystemCPUs = fmt.Sprintf("0-%d", runtime.NumCPU()/2-1)
		},
		Agent: node.Agent{Binary: confinedAgent, NVML: profile, Args: []string{"--advertise=device-plugin"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Stop(); err != nil {
			t.Error(err)
		}
	})
	waitGPUs(t, name, gpuCount, gpuCount)
	node := pluginNode{Node: n, namespace: namespace}
	if node.profile, err = nvmlsim.LoadProfile("dgx-h100"); err != nil {
		t.Fatal(err)
	}

	t.Run("a pod gets the GPUs of one NUMA node or is refused", node.alignedGPUs)
	t.Run("a pod with a CPU of its own gets GPUs beside it", node.alignedCPUs)
	t.Run("forty pods never share one of eight GPUs", node.burst)
}

// pluginNode is a node whose GPUs are offered by the device plugin API.
type pluginNode struct {
	*node.Node
	namespace string
	profile   *nvmlsim.Profile
}

func (n *pluginNode) alignedGPUs(t *testing.T) {
	refused := func(p pod) {
		t.Helper()
		pods, err := cluster.WaitForPods(t.Context(), n.namespace, []string{p.name}, "refused by the kubelet", podTimeout, failed)
		if err != nil {
			t.Fatal(err)
		}
		if pods[0].Status.Reason != "TopologyAffinityError" {
			t.Errorf("pod %s is refused because of %s: %s", p.name, pods[0].Status.Reason, pods[0].Status.Message)
		}
		p.delete()
	}
	refused(n.create(t, "eight", 8))

	four := n.create(t, "four", 4)
	four.waitRunning()
	others := n.create(t, "others", 4)
	others.waitRunning()
	if a, b := n.numaNodesOf(t, four, 4), n.numaNodesOf(t, others, 4); len(a) != 1 || len(b) != 1 || a.Equal(b) {
		t.Errorf("the GPUs of two pods with four each are of NUMA nodes %v and %v", sets.List(a), sets.List(b))
	}
	four.delete()
	others.delete()

	// One is left on each NUMA node.
	three, again := n.create(t, "three", 3), n.create(t, "three-again", 3)
	three.waitRunning()
	again.waitRunning()
	n.numaNodesOf(t, three, 3)
	n.numaNodesOf(t, again, 3)
	refused(n.create(t, "two", 2))
	one := n.create(t, "one", 1)
	one.waitRunning()
	n.numaNodesOf(t, one, 1)
	for _, p := range []pod{three, again, one} {
		p.delete()
	}
}

func (n *pluginNode) alignedCPUs(t *testing.T) {
	guaranteed := func(p *corev1.Pod) {
		maps.Copy(p.Spec.Containers[0].Resources.Limits, corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("1"), corev1.ResourceMemory: resource.MustParse("64Mi"),
		})
	}
	p := n.create(t, "with-cpu", 4, guaranteed)
	p.waitRunning()
	if numa := n.numaNodesOf(t, p, 4); !numa.Equal(sets.New(1)) {
		t.Errorf("the GPUs are of NUMA nodes %v, and all CPUs that pods can have are of 1", sets.List(numa))
	}
	answer, err := podResources(t.Context(), n.Node)
	if err != nil {
		t.Fatal(err)
	}
	for _, listed := range answer.GetPodResources() {
		if cpus := listed.GetContainers()[0].GetCpuIds(); listed.GetName() == p.name && (len(cpus) != 1 || cpus[0] < int64(runtime.NumCPU()/2)) {
			t.Errorf("the pod has the CPUs %v, want one of NUMA node 1", cpus)
		}
	}
	p.delete()
}

// burst has forty pods come at once. Each keeps its GPU until eight run, and then goes: half of them end by themselves, as those
// of a Job do, and the others are deleted.
func (n *pluginNode) burst(t *testing.T) {
	const pods = 40
	begin := time.Now()
	kubelet := watchPodResources(t, n.Node)
	for i := range pods {
		n.create(t, fmt.Sprintf("burst-%02d", i), 1)
	}
	holders, served := map[string]pod{}, sets.New[string]()
	end := func() {
		for _, uuid := range slices.Sorted(maps.Keys(holders)) {
			p := holders[uuid]
			delete(holders, uuid)
			var err error
			if len(holders)%2 == 0 {
				err = n.SignalContainer(t.Context(), n.namespace, p.name, "main", "SIGTERM")
			} else {
				err = cluster.AdminClient().CoreV1().Pods(n.namespace).Delete(t.Context(), p.name, metav1.DeleteOptions{})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	poll(t, "each of the pods has had a GPU", func(context.Context) error {
		for uuid, two := range kubelet.givenTwice() {
			if served.HasAny(two[:]...) {
				continue // the other one starts when this one has ended
			}
			// The agent starts neither, and says so. An administrator deletes one.
			t.Logf("the kubelet has given %s to the pods %s and %s", uuid, two[0], two[1])
			if err := cluster.AdminClient().CoreV1().Pods(n.namespace).Delete(t.Context(), two[1], metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			served.Insert(two[1])
		}
		objects := listPods(t, n.namespace)
		for _, object := range objects {
			if object.Status.Phase == corev1.PodFailed {
				t.Errorf("pod %s: %s: %s", object.Name, object.Status.Reason, object.Status.Message)
				served.Insert(object.Name)
			}
			if running, err := lab.Running(object); err != nil || !running || served.Has(object.Name) {
				continue
			}
			p := pod{t: t, namespace: n.namespace, name: object.Name}
			sees := sets.List(uuidsOf(p.report(n.Node, "main")))
			if len(sees) != 1 {
				t.Fatalf("pod %s sees %v, want one GPU", p.name, sees)
			}
			if other, taken := holders[sees[0]]; taken {
				t.Errorf("pods %s and %s both see %s", other.name, p.name, sees[0])
			}
			if told := kubelet.deviceOf(p.name); told != "" && told != sees[0] {
				t.Errorf("pod %s sees %s, and the kubelet says that it has %s", p.name, sees[0], told)
			}
			for _, other := range objects {
				if kubelet.given(p.name, other.Name) && other.Status.Phase == corev1.PodRunning {
					t.Errorf("pod %s runs with %s, which the kubelet has given to pod %s, too, and that one runs", p.name, sees[0], other.Name)
				}
			}
			holders[sees[0]] = p
			served.Insert(p.name)
		}
		if len(holders) == gpuCount || len(served) == pods {
			end()
		}
		if len(served) < pods {
			return fmt.Errorf("%d have", served.Len())
		}
		return nil
	})
	t.Logf("%d pods had one of %d GPUs each after %s; %d lists of the kubelet show it", pods, gpuCount, since(begin), kubelet.stop())
	if seen := kubelet.pods(); len(seen) != pods {
		t.Errorf("the kubelet has listed %d pods with GPUs, want %d", len(seen), pods)
	}
	all := cluster.AdminClient().CoreV1().Pods(n.namespace)
	if err := all.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	waitNoPods(t, n.namespace)
}

// create creates a pod for the node that asks for GPUs.
func (n *pluginNode) create(t *testing.T, name string, gpus int64, adjust ...func(*corev1.Pod)) pod {
	t.Helper()
	object := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			SchedulerName:                 "stowage",
			NodeSelector:                  map[string]string{corev1.LabelHostname: n.Name()},
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			AutomountServiceAccountToken:  ptr.To(false),
			DNSPolicy:                     corev1.DNSDefault,
			Containers: []corev1.Container{{
				Name: "main", Image: image.Probe, ImagePullPolicy: corev1.PullNever,
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(gpus, resource.DecimalSI)}},
			}},
		},
	}
	for _, f := range adjust {
		f(object)
	}
	create(t, n.namespace, object)
	t.Cleanup(func() { // where the test has come to its end before that
		err := cluster.AdminClient().CoreV1().Pods(n.namespace).Delete(context.Background(), name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	})
	return pod{t: t, namespace: n.namespace, name: name}
}

// numaNodesOf are those of the GPUs whose device nodes the pod's container can open, which are to be so many of one NUMA node.
func (n *pluginNode) numaNodesOf(t *testing.T, p pod, gpus int) sets.Set[int] {
	t.Helper()
	count, of := 0, sets.New[int]()
	sees := p.report(n.Node, "main").Devices
	for i, gpu := range n.profile.GPUs {
		if slices.ContainsFunc(sees, func(d report.Device) bool {
			return d.Path == fmt.Sprintf("/dev/nvidia%d", i) && d.Open == report.Admitted
		}) {
			count++
			of.Insert(gpu.NUMANode)
		}
	}
	if count != gpus || len(of) != 1 {
		t.Errorf("pod %s sees %d GPUs of NUMA nodes %v, want %d of one", p.name, count, sets.List(of), gpus)
	}
	return of
}

func failed(p *corev1.Pod) (bool, error) { return p.Status.Phase == corev1.PodFailed, nil }

func waitNoPods(t *testing.T, namespace string) {
	t.Helper()
	poll(t, "all pods are gone", func(context.Context) error {
		if left := listPods(t, namespace); len(left) > 0 {
			return fmt.Errorf("%d are there", len(left))
		}
		return nil
	})
}

// podResources asks the node's kubelet what its pods have.
func podResources(ctx context.Context, n *node.Node) (*podresourcesapi.ListPodResourcesResponse, error) {
	socket := filepath.Join(n.KubeletDir(), "pod-resources", "kubelet.sock")
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return podresourcesapi.NewPodResourcesListerClient(conn).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
}

// podResourcesWatch asks a kubelet again and again which pods have which GPUs.
type podResourcesWatch struct {
	stop func() (answers int)

	mu    sync.Mutex
	seen  map[string]string    // GPU of each pod, by name
	twice map[string][2]string // pods that have one GPU, by the last answer
	both  sets.Set[[2]string]  // those by any answer, in both orders
}

func watchPodResources(t *testing.T, n *node.Node) *podResourcesWatch {
	w := &podResourcesWatch{seen: map[string]string{}, both: sets.New[[2]string]()}
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	answers := 0
	group.Go(func() {
		ticker := time.NewTicker(50 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			answer, err := podResources(ctx, n)
			if err != nil {
				if ctx.Err() == nil {
					t.Errorf("asking the kubelet for its pods' resources: %v", err)
				}
				continue
			}
			answers++
			w.judge(t, answer)
		}
	})
	w.stop = sync.OnceValue(func() int {
		cancel()
		group.Wait()
		return answers
	})
	t.Cleanup(func() { w.stop() })
	return w
}

func (w *podResourcesWatch) judge(t *testing.T, answer *podresourcesapi.ListPodResourcesResponse) {
	holders := map[string]string{}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.twice = map[string][2]string{}
	for _, listed := range answer.GetPodResources() {
		for _, container := range listed.GetContainers() {
			for _, devices := range container.GetDevices() {
				for _, id := range devices.GetDeviceIds() {
					if other, taken := holders[id]; taken {
						w.twice[id] = [2]string{other, listed.GetName()}
						w.both.Insert(w.twice[id], [2]string{listed.GetName(), other})
					}
					holders[id] = listed.GetName()
					if before := w.seen[listed.GetName()]; before != "" && before != id {
						t.Errorf("the kubelet says that pod %s has %s; before it was %s", listed.GetName(), id, before)
					}
					w.seen[listed.GetName()] = id
				}
			}
		}
	}
}

// deviceOf is what the kubelet has said of the pod, empty if nothing.
func (w *podResourcesWatch) deviceOf(pod string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen[pod]
}

// givenTwice are the pods that have one GPU, by UUID. A kubelet that is asked what pods have while it gives a GPU forgets that, if a pod has
// just ended.
func (w *podResourcesWatch) givenTwice() map[string][2]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.twice
}

// given tells whether the kubelet has ever said that the two pods have one GPU.
func (w *podResourcesWatch) given(pod, other string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.both.Has([2]string{pod, other})
}

func (w *podResourcesWatch) pods() map[string]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.seen)
}
