// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// process is a command that starts one.
func process(pid uint32, pod string) *nvmlsim.AddProcess {
	return &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 1024, Pod: pod}}
}

func (n *node) pids() []uint32 {
	var pids []uint32
	for _, p := range n.gpu(0).Processes {
		pids = append(pids, p.PID)
	}
	return pids
}

func TestProcessesThatAPodLeavesBehind(t *testing.T) {
	stuck := process(7, "pod-1")
	stuck.Stuck = true
	tests := map[string]struct {
		policy      prepare.Leftovers
		left        []nvmlsim.Command
		pids        []uint32 // after unprepare
		quarantined string   // in the reason
	}{
		"none":                     {},
		"ended":                    {left: []nvmlsim.Command{process(7, "pod-1"), process(8, "pod-1")}},
		"others are not touched":   {left: []nvmlsim.Command{process(7, "pod-1"), process(8, ""), process(9, "pod-2")}, pids: []uint32{8, 9}},
		"one that does not end":    {left: []nvmlsim.Command{stuck}, pids: []uint32{7}, quarantined: "process 7 of pod pod-1 is still on it"},
		"by policy left alone":     {policy: prepare.QuarantineLeftovers, left: []nvmlsim.Command{process(7, "pod-1")}, pids: []uint32{7}, quarantined: "process 7 of pod pod-1"},
		"memory that nobody frees": {left: []nvmlsim.Command{&nvmlsim.LeakMemory{GPU: "0", MemoryMiB: 512}}, quarantined: "MiB of memory are in use"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.options.Leftovers = tc.policy
			if tc.quarantined != "" {
				n.options.EndTimeout = 50 * time.Millisecond // what does not end is waited for in vain
			}
			m := n.manager()
			c := reservedFor(claim("train", "gpu="+gpu0), "pod-1")
			if _, err := m.Prepare(n.ctx, c); err != nil {
				t.Fatal(err)
			}
			n.do(tc.left...)
			if err := m.Unprepare(n.ctx, c.UID); err != nil {
				t.Fatal(err)
			}
			if left := n.files(); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			if diff := cmp.Diff(tc.pids, n.pids()); diff != "" {
				t.Errorf("processes (-want +got):\n%s", diff)
			}
			list, err := m.Quarantined()
			if err != nil {
				t.Fatal(err)
			}
			if tc.quarantined == "" {
				if len(list) > 0 {
					t.Errorf("in quarantine: %+v", list)
				}
				return
			}
			if len(list) != 1 || list[0].GPU != gpu0 || !strings.Contains(list[0].Reason, tc.quarantined) {
				t.Fatalf("in quarantine: %+v, want %s because of %q", list, gpu0, tc.quarantined)
			}
			// Nobody gets it, also from an agent that starts now; what it was for is told.
			m = n.manager()
			var quarantined *prepare.QuarantinedError
			if _, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu0)); !errors.As(err, &quarantined) || quarantined.Owed.Name != "train" {
				t.Errorf("error %v, want a QuarantinedError that names the claim", err)
			}
			// As soon as they are gone it is free.
			n.do(&nvmlsim.Reboot{})
			n.hardware.discover(t, dynamic)
			recovery, err := m.Reconcile(n.ctx)
			if err != nil || recovery.Quarantined != 0 {
				t.Errorf("recovery %+v, %v", recovery, err)
			}
			if _, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu0)); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAPodThatJoinedAClaimLaterIsItsPodToo(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	c := claim("train", "gpu="+gpu0)
	// The first one has gone when the second one comes, and for the third one the kubelet does not call.
	for _, join := range []struct {
		pod types.UID
		by  func(context.Context, *resourceapi.ResourceClaim) error
	}{
		{"pod-0", m.NotePods}, // the claim is not prepared yet
		{"pod-1", func(ctx context.Context, c *resourceapi.ResourceClaim) error { _, err := m.Prepare(ctx, c); return err }},
		{"pod-3", func(ctx context.Context, c *resourceapi.ResourceClaim) error { _, err := m.Prepare(ctx, c); return err }},
		{"pod-4", m.NotePods},
		{"pod-4", m.NotePods},
	} {
		c.Status.ReservedFor = nil
		if err := join.by(n.ctx, reservedFor(c, join.pod)); err != nil {
			t.Fatal(err)
		}
	}
	n.do(process(7, "pod-1"), process(8, "pod-3"), process(9, "pod-4"), process(10, "pod-0"))
	if err := m.Unprepare(n.ctx, c.UID); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]uint32{10}, n.pids()); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

// TestPodsThatCameAndWentAreNotRememberedForEver: a claim that always has a pod is never unprepared.
func TestPodsThatCameAndWentAreNotRememberedForEver(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	c := reservedFor(claim("train", "gpu="+gpu0), "pod-0")
	if _, err := m.Prepare(n.ctx, c); err != nil {
		t.Fatal(err)
	}
	by := map[string]func() error{
		"noted":    func() error { return m.NotePods(n.ctx, c) },
		"prepared": func() error { _, err := m.Prepare(n.ctx, c); return err },
	}
	pods := 0
	for name, join := range by {
		const most = resourceapi.ResourceClaimReservedForMaxSize
		for range most + 10 {
			c.Status.ReservedFor = nil
			pods++
			reservedFor(c, "pod-that-stays", types.UID(fmt.Sprint("pod-", pods)))
			if err := join(); err != nil {
				t.Fatal(err)
			}
		}
		_, record := n.recordOf(c.UID)
		known := record.Entry.Pods
		if len(known) != most+2 {
			t.Errorf("%s: %d pods are known, want the two of now and %d that were before", name, len(known), most)
		}
		for _, pod := range []types.UID{"pod-that-stays", types.UID(fmt.Sprint("pod-", pods)), types.UID(fmt.Sprint("pod-", pods-most))} {
			if !slices.Contains(known, pod) {
				t.Errorf("%s: %s is not known any more", name, pod)
			}
		}
	}
}

// TestPodsAreNotedOnlyOfWhatIsCertain: a record that is unfinished, unreadable or a previous copy is not written over.
func TestPodsAreNotedOnlyOfWhatIsCertain(t *testing.T) {
	prepared := reservedFor(claim("train", "gpu="+gpu0), "pod-1")
	for name, damage := range map[string]func(*testing.T, *ledger.Ledger, *ledger.Record){
		"unfinished": func(t *testing.T, records *ledger.Ledger, record *ledger.Record) {
			record.Entry.State = ledger.PrepareStarted
			if err := records.Put(record.Entry); err != nil {
				t.Fatal(err)
			}
		},
		"unreadable": func(t *testing.T, _ *ledger.Ledger, record *ledger.Record) {
			for _, file := range []string{record.Path, record.Path + ".prev"} {
				if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		},
		"a previous copy": func(t *testing.T, _ *ledger.Ledger, record *ledger.Record) {
			if err := os.WriteFile(record.Path, []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			m := n.manager()
			if _, err := m.Prepare(n.ctx, prepared); err != nil {
				t.Fatal(err)
			}
			records, record := n.recordOf(prepared.UID)
			damage(t, records, record)
			before, err := os.ReadFile(record.Path)
			if err != nil {
				t.Fatal(err)
			}
			if err := m.NotePods(n.ctx, reservedFor(prepared.DeepCopy(), "pod-2")); err != nil {
				t.Error(err)
			}
			after, err := os.ReadFile(record.Path)
			if err != nil || !bytes.Equal(before, after) {
				t.Errorf("the record is written over with\n%s\n%v", after, err)
			}
		})
	}
}

func TestAGPUIsNotHandedOutUnderAnotherPodsProcess(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	if _, err := m.Prepare(n.ctx, reservedFor(claim("monitor", "gpu="+gpu0+"+admin"), "monitor-pod")); err != nil {
		t.Fatal(err)
	}
	// The host's own, a pod's with admin access, and the pod's itself are no reason.
	n.do(process(5, ""), process(6, "monitor-pod"), process(7, "pod-1"))
	c := reservedFor(claim("train", "gpu="+gpu0), "pod-1")
	if _, err := m.Prepare(n.ctx, c); err != nil {
		t.Error(err)
	}
	if err := m.Unprepare(n.ctx, c.UID); err != nil {
		t.Fatal(err)
	}
	n.do(process(8, "pod-of-yesterday"))
	var busy *prepare.BusyError
	if _, err := m.Prepare(n.ctx, c); !errors.As(err, &busy) || busy.PID != 8 || busy.Pod != "pod-of-yesterday" {
		t.Errorf("error %v, want a BusyError about process 8", err)
	}
	n.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 8})
	if _, err := m.Prepare(n.ctx, c); err != nil {
		t.Error(err)
	}
}

// TestProcessesInAPartitionAreItsClaims: other partitions of the GPU are not looked at.
func TestProcessesInAPartitionAreItsClaims(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	a := reservedFor(claim("a", result("x="+gpu0+"-mig-3g40gb-0")), "pod-a")
	b := reservedFor(claim("b", result("x="+gpu0+"-mig-3g40gb-4")), "pod-a") // the same pod
	for _, c := range []*resourceapi.ResourceClaim{a, b} {
		if _, err := m.Prepare(n.ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	for i, instance := range n.gpu(0).Instances {
		p := process(uint32(7+i), "pod-a")
		p.Instance = &nvmlsim.Instance{GPU: instance.ID}
		n.do(p)
	}
	if err := m.Unprepare(n.ctx, a.UID); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]uint32{8}, n.pids()); diff != "" {
		t.Errorf("processes (-want +got):\n%s", diff)
	}
	if list, err := m.Quarantined(); err != nil || len(list) > 0 {
		t.Errorf("in quarantine: %v, %v", list, err)
	}
}

// TestAPartitionThatIsStuckKeepsNoOther: it is in quarantine, with its place, and its GPU is not. What is done for one of two is not done again,
// when somebody else has it; and MIG mode ends with the last of them all.
func TestAPartitionThatIsStuckKeepsNoOther(t *testing.T) {
	n := newNode(t)
	n.options.EndTimeout = 50 * time.Millisecond // what does not end is waited for in vain
	m := n.manager()
	part := func(at int) result { return result(fmt.Sprintf("part=%s-mig-1g10gb-%d", gpu0, at)) }
	a := reservedFor(claim("a", part(0), "more="+part(1)[len("part="):]), "pod-a")
	n.prepared(m, a)
	for i, instance := range n.gpu(0).Instances {
		p := process(uint32(7+instance.Start), "pod-a")
		p.Instance, p.Stuck = &nvmlsim.Instance{GPU: instance.ID}, true
		n.do(p)
		if i > 1 {
			t.Fatal("a has two")
		}
	}
	places := func(want ...int) {
		t.Helper()
		list, err := m.Quarantined()
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, q := range list {
			for _, place := range q.Places() {
				got = append(got, int(place.Start))
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("in quarantine: %v, want %v", got, want)
		}
	}
	refused := func(c *resourceapi.ResourceClaim, where string) {
		t.Helper()
		var quarantined *prepare.QuarantinedError
		if _, err := m.Prepare(n.ctx, c); !errors.As(err, &quarantined) || !strings.Contains(err.Error(), where) {
			t.Errorf("claim %s: %v, want a QuarantinedError with %q", c.Name, err, where)
		}
	}
	n.unprepare(m, a.UID)
	places(0, 1)
	refused(claim("b", part(0)), gpu0+", 1g.10gb at slice 0, 1g.10gb at slice 1 is in quarantine")
	refused(claim("b", part(1)), "in quarantine")
	refused(claim("b", result("all="+gpu0)), "in quarantine")
	n.prepared(m, claim("c", part(2)))

	n.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 8})
	b := claim("b", part(1))
	n.prepared(m, b)
	places(0)
	m = n.manager()
	for range 2 {
		if _, err := m.Reconcile(n.ctx); err != nil {
			t.Fatal(err)
		}
	}
	n.prepared(m, b) // the kubelet looks again
	if left := n.gpu(0).Instances; len(left) != 3 {
		t.Errorf("instances: %+v, want those of b and c, and the one that is stuck", left)
	}
	n.unprepare(m, "c-uid")
	n.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 7})
	if _, err := m.Reconcile(n.ctx); err != nil {
		t.Fatal(err)
	}
	places()
	if g := n.gpu(0); len(g.Instances) != 1 || !g.MIG {
		t.Errorf("MIG is %t, instances %+v, want that of b", g.MIG, g.Instances)
	}
	n.unprepare(m, b.UID)
	if g := n.gpu(0); len(g.Instances) > 0 || g.MIG {
		t.Errorf("MIG is %t, instances %+v, want it as it was", g.MIG, g.Instances)
	}
}

// TestTheOtherPartitionOfItsClaimIsFree at once.
func TestTheOtherPartitionOfItsClaimIsFree(t *testing.T) {
	for stuck := range uint32(2) {
		n := newNode(t)
		n.options.EndTimeout = 50 * time.Millisecond
		m := n.manager()
		a := reservedFor(claim("a", result("part="+gpu0+"-mig-1g10gb-0"), result("more="+gpu0+"-mig-1g10gb-1")), "pod-a")
		n.prepared(m, a)
		for _, instance := range n.gpu(0).Instances {
			if instance.Start == stuck {
				p := process(7, "pod-a")
				p.Instance, p.Stuck = &nvmlsim.Instance{GPU: instance.ID}, true
				n.do(p)
			}
		}
		n.unprepare(m, a.UID)
		if list, err := m.Quarantined(); err != nil || len(list) != 1 || len(list[0].Places()) != 1 || list[0].Places()[0].Start != stuck {
			t.Errorf("slice %d is stuck, in quarantine: %+v, %v", stuck, list, err)
		}
		if left := n.gpu(0).Instances; len(left) != 1 || left[0].Start != stuck {
			t.Errorf("slice %d is stuck, instances: %+v", stuck, left)
		}
	}
}

// TestAGPUThatHangsIsAskedOnceForAllItsPartitions: the claim's other GPU is asked in time, too.
func TestAGPUThatHangsIsAskedOnceForAllItsPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNodeOf(t, twoGPUs)
		m := n.manager()
		var parts []result
		for _, gpu := range []string{gpu0, gpu1} {
			for i := range 4 {
				parts = append(parts, result(fmt.Sprintf("r%d=%s-mig-1g10gb-%d", len(parts), gpu, i)))
			}
		}
		c := claim("many", parts...)
		n.prepared(m, c)
		n.do(&nvmlsim.HangGPU{GPU: "1"})
		begin := time.Now()
		n.unprepare(m, c.UID)
		if took := time.Since(begin); took > prepare.DefaultUndoTimeout/2 {
			t.Errorf("it took %v", took)
		}
		if list, err := m.Quarantined(); err != nil || len(list) != 1 || list[0].GPU != gpu1 {
			t.Errorf("in quarantine: %+v, %v: want %s alone", list, err, gpu1)
		}
		if left := n.gpu(0).Instances; len(left) > 0 {
			t.Errorf("left on the other GPU: %+v", left)
		}
		n.do(&nvmlsim.UnhangGPU{GPU: "1"})
	})
}

// TestMIGModeThatIsOwedEndsWithWhoComesMeanwhile: among the claims of the ledger none has switched it on.
func TestMIGModeThatIsOwedEndsWithWhoComesMeanwhile(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	a, b := claim("a", result("part="+gpu0+"-mig-1g10gb-0")), claim("b", result("part="+gpu0+"-mig-1g10gb-1"))
	n.prepared(m, a)
	n.do(dcgm)
	n.unprepare(m, a.UID)
	n.prepared(m, b)
	n.do(ends(dcgm))
	if _, err := m.Reconcile(n.ctx); err != nil {
		t.Fatal(err)
	}
	if !n.gpu(0).MIG {
		t.Error("MIG is off while b has a partition")
	}
	n.unprepare(m, b.UID)
	if g := n.gpu(0); len(g.Instances) > 0 || g.MIG {
		t.Errorf("MIG is %t, instances %+v, want it as it was", g.MIG, g.Instances)
	}
}

// keepsMIG is a GPU of which somebody keeps MIG mode on.
type keepsMIG struct {
	nvml.Device
	on *bool
}

func (d keepsMIG) SetMIGMode(on bool) error {
	if !on && *d.on {
		return nvml.ErrInUse
	}
	return d.Device.SetMIGMode(on)
}

// TestMIGModeThatStaysOnKeepsNobodyOffPartitions: who has one wants it on.
func TestMIGModeThatStaysOnKeepsNobodyOffPartitions(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	stays := true
	n.hardware.wrap = func(d nvml.Device) nvml.Device { return keepsMIG{d, &stays} }
	m := n.manager()
	whole := claim("whole", result("all="+gpu0))
	for _, name := range []string{"a", "b", "a"} { // also one that owes it itself
		c := claim(name, result("part="+gpu0+"-mig-1g10gb-0"))
		n.prepared(m, c)
		n.unprepare(m, c.UID)
		var quarantined *prepare.QuarantinedError
		_, err := m.Prepare(n.ctx, whole)
		if !errors.As(err, &quarantined) || !strings.Contains(err.Error(), "GPU "+gpu0+", as a whole is in quarantine") {
			t.Errorf("after %s: %v, want a QuarantinedError for the whole GPU", name, err)
		}
	}
	stays = false
	n.prepared(m, whole)
	if list, err := m.Quarantined(); err != nil || len(list) > 0 || n.gpu(0).MIG {
		t.Errorf("in quarantine: %+v, %v, MIG mode is %t", list, err, n.gpu(0).MIG)
	}
}

// TestAClaimOwesWhatItHadBefore: it is allocated another partition, which has no taint, while something is stuck in the one before.
func TestAClaimOwesWhatItHadBefore(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.options.EndTimeout = 50 * time.Millisecond // what does not end is waited for in vain
	m := n.manager()
	placed := func(pod types.UID, slice int) *resourceapi.ResourceClaim {
		return reservedFor(claim("a", result(fmt.Sprintf("part=%s-mig-1g10gb-%d", gpu0, slice))), pod)
	}
	stuckIn := func(pid uint32, pod string, slice uint32) {
		t.Helper()
		i := slices.IndexFunc(n.gpu(0).Instances, func(i nvmlsim.GPUInstance) bool { return i.Start == slice })
		p := process(pid, pod)
		p.Instance, p.Stuck = &nvmlsim.Instance{GPU: n.gpu(0).Instances[i].ID}, true
		n.do(p)
	}
	n.prepared(m, placed("pod-1", 6))
	stuckIn(7, "pod-1", 6)
	n.unprepare(m, "a-uid")
	var quarantined *prepare.QuarantinedError
	if _, err := m.Prepare(n.ctx, placed("pod-2", 6)); !errors.As(err, &quarantined) {
		t.Errorf("the same partition: %v, want a QuarantinedError", err)
	}
	first := n.prepared(m, placed("pod-2", 0))
	stuckIn(8, "pod-2", 0)
	if diff := cmp.Diff(first, n.prepared(m, placed("pod-2", 0))); diff != "" {
		t.Errorf("a second prepare (-first +second):\n%s", diff)
	}
	n.unprepare(m, "a-uid")
	list, err := m.Quarantined()
	if err != nil || len(list) != 1 || len(list[0].Places()) != 2 || !slices.Equal(list[0].Owed.Pods, []types.UID{"pod-1", "pod-2"}) {
		t.Errorf("in quarantine: %+v, %v, want both partitions, and both pods", list, err)
	}
	n.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 7}, &nvmlsim.RemoveProcess{GPU: "0", PID: 8})
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 0 {
		t.Errorf("reconcile: %+v, %v", recovery, err)
	}
	if now := n.gpu(0); now.MIG || len(now.Instances) > 0 {
		t.Errorf("left on the GPU: MIG %t, instances %v", now.MIG, now.Instances)
	}
}

// TestAPartitionWhoseDaemonHasEndedIsThatAlone: while the daemon does not end nobody knows what it has open.
func TestAPartitionWhoseDaemonHasEndedIsThatAlone(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.options.EndTimeout = 50 * time.Millisecond // what does not end is waited for in vain
	daemons := &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
	n.tools.Daemons = daemons
	m := n.manager()
	a := withConfig(claim("a", result("a="+gpu0+"-mig-2g20gb-0")), driverName, sharingConfig("MigDeviceConfig", "MPS", ""))
	n.prepared(m, reservedFor(a, "pod"))
	p := process(7, "pod")
	p.Instance, p.Stuck = &nvmlsim.Instance{GPU: n.gpu(0).Instances[0].ID}, true
	n.do(p)
	n.unprepare(m, a.UID)
	other := claim("other", result("a="+gpu0+"-mig-1g10gb-2"))
	var quarantined *prepare.QuarantinedError
	if _, err := m.Prepare(n.ctx, other); !errors.As(err, &quarantined) {
		t.Errorf("beside the daemon: %v, want a QuarantinedError", err)
	}
	daemons.stuck = false
	n.prepared(m, other)
	if list, err := m.Quarantined(); err != nil || len(list) != 1 || len(list[0].Places()) != 1 || list[0].Places()[0].Profile != "2g.20gb" {
		t.Errorf("in quarantine: %+v, %v, want the partition", list, err)
	}
}

// TestUnprepareEndsWhateverAGPUDoes: the claim goes, in time, and the GPU is nobody's until it is in order.
func TestUnprepareEndsWhateverAGPUDoes(t *testing.T) {
	tests := map[string]struct{ fault, mend []nvmlsim.Command }{
		"lost": {[]nvmlsim.Command{&nvmlsim.LoseGPU{GPU: "0"}}, []nvmlsim.Command{&nvmlsim.RestoreGPU{GPU: "0"}}},
		"hung": {[]nvmlsim.Command{&nvmlsim.HangGPU{GPU: "0"}}, []nvmlsim.Command{&nvmlsim.UnhangGPU{GPU: "0"}}},
	}
	for name, tc := range tests {
		for kind, s := range scenarios {
			t.Run(name+"/"+kind, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := newNodeOf(t, s.machine())
					n.do(s.before...)
					n.hardware.discover(t, n.hardware.policy)
					m := n.manager()
					n.options.GPUTimeout = time.Second // for a GPU that hangs, and enough for the others
					impatient := n.manager()
					if _, err := m.Prepare(n.ctx, s.claim()); err != nil {
						t.Fatal(err)
					}
					n.do(tc.fault...)
					start := time.Now()
					if err := impatient.Unprepare(n.ctx, s.claim().UID); err != nil {
						t.Fatal(err)
					}
					if took := time.Since(start); took > prepare.DefaultUndoTimeout {
						t.Errorf("it took %v", took)
					}
					if left := n.files(); len(left) > 0 {
						t.Errorf("left: %v", left)
					}
					list, err := m.Quarantined()
					if err != nil || len(list) != 1 || list[0].GPU != gpu0 {
						t.Errorf("in quarantine: %+v, %v: want %s alone", list, err, gpu0)
					}
					n.do(tc.mend...)
					if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 0 {
						t.Errorf("recovery %+v, %v", recovery, err)
					}
					if g := n.gpu(0); g.MIG || len(g.Instances) > 0 || g.TimeSlice != "" || len(n.hardware.machine.State().Daemons) > 0 {
						t.Errorf("left on the GPU: %+v", g)
					}
					if _, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu0)); err != nil {
						t.Errorf("the next claim: %v", err)
					}
				})
			})
		}
	}
}

// TestAPodGoesWhileMuchIsOwedOnItsGPU: what cannot be undone is tried again every half minute, and each takes its time.
func TestAPodGoesWhileMuchIsOwedOnItsGPU(t *testing.T) {
	for what, tc := range map[string]struct{ hangs, byOne bool }{
		"it hangs": {hangs: true}, "it hangs, and one claim owes most of it": {hangs: true, byOne: true},
		"processes do not end": {}, "processes do not end, and one claim owes most of it": {byOne: true},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNodeOf(t, twoGPUs)
				n.timeout = prepare.DefaultLockTimeout
				m := n.manager()
				uid := func(i int) types.UID { return types.UID(fmt.Sprint("c", i, "-uid")) }
				owed := make([][]result, 6) // by claim
				for i := range 6 {
					of := i
					if tc.byOne {
						of = 0
					}
					owed[of] = append(owed[of], result(fmt.Sprintf("a%d=%s-mig-1g10gb-%d", i, gpu0, i)))
				}
				owed = slices.DeleteFunc(owed, func(of []result) bool { return of == nil })
				for i, results := range append(owed, []result{"a=" + gpu0 + "-mig-1g10gb-6"}) {
					n.prepared(m, reservedFor(claim(fmt.Sprint("c", i), results...), "pod"))
				}
				for i, instance := range n.gpu(0).Instances {
					p := process(uint32(70+i), "pod")
					p.Instance, p.Stuck = &nvmlsim.Instance{GPU: instance.ID}, true
					n.do(p)
				}
				if tc.hangs {
					n.do(&nvmlsim.HangGPU{GPU: "0"})
					defer n.do(&nvmlsim.UnhangGPU{GPU: "0"})
				}
				for i := range owed {
					n.unprepare(m, uid(i))
				}
				begin := time.Now()
				var group sync.WaitGroup
				group.Go(func() {
					recovery, err := m.Reconcile(n.ctx)
					if took := time.Since(begin); err != nil || recovery.Quarantined != 1 || took > prepare.DefaultUndoTimeout {
						t.Errorf("reconcile: %+v, %v, and it took %v", recovery, err, took)
					}
				})
				synctest.Wait() // it is at work
				if err := m.Unprepare(n.ctx, uid(len(owed))); err != nil {
					t.Error(err)
				}
				if took := time.Since(begin); took > prepare.DefaultLockTimeout {
					t.Errorf("the pod is gone after %v", took)
				}
				group.Wait()
				if list, err := m.Quarantined(); err != nil || len(list) != len(owed)+1 {
					t.Errorf("in quarantine: %+v, %v, want it for each claim", list, err)
				}
			})
		})
	}
}

// TestAGPUThatHangsHoldsNobodyElseUp prepares claims for other GPUs meanwhile.
func TestAGPUThatHangsHoldsNobodyElseUp(t *testing.T) {
	n := newNode(t)
	n.options.GPUTimeout = time.Hour
	m := n.manager()
	if _, err := m.Prepare(n.ctx, claim("hung", "gpu="+gpu0)); err != nil {
		t.Fatal(err)
	}
	n.do(&nvmlsim.HangGPU{GPU: "0"})
	done := make(chan error, 1)
	go func() { done <- m.Unprepare(n.ctx, "hung-uid") }()
	for _, gpu := range []result{gpu1, gpu2} {
		if _, err := m.Prepare(n.ctx, claim("fine-"+string(gpu), "gpu="+gpu)); err != nil {
			t.Error(err)
		}
	}
	select {
	case err := <-done:
		t.Errorf("unprepare has ended with %v although the GPU hangs", err)
	default:
	}
	n.do(&nvmlsim.UnhangGPU{GPU: "0"})
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestAnUnreadableQuarantineHoldsItsGPUAlone(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	path := filepath.Join(n.root, "state", "quarantine", gpu0+"_x.quarantine")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	var quarantined *prepare.QuarantinedError
	if _, err := m.Prepare(n.ctx, claim("a", "gpu="+gpu0)); !errors.As(err, &quarantined) || strings.Contains(err.Error(), "_x") || !strings.Contains(strings.Join(prepare.Others(err), ""), path) {
		t.Errorf("error %v, want a QuarantinedError that names the file, which has a claim's UID, for the log alone", err)
	}
	if _, err := m.Prepare(n.ctx, claim("b", "gpu="+gpu1)); err != nil {
		t.Error(err)
	}
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 1 {
		t.Errorf("recovery %+v, %v: want one in quarantine", recovery, err)
	}
}

// TestNoDriverIsAReasonToWaitNotToHold: a pod can go before the driver is there, and its GPU is free with the driver.
func TestNoDriverIsAReasonToWaitNotToHold(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); err != nil {
		t.Fatal(err)
	}
	n.hardware.gone = true
	if err := m.Unprepare(n.ctx, "train-uid"); err != nil {
		t.Fatal(err)
	}
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined != 1 {
		t.Errorf("without a driver: recovery %+v, %v", recovery, err)
	}
	n.hardware.gone = false
	// Prepare does not wait for the next reconcile.
	if _, err := m.Prepare(n.ctx, claim("next", "gpu="+gpu0)); err != nil {
		t.Error(err)
	}
}

// A process that does not end is killed and looked at many times in each try, and told of once.
func TestAProcessThatDoesNotEndIsToldOncePerTry(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
	n.ctx = klog.NewContext(n.ctx, logger)
	n.options.EndTimeout = 200 * time.Millisecond // it is waited for in vain
	m := n.manager()
	c := claim("train", "gpu="+gpu0)
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "p", UID: "p-uid"}}
	n.prepared(m, c)
	for pid := range uint32(2) {
		n.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 4711 + pid, Kind: nvmlsim.ProcessCompute, Pod: "p-uid", Stuck: true}})
	}
	n.unprepare(m, c.UID)
	text := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	for _, pid := range []string{"pid=4711", "pid=4712"} {
		if got := strings.Count(text, pid); got != 1 {
			t.Errorf("%s is told %d times, want once:\n%s", pid, got, text)
		}
	}
}
