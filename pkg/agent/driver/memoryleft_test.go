// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// faultsByMetric are the devices that have the fault.
func faultsByMetric(t *testing.T, reason string) (devices []string) {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, pair := range metric.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			if family.GetName() == "stowage_agent_device_fault" && labels["reason"] == reason {
				devices = append(devices, labels["device"])
			}
		}
	}
	return devices
}

// TestMemoryThatIsLeftOnAGPUIsTold: of two GPUs, one of which has memory in use that no process, claim or container has. It is told
// when it was seen twice, and no more when it is gone.
func TestMemoryThatIsLeftOnAGPUIsTold(t *testing.T) {
	leak := func(mib uint64) func(*rig, *Agent) {
		return func(r *rig, _ *Agent) { r.do(&nvmlsim.LeakMemory{GPU: "0", MemoryMiB: mib}) }
	}
	held := func(r *rig, agent *Agent) {
		leak(600)(r, agent)
		gpu := agent.opts.Hardware.Node().GPUs[0]
		entry := &ledger.Entry{
			Claim: ledger.Claim{UID: "held-uid", Namespace: "default", Name: "held"}, State: ledger.PrepareCompleted,
			Devices: []ledger.Device{{Device: gpu.Name, GPU: gpu.Name}},
		}
		if err := agent.reporter.ledger.Put(entry); err != nil {
			r.t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		profile string
		uses    func(*rig, *Agent)
		told    bool
	}{
		"more than the driver keeps":     {"t4", leak(257), true},
		"as much as it may keep":         {"t4", leak(256), false},
		"where it keeps more for itself": {"hgx-b200", leak(257), true},
		"a claim has the GPU":            {"t4", held, false},
		"it is in quarantine": {"t4", func(r *rig, agent *Agent) {
			leak(600)(r, agent)
			file := agent.opts.Hardware.Node().GPUs[0].Name + "_was-uid" + prepare.QuarantineSuffix
			writeFile(r.t, filepath.Join(prepare.QuarantineDir(r.state), file), "{")
		}, false},
		"memory that the system may have used": {"gb200", leak(6000), false},
		"a process has it": {"t4", func(r *rig, _ *Agent) {
			process := nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute, Command: "nv-hostengine", MemoryMiB: 600}
			r.do(&nvmlsim.AddProcess{GPU: "0", Process: process})
		}, false},
		"another device plugin has the GPU": {"t4", func(r *rig, agent *Agent) {
			leak(600)(r, agent)
			r.pluginDevices = []ledger.PluginDevice{{Resource: "nvidia.com/gpu", ID: agent.opts.Hardware.Node().GPUs[0].UUID}}
		}, false},
		"it is partitioned": {"dgx-h100", func(r *rig, agent *Agent) {
			r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
			leak(600)(r, agent)
			if _, err := agent.opts.Hardware.Discover(r.t.Context()); err != nil {
				r.t.Fatal(err)
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				r := newRig(t, tc.profile)
				agent := r.agent(ctx, newAPIServer())
				defer background(ctx, agent.reporter.run)()
				tc.uses(r, agent)
				look := func(when string, told bool) {
					t.Helper()
					agent.lookForForeign(ctx)
					var with []string
					for _, device := range published(t, agent.opts.Hardware) {
						if strings.Contains(device, " memory-left=:None") {
							with = append(with, device)
						}
					}
					gpus := agent.opts.Hardware.Node().GPUs
					want := []string{gpus[0].Name + " memory-left=:None"}
					if told != slices.Equal(with, want) || !told && len(with) > 0 {
						t.Errorf("%s: told of %q, want %t of the first alone", when, with, told)
					}
					if got := faultsByMetric(t, "memory-left"); told != slices.Equal(got, []string{gpus[0].Name}) || !told && len(got) > 0 {
						t.Errorf("%s: by the metric it is left on %q", when, got)
					}
				}
				look("seen once", false)
				time.Sleep(foreignInterval)
				look("seen twice", tc.told)
				r.do(&nvmlsim.LeakMemory{GPU: "0"})
				time.Sleep(foreignInterval)
				look("it is free", false)
			})
		})
	}
}

// TestMemoryThatWasLeftIsOverWhereItIsNotJudged: the GPU has been partitioned since, so nobody would ever look whether it is gone.
func TestMemoryThatWasLeftIsOverWhereItIsNotJudged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		agent := r.agent(ctx, newAPIServer())
		defer background(ctx, agent.reporter.run)()
		r.do(&nvmlsim.LeakMemory{GPU: "0", MemoryMiB: 600})
		look := func(when string, want int) {
			t.Helper()
			time.Sleep(foreignInterval)
			agent.lookForForeign(ctx)
			if got := faultsByMetric(t, "memory-left"); len(got) != want {
				t.Errorf("%s: left on %q, want %d GPUs", when, got, want)
			}
		}
		look("seen once", 0)
		look("seen twice", 1)
		r.do(&nvmlsim.LeakMemory{GPU: "0"})
		r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		if _, err := agent.opts.Hardware.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		look("it is partitioned", 0)
	})
}
