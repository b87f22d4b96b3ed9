// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/test/lab"
)

// Sixty pods come to one node at once, each for a MIG partition of its own, which is made for it. They are prepared side by side: while
// nothing can be done on one GPU, the pods of all others get what is theirs.
func TestSixtyPodsAtOnceOnOneNode(t *testing.T) {
	const (
		name = "dense"
		pods = 60
		gpus = 16
		// A whole GPU, and 25 places for partitions of an H100.
		devices = gpus * 26
	)
	dense, err := cluster.StartRealNode(t.Context(), name, "sim:"+twoMachinesInOne(t), "--partitions=dynamic", lockTimeout)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dense.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := cluster.WaitForSlices(t.Context(), name, devices); err != nil {
		t.Fatal(err)
	}
	namespace := newNamespace(t)

	// 1. All come at once: the kubelet stands still until all pods are bound. The agent then finds no GPU free to work on.
	kubeletGoesOn := halt(t, dense.SignalKubelet)
	begin := time.Now()
	createPartitionPods(t, namespace, pods)
	waitReadable(t, namespace, name, pods)
	t.Logf("all pods are bound after %s", since(begin))
	gpuOf := map[string]string{} // by pod
	for _, claim := range allClaims(t, namespace) {
		gpuOf[claim.Status.ReservedFor[0].Name], _, _ = strings.Cut(claim.Status.Allocation.Devices.Results[0].Device, "-mig-")
	}
	locks := lockGPUs(t, dense, slices.Collect(maps.Values(gpuOf))...)
	kubeletGoesOn()
	waitCalls(t, dense.Agent(), "all pods are being prepared", pods, 0, lab.Metrics{})

	// 2. The pods of all GPUs but one are prepared while that one's wait. No container is started meanwhile: the processor is for the agent.
	containersGoOn := halt(t, dense.SignalContainerd)
	byGPU := map[string]int{}
	busiest := ""
	for _, gpu := range gpuOf {
		if byGPU[gpu]++; byGPU[gpu] > byGPU[busiest] {
			busiest = gpu
		}
	}
	held := byGPU[busiest]
	released := time.Now()
	locks.releaseAllBut(busiest)
	waitCalls(t, dense.Agent(), "the pods of the other GPUs are prepared", float64(held), float64(pods-held), lab.Metrics{})
	t.Logf("%d claims on %d GPUs are prepared in %s, while %d of another one wait", pods-held, len(byGPU)-1, since(released), held)
	locks.releaseAllBut()
	waitCalls(t, dense.Agent(), "all pods are prepared", 0, pods, lab.Metrics{})
	containersGoOn()

	// 3. All run, each with what it was allocated, and no two with the same.
	poll(t, "all pods run", func(context.Context) error {
		return every(t, namespace, pods, func(p *corev1.Pod) bool {
			running, err := lab.Running(p)
			if err != nil {
				t.Fatal(err)
			}
			return running
		})
	})
	t.Logf("all pods run after %s", since(begin))
	has := map[string]string{}
	for _, row := range cluster.Rows(t.Context(), listPods(t, namespace)) {
		if row.Err != nil {
			t.Errorf("pod %s: %v", row.Pod, row.Err)
		}
		if len(row.Allocated) != 1 {
			t.Fatalf("pod %s has the devices %v, want one", row.Pod, row.Allocated)
		}
		if other := has[row.Allocated[0]]; other != "" {
			t.Errorf("pods %s and %s both have %s", other, row.Pod, row.Allocated[0])
		}
		has[row.Allocated[0]] = row.Pod
	}

	// 4. All is given back.
	leaves := time.Now()
	if err := cluster.AdminClient().CoreV1().Pods(namespace).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := cluster.WaitForNoLeftovers(t.Context(), podTimeout); err != nil {
		t.Fatal(err)
	}
	t.Logf("nothing is left %s after the pods were deleted, %s after they were created", since(leaves), since(begin))
	result, err := nvmlsim.Control(t.Context(), filepath.Join(dense.SimulationDir(), nvmlsim.ControlSocket), &nvmlsim.ShowState{})
	if err != nil {
		t.Fatal(err)
	}
	for i, gpu := range result.State.GPUs {
		if gpu.MIG || len(gpu.Instances) > 0 {
			t.Errorf("GPU %d is left partitioned: MIG mode %t, instances %+v", i, gpu.MIG, gpu.Instances)
		}
	}
	m := agentMetrics(t, dense.Agent())
	for operation, outcomes := range map[string]map[string]float64{"prepare": {"ok": pods, "error": 0}, "unprepare": {"ok": pods, "error": 0}} {
		for outcome, want := range outcomes {
			if n := m.Count("stowage_agent_call_duration_seconds", "operation", operation, "outcome", outcome); n != want {
				t.Errorf("%s with outcome %s: %g claims, want %g", operation, outcome, n, want)
			}
		}
	}
	checkKubeletCalls(t, namespace, nil, kubeletMetrics(t, dense), pods)
}

// halt lets a process stand still until the test ends, or until the function is called that it returns.
func halt(t *testing.T, signal func(syscall.Signal) error) (goOn func()) {
	t.Helper()
	if err := signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	goOn = sync.OnceFunc(func() {
		if err := signal(syscall.SIGCONT); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(goOn)
	return goOn
}

func since(begin time.Time) time.Duration { return time.Since(begin).Round(10 * time.Millisecond) }

// twoMachinesInOne writes the profile of a machine with 16 GPUs: twice those of a DGX H100, on PCI buses of their own.
func twoMachinesInOne(t *testing.T) (path string) {
	t.Helper()
	profile, err := nvmlsim.LoadProfile("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	profile.Name = "two-dgx-h100"
	for _, gpu := range profile.GPUs {
		gpu.PCI = strings.ReplaceAll(gpu.PCI, "0000:", "0001:")
		profile.GPUs = append(profile.GPUs, gpu)
	}
	data, err := yaml.Marshal(profile)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "profile.yaml")
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// createPartitionPods creates pods that want a partition each.
func createPartitionPods(t *testing.T, namespace string, count int) {
	t.Helper()
	client := cluster.AdminClient()
	if _, err := client.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: "partition"},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{
			Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
				Name: "partition",
				Exactly: &resourceapi.ExactDeviceRequest{
					DeviceClassName: "mig.nvidia.com",
					Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
						Expression: `device.attributes["gpu.nvidia.com"].profile == "1g.10gb"`,
					}}},
				},
			}}},
		}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for i := range count {
		group.Go(func() {
			p := podWithClaim(fmt.Sprintf("pod-%d", i), "partition")
			if _, err := client.CoreV1().Pods(namespace).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

func listPods(t *testing.T, namespace string) []*corev1.Pod {
	t.Helper()
	list, err := cluster.AdminClient().CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pods := make([]*corev1.Pod, 0, len(list.Items))
	for i := range list.Items {
		pods = append(pods, &list.Items[i])
	}
	return pods
}

// every tells which of the pods do not meet the condition.
func every(t *testing.T, namespace string, count int, condition func(*corev1.Pod) bool) error {
	t.Helper()
	met, waiting := 0, ""
	for _, p := range listPods(t, namespace) {
		if condition(p) {
			met++
		} else {
			waiting = lab.Describe(p)
		}
	}
	if met != count {
		return fmt.Errorf("%d of %d; not %s", met, count, waiting)
	}
	return nil
}

func allClaims(t *testing.T, namespace string) []resourceapi.ResourceClaim {
	t.Helper()
	claims, err := cluster.AdminClient().ResourceV1().ResourceClaims(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return claims.Items
}
