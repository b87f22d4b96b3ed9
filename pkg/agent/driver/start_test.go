// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/durable"
)

// TestNoAPIServerAtTheStart: the kubelet is served, and pods go; when the API server comes the GPUs are published and pods come.
func TestNoAPIServerAtTheStart(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var asked atomic.Int64
	m.client.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		asked.Add(1)
		return false, nil, nil
	})
	stop := m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	claim := m.allocate("train", gpu0)
	if answer, err := m.plugin().NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}}); err != nil || answer.GetClaims()["train-uid"].GetError() != "" {
		t.Fatalf("prepare: %v, %v", answer, err)
	}
	must(t, stop())
	// A kubelet that starts deletes all slices of its node.
	list, err := m.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	for _, slice := range list.Items {
		must(t, m.client.ResourceV1().ResourceSlices().Delete(t.Context(), slice.Name, metav1.DeleteOptions{}))
	}

	m.away.Store(true)
	before := asked.Load()
	m.run("")
	m.register(driver.Name + "-reg.sock")
	eventually(t, "the API server was asked in vain", func() error {
		if n := asked.Load() - before; n < 2 {
			return fmt.Errorf("asked %d times", n)
		}
		return nil
	})
	gone, err := m.plugin().NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil || gone.GetClaims()["train-uid"].GetError() != "" {
		t.Errorf("unprepare: %v, %v", gone, err)
	}
	for _, dir := range []string{"cdi", "state/claims"} {
		if left, err := os.ReadDir(m.path(dir)); err != nil || len(left) > 0 {
			t.Errorf("%s: left are %v, %v", dir, left, err)
		}
	}
	// What needs the API server says so, and succeeds when it is tried again.
	again, err := m.plugin().NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err == nil && again.GetClaims()["train-uid"].GetError() == "" {
		t.Error("a claim was prepared that could not be read")
	}

	m.away.Store(false)
	m.waitForGPUs(8)
	again, err = m.plugin().NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil || again.GetClaims()["train-uid"].GetError() != "" {
		t.Errorf("prepare: %v, %v", again, err)
	}
}

// TestSlicesArePublishedOnceThereIsALock: a file could not be made at the start.
func TestSlicesArePublishedOnceThereIsALock(t *testing.T) {
	m := newMachine(t)
	lock := m.path("state", "publisher.lock")
	must(t, os.MkdirAll(lock, 0o700)) // which is no file
	m.run("")
	failed := func() float64 {
		_, metrics := m.scrape()
		return metrics["slice_errors_total"]["reason=other"]
	}
	before := failed()
	eventually(t, "it failed", func() error {
		if got := failed(); got <= before {
			return fmt.Errorf("%v errors, %v before", got, before)
		}
		return nil
	})
	if got := m.published(); len(got) > 0 {
		t.Errorf("published without a lock: %v", got)
	}
	m.awaitReadyz("[-] publishes the node's ResourceSlices: ", lock)
	must(t, os.Remove(lock))
	m.waitForGPUs(8)
	m.awaitReadyz("[+] publishes the node's ResourceSlices\n")
}

// TestWhoWaitsForAnotherAgentToPublishSaysSo, and is ready: in an update the other one ends once this one is. An agent of another namespace does not,
// and if it has lost its rights nobody publishes.
func TestWhoWaitsForAnotherAgentToPublishSaysSo(t *testing.T) {
	m := newMachine(t)
	lock := m.path("state", "publisher.lock")
	must(t, os.MkdirAll(filepath.Dir(lock), 0o700))
	unlock, err := durable.Lock(t.Context(), lock)
	must(t, err)
	m.run("")
	m.awaitReadyz("[-] publishes the node's ResourceSlices: since ", "another agent of this node", lock)
	if got := m.published(); len(got) > 0 {
		t.Errorf("published beside the other agent: %v", got)
	}
	unlock()
	m.waitForGPUs(8)
	m.awaitReadyz("[+] publishes the node's ResourceSlices\n")
}

// awaitReadyz waits until the agent is ready, and /readyz has the texts.
func (m *machine) awaitReadyz(texts ...string) {
	m.t.Helper()
	eventually(m.t, fmt.Sprintf("/readyz has %q", texts), func() error {
		recorder := httptest.NewRecorder()
		m.last.Status().Handler(allowAll).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		body := recorder.Body.String()
		if recorder.Code != http.StatusOK || slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(body, text) }) {
			return fmt.Errorf("%d: %s", recorder.Code, body)
		}
		return nil
	})
}
