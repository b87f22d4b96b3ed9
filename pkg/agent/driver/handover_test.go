// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"stowage.dev/stowage/pkg/agent/driver"
)

// TestTheSuccessorOfAPodDeletedByForceWaits for the kubelet to unprepare the claim, and says so. As long as the pod is there it is refused.
func TestTheSuccessorOfAPodDeletedByForceWaits(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.run("")
	m.waitForGPUs(8)
	first, second := m.allocate("first", gpu0), m.allocate("second", gpu0)
	must(t, errorOf(m.prepare(first)))
	told := func(reason, message string) func() error { return m.tells(second, reason, message) }

	const held = "device gpu-0000-1b-00-0 is still held on this node by claim default/first (first-uid), used by pod default/first-pod, which runs"
	if err := errorOf(m.prepare(second)); err == nil || !strings.Contains(err.Error(), held) {
		t.Errorf("while the pod runs: %v, want %q", err, held)
	}
	eventually(t, "the second claim is told who has its GPU", told("DeviceHeld", held))

	must(t, errors.Join(
		m.client.CoreV1().Pods("default").Delete(t.Context(), "first-pod", metav1.DeleteOptions{}),
		m.client.ResourceV1().ResourceClaims("default").Delete(t.Context(), "first", metav1.DeleteOptions{}),
	))
	answers := make(chan *drapb.NodePrepareResourceResponse, 1)
	go func() { answers <- m.prepare(second) }()
	eventually(t, "the second claim is told what it waits for", told("DeviceNotReleased",
		"device gpu-0000-1b-00-0 waits for claim default/first (first-uid), which is being released: its pod is gone from the API server, and the kubelet has not unprepared it yet"))
	must(t, m.unprepare(first))
	if err := errorOf(<-answers); err != nil {
		t.Errorf("when the first claim is unprepared: %v", err)
	}
	eventually(t, "the second claim is told that its GPU is prepared", told("Prepared", ""))
}

// tells compares the claim's condition Ready, of which it wants the end of the message.
func (m *machine) tells(claim *drapb.Claim, reason, message string) func() error {
	return func() error {
		object, err := m.client.ResourceV1().ResourceClaims(claim.GetNamespace()).Get(m.t.Context(), claim.GetName(), metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, device := range object.Status.Devices {
			c := meta.FindStatusCondition(device.Conditions, driver.ConditionReady)
			if c != nil && c.Reason == reason && strings.HasSuffix(c.Message, message) {
				return nil
			}
		}
		return fmt.Errorf("its devices are %v", object.Status.Devices)
	}
}

// TestATenantIsToldOfNoOtherTenantsClaims, nor of their pods, be it in a condition, an event, or the answer to the kubelet.
func TestATenantIsToldOfNoOtherTenantsClaims(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.run("")
	m.waitForGPUs(8)
	first, second := m.allocateIn("team-a", "first", gpu0), m.allocateIn("team-b", "second", gpu0)
	must(t, errorOf(m.prepare(first)))

	const held = "claim team-b/second (second-uid), request gpu/h100: device gpu-0000-1b-00-0 is still held on this node by a claim of another namespace, used by its pod, which runs"
	if err := errorOf(m.prepare(second)); err == nil || err.Error() != held {
		t.Errorf("the kubelet is answered %v\nwant %s", err, held)
	}
	eventually(t, "its condition tells who has its GPU", m.tells(second, "DeviceHeld", held))

	must(t, m.client.CoreV1().Pods("team-a").Delete(t.Context(), "first-pod", metav1.DeleteOptions{}))
	answers := make(chan *drapb.NodePrepareResourceResponse, 1)
	go func() { answers <- m.prepare(second) }()
	eventually(t, "its condition tells what it waits for", m.tells(second, "DeviceNotReleased",
		"device gpu-0000-1b-00-0 waits for a claim of another namespace, which is being released: its pod is gone from the API server, and the kubelet has not unprepared it yet"))
	must(t, m.unprepare(first))
	must(t, errorOf(<-answers))

	reasons := map[string]bool{}
	eventually(t, "both are told by events", func() error {
		list, err := m.client.CoreV1().Events("team-b").List(t.Context(), metav1.ListOptions{})
		must(t, err)
		for _, event := range list.Items {
			reasons[event.Reason] = true
			if strings.Contains(event.Message, "team-a") || strings.Contains(event.Message, "first") {
				t.Errorf("event of %s: %s", event.InvolvedObject.Name, event.Message)
			}
		}
		if !reasons["DeviceHeld"] || !reasons["DeviceNotReleased"] {
			return fmt.Errorf("events %v", reasons)
		}
		return nil
	})
}
