// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// leftDaemons are folders that the machine has beside those of its daemons.
type leftDaemons struct {
	sharing.Daemons
	left, running, stopped []string
	fails                  error
}

func (d *leftDaemons) List() ([]string, error) {
	names, err := d.Daemons.List()
	return append(names, d.left...), err
}

func (d *leftDaemons) Running(ctx context.Context, name string) (bool, error) {
	if slices.Contains(d.left, name) {
		return slices.Contains(d.running, name), nil
	}
	return d.Daemons.Running(ctx, name)
}

func (d *leftDaemons) Stop(ctx context.Context, name string) error {
	if d.fails != nil {
		return d.fails
	}
	d.stopped = append(d.stopped, name)
	return d.Daemons.Stop(ctx, name)
}

// TestWhatIsLeftOfDaemonsIsTakenAway at the start, if no claim has them: what a claim has, or may have, stays, and so does what runs.
func TestWhatIsLeftOfDaemonsIsTakenAway(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares = config.MPS
	daemons := &leftDaemons{Daemons: n.tools.Daemons}
	n.tools.Daemons = daemons
	m := n.manager()
	n.prepared(m, withConfig(claim("train", "gpu="+gpu1), driverName, underMPS))
	n.prepared(m, sharedBy("share", "20Gi:25", ""))
	n.tear("share-uid")
	daemons.left = []string{"lost-uid", gpu2, "running-uid", "train-uid", gpu0, "share-uid"}
	daemons.running = []string{"running-uid"}
	if _, err := m.Reconcile(n.ctx); err == nil || len(daemons.stopped) > 0 {
		t.Errorf("stopped while the agent runs: %v, %v; want none, and an error about the record", daemons.stopped, err)
	}
	if _, err := n.manager().Recover(n.ctx); err == nil {
		t.Error("no error about the record that cannot be read")
	}
	if diff := cmp.Diff([]string{"lost-uid", gpu2}, daemons.stopped); diff != "" {
		t.Errorf("stopped (-want +got):\n%s", diff)
	}
}

// TestAReasonIsClippedBeforeItIsKept: an error may have paths and text in it that a tenant has made long.
func TestAReasonIsClippedBeforeItIsKept(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	daemons := &leftDaemons{Daemons: n.tools.Daemons, fails: errors.New(strings.Repeat("ä/", 1<<20))}
	n.tools.Daemons = daemons
	m := n.manager()
	n.prepared(m, withConfig(claim("train", "gpu="+gpu0), driverName, underMPS))
	n.unprepare(m, "train-uid")
	list, err := m.Quarantined()
	if err != nil || len(list) != 1 || len(list[0].Reason) > 1100 || !utf8.ValidString(list[0].Reason) || !strings.Contains(list[0].Reason, "MPSDaemon train-uid") {
		t.Errorf("%d in quarantine, %v; want one with a short reason", len(list), err)
	}
}

// TestADaemonThatDiedIsStartedAgain as it was, with its limits, while its claims are prepared: that of a claim and the one of those who share a GPU. With
// the claims it ends, and it does not come back; nor does the reconcile after a reboot start one for a claim that has yet to be prepared again.
func TestADaemonThatDiedIsStartedAgain(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares = config.MPS
	m := n.manager()
	limited := sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"2Gi"}`)
	n.prepared(m, withConfig(claim("train", "gpu="+gpu1), driverName, limited))
	n.prepared(m, sharedBy("one", "20Gi:25", ""))
	n.prepared(m, sharedBy("two", "20Gi:25", ""))
	before := n.state()
	if len(before.Daemons) != 2 {
		t.Fatalf("daemons %v, want two", before.Daemons)
	}
	byName := func(s machineState) machineState {
		slices.SortFunc(s.Daemons, func(a, b nvmlsim.Daemon) int { return strings.Compare(a.Name, b.Name) })
		for i := range s.GPUs { // the server is another process
			s.GPUs[i].Processes = slices.Clone(s.GPUs[i].Processes)
			for j := range s.GPUs[i].Processes {
				s.GPUs[i].Processes[j].PID = 0
			}
		}
		return s
	}
	for _, start := range []func(context.Context) (prepare.Recovery, error){m.Reconcile, n.manager().Recover} {
		n.do(&nvmlsim.StopMPS{Daemon: "train-uid"}, &nvmlsim.StopMPS{Daemon: gpu0})
		// A daemon has the driver open.
		n.hardware.aside = errors.New("the driver is released")
		if recovery, err := start(n.ctx); err != nil || recovery.Restarted != 0 || recovery.Claims != 3 || len(n.state().Daemons) != 0 {
			t.Errorf("while the driver is released: recovery %+v, %v, daemons %v", recovery, err, n.state().Daemons)
		}
		n.hardware.aside = nil
		if recovery, err := start(n.ctx); err != nil || recovery.Restarted != 2 {
			t.Errorf("recovery %+v, %v; want two started again", recovery, err)
		}
		if diff := cmp.Diff(byName(before), byName(n.state()), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("(-before it died +now):\n%s", diff)
		}
		if recovery, err := start(n.ctx); err != nil || recovery.Restarted != 0 {
			t.Errorf("while they run: recovery %+v, %v", recovery, err)
		}
	}
	n.unprepare(m, "one-uid")
	n.unprepare(m, "train-uid")
	n.do(&nvmlsim.StopMPS{Daemon: gpu0})
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Restarted != 1 || len(n.hardware.machine.State().Daemons) != 1 {
		t.Errorf("recovery %+v, %v; want one that is left started again", recovery, err)
	}
	n.do(&nvmlsim.Reboot{})
	n.hardware.discover(t, dynamic)
	if recovery, err := n.manager().Recover(n.ctx); err != nil || recovery.Restarted != 0 {
		t.Errorf("after a reboot: recovery %+v, %v", recovery, err)
	}
}

// slowDaemons are those of a machine where a daemon does not take its limits in time as often as that.
type slowDaemons struct {
	sharing.Daemons
	mu      sync.Mutex
	deaf    int
	limited map[string]bool
	endless bool // asked by a call that would wait for ever
}

func (d *slowDaemons) Start(ctx context.Context, daemon sharing.Daemon) error {
	err := d.Daemons.Start(ctx, daemon)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.deaf > 0 {
		d.deaf--
		return errors.Join(err, errors.New("it does not take its limits"))
	}
	d.limited[daemon.Name] = true
	return err
}

func (d *slowDaemons) Running(ctx context.Context, name string) (bool, error) {
	if _, ends := ctx.Deadline(); !ends {
		d.mu.Lock()
		d.endless = true
		d.mu.Unlock()
	}
	return d.Daemons.Running(ctx, name)
}

func (d *slowDaemons) Ready(ctx context.Context, daemon sharing.Daemon) (bool, error) {
	running, err := d.Running(ctx, daemon.Name)
	d.mu.Lock()
	defer d.mu.Unlock()
	return running && d.limited[daemon.Name], err
}

func (d *slowDaemons) List() ([]string, error) { return []string{"lost-uid"}, nil }

// TestADaemonThatIsStartedAgainGetsItsLimits: in the next round, if it does not take them in this one. Whether it runs is never asked without an
// end: nobody is served before the first round ends, and claims are locked.
func TestADaemonThatIsStartedAgainGetsItsLimits(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	daemons := &slowDaemons{Daemons: n.tools.Daemons, limited: map[string]bool{}}
	n.tools.Daemons = daemons
	m := n.manager()
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(m, withConfig(claim(name, result("gpu="+gpu)), driverName, underMPS))
	}
	n.do(&nvmlsim.StopMPS{Daemon: "train-uid"})
	daemons.deaf, daemons.limited["train-uid"] = 1, false
	if _, err := m.Reconcile(n.ctx); err == nil || !strings.Contains(err.Error(), "does not take its limits") {
		t.Errorf("error %v, want that it does not take its limits", err)
	}
	if recovery, err := n.manager().Recover(n.ctx); err != nil || recovery.Restarted != 1 || !daemons.limited["train-uid"] {
		t.Errorf("recovery %+v, %v, limits %v; want that the daemon has them", recovery, err, daemons.limited)
	}
	if daemons.endless {
		t.Error("a call waits for systemd without an end")
	}
}

// TestADaemonIsNotMissedByAClaimOfOtherParameters: a claim that was never unprepared here may be allocated anew, when its class says something
// else by now. What there is stays until it is unprepared.
func TestADaemonIsNotMissedByAClaimOfOtherParameters(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(m, withConfig(claim(name, result("gpu="+gpu)), driverName, underMPS))
		n.prepared(m, claim(name, result("gpu="+gpu)))
	}
	if got := n.hardware.machine.State().Daemons; len(got) != 2 {
		t.Errorf("daemons %v, want both", got)
	}
	n.unprepare(m, "train-uid")
	n.unprepare(m, "infer-uid")
	if got := n.hardware.machine.State().Daemons; len(got) > 0 {
		t.Errorf("daemons %v are left", got)
	}
}

// TestTheRecordHasTheLimitsOfTheDaemon, also when the claim has others by now, or was prepared by an agent that did not record them: it is
// started again with what is recorded.
func TestTheRecordHasTheLimitsOfTheDaemon(t *testing.T) {
	with := func(name, gpu, limit string) *resourceapi.ResourceClaim {
		return withConfig(claim(name, result("gpu="+gpu)), driverName, sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultPinnedDeviceMemoryLimit":"`+limit+`"}`))
	}
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	n.prepared(m, with("train", gpu0, "2Gi"))
	n.prepared(m, with("infer", gpu1, "2Gi"))
	records, record := n.recordOf("infer-uid")
	for i := range record.Entry.Undo {
		record.Entry.Undo[i].Daemon = nil
	}
	if err := records.Put(record.Entry); err != nil {
		t.Fatal(err)
	}
	n.prepared(m, with("train", gpu0, "1Gi"))
	n.prepared(m, with("infer", gpu1, "2Gi"))
	for claim, want := range map[types.UID]int64{"train-uid": 1024, "infer-uid": 2048} {
		_, record := n.recordOf(claim)
		i := slices.IndexFunc(record.Entry.Undo, func(s ledger.Step) bool { return s.Kind == ledger.StepMPSDaemon })
		if daemon := record.Entry.Undo[i].Daemon; daemon == nil || !slices.Equal(daemon.MemoryMiB, []int64{want}) {
			t.Errorf("claim %s: the record has %+v, want %d MiB", claim, daemon, want)
		}
	}
}

// lateNodes is a driver whose device nodes are made when somebody asks for them. closed is why NVML is not loaded.
type lateNodes struct {
	cdi.Backend
	fails, closed error
	made          bool
}

func (n *lateNodes) CommonEdits(ctx context.Context) (*specs.ContainerEdits, error) {
	if n.closed != nil {
		return nil, n.closed
	}
	return n.Backend.CommonEdits(ctx)
}

func (n *lateNodes) ControlNodes(ctx context.Context) error {
	if n.fails != nil {
		return n.fails
	}
	n.made = true
	return n.Backend.ControlNodes(ctx)
}

// lookingDaemons look at their starts whether the nodes are there.
type lookingDaemons struct {
	sharing.Daemons
	nodes *lateNodes
	seen  []bool
}

func (d *lookingDaemons) Start(ctx context.Context, daemon sharing.Daemon) error {
	d.seen = append(d.seen, d.nodes.made)
	return d.Daemons.Start(ctx, daemon)
}

// TestTheDriversNodesAreThereBeforeADaemon: it sees, and may open, those of its start alone, and nvidia-uvm is loaded for the first claim.
func TestTheDriversNodesAreThereBeforeADaemon(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	nodes := &lateNodes{fails: errors.New("there is no /dev/nvidia-uvm")}
	daemons := &lookingDaemons{Daemons: n.tools.Daemons, nodes: nodes}
	n.tools.Daemons = daemons
	n.backend = func(b cdi.Backend) cdi.Backend {
		nodes.Backend = b
		return nodes
	}
	m := n.manager()
	train := withConfig(claim("train", "gpu="+gpu0), driverName, underMPS)
	if err := m.PrepareAll(n.ctx, []*resourceapi.ResourceClaim{train})[train.UID].Err; err == nil || len(daemons.seen) > 0 {
		t.Errorf("without them: %v; started %d", err, len(daemons.seen))
	}
	nodes.fails = nil
	n.prepared(m, train)
	if !slices.Equal(daemons.seen, []bool{true}) {
		t.Errorf("the nodes were there at the starts %v", daemons.seen)
	}

	// The daemon ends while there is no agent. The next one looks before it has loaded NVML.
	if err := n.tools.Daemons.Stop(n.ctx, string(train.UID)); err != nil {
		t.Fatal(err)
	}
	nodes.made, nodes.closed = false, errors.New("no NVML library is loaded")
	recovery, err := n.manager().Recover(n.ctx)
	if err != nil || recovery.Restarted != 1 || !slices.Equal(daemons.seen, []bool{true, true}) {
		t.Errorf("recovered: %v, %+v; the nodes were there at the starts %v", err, recovery, daemons.seen)
	}
}
