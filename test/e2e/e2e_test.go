// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster/image"
	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/test/lab"
)

const (
	nodeName = "h100"
	profile  = "sim:dgx-h100"
	gpuCount = 8
	// podTimeout is for one change of a pod on a busy machine. What a kubelet is refused it tries again after 60 to 90 s, so it leaves
	// room for that more than once.
	podTimeout = 5 * time.Minute
	// lockTimeout gives the tests that keep an agent from a GPU, on a busy machine too, nearly all of the time that the kubelet waits.
	lockTimeout = "--lock-timeout=40s"
)

// The tests share one cluster with one node, and run one after another: most of
// them disturb the node.
var (
	cluster *lab.Lab
	theNode *node.Node
	// confinedAgent is the program of an agent with the rights of one for simulated GPUs, unconfinedAgent has all rights of a real one.
	confinedAgent, unconfinedAgent string
)

func TestMain(m *testing.M) {
	root := flag.String("root", filepath.Join("..", ".."), "the project's folder")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code, err := run(ctx, m, *root)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(ctx context.Context, m *testing.M, root string) (code int, err error) {
	if os.Geteuid() != 0 {
		return 0, fmt.Errorf("the end-to-end tests start a kubelet and containerd and need root; this is user %d", os.Geteuid())
	}
	root, err = filepath.Abs(root)
	if err != nil {
		return 0, err
	}
	folder, err := os.MkdirTemp("", "e2e")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	confinedAgent = filepath.Join(folder, "node-agent")
	cluster, err = lab.Start(ctx, lab.Options{
		Root:      root,
		Scheduler: filepath.Join(root, "bin", "scheduler"),
		Agent:     confinedAgent,
		Library:   filepath.Join(root, "bin", "nvml", "libnvidia-ml.so.1"),
		Progress:  os.Stderr,
	})
	if err != nil {
		return 0, err
	}
	defer func() {
		if code != 0 || err != nil {
			cluster.Keep()
			fmt.Fprintln(os.Stderr, "the logs stay in", cluster.LogDir())
		}
		if stopErr := cluster.Stop(); stopErr != nil && err == nil {
			err = fmt.Errorf("stopping the cluster: %w", stopErr)
		}
	}()
	unconfinedAgent = filepath.Join(root, "bin", "node-agent")
	if err := writeConfinedAgent(ctx, cluster, unconfinedAgent, confinedAgent); err != nil {
		return 0, err
	}
	if _, err := cluster.StartStowage(ctx); err != nil {
		return 0, err
	}
	if theNode, err = cluster.StartRealNode(ctx, nodeName, profile, lockTimeout); err != nil {
		return 0, err
	}
	if err := cluster.WaitForSlices(ctx, nodeName, gpuCount); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// pod is a pod with a generated claim for a number of GPUs, on a namespace of its
// test.
type pod struct {
	t         *testing.T
	namespace string
	name      string
}

// newNamespace makes a namespace that goes, with all that is in it, when the test
// ends.
func newNamespace(t *testing.T) string {
	t.Helper()
	created, err := cluster.AdminClient().CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), podTimeout)
		defer cancel()
		if err := cluster.AdminClient().CoreV1().Pods(created.Name).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			t.Errorf("deleting the pods of the test: %v", err)
		}
		if err := cluster.WaitForNoLeftovers(ctx, podTimeout); err != nil {
			t.Errorf("after the test: %v", err)
		}
		if err := cluster.AdminClient().CoreV1().Namespaces().Delete(ctx, created.Name, metav1.DeleteOptions{}); err != nil {
			t.Errorf("deleting the namespace of the test: %v", err)
		}
	})
	return created.Name
}

// startPod creates a pod that asks for GPUs and waits until it runs.
func startPod(t *testing.T, namespace, name string, gpus int64) pod {
	t.Helper()
	createPod(t, namespace, name, gpus)
	p := pod{t: t, namespace: namespace, name: name}
	p.waitRunning()
	return p
}

func createPod(t *testing.T, namespace, name string, gpus int64, adjust ...func(*corev1.Pod)) {
	t.Helper()
	client := cluster.AdminClient()
	if _, err := client.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{
			Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
				Name: "gpus",
				Exactly: &resourceapi.ExactDeviceRequest{
					DeviceClassName: "gpu.nvidia.com",
					AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
					Count:           gpus,
				},
			}}},
		}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	object := podWithClaim(name, name)
	for _, f := range adjust {
		f(object)
	}
	if _, err := client.CoreV1().Pods(namespace).Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// podWithClaim has one small container with a claim of the template.
func podWithClaim(name, template string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			SchedulerName:                 "stowage",
			RestartPolicy:                 corev1.RestartPolicyAlways,
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			AutomountServiceAccountToken:  ptr.To(false),
			DNSPolicy:                     corev1.DNSDefault,
			ResourceClaims:                []corev1.PodResourceClaim{{Name: template, ResourceClaimTemplateName: ptr.To(template)}},
			Containers: []corev1.Container{{
				Name:            "main",
				Image:           image.Probe,
				ImagePullPolicy: corev1.PullNever,
				Resources:       corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: template}}},
			}},
		},
	}
}

func (p pod) waitRunning() *corev1.Pod {
	p.t.Helper()
	pods, err := cluster.WaitForPods(p.t.Context(), p.namespace, []string{p.name}, "running", podTimeout, lab.Running)
	if err != nil {
		p.t.Fatal(err)
	}
	return pods[0]
}

// check compares what the container last printed with the pod's allocation.
func (p pod) check() lab.Row {
	p.t.Helper()
	row := cluster.Row(p.t.Context(), p.get())
	if row.Err != nil {
		p.t.Errorf("pod %s: %v", p.name, row.Err)
	}
	return row
}

// checkAgain lets the running container look at its devices once more.
func (p pod) checkAgain() {
	p.t.Helper()
	before := p.log()
	if err := theNode.SignalContainer(p.t.Context(), p.namespace, p.name, "main", "SIGUSR1"); err != nil {
		p.t.Fatal(err)
	}
	if err := wait.PollUntilContextTimeout(p.t.Context(), 100*time.Millisecond, podTimeout, true, func(context.Context) (bool, error) {
		return len(p.log()) > len(before), nil
	}); err != nil {
		p.t.Fatalf("pod %s did not look at its devices again: %v", p.name, err)
	}
	p.check()
}

func (p pod) log() string {
	p.t.Helper()
	log, err := theNode.PodLogs(p.t.Context(), p.namespace, p.name, "main")
	if err != nil {
		p.t.Fatal(err)
	}
	return log
}

func (p pod) get() *corev1.Pod {
	p.t.Helper()
	object, err := cluster.AdminClient().CoreV1().Pods(p.namespace).Get(p.t.Context(), p.name, metav1.GetOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	return object
}

// container is the status of the pod's container.
func (p pod) container() corev1.ContainerStatus {
	p.t.Helper()
	statuses := p.get().Status.ContainerStatuses
	if len(statuses) != 1 {
		p.t.Fatalf("pod %s has %d container statuses, want 1", p.name, len(statuses))
	}
	return statuses[0]
}

// delete deletes the pod and waits until it is gone.
func (p pod) delete() {
	p.t.Helper()
	pods := cluster.AdminClient().CoreV1().Pods(p.namespace)
	if err := pods.Delete(p.t.Context(), p.name, metav1.DeleteOptions{}); err != nil {
		p.t.Fatal(err)
	}
	if err := wait.PollUntilContextTimeout(p.t.Context(), 100*time.Millisecond, podTimeout, true, func(ctx context.Context) (bool, error) {
		_, err := pods.Get(ctx, p.name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		return false, err
	}); err != nil {
		p.t.Fatalf("waiting for pod %s to be gone: %v", p.name, err)
	}
}
