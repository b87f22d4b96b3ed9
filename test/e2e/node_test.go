// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/test/lab"
)

func TestContainersSeeExactlyTheirGPUs(t *testing.T) {
	namespace := newNamespace(t)
	rows := []lab.Row{
		startPod(t, namespace, "one", 1).check(),
		startPod(t, namespace, "three", 3).check(),
	}
	for _, device := range rows[0].Allocated {
		if slices.Contains(rows[1].Allocated, device) {
			t.Errorf("device %s is given to both pods", device)
		}
	}
	if one, three := len(rows[0].Allocated), len(rows[1].Allocated); one != 1 || three != 3 {
		t.Errorf("the pods have %d and %d GPUs, want 1 and 3", one, three)
	}
}

func TestAPodThatWaitsGetsTheGPUsOfOneThatEnds(t *testing.T) {
	namespace := newNamespace(t)
	first := startPod(t, namespace, "first", gpuCount)
	first.check()
	createPod(t, namespace, "second", 1)
	if _, err := cluster.WaitForPods(t.Context(), namespace, []string{"second"}, "refused", podTimeout, lab.Unschedulable); err != nil {
		t.Fatal(err)
	}
	first.delete()
	second := pod{t: t, namespace: namespace, name: "second"}
	second.waitRunning()
	second.check()
}

// A kubelet that starts deletes its node's slices. They are published again soon, and the agent tells how long not all were there.
func TestKubeletRestartLeavesRunningPodsTheirGPUs(t *testing.T) {
	// Without the agent's own publishing it would be 30 s.
	const longestGap = 28 * time.Second
	namespace := newNamespace(t)
	before := startPod(t, namespace, "before", 2)
	before.check()
	was := before.container()
	old, metrics := sliceUIDs(t), agentMetrics(t, theNode.Agent())

	begin := time.Now()
	if err := theNode.RestartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	poll(t, "all slices are new ones", func(context.Context) error {
		now := sliceUIDs(t)
		for uid := range old {
			if now[uid] {
				return fmt.Errorf("slice %s is as before", uid)
			}
		}
		if len(now) != len(old) {
			return fmt.Errorf("there are %d slices, before it were %d", len(now), len(old))
		}
		return nil
	})
	const gaps = "stowage_agent_slice_gap_seconds"
	poll(t, "the agent tells of the gap", func(context.Context) error {
		if now := agentMetrics(t, theNode.Agent()); now.Count(gaps) != metrics.Count(gaps)+1 {
			return fmt.Errorf("it has measured %g gaps, before it were %g", now.Count(gaps), metrics.Count(gaps))
		}
		return nil
	})
	gap := time.Duration((agentMetrics(t, theNode.Agent()).Sum(gaps) - metrics.Sum(gaps)) * float64(time.Second))
	if gap <= 0 || gap > longestGap || gap > time.Since(begin) {
		t.Errorf("the measured gap is %s; the restart began %s ago, and at most %s are allowed", gap, time.Since(begin), longestGap)
	}
	t.Logf("not all slices were there for %s", gap)

	if err := cluster.WaitForSlices(t.Context(), nodeName, gpuCount); err != nil {
		t.Fatal(err)
	}
	after := startPod(t, namespace, "after", 1)
	after.check()

	before.waitRunning()
	before.checkAgain()
	checkSameContainer(t, was, before)
}

func sliceUIDs(t *testing.T) map[types.UID]bool {
	t.Helper()
	list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + nodeName})
	if err != nil {
		t.Fatal(err)
	}
	uids := map[types.UID]bool{}
	for _, slice := range list.Items {
		uids[slice.UID] = true
	}
	return uids
}

func TestAgentKilledAndRestarted(t *testing.T) {
	namespace := newNamespace(t)
	before := startPod(t, namespace, "before", 2)
	before.check()
	was := before.container()
	leaving := startPod(t, namespace, "leaving", 1)

	if err := theNode.KillAgent(); err != nil {
		t.Fatal(err)
	}
	// Nobody prepares or unprepares now: the kubelet must be patient, and the
	// running pod must not notice.
	if err := cluster.AdminClient().CoreV1().Pods(namespace).Delete(t.Context(), leaving.name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	createPod(t, namespace, "meanwhile", 1)
	before.checkAgain()
	checkSameContainer(t, was, before)

	if err := theNode.StartAgent(t.Context()); err != nil {
		t.Fatal(err)
	}
	meanwhile := pod{t: t, namespace: namespace, name: "meanwhile"}
	meanwhile.waitRunning()
	meanwhile.check()
	after := startPod(t, namespace, "after", 1)
	after.check()
	before.checkAgain()
	checkSameContainer(t, was, before)
}

func TestContainerRestartsAfterItsCDIFileWasDeleted(t *testing.T) {
	namespace := newNamespace(t)
	p := startPod(t, namespace, "pod", 2)
	row := p.check()
	was := p.container()

	files := cdiFiles(t)
	if len(files) != 1 {
		t.Fatalf("the CDI folder holds %v, want one file", files)
	}
	for _, file := range files {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	if err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, podTimeout, true, func(context.Context) (bool, error) {
		return slices.Equal(cdiFiles(t), files), nil
	}); err != nil {
		t.Fatalf("the agent did not restore the CDI file: %v", err)
	}

	if err := theNode.KillContainer(t.Context(), namespace, p.name, "main"); err != nil {
		t.Fatal(err)
	}
	if err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, podTimeout, true, func(context.Context) (bool, error) {
		now := p.container()
		return now.RestartCount > was.RestartCount && now.State.Running != nil, nil
	}); err != nil {
		t.Fatalf("the container did not run again: %v; %s", err, lab.Describe(p.get()))
	}
	p.waitRunning()
	if again := p.check(); !slices.Equal(again.Allocated, row.Allocated) || again.Seen != row.Seen {
		t.Errorf("the restarted container sees %s (allocated %v), before it was %s (allocated %v)", again.Seen, again.Allocated, row.Seen, row.Allocated)
	}
}

func cdiFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(theNode.CDIDir(), "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// checkSameContainer checks that the pod's container is the one that ran before.
func checkSameContainer(t *testing.T, was corev1.ContainerStatus, p pod) {
	t.Helper()
	if now := p.container(); now.ContainerID != was.ContainerID || now.RestartCount != was.RestartCount {
		t.Errorf("pod %s: container %s (%d restarts) ran before, now it is %s (%d restarts)",
			p.name, was.ContainerID, was.RestartCount, now.ContainerID, now.RestartCount)
	}
}
