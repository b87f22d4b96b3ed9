// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// Of two pods that are bound already one finds a process of a third pod on its GPU, and gets nothing; the other one a program of
// the host, which may be there to look at something.
func TestAStrangersProcessKeepsAGPUFromAPod(t *testing.T) {
	namespace := newNamespace(t)
	goOn := halt(t, theNode.SignalKubelet)
	createPod(t, namespace, "strangers", 1)
	createPod(t, namespace, "hosts", 1)
	waitReadable(t, namespace, nodeName, 2)
	device := gpuOf(t, namespace, "strangers")
	addProcess(t, device, nvmlsim.Process{PID: 4190002, Kind: nvmlsim.ProcessCompute, Command: "python3", Pod: "stranger"})
	addProcess(t, gpuOf(t, namespace, "hosts"), nvmlsim.Process{PID: 4190003, Kind: nvmlsim.ProcessCompute, Command: "python3"})
	goOn()

	hosts, refused := pod{t: t, namespace: namespace, name: "hosts"}, pod{t: t, namespace: namespace, name: "strangers"}
	hosts.waitRunning()
	hosts.check()
	text, want := refused.waitEvent("FailedPrepareDynamicResources"), "GPU "+device+" is in use by a process of another pod"
	if !strings.Contains(text, want) {
		t.Errorf("the pod is told %q, want %q in it", text, want)
	}
	if files := cdiFiles(t); len(files) != 1 {
		t.Errorf("CDI files %v, want that of the other pod", files)
	}
}

// Two pods leave a process each on their GPU. One ends when it is killed, and the next pod has the GPU, with the program of the
// host that was there all the time. The other one does not, and its GPU is nobody's until it is gone.
func TestProcessesThatPodsLeaveBehindAreEnded(t *testing.T) {
	namespace := newNamespace(t)
	ends, stuck := startPod(t, namespace, "ends", 1), startPod(t, namespace, "stuck", 1)
	free, kept := gpuOf(t, namespace, ends.name), gpuOf(t, namespace, stuck.name)
	uid := string(ends.get().UID)
	addProcess(t, free, nvmlsim.Process{PID: 4190004, Kind: nvmlsim.ProcessCompute, MemoryMiB: 512, Pod: uid})
	addProcess(t, free, nvmlsim.Process{PID: 4190005, Kind: nvmlsim.ProcessCompute, MemoryMiB: 512, Pod: uid})
	addProcess(t, free, nvmlsim.Process{PID: 4190006, Kind: nvmlsim.ProcessCompute, Command: "nv-hostengine"})
	removeStuck := addProcess(t, kept, nvmlsim.Process{
		PID: 4190007, Kind: nvmlsim.ProcessCompute, MemoryMiB: 512, Pod: string(stuck.get().UID), Stuck: true,
	})
	used := agentMetrics(t, theNode.Agent()).Sum("stowage_agent_device_use_seconds_total", "device", free)

	ends.delete()
	stuck.delete()
	if diff := cmp.Diff([]uint32{4190006}, processesOn(t, free)); diff != "" {
		t.Errorf("processes on the GPU of the pod that has ended (-want +got):\n%s", diff)
	}
	if now := agentMetrics(t, theNode.Agent()).Sum("stowage_agent_device_use_seconds_total", "device", free); now <= used {
		t.Errorf("the GPU was used for %g s, before the pod it was %g", now, used)
	}
	waitTaints(t, free)
	if taints := taintsOf(t, kept); len(taints) != 1 || taints[0].Key != "gpu.nvidia.com/occupied" {
		t.Errorf("the GPU with a process that does not end has the taints %+v, want that it is occupied", taints)
	}
	next := startPod(t, namespace, "next", gpuCount-1)
	if row := next.check(); slices.Contains(row.Allocated, kept) {
		t.Errorf("the next pod has %v, and a process of another one is on %s", row.Allocated, kept)
	}

	removeStuck()
	restartAgent(t)
	waitTaints(t, kept)
	startPod(t, namespace, "last", 1).check()
}

// gpuOf is the device of the pod's claim.
func gpuOf(t *testing.T, namespace, name string) (device string) {
	t.Helper()
	for _, claim := range allClaims(t, namespace) {
		if claim.Status.Allocation != nil && len(claim.Status.ReservedFor) == 1 && claim.Status.ReservedFor[0].Name == name {
			return claim.Status.Allocation.Devices.Results[0].Device
		}
	}
	t.Fatalf("pod %s has no claim that is allocated", name)
	return ""
}

// indexOf is the GPU's place in the machine.
func indexOf(t *testing.T, device string) string {
	t.Helper()
	machine, err := nvmlsim.LoadProfile(strings.TrimPrefix(profile, "sim:"))
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(machine.GPUs, func(gpu nvmlsim.GPU) bool {
		address := gpu.PCI[strings.LastIndexByte(gpu.PCI, '/')+1:]
		return "gpu-"+strings.NewReplacer(":", "-", ".", "-").Replace(address) == device
	})
	if i < 0 {
		t.Fatalf("the machine has no %s", device)
	}
	return fmt.Sprint(i)
}

// addProcess puts a process on the device's GPU until the test ends, or until the function is called that it returns.
func addProcess(t *testing.T, device string, process nvmlsim.Process) (remove func()) {
	t.Helper()
	gpu := indexOf(t, device)
	hardware(t, &nvmlsim.AddProcess{GPU: gpu, Process: process})
	remove = func() {
		_, err := nvmlsim.Control(context.Background(), controlSocket(), &nvmlsim.RemoveProcess{GPU: gpu, PID: process.PID})
		if err != nil && !strings.Contains(err.Error(), "no such process") {
			t.Error(err)
		}
	}
	t.Cleanup(remove)
	return remove
}

// processesOn are the processes on the device's GPU.
func processesOn(t *testing.T, device string) (pids []uint32) {
	t.Helper()
	result, err := nvmlsim.Control(t.Context(), controlSocket(), &nvmlsim.ShowState{})
	if err != nil {
		t.Fatal(err)
	}
	for i, gpu := range result.State.GPUs {
		if fmt.Sprint(i) == indexOf(t, device) {
			for _, process := range gpu.Processes {
				pids = append(pids, process.PID)
			}
		}
	}
	return pids
}
