// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drahealthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestALostGPUIsToldEverywhere: to the scheduler and the eviction controller by a taint, to the kubelet in both versions of the health
// service, to the claim, the pod and the node, and to Prometheus; and the next prepare fails for good.
func TestALostGPUIsToldEverywhere(t *testing.T) {
	m := newMachine(t)
	m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	claim := m.allocate("train", gpu0)
	answer := m.prepare(claim)
	if answer.GetError() != "" {
		t.Fatalf("prepare: %s", answer.GetError())
	}
	condition := func(kind string) (status metav1.ConditionStatus, reason string) {
		object, err := m.client.ResourceV1().ResourceClaims("default").Get(t.Context(), "train", metav1.GetOptions{})
		must(t, err)
		for _, device := range object.Status.Devices {
			if c := meta.FindStatusCondition(device.Conditions, kind); c != nil {
				return c.Status, c.Reason
			}
		}
		return "", ""
	}
	eventually(t, "the claim says that its device is ready", func() error {
		if status, reason := condition(driver.ConditionReady); status != metav1.ConditionTrue {
			return fmt.Errorf("Ready is %q, %q", status, reason)
		}
		return nil
	})

	m.do(&nvmlsim.LoseGPU{GPU: "0"})
	eventually(t, "the slice has a taint", func() error {
		if taints := m.taints(gpu0); len(taints) != 1 || taints[0].Key != "gpu.nvidia.com/gpu-lost" || taints[0].Effect != resourceapi.DeviceTaintEffectNoExecute {
			return fmt.Errorf("taints %v", taints)
		}
		return nil
	})
	conn := m.dial("plugins", driver.Name, "dra.sock")
	v1, err := drahealthv1.NewDRAResourceHealthClient(conn).NodeWatchResources(t.Context(), &drahealthv1.NodeWatchResourcesRequest{})
	must(t, err)
	alpha, err := drahealthv1.V1Alpha1ClientWrapper{Client: drahealthv1alpha1.NewDRAResourceHealthClient(conn)}.NodeWatchResources(t.Context(), &drahealthv1.NodeWatchResourcesRequest{})
	must(t, err)
	for version, stream := range map[string]drahealthv1.DRAResourceHealth_NodeWatchResourcesClient{"v1": v1, "v1alpha1": alpha} {
		report, err := stream.Recv()
		must(t, err)
		for _, device := range report.GetDevices() {
			want := drahealthv1.HealthStatus_HEALTHY
			if device.GetDevice().GetDeviceName() == gpu0 {
				want = drahealthv1.HealthStatus_UNHEALTHY
			}
			if device.GetHealth() != want {
				t.Errorf("%s: health of %s is %s, want %s", version, device.GetDevice().GetDeviceName(), device.GetHealth(), want)
			}
		}
	}
	eventually(t, "the claim says that its device is not healthy", func() error {
		if status, reason := condition(driver.ConditionHealthy); status != metav1.ConditionFalse {
			return fmt.Errorf("Healthy is %q, %q", status, reason)
		}
		return nil
	})
	eventually(t, "the pod and the node have an event", func() error {
		list, err := m.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		must(t, err)
		missing := map[string]bool{"Pod/train-pod DeviceUnhealthy": true, "Node/" + nodeName + " GPUUnhealthy": true}
		for _, event := range list.Items {
			delete(missing, event.InvolvedObject.Kind+"/"+event.InvolvedObject.Name+" "+event.Reason)
		}
		if len(missing) > 0 {
			return fmt.Errorf("missing %v", missing)
		}
		return nil
	})
	recorder := httptest.NewRecorder()
	m.last.Status().Handler(allowAll).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, want := range []string{
		fmt.Sprintf(`stowage_agent_device_health{device=%q,health="Unhealthy"} 1`, gpu0),
		fmt.Sprintf(`stowage_agent_device_fault{device=%q,permanent="true",reason="gpu-lost"} 1`, gpu0),
		`stowage_agent_gpu_temperature_celsius{device="gpu-0000-43-00-0"}`,
		`stowage_agent_lock_wait_seconds_count{lock="gpu",outcome="ok"}`, `stowage_agent_call_duration_seconds_count{operation="prepare",outcome="ok"}`,
		"stowage_agent_slices 8", "stowage_agent_pool_generation 1",
	} {
		if !strings.Contains(recorder.Body.String(), want) {
			t.Errorf("no metric %s", want)
		}
	}

	// Another claim, decided before the taint was seen. The claim that has the GPU is released all the same.
	must(t, m.unprepare(claim))
	late := m.allocate("late", gpu0)
	if message := m.prepare(late).GetError(); !strings.Contains(message, "GPU is lost") && !strings.Contains(message, "GPU_IS_LOST") {
		t.Errorf("prepare of a claim for a lost GPU: %q", message)
	}
	eventually(t, "the late claim says that it cannot be prepared", func() error {
		object, err := m.client.ResourceV1().ResourceClaims("default").Get(t.Context(), "late", metav1.GetOptions{})
		must(t, err)
		for _, device := range object.Status.Devices {
			if c := meta.FindStatusCondition(device.Conditions, driver.ConditionReady); c != nil && c.Status == metav1.ConditionFalse && c.Reason == "GPULost" {
				return nil
			}
		}
		return fmt.Errorf("its devices are %v", object.Status.Devices)
	})
}

func (m *machine) do(c nvmlsim.Command) {
	m.t.Helper()
	_, err := m.gpus.Do(c)
	must(m.t, err)
}

func (m *machine) prepare(claim *drapb.Claim) *drapb.NodePrepareResourceResponse {
	m.t.Helper()
	answer, err := m.plugin().NodePrepareResources(m.t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	must(m.t, err)
	return answer.GetClaims()[claim.GetUid()]
}

func (m *machine) unprepare(claim *drapb.Claim) error {
	m.t.Helper()
	answer, err := m.plugin().NodeUnprepareResources(m.t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	must(m.t, err)
	if message := answer.GetClaims()[claim.GetUid()].GetError(); message != "" {
		return errors.New(message)
	}
	return nil
}

// taints of a published device.
func (m *machine) taints(device string) []resourceapi.DeviceTaint {
	m.t.Helper()
	return m.devices()[device]
}

// devices are those that are published, each with its taints.
func (m *machine) devices() map[string][]resourceapi.DeviceTaint {
	m.t.Helper()
	list, err := m.client.ResourceV1().ResourceSlices().List(m.t.Context(), metav1.ListOptions{})
	must(m.t, err)
	devices := map[string][]resourceapi.DeviceTaint{}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			devices[d.Name] = d.Taints
		}
	}
	return devices
}

// TestAGPUInQuarantineIsTainted: nobody could prepare it, so no claim should get it.
func TestAGPUInQuarantineIsTainted(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	must(t, os.MkdirAll(m.path("state", "quarantine"), 0o700))
	must(t, os.WriteFile(m.path("state", "quarantine", gpu0+"_a-claim.quarantine"), []byte("{"), 0o600))
	m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	eventually(t, "the slice has a taint", func() error {
		if taints := m.taints(gpu0); len(taints) != 1 || taints[0].Key != "gpu.nvidia.com/occupied" || taints[0].Effect != resourceapi.DeviceTaintEffectNoSchedule {
			return fmt.Errorf("taints %v", taints)
		}
		return nil
	})
	if answer := m.prepare(m.allocate("train", gpu0)); !strings.Contains(answer.GetError(), "in quarantine") {
		t.Errorf("prepare: %q, want an error about the quarantine", answer.GetError())
	}
	eventually(t, "the claim says why its device is not ready", func() error {
		object, err := m.client.ResourceV1().ResourceClaims("default").Get(t.Context(), "train", metav1.GetOptions{})
		must(t, err)
		for _, device := range object.Status.Devices {
			if c := meta.FindStatusCondition(device.Conditions, driver.ConditionReady); c != nil && c.Status == metav1.ConditionFalse && c.Reason == "DeviceQuarantined" {
				return nil
			}
		}
		return fmt.Errorf("devices %v", object.Status.Devices)
	})
}
