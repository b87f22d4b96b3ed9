// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// The power of a node is lost while pods have its GPUs on both paths, and one pod of each path is deleted by force meanwhile. The
// kubelet is back before the agent: nobody has told it of GPUs when it admits its pods again, so it refuses the one of the device
// plugin. The pod with a claim comes back with its GPU; the others are free, on each path for its pods.
func TestANodeIsRebootedWithPods(t *testing.T) {
	const name, gpus = "reboots", 4
	namespace := newNamespace(t) // which goes after the node
	n, err := cluster.StartRealNode(t.Context(), name, "sim:gb200", "--advertise=dra,0018:01:00.0=device-plugin,0019:01:00.0=device-plugin")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Stop(); err != nil {
			t.Error(err)
		}
	})
	onNode := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: name} }
	byPlugin := pluginNode{Node: n, namespace: namespace}
	waitGPUs(t, name, 2, 2)
	createPod(t, namespace, "stays", 1, onNode)
	createPod(t, namespace, "leaves", 1, onNode)
	again := func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyAlways }
	stays, leaves := pod{t: t, namespace: namespace, name: "stays"}, pod{t: t, namespace: namespace, name: "leaves"}
	refused, left := byPlugin.create(t, "refused", 1, again), byPlugin.create(t, "left", 1, again)
	for _, p := range []pod{stays, leaves, refused, left} {
		p.waitRunning()
	}
	was, sees := stays.container(), uuidsOf(stays.report(n, "main"))

	begin := time.Now()
	if err := n.Reboot(t.Context(), func() error {
		machine, err := nvmlsim.LoadProfile("gb200")
		if err != nil {
			return err
		}
		gpus, err := nvmlsim.OpenMachine(machine, name, n.SimulationDir())
		if err != nil {
			return err
		}
		if _, err := gpus.Do(&nvmlsim.Reboot{}); err != nil {
			return err
		}
		for _, p := range []pod{leaves, left} {
			byForce := metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}
			if err := cluster.AdminClient().CoreV1().Pods(namespace).Delete(t.Context(), p.name, byForce); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	pods, err := cluster.WaitForPods(t.Context(), namespace, []string{"refused"}, "refused by the kubelet", podTimeout, failed)
	if err != nil {
		t.Fatal(err)
	}
	if reason := pods[0].Status.Reason; reason != "UnexpectedAdmissionError" {
		t.Errorf("the pod of the device plugin is refused because of %s", reason)
	}
	if err := n.StartAgent(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("kubelet and agent are back after %s", since(begin))

	poll(t, "the pod with a claim runs again", func(context.Context) error {
		if now := stays.container(); now.State.Running == nil || now.ContainerID == was.ContainerID {
			return fmt.Errorf("it has %+v", now)
		}
		return nil
	})
	if now := uuidsOf(stays.report(n, "main")); !now.Equal(sees) {
		t.Errorf("the pod with a claim sees %v, before the reboot it was %v", sets.List(now), sets.List(sees))
	}
	t.Logf("the pod with a claim runs again after %s", since(begin))
	waitGPUs(t, name, 2, 2)

	// Who comes gets what the others had.
	next, last := byPlugin.create(t, "next", 2), pod{t: t, namespace: namespace, name: "last"}
	createPod(t, namespace, "last", 1, onNode)
	next.waitRunning()
	t.Logf("the next pod of the device plugin runs after %s", since(begin))
	last.waitRunning()
	t.Logf("the next pod with a claim runs after %s", since(begin))
	all := sees.Union(uuidsOf(next.report(n, "main"))).Union(uuidsOf(last.report(n, "main")))
	if len(all) != gpus {
		t.Errorf("the pods see %v together, want %d GPUs", sets.List(all), gpus)
	}
	poll(t, "the ledger has the pods that there are", func(context.Context) error {
		records, err := filepath.Glob(filepath.Join(n.StateDir(), "claims", "*"))
		if err == nil && len(sets.New(records...)) != 2*gpus { // each has two copies
			err = fmt.Errorf("it has %v", records)
		}
		return err
	})
}
