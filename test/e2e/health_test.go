// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/test/lab"
)

// The health of a pod's GPU shows in the pod's status, both ways, and over a crash of the agent. The kubelet has its feature gates as
// they are by default (ResourceHealthStatus is on since 1.36).
func TestHealthShowsInThePodsStatusBothWays(t *testing.T) {
	namespace := newNamespace(t)
	p := startPod(t, namespace, "watched", 1)
	p.waitHealth(corev1.ResourceHealthStatusHealthy, "")
	device, uuid := p.gpu()

	// What the driver asks for is believed at once, and is over soon after it has been done.
	hardware(t, &nvmlsim.SetRecovery{GPU: uuid, Action: nvmlsim.RecoveryReset})
	p.waitHealth(corev1.ResourceHealthStatusUnhealthy, "reset")
	waitTaints(t, device, "gpu.nvidia.com/recovery-action=gpu-reset:NoSchedule")
	p.waitEvent("DeviceUnhealthy")

	// The agent is killed and started: what was known is known, and the kubelet is told again.
	if err := theNode.KillAgent(); err != nil {
		t.Fatal(err)
	}
	if err := theNode.StartAgent(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.waitHealth(corev1.ResourceHealthStatusUnhealthy, "reset")

	hardware(t, &nvmlsim.SetRecovery{GPU: uuid})
	p.waitHealth(corev1.ResourceHealthStatusHealthy, "")
	waitTaints(t, device)
	p.waitEvent("DeviceHealthy")
	if was := p.container(); was.RestartCount != 0 {
		t.Errorf("the container was restarted %d times", was.RestartCount)
	}
}

// A GPU that falls off the bus takes its pod with it: the taint evicts it, so that its owner makes another one elsewhere. Nobody gets the GPU
// until it is back. The pods of the seven others, which are busy, notice nothing and are told nothing.
func TestALostGPUEvictsItsPod(t *testing.T) {
	namespace := newNamespace(t)
	createPod(t, namespace, "unlucky", 1)
	p := pod{t: t, namespace: namespace, name: "unlucky"}
	busy := map[pod]corev1.ContainerStatus{}
	for i := range gpuCount - 1 {
		other := pod{t: t, namespace: namespace, name: fmt.Sprint("busy-", i)}
		createPod(t, namespace, other.name, 1)
		busy[other] = corev1.ContainerStatus{}
	}
	devices, pid := map[string]bool{}, uint32(4000)
	for other := range busy {
		object := other.waitRunning()
		device, uuid := other.gpu()
		devices[device] = true
		pid++
		hardware(t, &nvmlsim.AddProcess{GPU: uuid, Process: nvmlsim.Process{
			PID: pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 1024, Pod: string(object.UID),
		}})
		other.waitHealth(corev1.ResourceHealthStatusHealthy, "")
		busy[other] = other.container()
	}
	p.waitRunning()
	device, uuid := p.gpu()
	if devices[device] || len(devices) != gpuCount-1 {
		t.Fatalf("the pods have %v, and %s", devices, device)
	}

	hardware(t, &nvmlsim.LoseGPU{GPU: uuid})
	t.Cleanup(func() {
		if _, err := nvmlsim.Control(context.Background(), controlSocket(), &nvmlsim.RestoreGPU{GPU: uuid}); err != nil && !strings.Contains(err.Error(), "not lost") {
			t.Error(err)
		}
	})
	waitTaints(t, device, "gpu.nvidia.com/gpu-lost=:NoExecute")
	p.waitGone()
	createPod(t, namespace, "next", 1)
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"next"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}
	untouched(t, busy, devices)
	hardware(t, &nvmlsim.RestoreGPU{GPU: uuid})
	waitTaints(t, device)
	untouched(t, busy, devices)
	next := pod{t: t, namespace: namespace, name: "next"}
	next.waitRunning()
	next.check()
}

// untouched checks that the pods' containers are those that they were, with healthy GPUs and without an event about them, and their devices
// without a taint.
func untouched(t *testing.T, pods map[pod]corev1.ContainerStatus, devices map[string]bool) {
	t.Helper()
	for p, was := range pods {
		checkSameContainer(t, was, p)
		for _, resource := range p.container().AllocatedResourcesStatus {
			for _, device := range resource.Resources {
				if device.Health != corev1.ResourceHealthStatusHealthy {
					t.Errorf("pod %s: %s is %s", p.name, device.ResourceID, device.Health)
				}
			}
		}
		ofPod := metav1.ListOptions{FieldSelector: "involvedObject.name=" + p.name}
		events, err := cluster.AdminClient().CoreV1().Events(p.namespace).List(t.Context(), ofPod)
		mustDo(t, err)
		for _, event := range events.Items {
			// Before a container starts the API server may refuse the kubelet its claim, for want of having heard of the binding.
			isNews := event.LastTimestamp.After(was.State.Running.StartedAt.Time)
			if isNews && event.Type != corev1.EventTypeNormal {
				t.Errorf("pod %s: event %s: %s", p.name, event.Reason, event.Message)
			}
		}
	}
	for device := range devices {
		waitTaints(t, device)
	}
}

func controlSocket() string { return filepath.Join(theNode.SimulationDir(), nvmlsim.ControlSocket) }

// hardware lets something happen to the node's GPUs.
func hardware(t *testing.T, c nvmlsim.Command) {
	t.Helper()
	if _, err := nvmlsim.Control(t.Context(), controlSocket(), c); err != nil {
		t.Fatal(err)
	}
}

// poll waits until there is no error.
func poll(t *testing.T, what string, condition func(ctx context.Context) error) {
	t.Helper()
	var last error
	if err := wait.PollUntilContextTimeout(t.Context(), 200*time.Millisecond, podTimeout, true, func(ctx context.Context) (bool, error) {
		last = condition(ctx)
		return last == nil, nil
	}); err != nil {
		t.Fatalf("waiting until %s: %v: %v", what, err, last)
	}
}

// gpu returns the device that the pod's claim has, and its UUID, which the agent tells in the claim's status.
func (p pod) gpu() (device, uuid string) {
	p.t.Helper()
	poll(p.t, "the claim's status names its GPU", func(ctx context.Context) error {
		claims, err := cluster.AdminClient().ResourceV1().ResourceClaims(p.namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, claim := range claims.Items {
			if len(claim.Status.ReservedFor) != 1 || claim.Status.ReservedFor[0].Name != p.name || len(claim.Status.Devices) != 1 {
				continue
			}
			var data struct{ UUID string }
			if d := claim.Status.Devices[0]; d.Data != nil {
				if err := json.Unmarshal(d.Data.Raw, &data); err != nil {
					return err
				}
				device, uuid = d.Device, data.UUID
				return nil
			}
		}
		return fmt.Errorf("no claim of pod %s tells it", p.name)
	})
	return device, uuid
}

// waitHealth waits until the pod's status has that health for its GPU, with a message that holds the text.
func (p pod) waitHealth(want corev1.ResourceHealthStatus, text string) {
	p.t.Helper()
	poll(p.t, fmt.Sprintf("pod %s shows its GPU to be %s", p.name, want), func(context.Context) error {
		var seen []string
		for _, resource := range p.container().AllocatedResourcesStatus {
			for _, device := range resource.Resources {
				message := ""
				if device.Message != nil {
					message = *device.Message
				}
				if device.Health == want && strings.Contains(message, text) {
					return nil
				}
				seen = append(seen, fmt.Sprintf("%s %s is %s: %s", resource.Name, device.ResourceID, device.Health, message))
			}
		}
		return fmt.Errorf("it shows %q", seen)
	})
}

// waitEvent waits until the pod has an event of that reason, and returns what it says.
func (p pod) waitEvent(reason string) (message string) {
	p.t.Helper()
	poll(p.t, "pod "+p.name+" has an event "+reason, func(ctx context.Context) error {
		events, err := cluster.AdminClient().CoreV1().Events(p.namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + p.name + ",reason=" + reason})
		if err != nil {
			return err
		}
		if len(events.Items) == 0 {
			return fmt.Errorf("there is none")
		}
		message = events.Items[0].Message
		return nil
	})
	return message
}

func (p pod) waitGone() {
	p.t.Helper()
	poll(p.t, "pod "+p.name+" is gone", func(ctx context.Context) error {
		_, err := cluster.AdminClient().CoreV1().Pods(p.namespace).Get(ctx, p.name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return fmt.Errorf("it is there")
	})
}

// waitTaints waits until the device is published with these taints, and no others.
func waitTaints(t *testing.T, device string, want ...string) {
	t.Helper()
	poll(t, fmt.Sprintf("device %s has the taints %v", device, want), func(ctx context.Context) error {
		slices, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + nodeName})
		if err != nil {
			return err
		}
		for _, slice := range slices.Items {
			for _, d := range slice.Spec.Devices {
				if d.Name != device {
					continue
				}
				var got []string
				for _, taint := range d.Taints {
					got = append(got, fmt.Sprintf("%s=%s:%s", taint.Key, taint.Value, taint.Effect))
				}
				if strings.Join(got, " ") != strings.Join(want, " ") {
					return fmt.Errorf("it has %v", got)
				}
				return nil
			}
		}
		return fmt.Errorf("it is not published")
	})
}
