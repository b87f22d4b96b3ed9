// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/test/lab"
)

// TestTheSuccessorOfAPodThatWasDeletedByForceWaitsForIt: to the API the pod is gone at once, and its GPUs are another pod's. On the node it
// has the rest of its grace period, and what the kubelet is refused it tries again after 60 to 90 s.
func TestTheSuccessorOfAPodThatWasDeletedByForceWaitsForIt(t *testing.T) {
	const grace, soon = 20 * time.Second, 10 * time.Second
	namespace := newNamespace(t)
	createPod(t, namespace, "first", gpuCount, func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(grace / time.Second)) })
	first := pod{t: t, namespace: namespace, name: "first"}
	first.waitRunning()
	claim := onlyClaim(t, namespace)
	createPod(t, namespace, "second", gpuCount)
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"second"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}

	// It hears no SIGTERM, and is killed when its grace period is over.
	if err := theNode.SignalContainer(t.Context(), namespace, "first", "main", "SIGSTOP"); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := cluster.AdminClient().CoreV1().Pods(namespace).Delete(t.Context(), "first", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Fatal(err)
	}
	second := pod{t: t, namespace: namespace, name: "second"}
	text := second.waitEvent("DeviceNotReleased")
	for _, want := range []string{"waits for claim " + namespace + "/" + claim.Name, "being released"} {
		if !strings.Contains(text, want) {
			t.Errorf("the successor is told %q, want %q in it", text, want)
		}
	}
	poll(t, "the ledger has no record of the first claim", func(context.Context) error {
		records, err := filepath.Glob(filepath.Join(theNode.StateDir(), "claims", "*"+string(claim.UID)+"*"))
		if err == nil && len(records) > 0 {
			err = fmt.Errorf("there are %v", records)
		}
		return err
	})
	released := time.Now()
	second.waitRunning()
	took := time.Since(released)
	t.Logf("released %s after the deletion; the successor runs %s after that", released.Sub(begin).Round(time.Millisecond), took.Round(time.Millisecond))
	if took > soon {
		t.Errorf("the successor runs %s after the release, want at most %s", took, soon)
	}
	second.check()
}

// TestAHolderThatRunsIsNamed: nobody waits for it, because it will not go by itself.
func TestAHolderThatRunsIsNamed(t *testing.T) {
	namespace := newNamespace(t)
	holder := startPod(t, namespace, "holder", 1)
	claim := onlyClaim(t, namespace)

	// Another scheduler gives the same GPU away, which knows nothing of this one.
	client := cluster.AdminClient()
	double, err := client.ResourceV1().ResourceClaims(namespace).Create(t.Context(), &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "double"}, Spec: claim.Spec}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	refused := podWithClaim("refused", "")
	refused.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("double")}}
	refused.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	refused.Spec.SchedulerName = "somebody-else"
	created, err := client.CoreV1().Pods(namespace).Create(t.Context(), refused, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	double.Status.Allocation = claim.Status.Allocation
	double.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: created.Name, UID: created.UID}}
	if _, err := client.ResourceV1().ResourceClaims(namespace).UpdateStatus(t.Context(), double, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: created.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: nodeName}}
	if err := client.CoreV1().Pods(namespace).Bind(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	text := (pod{t: t, namespace: namespace, name: created.Name}).waitEvent("DeviceHeld")
	for _, want := range []string{"held on this node by claim " + namespace + "/" + claim.Name, "used by pod " + namespace + "/holder, which runs"} {
		if !strings.Contains(text, want) {
			t.Errorf("the refused pod is told %q, want %q in it", text, want)
		}
	}
	holder.check()
	(pod{t: t, namespace: namespace, name: created.Name}).delete()
	if err := client.ResourceV1().ResourceClaims(namespace).Delete(t.Context(), double.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// onlyClaim is the claim of the namespace, once it is allocated.
func onlyClaim(t *testing.T, namespace string) resourceapi.ResourceClaim {
	t.Helper()
	claims := allClaims(t, namespace)
	if len(claims) != 1 || claims[0].Status.Allocation == nil {
		t.Fatalf("claims %v, want one that is allocated", claims)
	}
	return claims[0]
}

// TestTheAgeOfATaintIsKept over restarts of the kubelet, which deletes the slices, and of the agent: tolerationSeconds count from there.
func TestTheAgeOfATaintIsKept(t *testing.T) {
	p := startPod(t, newNamespace(t), "watched", 1)
	device, uuid := p.gpu()
	hardware(t, &nvmlsim.SetRecovery{GPU: uuid, Action: nvmlsim.RecoveryReset})
	t.Cleanup(func() {
		for _, c := range []nvmlsim.Command{&nvmlsim.SetRecovery{GPU: uuid}, &nvmlsim.RemapRows{GPU: uuid}} {
			if _, err := nvmlsim.Control(context.Background(), controlSocket(), c); err != nil {
				t.Error(err)
			}
		}
	})
	const taint = "gpu.nvidia.com/recovery-action=gpu-reset:NoSchedule"
	waitTaints(t, device, taint)
	added := taintsOf(t, device)[0].TimeAdded
	// The times that the API keeps have no fractions of a second.
	time.Sleep(time.Until(added.Add(3 * time.Second)))
	check := func(after string) {
		t.Helper()
		if now := taintsOf(t, device)[0].TimeAdded; !now.Equal(added) {
			t.Errorf("after %s the taint is there since %s, before it was %s", after, now, added)
		}
	}

	old := sliceUIDs(t)
	if err := theNode.RestartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	poll(t, "the slices are new ones", func(context.Context) error {
		now := sliceUIDs(t)
		for uid := range old {
			if now[uid] {
				return fmt.Errorf("slice %s is as before", uid)
			}
		}
		return nil
	})
	waitTaints(t, device, taint)
	check("a restart of the kubelet")

	if err := theNode.KillAgent(); err != nil {
		t.Fatal(err)
	}
	if err := theNode.StartAgent(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.waitHealth(corev1.ResourceHealthStatusUnhealthy, "reset")
	// The next agent publishes what it knows, and another taint, which is written with it.
	hardware(t, &nvmlsim.RemapRows{GPU: uuid, Rows: nvmlsim.Rows{Pending: true}})
	waitTaints(t, device, taint, "gpu.nvidia.com/row-remap-pending=:None")
	check("a restart of the agent")
	hardware(t, &nvmlsim.RemapRows{GPU: uuid})
	hardware(t, &nvmlsim.SetRecovery{GPU: uuid})
	waitTaints(t, device)
}

// taintsOf are the taints that the device is published with.
func taintsOf(t *testing.T, device string) []resourceapi.DeviceTaint {
	t.Helper()
	list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + nodeName})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			if d.Name == device && len(d.Taints) > 0 {
				return d.Taints
			}
		}
	}
	t.Fatalf("device %s is not published with a taint", device)
	return nil
}

// TestAGPUInQuarantineIsTaintedWhenItsClaimIsGone: the pod that waits for a GPU gets none that nobody can have.
func TestAGPUInQuarantineIsTaintedWhenItsClaimIsGone(t *testing.T) {
	namespace := newNamespace(t)
	p := startPod(t, namespace, "leaving", 1)
	device, uuid := p.gpu()
	claim := onlyClaim(t, namespace)
	// It hangs in the very moment in which the claim is unprepared: its fault is seen later.
	hardware(t, &nvmlsim.HangGPU{GPU: uuid})
	t.Cleanup(func() {
		if _, err := nvmlsim.Control(context.Background(), controlSocket(), &nvmlsim.UnhangGPU{GPU: uuid}); err != nil && !strings.Contains(err.Error(), "not") {
			t.Error(err)
		}
	})
	p.delete()
	taints := taintsOf(t, device)
	if !slices.ContainsFunc(taints, func(d resourceapi.DeviceTaint) bool {
		return d.Key == "gpu.nvidia.com/occupied" && d.Value == string(claim.UID)
	}) {
		t.Errorf("when the pod is gone the device has the taints %v, want that it is occupied", taints)
	}
	hardware(t, &nvmlsim.UnhangGPU{GPU: uuid})
	waitTaints(t, device)
}

// TestNoPodIsBoundToAGPUInQuarantine: ten wait while a claim is unprepared whose GPU does not answer. The other GPUs become free, and theirs are those.
func TestNoPodIsBoundToAGPUInQuarantine(t *testing.T) {
	const waiting = 10
	namespace := newNamespace(t)
	leaving := startPod(t, namespace, "leaving", 1)
	device, uuid := leaving.gpu()
	others := startPod(t, namespace, "others", gpuCount-1)
	for i := range waiting {
		createPod(t, namespace, fmt.Sprint("waiting-", i), 1)
	}
	hardware(t, &nvmlsim.HangGPU{GPU: uuid})
	t.Cleanup(func() {
		if _, err := nvmlsim.Control(context.Background(), controlSocket(), &nvmlsim.UnhangGPU{GPU: uuid}); err != nil && !strings.Contains(err.Error(), "not") {
			t.Error(err)
		}
	})
	leaving.delete()
	others.delete()
	runs := func(want int) {
		t.Helper()
		poll(t, fmt.Sprintf("%d of the pods run", want), func(ctx context.Context) error {
			list, err := cluster.AdminClient().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			bound, running := 0, 0
			for i := range list.Items {
				if is, err := lab.Running(&list.Items[i]); err != nil {
					t.Fatal(err)
				} else if is {
					running++
				}
				if list.Items[i].Spec.NodeName != "" {
					bound++
				}
			}
			if bound > want {
				t.Fatalf("%d pods are bound, and there are %d GPUs for them", bound, want)
			}
			if running != want {
				return fmt.Errorf("%d do", running)
			}
			return nil
		})
	}
	runs(gpuCount - 1)
	for _, claim := range allClaims(t, namespace) {
		if claim.Status.Allocation != nil && claim.Status.Allocation.Devices.Results[0].Device == device {
			t.Errorf("claim %s has device %s, which is in quarantine", claim.Name, device)
		}
	}
	hardware(t, &nvmlsim.UnhangGPU{GPU: uuid})
	runs(gpuCount)
}
