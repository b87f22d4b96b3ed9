package prepare_test

import (
	"errors"
	"strings"
	"testing"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// dcgm and exporter watch GPU 0, and persistenced has it open. NVML lists none of them as a process.
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
