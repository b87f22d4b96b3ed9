// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package node_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/internal/localcluster/image"
	"stowage.dev/stowage/internal/localcluster/image/report"
	"stowage.dev/stowage/internal/localcluster/node"
)

const (
	nodeName  = "node-1"
	namespace = "default"
	root      = "../../.."
	driver    = "gpu.nvidia.com"
)

var (
	cluster *localcluster.Cluster
	errCut  = errors.New("cut off by the test")
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintf(os.Stderr, "the tests of real nodes need root; this is user %d\n", os.Geteuid())
		os.Exit(1)
	}
	os.Exit(localcluster.RunTests(m, localcluster.Options{Progress: os.Stderr}, func(c *localcluster.Cluster) { cluster = c }))
}

// startNode starts a node that ends with the test, which fails if the machine is then not as it was.
func startNode(t *testing.T, agent node.Agent) *node.Node {
	t.Helper()
	before := machine(t)
	n, err := node.Start(t.Context(), cluster, node.Options{Name: nodeName, Labels: map[string]string{"example.com/rack": "r1"}, Agent: agent})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, program := range []string{"kubelet", "containerd", "agent"} {
				t.Logf("the log of %s ends with:\n%s", program, localcluster.LogTail(n.LogFile(program)))
			}
		}
		if err := n.Stop(); err != nil {
			t.Error(err)
		}
		wantUnchanged(t, before)
	})
	return n
}

func TestANodeRunsPodsThroughRestartsAndLeavesTheMachineAsItWas(t *testing.T) {
	n := startNode(t, node.Agent{})
	pods := cluster.AdminClient().CoreV1().Pods(namespace)
	object, err := cluster.AdminClient().CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if object.Labels["example.com/rack"] != "r1" || object.Status.Addresses[0].Address != "127.0.0.1" {
		t.Errorf("the Node has labels %v and addresses %v", object.Labels, object.Status.Addresses)
	}

	createPod(t, newPod("plain", nil))
	pod := waitFor(t, "plain", running)
	printed := readReport(t, n, "plain")
	if diff := cmp.Diff(&report.Report{Reason: "start", Env: map[string]string{"STOWAGE_TEST": "plain"}, Devices: []report.Device{}}, printed); diff != "" {
		t.Errorf("what the container printed, read through the API server (-want +got):\n%s", diff)
	}

	if err := n.RestartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A second pod proves that the new kubelet has looked at all pods.
	createPod(t, newPod("second", nil))
	waitFor(t, "second", running)
	after := waitFor(t, "plain", running)
	if diff := cmp.Diff(pod.Status.ContainerStatuses[0].ContainerID, after.Status.ContainerStatuses[0].ContainerID); diff != "" {
		t.Errorf("the container that ran while the kubelet was restarted (-before +after):\n%s", diff)
	}

	if err := n.KillContainer(t.Context(), namespace, "plain", "main"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "plain", func(pod *corev1.Pod) error {
		if count := pod.Status.ContainerStatuses[0].RestartCount; count != 1 {
			return fmt.Errorf("the container was restarted %d times, want once", count)
		}
		return running(pod)
	})
	eventually(t, func() error {
		// Again, as a container that runs need not listen yet.
		if err := n.SignalContainer(t.Context(), namespace, "plain", "main", "SIGUSR1"); err != nil {
			return err
		}
		if printed := readReport(t, n, "plain"); printed.Reason != "signal" {
			return fmt.Errorf("the container printed because of %q, not of the signal", printed.Reason)
		}
		return nil
	})

	begin := time.Now()
	if err := pods.Delete(t.Context(), "plain", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	waitGone(t, "plain")
	// One that does not end is killed after the grace period of 30 s.
	if took := time.Since(begin); took > 28*time.Second {
		t.Errorf("deleting the pod took %s: the probe does not end at SIGTERM", took)
	}
	// "second" still runs when the node is stopped.
}

func TestAContainerSeesTheDevicesOfItsClaimAndNoOther(t *testing.T) {
	binary, err := filepath.Abs(filepath.Join(root, "bin", "node-agent"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(binary); err != nil {
		t.Skipf("needs the node agent, from `make build`: %v", err)
	}
	if err := cluster.Apply(t.Context(), filepath.Join(root, "manifests", "base", "access")); err != nil {
		t.Fatal(err)
	}
	n := startNode(t, node.Agent{Binary: binary, NVML: "sim:dgx-h100"})
	device := aDevice(t)
	allocate(t, "gpu-claim", device)
	// Bound only when it may use the claim: a kubelet that was refused a claim tries again after more than a minute.
	pod := newPod("gpu-pod", ptr.To("gpu-claim"))
	pod.Spec.NodeName = ""
	createPod(t, pod)
	reserve(t, "gpu-claim", "gpu-pod")
	bind(t, "gpu-pod")
	waitFor(t, "gpu-pod", running)
	wantOneGPU := func() {
		t.Helper()
		printed := readReport(t, n, "gpu-pod")
		var gpus []report.Device
		for _, d := range printed.Devices {
			// /dev/nvidia<minor>, not /dev/nvidiactl and the like.
			if minor := strings.TrimPrefix(d.Path, "/dev/nvidia"); minor != "" && strings.Trim(minor, "0123456789") == "" {
				gpus = append(gpus, d)
			}
		}
		if len(gpus) != 1 || gpus[0].Type != "char" || gpus[0].Open != report.Admitted {
			t.Errorf("GPUs in the container: got %+v, want one that the devices cgroup admits", gpus)
		}
		if printed.VisibleDevices == "" {
			t.Error("NVIDIA_VISIBLE_DEVICES is not set in the container")
		}
	}
	wantOneGPU()
	wantEntries(t, n.CDIDir(), true)

	// Neither a crash of the agent nor a restart of the kubelet touches a running pod.
	if err := n.KillAgent(); err != nil {
		t.Fatal(err)
	}
	if err := n.RestartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := n.StartAgent(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := n.KillContainer(t.Context(), namespace, "gpu-pod", "main"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "gpu-pod", func(pod *corev1.Pod) error {
		if pod.Status.ContainerStatuses[0].RestartCount != 1 {
			return errors.New("the container was not restarted")
		}
		return running(pod)
	})
	wantOneGPU()

	if err := cluster.AdminClient().CoreV1().Pods(namespace).Delete(t.Context(), "gpu-pod", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	waitGone(t, "gpu-pod")
	wantEntries(t, n.CDIDir(), false)
}

func TestAStartThatIsCutOffLeavesTheMachineAsItWas(t *testing.T) {
	for _, after := range []time.Duration{0, 300 * time.Millisecond, 700 * time.Millisecond, 1100 * time.Millisecond, 1500 * time.Millisecond} {
		t.Run(after.String(), func(t *testing.T) {
			before := machine(t)
			ctx, cancel := context.WithTimeoutCause(t.Context(), after, errCut)
			defer cancel()
			n, err := node.Start(ctx, cluster, node.Options{Name: nodeName})
			if err == nil { // on a fast machine
				<-ctx.Done()
				if err := n.Stop(); err != nil {
					t.Error(err)
				}
			} else if !errors.Is(err, errCut) {
				t.Errorf("error: got %v, want %v in it", err, errCut)
			}
			wantUnchanged(t, before)
		})
	}
}

// newPod is a pod that prints what it sees, with the GPU of a claim if one is given.
func newPod(name string, claim *string) *corev1.Pod {
	container := corev1.Container{
		Name: "main", Image: image.Probe, ImagePullPolicy: corev1.PullNever,
		Env: []corev1.EnvVar{{Name: "STOWAGE_TEST", Value: name}},
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       corev1.PodSpec{NodeName: nodeName, DNSPolicy: corev1.DNSDefault, AutomountServiceAccountToken: ptr.To(false)},
	}
	if claim != nil {
		container.Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: claim}}
	}
	pod.Spec.Containers = []corev1.Container{container}
	return pod
}

func createPod(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	if _, err := cluster.AdminClient().CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// aDevice waits for the agent's slices and returns a device of one.
func aDevice(t *testing.T) resourceapi.DeviceRequestAllocationResult {
	t.Helper()
	var device resourceapi.DeviceRequestAllocationResult
	eventually(t, func() error {
		slices, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{
			FieldSelector: fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, nodeName).String(),
		})
		if err != nil {
			return err
		}
		for _, slice := range slices.Items {
			for _, d := range slice.Spec.Devices {
				device = resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name, Device: d.Name}
				return nil
			}
		}
		return errors.New("the agent has published no device")
	})
	return device
}

// allocate plays the scheduler: there is none here.
func allocate(t *testing.T, claim string, device resourceapi.DeviceRequestAllocationResult) {
	t.Helper()
	client := cluster.AdminClient().ResourceV1().ResourceClaims(namespace)
	object, err := client.Create(t.Context(), &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: claim},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: driver, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	object.Status.Allocation = &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{device}},
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{nodeName}}},
		}}},
	}
	if _, err := client.UpdateStatus(t.Context(), object, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func reserve(t *testing.T, claim, pod string) {
	t.Helper()
	object, err := cluster.AdminClient().CoreV1().Pods(namespace).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	client := cluster.AdminClient().ResourceV1().ResourceClaims(namespace)
	err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		c, err := client.Get(t.Context(), claim, metav1.GetOptions{})
		if err != nil {
			return err
		}
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod, UID: object.UID}}
		_, err = client.UpdateStatus(t.Context(), c, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func bind(t *testing.T, pod string) {
	t.Helper()
	err := cluster.AdminClient().CoreV1().Pods(namespace).Bind(t.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pod},
		Target:     corev1.ObjectReference{Kind: "Node", Name: nodeName},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// readReport waits for the container's print, which may come a moment after the container is reported to run.
func readReport(t *testing.T, n *node.Node, pod string) *report.Report {
	t.Helper()
	var printed *report.Report
	eventually(t, func() error {
		log, err := n.PodLogs(t.Context(), namespace, pod, "main")
		if err == nil {
			printed, err = report.Last(strings.NewReader(log))
		}
		return err
	})
	return printed
}

func running(pod *corev1.Pod) error {
	if pod.Status.Phase != corev1.PodRunning || pod.Status.ContainerStatuses[0].State.Running == nil {
		return fmt.Errorf("pod %s is %s: %+v", pod.Name, pod.Status.Phase, pod.Status.ContainerStatuses)
	}
	return nil
}

func waitFor(t *testing.T, name string, condition func(*corev1.Pod) error) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	eventually(t, func() (err error) {
		if pod, err = cluster.AdminClient().CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		return condition(pod)
	})
	return pod
}

func waitGone(t *testing.T, name string) {
	t.Helper()
	eventually(t, func() error {
		switch _, err := cluster.AdminClient().CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{}); {
		case err == nil:
			return fmt.Errorf("pod %s is not gone", name)
		case !apierrors.IsNotFound(err):
			return fmt.Errorf("asking for pod %s: %w", name, err)
		}
		return nil
	})
}

// wantEntries waits until a folder has something in it, or nothing.
func wantEntries(t *testing.T, dir string, any bool) {
	t.Helper()
	eventually(t, func() error {
		entries, err := filepath.Glob(filepath.Join(dir, "*.json"))
		if err == nil && (len(entries) > 0) != any {
			err = fmt.Errorf("%s holds %v", dir, entries)
		}
		return err
	})
}

// eventually tries until there is no error.
func eventually(t *testing.T, try func() error) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Minute) // what a kubelet is refused it tries again after 60 to 90 s
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
