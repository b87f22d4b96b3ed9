// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"errors"
	"strings"
	"testing"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// dcgm and exporter watch GPU 0, and persistenced, whose socket nobody finds, has it open. NVML lists none of them as a process.
var (
	dcgm         = &nvmlsim.AddClient{Client: nvmlsim.Client{PID: 801, Command: "nv-hostengine", GPUs: []int{0}, Watches: true}}
	exporter     = &nvmlsim.AddClient{Client: nvmlsim.Client{PID: 802, Command: "dcgm-exporter", GPUs: []int{0}, Watches: true}}
	persistenced = &nvmlsim.AddClient{Client: nvmlsim.Client{PID: 803, Command: "nvidia-persiste", GPUs: []int{0}}}
)

func ends(client *nvmlsim.AddClient) nvmlsim.Command { return &nvmlsim.RemoveClient{PID: client.PID} }

// TestMIGIsNotLeftPendingBesideDCGM: what keeps the mode from being switched is named, and nothing is left that the next reset of the
// GPU would do.
func TestMIGIsNotLeftPendingBesideDCGM(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.do(dcgm, exporter)
	m := n.manager()
	first, other := claim("first", result("part="+gpu0+"-mig-1g10gb-0")), claim("other", result("part="+gpu1+"-mig-1g10gb-0"))
	for range 2 { // the kubelet tries again
		_, err := m.Prepare(n.ctx, first)
		if !errors.Is(err, nvml.ErrInUse) || !strings.Contains(err.Error(), "process 801 (nv-hostengine), process 802 (dcgm-exporter)") {
			t.Errorf("beside DCGM: %v; want it named", err)
		}
		if g := n.gpu(0); g.MIG || g.PendingMIG {
			t.Errorf("MIG is %t, and pending %t", g.MIG, g.PendingMIG)
		}
	}
	n.prepared(m, other)
	n.do(ends(dcgm), ends(exporter))
	n.prepared(m, first)
	n.unprepare(m, first.UID)
	n.unprepare(m, other.UID)
	if list, err := m.Quarantined(); len(list) > 0 || err != nil {
		t.Errorf("in quarantine: %+v, %v", list, err)
	}
}

// TestAPartitionThatDCGMWatchesIsOwed: its claim goes, and it is removed when DCGM has let go. Who keeps it is named.
func TestAPartitionThatDCGMWatchesIsOwed(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	a, b := claim("a", result("part="+gpu0+"-mig-1g10gb-0")), claim("b", result("part="+gpu0+"-mig-1g10gb-1"))
	n.prepared(m, a)
	n.prepared(m, b)
	n.do(dcgm)
	n.unprepare(m, a.UID)
	list, err := m.Quarantined()
	if err != nil || len(list) != 1 || list[0].GPU != gpu0 || list[0].Holder() != a.UID ||
		!strings.Contains(list[0].Reason, "process 801 (nv-hostengine)") {
		t.Errorf("in quarantine: %+v, %v; want %s for claim a, because of nv-hostengine", list, err, gpu0)
	}
	if left := n.gpu(0).Instances; len(left) != 2 {
		t.Errorf("instances: %+v; want both", left)
	}
	n.prepared(m, b) // a pod of it starts again
	n.do(ends(dcgm))
	if _, err := m.Reconcile(n.ctx); err != nil {
		t.Fatal(err)
	}
	if left := n.gpu(0).Instances; len(left) != 1 || !n.gpu(0).MIG {
		t.Errorf("instances: %+v; want that of b", left)
	}
	n.unprepare(m, b.UID)
	if g := n.gpu(0); len(g.Instances) > 0 || g.MIG {
		t.Errorf("MIG is %t, instances %+v", g.MIG, g.Instances)
	}
}

// TestWhoKeepsAGPUFromAVirtualMachineIsNamed: nothing was begun that hangs, and it works when he has gone.
func TestWhoKeepsAGPUFromAVirtualMachineIsNamed(t *testing.T) {
	for name, client := range map[string]*nvmlsim.AddClient{"nvidia-persiste": persistenced, "nv-hostengine": dcgm} {
		n := newNodeOf(t, withSound)
		n.do(client)
		m := n.manager()
		c := claim("machine", "vm="+vm0)
		_, err := m.Prepare(n.ctx, c)
		var used *prepare.InUseError
		if !errors.As(err, &used) || used.Program != name || used.PID != client.PID || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
		if driver := n.state().GPUs[0].Functions; driver != nil {
			t.Errorf("%s: functions %+v; want them as they were", name, driver)
		}
		n.do(ends(client))
		n.prepared(m, c)
	}
}

// TestPersistenceModeIsAsBeforeAfterAMachine: the driver's own mode, and that of NVIDIA's daemon, which lets go of the GPUs meanwhile.
func TestPersistenceModeIsAsBeforeAfterAMachine(t *testing.T) {
	tests := map[string][]nvmlsim.Command{
		"the driver's own": nil,
		"none":             {&nvmlsim.SetPersistence{GPU: "0"}, &nvmlsim.SetPersistence{GPU: "1"}},
		"of the daemon, in whose place the agent's NVML looks": keptOpen(&nvmlsim.Persistenced{Seen: true}),
		"of the daemon, as in a container":                     keptOpen(&nvmlsim.Persistenced{}),
		"of the daemon for one GPU, the driver's own of the other": append(keptOpen(&nvmlsim.Persistenced{})[:1],
			&nvmlsim.AddClient{Client: nvmlsim.Client{PID: 804, GPUs: []int{0}, Persistence: &nvmlsim.Persistenced{}}}),
		"of a daemon that keeps none": append(keptOpen(nil)[:2],
			&nvmlsim.AddClient{Client: nvmlsim.Client{PID: 804, Persistence: &nvmlsim.Persistenced{LetGo: []int{0, 1}}}}),
	}
	for name, world := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			n.do(world...)
			m := n.manager()
			before := n.state()
			n.prepared(m, besidePersistenced.claim())
			for i, g := range n.state().GPUs {
				if !g.Detached() || g.Persistence || len(n.hardware.machine.State().ClientsOf(i)) > 0 {
					t.Errorf("GPU %d with the machine: %+v", i, g)
				}
			}
			n.unprepare(m, "machine-uid")
			if diff := before.diff(n.state()); diff != "" {
				t.Errorf("(-before the claim +after it):\n%s", diff)
			}
		})
	}
}

// TestADaemonThatDoesNotLetGoIsNamed, and the claim begins nothing that hangs.
func TestADaemonThatDoesNotLetGoIsNamed(t *testing.T) {
	n := newNodeOf(t, withSound)
	n.do(keptOpen(&nvmlsim.Persistenced{Refuses: true})...)
	m := n.manager()
	before := n.state()
	for range 2 { // the kubelet tries again
		_, err := m.Prepare(n.ctx, besidePersistenced.claim())
		var used *prepare.InUseError
		if !errors.As(err, &used) || used.PID != 804 || !strings.Contains(err.Error(), "process 804 (nvidia-persiste)") || !strings.Contains(err.Error(), "refuses") {
			t.Errorf("error %v; want the daemon named, and what it said", err)
		}
		if diff := before.diff(n.state()); diff != "" {
			t.Errorf("(-before the claim +after it):\n%s", diff)
		}
	}
}

// TestADaemonThatKeepsNoGPUAnyMore leaves none in quarantine. One that has ended has taken its mode along. One that runs and does not open the GPUs, or
// was started without them, leaves the mode to the driver.
func TestADaemonThatKeepsNoGPUAnyMore(t *testing.T) {
	another := func(gpus []int, daemon *nvmlsim.Persistenced) nvmlsim.Command {
		return &nvmlsim.AddClient{Client: nvmlsim.Client{PID: 805, Command: "nvidia-persiste", GPUs: gpus, Persistence: daemon}}
	}
	tests := map[string]struct {
		meanwhile []nvmlsim.Command
		want      bool // persistence mode of the driver
	}{
		"it has ended": {},
		"it does not know one, and does not open the other": {[]nvmlsim.Command{another([]int{1}, &nvmlsim.Persistenced{Refuses: true, LetGo: []int{1}})}, true},
		"it does not open": {[]nvmlsim.Command{another(nil, &nvmlsim.Persistenced{Refuses: true, LetGo: []int{0, 1}})}, true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			n.do(keptOpen(&nvmlsim.Persistenced{})...)
			m := n.manager()
			n.prepared(m, besidePersistenced.claim())
			n.do(append([]nvmlsim.Command{&nvmlsim.RemoveClient{PID: 804}}, tc.meanwhile...)...)
			n.unprepare(m, "machine-uid")
			if list, err := m.Quarantined(); len(list) > 0 || err != nil {
				t.Errorf("in quarantine: %+v, %v", list, err)
			}
			for i := range 2 {
				if g := n.gpu(i); g.Persistence != tc.want || g.Detached() {
					t.Errorf("GPU %d: %+v; want persistence %t", i, g, tc.want)
				}
			}
			n.prepared(m, claim("next", "gpu="+gpu0, "more="+gpu1))
		})
	}
}
