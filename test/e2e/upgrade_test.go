// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/test/lab"
)

// Agents are replaced as a DaemonSet with maxSurge 1 does it. Each time one prepare is under way at the old agent when that is told to end,
// one is done while both run, and one comes after. None fails, and the health of a running pod's GPU never is anything but Healthy.
func TestAgentUpgradeFailsNoPrepare(t *testing.T) {
	namespace := newNamespace(t)
	watched := startPod(t, namespace, "watched", 1)
	watched.waitHealth(corev1.ResourceHealthStatusHealthy, "")
	unhealthy := watched.watchHealth()
	before := kubeletMetrics(t, theNode)

	const upgrades = 3
	for upgrade := range upgrades {
		// The kubelet stands still until it may read the pod's claim: what it is refused it tries again only after a minute, and no
		// call waits so long for a lock.
		create := func(when string) pod {
			kubeletGoesOn := halt(t, theNode.SignalKubelet)
			p := pod{t: t, namespace: namespace, name: fmt.Sprintf("%s-%d", when, upgrade)}
			createPod(t, namespace, p.name, 1)
			waitReadable(t, namespace, nodeName, 1, p.name)
			kubeletGoesOn()
			return p
		}
		// 1. The old agent begins to prepare, and has to wait for the lock of the GPU.
		old := theNode.Agent()
		locks := lockGPUs(t, theNode)
		had := agentMetrics(t, old) // it may have served other tests
		begun := create("begun")
		waitCalls(t, old, "the old agent prepares", 1, 0, had)
		device := begun.device()
		locks.releaseAllBut(device)

		// 2. Both run. The kubelet calls the one that it got to know last.
		former, err := theNode.StartNextAgent(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		during := create("during")
		waitCalls(t, theNode.Agent(), "the new agent prepares while both run", 0, 1, lab.Metrics{})

		// 3. The old one is told to end. It answers the call that it has, and only that.
		stopped := make(chan error, 1)
		go func() { stopped <- former.Stop() }()
		poll(t, "the old agent ends", func(ctx context.Context) error {
			if _, err := former.Get(ctx, "/readyz"); err == nil {
				return errors.New("it is ready")
			}
			return nil
		})
		locks.releaseAllBut()
		if err := <-stopped; err != nil {
			t.Fatal(err)
		}
		after := create("after")
		for _, p := range []pod{begun, during, after} {
			p.waitRunning()
			p.check()
		}
		if n := prepared(agentMetrics(t, theNode.Agent())); n != 2 {
			t.Errorf("upgrade %d: the new agent has prepared %g claims, want those of pods %s and %s", upgrade, n, during.name, after.name)
		}
		for _, p := range []pod{begun, during, after} {
			p.delete()
		}
	}
	checkKubeletCalls(t, namespace, before, kubeletMetrics(t, theNode), 3*upgrades)
	if seen := unhealthy(); len(seen) > 0 {
		t.Errorf("health of the watched pod's GPU on the way: %v", seen)
	}
}

// checkKubeletCalls compares the kubelet's own count of the pods that needed something to be prepared or unprepared, between two times, with
// how many there were in the namespace. None failed at the agent.
func checkKubeletCalls(t *testing.T, namespace string, before, after lab.Metrics, wantPrepared float64) {
	t.Helper()
	count := func(m lab.Metrics, operation, isError string) float64 {
		return m.Count("dra_operations_duration_seconds", "operation_name", operation, "is_error", isError)
	}
	for _, operation := range []string{"PrepareResources", "UnprepareResources"} {
		if n := count(after, operation, "true") - count(before, operation, "true"); n != 0 {
			t.Errorf("the kubelet counts %g failures of %s", n, operation)
		}
	}
	if n := count(after, "PrepareResources", "false") - count(before, "PrepareResources", "false"); n < wantPrepared {
		t.Errorf("the kubelet has prepared %g pods, want %g: nothing is proven", n, wantPrepared)
	}
	warnings, err := cluster.AdminClient().CoreV1().Events(namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "type=" + corev1.EventTypeWarning})
	if err != nil {
		t.Fatal(err)
	}
	for _, event := range warnings.Items {
		if event.Reason != "FailedScheduling" {
			t.Errorf("pod %s: %s: %s", event.InvolvedObject.Name, event.Reason, event.Message)
		}
	}
}

// watchHealth collects what the pod's status says of the health of its GPUs, unless it is Healthy, until the function is called that returns it.
func (p pod) watchHealth() (unhealthy func() []string) {
	p.t.Helper()
	stream, err := cluster.AdminClient().CoreV1().Pods(p.namespace).Watch(p.t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + p.name})
	if err != nil {
		p.t.Fatal(err)
	}
	var (
		seen    []string
		events  int
		stopped atomic.Bool
		done    = make(chan struct{})
	)
	go func() {
		defer close(done)
		for event := range stream.ResultChan() {
			object, ok := event.Object.(*corev1.Pod)
			if !ok {
				if !stopped.Load() {
					seen = append(seen, fmt.Sprintf("the watch broke: %v", event.Object))
				}
				return
			}
			for _, container := range object.Status.ContainerStatuses {
				for _, resource := range container.AllocatedResourcesStatus {
					for _, device := range resource.Resources {
						events++
						if device.Health != corev1.ResourceHealthStatusHealthy {
							seen = append(seen, fmt.Sprintf("%s is %s", device.ResourceID, device.Health))
						}
					}
				}
			}
		}
	}()
	return func() []string {
		stopped.Store(true)
		stream.Stop()
		<-done
		if events == 0 {
			seen = append(seen, "nothing was seen")
		}
		return seen
	}
}

// locks are those of GPUs, which the test has taken as another agent would.
type locks struct {
	t     *testing.T
	files map[string]*os.File // by GPU
}

// lockGPUs takes the locks of GPUs, of all of the node if none is named. They are released when the test ends, if not before.
func lockGPUs(t *testing.T, n *node.Node, gpus ...string) *locks {
	t.Helper()
	if len(gpus) == 0 {
		slices, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + n.Name()})
		if err != nil {
			t.Fatal(err)
		}
		for _, slice := range slices.Items {
			for _, device := range slice.Spec.Devices {
				gpus = append(gpus, device.Name)
			}
		}
	}
	l := &locks{t: t, files: map[string]*os.File{}}
	t.Cleanup(func() { l.releaseAllBut() })
	for _, gpu := range gpus {
		if l.files[gpu] != nil {
			continue
		}
		file, err := os.OpenFile(filepath.Join(n.StateDir(), "locks", "gpu-"+gpu+".lock"), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		l.files[gpu] = file
		if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// releaseAllBut releases the locks except that of one GPU, if one is named.
func (l *locks) releaseAllBut(gpus ...string) {
	l.t.Helper()
	keep := map[string]bool{}
	for _, gpu := range gpus {
		if l.files[gpu] == nil {
			l.t.Errorf("the lock of GPU %s has not been taken", gpu)
		}
		keep[gpu] = true
	}
	for gpu, file := range l.files {
		if keep[gpu] {
			continue
		}
		if err := file.Close(); err != nil {
			l.t.Error(err)
		}
		delete(l.files, gpu)
	}
}

// device is what the pod's only claim has.
func (p pod) device() string {
	p.t.Helper()
	for _, claim := range allClaims(p.t, p.namespace) {
		if r := claim.Status.ReservedFor; len(r) == 1 && r[0].Name == p.name && len(claim.Status.Allocation.Devices.Results) == 1 {
			return claim.Status.Allocation.Devices.Results[0].Device
		}
	}
	p.t.Fatalf("pod %s has no claim with one device", p.name)
	return ""
}

func agentMetrics(t *testing.T, agent *node.RunningAgent) lab.Metrics {
	t.Helper()
	return metrics(t, "the agent", func(ctx context.Context) ([]byte, error) { return agent.Get(ctx, "/metrics") })
}

func kubeletMetrics(t *testing.T, n *node.Node) lab.Metrics {
	t.Helper()
	return metrics(t, "the kubelet", n.KubeletMetrics)
}

// metrics asks until there is an answer: a program may have more to do at the moment.
func metrics(t *testing.T, of string, get func(context.Context) ([]byte, error)) lab.Metrics {
	t.Helper()
	var parsed lab.Metrics
	poll(t, of+" tells its metrics", func(ctx context.Context) error {
		text, err := get(ctx)
		if err == nil {
			parsed, err = lab.ParseMetrics(text)
		}
		return err
	})
	return parsed
}

// prepared is how many claims an agent has prepared.
func prepared(m lab.Metrics) float64 {
	return m.Count("stowage_agent_call_duration_seconds", "operation", "prepare", "outcome", "ok")
}

// failedCalls is how many calls of the kubelet an agent has answered by an error.
func failedCalls(m lab.Metrics) float64 {
	return m.Count("stowage_agent_call_duration_seconds", "outcome", "error")
}

// waitCalls waits until an agent has so many calls to prepare under way, and has prepared so many claims since it had these metrics.
func waitCalls(t *testing.T, agent *node.RunningAgent, what string, inFlight, done float64, had lab.Metrics) {
	t.Helper()
	begin := time.Now()
	poll(t, what, func(context.Context) error {
		m := agentMetrics(t, agent)
		calls, finished := m.Sum("stowage_agent_calls_in_flight", "operation", "prepare"), prepared(m)-prepared(had)
		if n := failedCalls(m) - failedCalls(had); n > 0 {
			t.Fatalf("waiting until %s: after %s %g calls of the kubelet have failed, %g are under way, %g claims are prepared", what, since(begin), n, calls, finished)
		}
		if calls != inFlight || finished != done {
			return fmt.Errorf("%g calls are under way, want %g, and %g claims are prepared, want %g", calls, inFlight, finished, done)
		}
		return nil
	})
}
