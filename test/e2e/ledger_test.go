// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// ledgerCommand runs "node-agent ledger" as an administrator does in the agent's container: where the agent runs, with its flags.
func ledgerCommand(ctx context.Context, args ...string) (output string, code int, err error) {
	pid := theNode.Agent().Pid()
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return "", 0, err
	}
	words := strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")
	var flags []string
	for _, word := range words {
		switch {
		case !strings.HasPrefix(word, "--"):
		case args[0] == "release", strings.HasPrefix(word, "--state-dir="):
			flags = append(flags, word)
		}
	}
	program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return "", 0, err
	}
	command := append([]string{"--target", fmt.Sprint(pid), "--mount", "--", program, "ledger"}, append(args, flags...)...)
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "nsenter", command...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return out.String(), exit.ExitCode(), nil
	}
	return out.String(), 0, err
}

// claimOf is the claim of the namespace, which has one.
func claimOf(t *testing.T, namespace string) *resourceapi.ResourceClaim {
	t.Helper()
	list, err := cluster.AdminClient().ResourceV1().ResourceClaims(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != 1 {
		t.Fatalf("there are %d claims, want 1", len(list.Items))
	}
	return &list.Items[0]
}

// notReady waits until the claim's device is not ready for that reason, and the pod has one event of it.
func (p pod) notReady(reason, message string) {
	p.t.Helper()
	poll(p.t, "the claim's device is not ready because of "+reason, func(ctx context.Context) error {
		list, err := cluster.AdminClient().ResourceV1().ResourceClaims(p.namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, claim := range list.Items {
			for _, device := range claim.Status.Devices {
				if c := meta.FindStatusCondition(device.Conditions, "Ready"); c != nil && c.Status == metav1.ConditionFalse && c.Reason == reason && strings.Contains(c.Message, message) {
					return nil
				}
			}
		}
		return errors.New("it is not told")
	})
	poll(p.t, "the pod has an event "+reason, func(ctx context.Context) error {
		list, err := cluster.AdminClient().CoreV1().Events(p.namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		found := 0
		for _, event := range list.Items {
			if event.InvolvedObject.Name == p.name && event.Reason == reason {
				found += int(event.Count)
			}
		}
		if found != 1 {
			return fmt.Errorf("there are %d", found)
		}
		return nil
	})
}

func TestParametersThatNoDeviceTakesAreToldAndNothingIsDone(t *testing.T) {
	const partitioned = "7"
	for name, tc := range map[string]struct {
		class, parameters, want string
	}{
		"a kind that is for partitions, for a whole GPU": {
			"gpu.nvidia.com", `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS"}}`,
			"kind: MigDeviceConfig is not for the device of request gpus, which takes a GpuConfig",
		},
		"MPS of the kind for whole GPUs, for a partition": {
			"mig.nvidia.com", `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`,
			"kind: GpuConfig is not for the device of request gpus, which takes a MigDeviceConfig",
		},
	} {
		t.Run(name, func(t *testing.T) {
			namespace := newNamespace(t)
			if tc.class == "mig.nvidia.com" {
				hardware(t, &nvmlsim.SetMIG{GPU: partitioned, Enabled: true})
				t.Cleanup(func() {
					if _, err := nvmlsim.Control(context.Background(), controlSocket(), &nvmlsim.SetMIG{GPU: partitioned}); err != nil {
						t.Error(err)
					}
					if err := cluster.WaitForSlices(context.Background(), nodeName, gpuCount); err != nil {
						t.Error(err)
					}
				})
				made, err := nvmlsim.Control(t.Context(), controlSocket(), &nvmlsim.CreateMIG{GPU: partitioned, Profile: "1g.10gb"})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if _, err := nvmlsim.Control(context.Background(), controlSocket(), &nvmlsim.DestroyMIG{GPU: partitioned, Instance: made.MIG.Instance.GPU}); err != nil {
						t.Error(err)
					}
				})
			}
			client := cluster.AdminClient()
			if _, err := client.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), &resourceapi.ResourceClaimTemplate{
				ObjectMeta: metav1.ObjectMeta{Name: "wrong"},
				Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
					Requests: []resourceapi.DeviceRequest{{Name: "gpus", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: tc.class}}},
					Config: []resourceapi.DeviceClaimConfiguration{{
						Requests: []string{"gpus"},
						DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
							Driver: "gpu.nvidia.com", Parameters: runtime.RawExtension{Raw: []byte(tc.parameters)},
						}},
					}},
				}}},
			}, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			if _, err := client.CoreV1().Pods(namespace).Create(t.Context(), podWithClaim("wrong", "wrong"), metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			p := pod{t: t, namespace: namespace, name: "wrong"}
			p.notReady("ConfigRefused", tc.want)
			if files := append(cdiFiles(t), recordsOf(t, claimOf(t, namespace))...); len(files) > 0 {
				t.Errorf("files %v", files)
			}
			p.delete()
		})
	}
}

func recordsOf(t *testing.T, claim *resourceapi.ResourceClaim) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(theNode.StateDir(), "claims", string(claim.UID)+"*"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// Both copies of a record are torn. While the pod runs its claim is not released; when it is to end, it cannot, says why, and goes after the release.
func TestAPodWhoseRecordIsTornGoesAfterARelease(t *testing.T) {
	namespace := newNamespace(t)
	p := startPod(t, namespace, "torn", 1)
	p.check()
	claim := claimOf(t, namespace)
	files := recordsOf(t, claim)
	if len(files) != 2 {
		t.Fatalf("the record's files are %v, want two", files)
	}
	for _, file := range files {
		if err := os.Truncate(file, 7); err != nil {
			t.Fatal(err)
		}
	}
	if out, code, err := ledgerCommand(t.Context(), "list"); err != nil || code != 0 || !strings.Contains(out, namespace+"/"+claim.Name) {
		t.Errorf("list: exit code %d, %v:\n%s", code, err, out)
	}
	out, code, err := ledgerCommand(t.Context(), "show", string(claim.UID))
	for _, file := range files {
		if want := "- path: " + file + "\n  problem: 'corrupt ledger record: no header line in 7 bytes'\n"; err != nil || code != 0 || !strings.Contains(out, want) {
			t.Errorf("show: exit code %d, %v:\n%s\nwant %s", code, err, out, want)
		}
	}
	// An agent finds it at its start, before anybody asks.
	restartAgent(t)
	p.notReady("RecordUnreadable", "see node-agent ledger show "+string(claim.UID))
	if out, code, err := ledgerCommand(t.Context(), "release", string(claim.UID)); err != nil || code != 2 || !strings.Contains(out, "uses it and has not ended") {
		t.Fatalf("release of what a pod uses: exit code %d, %v:\n%s", code, err, out)
	}

	log := theNode.LogFile("agent")
	logged, failures := logSize(t, log), failedUnprepares(t)
	pods := cluster.AdminClient().CoreV1().Pods(namespace)
	if err := pods.Delete(t.Context(), p.name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	p.notReady("UnprepareFailed", "cannot be read: corrupt ledger record: no header line in 7 bytes")
	if now := p.get(); now.DeletionTimestamp == nil || now.Status.Phase == corev1.PodSucceeded {
		t.Errorf("the pod is %s, want that it cannot end", now.Status.Phase)
	}
	poll(t, "the kubelet has tried again", func(context.Context) error {
		if n := failedUnprepares(t) - failures; n < 2 {
			return fmt.Errorf("it has tried %g times", n)
		}
		return nil
	})
	if lines := linesSince(t, log, logged, "Claim could not be unprepared", string(claim.UID)); len(lines) != 1 {
		t.Errorf("the agent's log has %d lines about it, want one:\n%s", len(lines), strings.Join(lines, ""))
	}
	out, code, err = ledgerCommand(t.Context(), "release", string(claim.UID))
	if err != nil || code != 0 {
		t.Fatalf("release: exit code %d, %v:\n%s", code, err, out)
	}
	t.Log(out)
	poll(t, "the pod is gone", func(ctx context.Context) error {
		if _, err := pods.Get(ctx, p.name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is there: %w", err)
		}
		return nil
	})
	if files := append(cdiFiles(t), recordsOf(t, claim)...); len(files) > 0 {
		t.Errorf("files %v are left", files)
	}
	next := startPod(t, namespace, "next", gpuCount)
	next.check()
}

// failedUnprepares is how often the kubelet was told that a claim cannot be unprepared.
func failedUnprepares(t *testing.T) float64 {
	t.Helper()
	return agentMetrics(t, theNode.Agent()).Count("stowage_agent_call_duration_seconds", "operation", "unprepare", "outcome", "error")
}

// TestASettingThatNoGPUTakesFailsItsPodsAlone: fifty of them come, as those of a Job do, and each hears which field it is. No GPU is out of service after
// that, and the next pod gets all of them.
func TestASettingThatNoGPUTakesFailsItsPodsAlone(t *testing.T) {
	const (
		pods  = 50
		field = "sharing.timeSlicingConfig.interval"
	)
	refuse := func(ctx context.Context, settings ...nvmlsim.Setting) {
		for i := range gpuCount {
			if _, err := nvmlsim.Control(ctx, controlSocket(), &nvmlsim.Refuse{GPU: fmt.Sprint(i), Settings: settings}); err != nil {
				t.Error(err)
			}
		}
	}
	refuse(t.Context(), nvmlsim.SettingTimeSlice)
	t.Cleanup(func() { refuse(context.Background()) })
	namespace := newNamespace(t)
	client := cluster.AdminClient()
	if _, err := client.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: "sliced"},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpus", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}},
			Config: []resourceapi.DeviceClaimConfiguration{{
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: "gpu.nvidia.com",
					Parameters: runtime.RawExtension{
						Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`),
					},
				}},
			}},
		}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	left := map[string]bool{}
	for i := range pods {
		p := podWithClaim(fmt.Sprint("sliced-", i), "sliced")
		left[p.Name] = true
		if _, err := client.CoreV1().Pods(namespace).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// Who has heard it goes, and makes room for the next ones.
	begin := time.Now()
	poll(t, "each pod hears which field is refused", func(ctx context.Context) error {
		events, err := client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, event := range events.Items {
			name := event.InvolvedObject.Name
			if !left[name] || !strings.Contains(event.Message, field) {
				continue
			}
			if err := client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
				return err
			}
			delete(left, name)
		}
		if len(left) > 0 {
			return fmt.Errorf("%d have not", len(left))
		}
		return nil
	})
	t.Logf("%d pods are refused in %s", pods, since(begin))
	begin = time.Now()
	next := startPod(t, namespace, "next", gpuCount)
	t.Logf("the next pod has all %d GPUs after %s", gpuCount, since(begin))
	next.check()
	quarantine, err := filepath.Glob(filepath.Join(theNode.StateDir(), "quarantine", "*"))
	if err != nil || len(quarantine) > 0 {
		t.Errorf("in quarantine: %v, %v", quarantine, err)
	}
	next.delete()
}
