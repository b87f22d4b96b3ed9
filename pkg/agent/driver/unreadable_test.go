// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/reconcile"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// truncateRecords leaves nothing to read of the claims' records that the pattern names.
func (m *machine) truncateRecords(pattern string) {
	m.t.Helper()
	files, err := filepath.Glob(m.path("state", "claims", pattern))
	must(m.t, err)
	if len(files) == 0 {
		m.t.Fatalf("no record %s", pattern)
	}
	for _, file := range files {
		must(m.t, os.Truncate(file, 7))
	}
}

// A claim whose record cannot be read keeps its pod from ending: the claim's condition says so, and the pod has one event, however often the
// kubelet tries.
func TestAPodThatCannotEndIsToldWhy(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	claim := m.allocate("train", gpu0)
	if message := m.prepare(claim).GetError(); message != "" {
		t.Fatal(message)
	}
	ready := func(want metav1.ConditionStatus, reason string) func() error {
		return func() error {
			object, err := m.client.ResourceV1().ResourceClaims("default").Get(t.Context(), "train", metav1.GetOptions{})
			must(t, err)
			for _, device := range object.Status.Devices {
				if c := meta.FindStatusCondition(device.Conditions, driver.ConditionReady); c != nil && c.Status == want && c.Reason == reason {
					return nil
				}
			}
			return fmt.Errorf("devices are %v", object.Status.Devices)
		}
	}
	eventually(t, "the device is ready", ready(metav1.ConditionTrue, "Prepared"))
	m.truncateRecords("train-uid_*")

	record := m.path("state", "claims", "train-uid_"+gpu0+".claim")
	want := "unprepare claim train-uid: the ledger record " + record + " cannot be read: corrupt ledger record: no header line in 7 bytes; " +
		"nor can its previous copy, .claim.prev: corrupt ledger record: no header line in 7 bytes. " +
		"It holds " + gpu0 + " until somebody decides: see node-agent ledger show train-uid"
	for range 3 {
		if err := m.unprepare(claim); err == nil || err.Error() != want {
			t.Fatalf("unprepare: %v\nwant %s", err, want)
		}
	}
	if lines := m.logged("Claim could not be unprepared"); len(lines) != 1 || !strings.Contains(lines[0], "train-uid") {
		t.Errorf("three tries are logged as %q, want one line", lines)
	}
	eventually(t, "the device is not ready", ready(metav1.ConditionFalse, "UnprepareFailed"))
	told := func() (messages []string) {
		list, err := m.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		must(t, err)
		for _, event := range list.Items {
			if event.Reason == "UnprepareFailed" && event.InvolvedObject.Name == "train-pod" {
				messages = append(messages, fmt.Sprintf("%d × %s", event.Count, event.Message))
			}
		}
		return messages
	}
	eventually(t, "the pod has an event", func() error {
		if got := told(); len(got) != 1 || got[0] != "1 × The pod cannot end, because device "+gpu0+" of claim train cannot be taken back: "+want {
			return fmt.Errorf("events %q", got)
		}
		return nil
	})
}

// A record that is torn while nobody calls: the condition says so at the next look, also of an agent that starts on it. When the claim is
// released while it stays allocated, what is said of its record is over, too.
func TestTheConditionTellsTheTruthWithoutACall(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	stop := m.run("")
	m.waitForGPUs(8)
	claim, whole := m.allocate("train", gpu0), m.allocate("whole", gpu1)
	must(t, errors.Join(errorOf(m.prepare(claim)), errorOf(m.prepare(whole))))
	eventually(t, "the device is ready", m.tells(claim, "Prepared", ""))
	eventually(t, "the other one is ready", m.tells(whole, "Prepared", ""))
	m.truncateRecords("train-uid_*")
	must(t, stop())

	m.run("")
	eventually(t, "the device is not ready", m.tells(claim, "RecordUnreadable", "see node-agent ledger show train-uid"))
	beside, err := m.agent(t.Context(), "")
	must(t, err)
	if _, err := beside.Release(t.Context(), "train-uid", true, func(string) {}); err != nil {
		t.Fatal(err)
	}
	m.last.LookAgain()
	eventually(t, "the claim is not prepared", m.tells(claim, "NotPrepared", "the claim is not prepared on this node"))
	eventually(t, "the other one is as it was", m.tells(whole, "Prepared", ""))
	must(t, errorOf(m.prepare(claim)))
	eventually(t, "the device is ready again", m.tells(claim, "Prepared", ""))
}

// An administrator frees the GPU beside the agent that runs, and the kubelet's next call succeeds. What is in use is not freed.
func TestAnAdministratorReleasesAClaimThatCannotBeRead(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.adjust = func(o *driver.Options) {
		o.Kubelet.Pods = func(context.Context) ([]reconcile.KubeletPod, error) {
			return []reconcile.KubeletPod{{Namespace: "default", Name: "train-pod", CDIClaims: []types.UID{"train-uid"}}}, nil
		}
		o.Kubelet.Devices = func(context.Context, bool) ([]ledger.PluginDevice, error) { return nil, nil }
	}
	m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	claim := m.allocate("train", gpu0)
	if message := m.prepare(claim).GetError(); message != "" {
		t.Fatal(message)
	}
	m.truncateRecords("train-uid_*")
	must(t, os.MkdirAll(m.path("pod-resources"), 0o755))
	must(t, os.WriteFile(m.path("pod-resources", "kubelet.sock"), nil, 0o600)) // when the kubelet has started
	m.do(&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess})

	found, err := prepare.Inspect(m.path("state"))
	must(t, err)
	if len(found) != 1 || found[0].UID != "train-uid" || found[0].Name != "train" || found[0].Readable() != "no" || len(found[0].Copies) != 2 {
		t.Errorf("found %+v", found)
	}
	beside, err := m.agent(t.Context(), "")
	must(t, err)
	silent := func(string) {}
	if _, err := beside.Release(t.Context(), "train-uid", false, silent); !errors.Is(err, prepare.ErrInUse) || err.Error() != "not released: the kubelet has it for pod default/train-pod" {
		t.Errorf("what a pod uses: %v", err)
	}
	if left := len(m.files("claims")); left != 2 {
		t.Errorf("%d files are left of the record", left)
	}
	// With --force without an API server, too.
	withKubelet := m.adjust
	m.adjust = func(o *driver.Options) { withKubelet(o); o.Client, o.NodeClient = nil, nil }
	beside, err = m.agent(t.Context(), "")
	must(t, err)
	done, err := beside.Release(t.Context(), "train-uid", true, silent)
	must(t, err)
	want := []string{
		"passed over, because of --force: the API server cannot be asked, for want of --kubeconfig",
		"undone: CDIFile " + m.path("cdi", "k8s.gpu.nvidia.com-claim_train-uid.json"), "undone: MPSDaemon train-uid", "undone: MPSDaemon " + gpu0,
		"undone: ComputeMode GPU-072282fa-319c-5a28-8e56-4b9fcf52c045", "removed: the claim's ledger record",
	}
	if !slices.Equal(done.Did, want) || len(done.Left) > 0 {
		t.Errorf("done %q, left %q, want %q", done.Did, done.Left, want)
	}
	if mode := m.gpus.State().GPUs[0].ComputeMode; mode != nvmlsim.ComputeDefault {
		t.Errorf("compute mode is %s", mode)
	}
	if files := append(m.files("claims"), m.files("metadata")...); len(files) > 0 {
		t.Errorf("files %v are left", files)
	}
	must(t, m.unprepare(claim))
	if message := m.prepare(m.allocate("next", gpu0)).GetError(); message != "" {
		t.Errorf("the next claim: %s", message)
	}
	if _, err := beside.Release(t.Context(), "train-uid", false, silent); !errors.Is(err, prepare.ErrNoClaim) {
		t.Errorf("once more: %v", err)
	}
}

func (m *machine) files(folder string) (names []string) {
	m.t.Helper()
	entries, err := os.ReadDir(m.path("state", folder))
	must(m.t, err)
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// What the log counts as prepared after a start, the metric does, too.
func TestAClaimReadFromItsPreviousCopyCountsAsPrepared(t *testing.T) {
	m := newMachine(t)
	stop := m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	if message := m.prepare(m.allocate("train", gpu0)).GetError(); message != "" {
		t.Fatal(message)
	}
	m.truncateRecords("train-uid_*.claim") // the previous copy says PrepareStarted
	must(t, stop())
	m.run("")
	m.register(driver.Name + "-reg.sock")
	if lines, want := m.logged("Ledger is read"), []string{"prepared 1 cdiRestored 0 rolledBack 0 unreadable 0"}; !slices.Equal(lines, want) {
		t.Errorf("the log says %q, want %q", lines, want)
	}
	recorder := httptest.NewRecorder()
	m.last.Status().Handler(allowAll).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, want := range []string{
		`stowage_agent_ledger_claims{state="completed"} 1`, `stowage_agent_ledger_claims{state="started"} 0`, `stowage_agent_ledger_claims{state="unreadable"} 0`,
	} {
		if !strings.Contains(recorder.Body.String(), want) {
			t.Errorf("no metric %s", want)
		}
	}
}
