// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/deviceplugin/kubelettest"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// sharesTwo lets agents that are started offer the first two GPUs as so many replicas each, and the others as they are.
func (m *machine) sharesTwo(replicas int, strategy config.Strategy) {
	m.advertise = "0000:1b:00.0=device-plugin,0000:43:00.0=device-plugin,0000:52:00.0=device-plugin"
	m.adjust = func(o *driver.Options) {
		o.Shares = discovery.Shares{GPUs: []string{gpu0, gpu1}, MemoryStep: 1 << 30, ComputeStep: 5, Replicas: replicas}
		o.Sharing.Shares, o.Sharing.AcrossNamespaces = strategy, true
	}
}

// process is one of the pod on the first GPU.
func (m *machine) process(pid uint32, pod types.UID, kind nvmlsim.ProcessKind) {
	m.t.Helper()
	_, err := m.gpus.Do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: pid, Kind: kind, MemoryMiB: 100, Pod: string(pod)}})
	must(m.t, err)
}

func (m *machine) processes() (pids []uint32) {
	for _, process := range m.gpus.State().GPUs[0].Processes {
		if process.Pod != "" {
			pids = append(pids, process.PID)
		}
	}
	return pids
}

// TestPodsShareAGPUByTheDevicePlugin: each has its own record, with its share. What is done to the GPU stays for the one that is left, and so do
// its processes.
func TestPodsShareAGPUByTheDevicePlugin(t *testing.T) {
	for strategy, want := range map[config.Strategy]struct {
		setup   string
		mode    nvmlsim.ComputeMode
		kind    nvmlsim.ProcessKind
		env     []string
		daemons int
	}{
		config.TimeSlicing: {setup: "TimeSlicing (Default)", mode: nvmlsim.ComputeDefault, kind: nvmlsim.ProcessCompute, env: []string{"SHARE_GPU_0000_1B_00_0_MEMORY_MIB=20389", "SHARE_GPU_0000_1B_00_0_COMPUTE_PERCENT=25"}},
		config.MPS: {setup: "MPS", mode: nvmlsim.ComputeExclusiveProcess, kind: nvmlsim.ProcessMPS, daemons: 1, env: []string{
			"SHARE_GPU_0000_1B_00_0_MEMORY_MIB=20389", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20389M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
		}},
	} {
		t.Run(string(strategy), func(t *testing.T) {
			t.Parallel()
			m := newMachine(t)
			uuids := m.uuids()
			m.sharesTwo(4, strategy)
			kubelet := m.plugins()
			stop := m.serves()
			m.waitForGPUs(5)
			kubelet.Await(t, pluginpath.SharedResource, 8)
			kubelet.Await(t, pluginpath.GPUResource, 1)
			replica := func(gpu, n int) string { return fmt.Sprintf("%s::%d", uuids[gpu], n) }
			one, two := replica(0, 0), replica(0, 1)
			isSetUp := func(when string) {
				t.Helper()
				if state := m.gpus.State(); state.GPUs[0].ComputeMode != want.mode || len(state.Daemons) != want.daemons {
					t.Errorf("%s: compute mode %s, MPS daemons %+v; want %s, %d", when, state.GPUs[0].ComputeMode, state.Daemons, want.mode, want.daemons)
				}
			}
			start := func(id string, pods map[string]types.UID) []string {
				t.Helper()
				response, err := kubelet.Allocate(t.Context(), pluginpath.SharedResource, id)
				must(t, err)
				m.writeCheckpoint(pods)
				must(t, kubelet.PreStart(t.Context(), pluginpath.SharedResource, id))
				must(t, m.resolve(names(response)...))
				return names(response)
			}

			first := start(one, map[string]types.UID{one: "pod-1"})
			m.process(41, "pod-1", want.kind)
			second := start(two, map[string]types.UID{one: "pod-1", two: "pod-2"})
			m.process(42, "pod-2", want.kind)
			for id, pod := range map[string]types.UID{one: "pod-1", two: "pod-2"} {
				entry := m.holder(id)
				if entry == nil || !slices.Equal(entry.Pods, []types.UID{pod}) || !slices.Equal(entry.HeldGPUs(), []string{gpu0}) {
					t.Fatalf("record of %s: %+v, want it for %s", id, entry, pod)
				}
				if diff := cmp.Diff(&ledger.Share{MemoryBytes: 20389 << 20, ComputePercent: 25, Setup: want.setup}, entry.Devices[0].Share); diff != "" {
					t.Errorf("share of %s (-want +got):\n%s", id, diff)
				}
				for _, variable := range append([]string{uuids[0]}, want.env...) {
					if !strings.Contains(string(entry.CDISpec), variable) {
						t.Errorf("the container of %s lacks %s", id, variable)
					}
				}
			}
			if len(first) != 1 || len(second) != 1 || first[0] == second[0] {
				t.Errorf("CDI devices %v and %v", first, second)
			}
			isSetUp("two pods have it")

			// An init container's device for the app container, a container that starts again, and the agent that does.
			for range 2 {
				if diff := cmp.Diff(first, start(one, map[string]types.UID{one: "pod-1", two: "pod-2"})); diff != "" {
					t.Errorf("asked again (-first +again):\n%s", diff)
				}
				must(t, stop())
				removeAll(t, m.path("cdi"))
				kubelet.Stop()
				stop = m.serves()
				kubelet = kubelettest.Start(t, m.path("device-plugins"))
				kubelet.Await(t, pluginpath.SharedResource, 8)
				must(t, m.resolve(first[0], second[0]))
			}
			if diff := cmp.Diff([]uint32{41, 42}, m.processes()); diff != "" {
				t.Errorf("processes of pods that run (-want +got):\n%s", diff)
			}

			// A claim gets nothing of it, and a container no two daemons.
			claim := m.allocate("late", gpu0)
			prepared, err := m.plugin().NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
			must(t, err)
			if got := prepared.GetClaims()[claim.GetUid()].GetError(); !strings.Contains(got, "not offered by claims") {
				t.Errorf("a claim for a GPU in replicas: %q", got)
			}
			if _, err := kubelet.Allocate(t.Context(), pluginpath.SharedResource, replica(0, 3), replica(1, 3)); (status.Code(err) == codes.InvalidArgument) != (strategy == config.MPS) {
				t.Errorf("replicas of two GPUs for one container: %v", err)
			}

			// The first pod has ended, and the next one gets its replica.
			start(one, map[string]types.UID{one: "pod-3", two: "pod-2"})
			if diff := cmp.Diff([]uint32{42}, m.processes()); diff != "" {
				t.Errorf("processes when another pod has the first replica (-want +got):\n%s", diff)
			}
			if entry := m.holder(one); !slices.Equal(entry.Pods, []types.UID{"pod-3"}) {
				t.Errorf("record of %s: %+v", one, entry)
			}
			isSetUp("two other pods have it")
		})
	}
}

// TestAnotherNumberOfReplicas is for pods that come. Who has a replica of before keeps its share, also when its container starts again, and
// nobody gets one that is larger or smaller beside it.
func TestAnotherNumberOfReplicas(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	uuid := m.uuids()[0]
	m.sharesTwo(4, config.TimeSlicing)
	kubelet := m.plugins()
	stop := m.serves()
	kubelet.Await(t, pluginpath.SharedResource, 8)
	zero, one := uuid+"::0", uuid+"::1"
	_, err := kubelet.Allocate(t.Context(), pluginpath.SharedResource, zero)
	must(t, err)
	m.writeCheckpoint(map[string]types.UID{zero: "pod-1"})
	must(t, kubelet.PreStart(t.Context(), pluginpath.SharedResource, zero))
	must(t, stop())
	kubelet.Stop()

	m.sharesTwo(2, config.TimeSlicing)
	m.serves()
	kubelet = kubelettest.Start(t, m.path("device-plugins"))
	kubelet.Await(t, pluginpath.SharedResource, 3)
	for _, device := range kubelet.Lists(pluginpath.SharedResource)[len(kubelet.Lists(pluginpath.SharedResource))-1].Devices {
		if healthy := device.GetHealth() == "Healthy"; healthy != (device.GetID() != one) {
			t.Errorf("%s is healthy: %t", device.GetID(), healthy)
		}
	}
	share := func(when string, memory int64) {
		t.Helper()
		if entry := m.holder(zero); entry == nil || entry.Devices[0].Share == nil || entry.Devices[0].Share.MemoryBytes != memory {
			t.Errorf("%s: record %+v, want a share of %d bytes", when, entry, memory)
		}
	}
	_, err = kubelet.Allocate(t.Context(), pluginpath.SharedResource, zero)
	must(t, err)
	must(t, kubelet.PreStart(t.Context(), pluginpath.SharedResource, zero))
	share("the same pod", 20389<<20)

	m.writeCheckpoint(map[string]types.UID{zero: "pod-2"})
	must(t, kubelet.PreStart(t.Context(), pluginpath.SharedResource, zero))
	share("the next pod", 40779<<20)
	kubelet.Await(t, pluginpath.SharedResource, 4)
	_, err = kubelet.Allocate(t.Context(), pluginpath.SharedResource, one)
	must(t, err)
	m.writeCheckpoint(map[string]types.UID{zero: "pod-2", one: "pod-3"})
	must(t, kubelet.PreStart(t.Context(), pluginpath.SharedResource, one))
}

// TestAContainerStartsAgainWithADeviceThatIsOfferedToNobodyElse: the flags are others since the pod got it, and the agent another one.
func TestAContainerStartsAgainWithADeviceThatIsOfferedToNobodyElse(t *testing.T) {
	replicas := func(n int, strategy config.Strategy) func(*machine) {
		return func(m *machine) { m.sharesTwo(n, strategy) }
	}
	whole := func(paths string) func(*machine) {
		return func(m *machine) { m.advertise, m.adjust = paths, func(*driver.Options) {} }
	}
	for name, tc := range map[string]struct {
		before func(*machine)
		had    []string // after the GPU's UUID
		after  func(*machine)
	}{
		"there are fewer replicas":         {replicas(4, config.TimeSlicing), []string{"::3"}, replicas(2, config.TimeSlicing)},
		"a container may have one":         {replicas(4, config.TimeSlicing), []string{"::0", "::1"}, replicas(4, config.MPS)},
		"its GPU is not shared any more":   {replicas(4, config.MPS), []string{"::0"}, whole("0000:1b:00.0=device-plugin")},
		"its GPU is shared":                {whole("0000:1b:00.0=device-plugin"), []string{""}, replicas(2, config.TimeSlicing)},
		"its GPU is on the path of claims": {replicas(4, config.TimeSlicing), []string{"::0"}, whole("dra")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t)
			var ids []string
			pods := map[string]types.UID{}
			for _, had := range tc.had {
				ids = append(ids, m.uuids()[0]+had)
				pods[m.uuids()[0]+had] = "pod-1"
			}
			resource := deviceOf(ids[0]).Resource
			tc.before(m)
			kubelet := m.plugins()
			stop := m.serves()
			for _, id := range ids {
				kubelet.AwaitDevice(t, resource, id)
			}
			response, err := kubelet.Allocate(t.Context(), resource, ids...)
			must(t, err)
			m.writeCheckpoint(pods)
			must(t, kubelet.PreStart(t.Context(), resource, ids...))
			was := m.holder(ids[0])
			must(t, stop())
			kubelet.Stop()

			tc.after(m)
			m.serves()
			kubelet = kubelettest.Start(t, m.path("device-plugins"))
			for _, id := range ids {
				kubelet.AwaitDevice(t, resource, id)
			}
			must(t, kubelet.PreStart(t.Context(), resource, ids...))
			must(t, m.resolve(names(response)...))
			if diff := cmp.Diff(was.Devices, m.holder(ids[0]).Devices); diff != "" {
				t.Errorf("what the pod has (-before +after):\n%s", diff)
			}
		})
	}
}
