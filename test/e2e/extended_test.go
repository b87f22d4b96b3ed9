// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster/image"
	"stowage.dev/stowage/internal/localcluster/image/report"
	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/test/lab"
)

// On a node with 4 GPUs, an init container and an app container that ask for 4 each share the same 4, which come from
// a claim that the scheduler made. Then all GPUs are moved to the path of the device plugin, and a pod of the same form has them by that. While a pod
// has them they wait for their new path, and say for whom; the agent is killed in the midst of each move.
func TestInitAndAppContainerShareTheirExtendedResource(t *testing.T) {
	const name, gpus = "gb200", 4
	namespace := newNamespace(t) // which goes after the node
	small, err := cluster.StartRealNode(t.Context(), name, "sim:gb200")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := small.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := cluster.WaitForSlices(t.Context(), name, gpus); err != nil {
		t.Fatal(err)
	}
	create := func(name string, initGPUs, appGPUs int64) pod {
		t.Helper()
		if _, err := cluster.AdminClient().CoreV1().Pods(namespace).Create(t.Context(), extendedPod(name, initGPUs, appGPUs), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		return pod{t: t, namespace: namespace, name: name}
	}

	move := func(path string) {
		t.Helper()
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"gpu.nvidia.com/advertise":%q}}}`, path)
		if _, err := cluster.AdminClient().CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := small.KillAgent(); err != nil {
				t.Fatal(err)
			}
			if err := small.StartAgent(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	sees := func(p pod, initGPUs, appGPUs int) {
		t.Helper()
		initSaw, appSees := p.report(small, "init"), p.report(small, "main")
		if countGPUs(initSaw) != initGPUs || countGPUs(appSees) != appGPUs {
			t.Errorf("the init container saw %d GPUs, the app container sees %d, want %d and %d", countGPUs(initSaw), countGPUs(appSees), initGPUs, appGPUs)
		}
		if initGPUs != appGPUs {
			return
		}
		if diff := cmp.Diff(initSaw.Env, appSees.Env) + cmp.Diff(initSaw.Devices, appSees.Devices); diff != "" {
			t.Errorf("environment and devices (-init +app):\n%s", diff)
		}
	}
	waits := func(name string) pod {
		t.Helper()
		p := create(name, 1, 1)
		if _, err := cluster.WaitForPods(t.Context(), namespace, []string{name}, "refused", podTimeout, lab.Unschedulable); err != nil {
			t.Fatal(err)
		}
		return p
	}

	// The init container of this one sees two of the four, as it would with a device plugin.
	p := create("two-and-four", 2, gpus)
	p.waitRunning()
	sees(p, 2, gpus)
	p.delete()

	p = create("four-and-four", gpus, gpus)
	p.waitRunning()
	row := p.check()
	if len(row.Allocated) != gpus || len(row.Claims) != 1 || !strings.HasPrefix(row.Claims[0], "four-and-four-extended-resources-") {
		t.Errorf("the pod has the devices %v of the claims %v", row.Allocated, row.Claims)
	}
	sees(p, gpus, gpus)
	was := p.container()
	next := waits("waits")

	move("device-plugin")
	waitDescribedOn(t, name, "GPUWaitsForPath", "waits to be offered by device-plugin: claim "+namespace+"/"+row.Claims[0]+" has it")
	waitGPUs(t, name, 0, 0) // not offered before the claim has ended
	if text := lab.SchedulingMessage(next.get()); next.get().Spec.NodeName != "" || text == "" {
		t.Errorf("the next pod is on node %q; it is told %q", next.get().Spec.NodeName, text)
	}
	checkSameContainer(t, was, p)
	p.delete()
	next.waitRunning()
	waitGPUs(t, name, gpus, gpus)
	next.delete()

	p = create("four-by-plugin", gpus, gpus)
	p.waitRunning()
	sees(p, gpus, gpus)
	if claimed := p.get().Status.ExtendedResourceClaimStatus; claimed != nil {
		t.Errorf("the pod of the device plugin has the claim %s", claimed.ResourceClaimName)
	}
	was = p.container()
	waits("waits-too")

	move("dra")
	waitDescribedOn(t, name, "GPUWaitsForPath", "waits to be offered by dra: pod "+namespace+"/four-by-plugin, by nvidia.com/gpu, has it")
	waitGPUs(t, name, gpus, 0)
	if list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + name}); err != nil {
		t.Fatal(err)
	} else if devices := slicesDevices(list.Items); len(devices) > 0 {
		t.Errorf("a pod has all GPUs by the device plugin, and the slices offer %v", devices)
	}
	checkSameContainer(t, was, p)
}

func slicesDevices(slices []resourceapi.ResourceSlice) (devices []string) {
	for _, slice := range slices {
		for _, device := range slice.Spec.Devices {
			devices = append(devices, device.Name)
		}
	}
	return devices
}

// extendedPod asks for GPUs as pods for a device plugin do, on the node with 4.
func extendedPod(name string, initGPUs, appGPUs int64) *corev1.Pod {
	container := func(name string, gpus int64, args ...string) corev1.Container {
		return corev1.Container{
			Name: name, Image: image.Probe, ImagePullPolicy: corev1.PullNever, Args: args,
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(gpus, resource.DecimalSI)}},
		}
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			SchedulerName:                 "stowage",
			NodeSelector:                  map[string]string{corev1.LabelHostname: "gb200"},
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			AutomountServiceAccountToken:  ptr.To(false),
			DNSPolicy:                     corev1.DNSDefault,
			InitContainers:                []corev1.Container{container("init", initGPUs, "once")},
			Containers:                    []corev1.Container{container("main", appGPUs)},
		},
	}
}

// report is what a container of the pod printed last. It waits for that: a container runs before its program does.
func (p pod) report(n *node.Node, container string) *report.Report {
	p.t.Helper()
	var printed *report.Report
	poll(p.t, fmt.Sprintf("container %s of pod %s has printed", container, p.name), func(ctx context.Context) error {
		log, err := n.PodLogs(ctx, p.namespace, p.name, container)
		if err == nil {
			printed, err = report.Last(strings.NewReader(log))
		}
		return err
	})
	return printed
}

// countGPUs counts the GPUs that the container was told of, one variable each.
func countGPUs(r *report.Report) int {
	n := 0
	for variable := range r.Env {
		if strings.HasPrefix(variable, "STOWAGE_") {
			n++
		}
	}
	return n
}
