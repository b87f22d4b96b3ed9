// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestADaemonThatCannotBeStartedAgainIsTold, and started by the next round: of two that have ended one may be.
func TestADaemonThatCannotBeStartedAgainIsTold(t *testing.T) {
	tests := map[string]struct {
		spoil func(n *node) (mend func())
		want  error
		text  string
		// others are how many are started all the same.
		others int
	}{
		"the boot is not known": {
			spoil: func(n *node) func() {
				n.hardware.readings = &readings{fails: 1}
				return func() { n.hardware.readings = nil }
			},
			want:   errReading,
			others: 1,
		},
		"its GPU is locked": {
			spoil: func(n *node) func() {
				n.timeout = 30 * time.Millisecond // what is locked is waited for in vain
				unlock, err := prepare.LockGPU(n.manager(), gpu0)
				if err != nil {
					n.t.Fatal(err)
				}
				return unlock
			},
			text: "restore claim default/train", others: 1,
		},
		"what is owed is not known": {
			spoil: func(n *node) func() {
				n.fsys = durabletest.Watched{FS: n.disk, Before: failing("list", "/quarantine", 1)}
				return func() { n.fsys = n.disk }
			},
			want: errDisk, text: "restore claim default/infer",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			daemons := &askedDaemons{Daemons: n.tools.Daemons, ready: func(int) (bool, error, bool) { return false, nil, false }}
			n.tools.Daemons = daemons
			daemonsDied(n, n.manager())
			daemons.started = nil
			mend := tc.spoil(n)
			recovery, err := n.manager().Reconcile(n.ctx)
			if err == nil || tc.want != nil && !errors.Is(err, tc.want) ||
				!strings.Contains(err.Error(), tc.text) || !strings.Contains(err.Error(), "restore claim default/") {
				t.Errorf("error %v, want %v with %q", err, tc.want, tc.text)
			}
			if recovery.Restarted != tc.others || len(daemons.started) != tc.others || recovery.Claims != 2 {
				t.Errorf("recovery %+v, started %v; want %d started", recovery, daemons.started, tc.others)
			}
			mend()
			if recovery, err := n.manager().Reconcile(n.ctx); err != nil || recovery.Restarted != 2-tc.others {
				t.Errorf("once it can be: %+v, %v", recovery, err)
			}
		})
	}
}

// TestSharesOfTwoGPUsAreCountedEachByItself: what a claim has of one takes nothing of the other.
func TestSharesOfTwoGPUsAreCountedEachByItself(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	n.prepared(m, claim("one", "a="+gpu0+"+share:a:30Gi:40", "b="+gpu1+"+share:b:30Gi:40"))
	n.prepared(m, claim("two", "a="+gpu0+"+share:a:40Gi:50", "b="+gpu1+"+share:b:30Gi:40"))
	for gpu, want := range map[string]resourceapi.QualifiedName{gpu0: "memory", gpu1: ""} {
		_, err := m.Prepare(n.ctx, claim("three", result("a="+gpu+"+share:a:15Gi:10")))
		var share *prepare.ShareError
		if errors.As(err, &share) != (want != "") || share != nil && (share.Capacity != want || len(share.Others) != 2) {
			t.Errorf("%s: %v, want it refused for %q", gpu, err, want)
		}
	}
}

// TestSharesAgreeAboutTheirGPUAlone: a claim may have shares of two GPUs that are set up otherwise.
func TestSharesAgreeAboutTheirGPUAlone(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	both := claim("both", "a="+gpu0+"+share:a:4Gi:10", "b="+gpu1+"+share:b:4Gi:10")
	n.prepared(m, both)
	records, record := n.recordOf("both-uid")
	record.Entry.Devices[0].Share.Setup = "TimeSlicing (Long)" // as an older agent let it be
	if err := records.Put(record.Entry); err != nil {
		t.Fatal(err)
	}
	var share *prepare.ShareError
	_, err := m.Prepare(n.ctx, claim("first", "a="+gpu0+"+share:c:4Gi:10"))
	if !errors.As(err, &share) || share.Setup != "TimeSlicing (Long)" {
		t.Errorf("beside the share that is set up otherwise: %v", err)
	}
	n.prepared(m, claim("second", "a="+gpu1+"+share:c:4Gi:10"))
}

// TestWhoHasNoShareIsNoneOfThoseWhoShare: one of so many GPUs that its file cannot name them is found for each GPU of the node.
func TestWhoHasNoShareIsNoneOfThoseWhoShare(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.rules.AcrossNamespaces = false
	n.rules.Shares = config.TimeSlicing
	many := &ledger.Entry{Claim: ledger.Claim{Namespace: "elsewhere", Name: "many", UID: "many-uid"}, State: ledger.PrepareCompleted}
	for i := range 15 {
		gpu := "gpu-0001-" + string(rune('a'+i)) + "0-00-0"
		many.Devices = append(many.Devices, ledger.Device{Request: "gpu", Pool: pool, Device: gpu, GPU: gpu, UUID: "GPU-" + gpu})
	}
	m := n.manager()
	if err := ledger.At(durable.OS{}, n.claimsDir()).Put(many); err != nil {
		t.Fatal(err)
	}
	n.prepared(m, sharedBy("one", "50Gi:25", ""))
	var share *prepare.ShareError
	_, err := m.Prepare(n.ctx, sharedBy("two", "50Gi:25", ""))
	if !errors.As(err, &share) || len(share.Others) != 1 || share.Others[0].UID != "one-uid" {
		t.Errorf("error %v, want that claim one alone has a share", err)
	}
}

// TestAFunctionOfNoneOfTheClaimsGPUsIsNotTaken from its driver, whatever the record says.
func TestAFunctionOfNoneOfTheClaimsGPUsIsNotTaken(t *testing.T) {
	n := newNodeOf(t, withSound)
	m := n.manager()
	c := claim("machine", "vm="+vm0)
	n.prepared(m, c)
	records, record := n.recordOf(c.UID)
	other := ledger.Step{Kind: ledger.StepPCIDriver, Target: "0000:43:00.0", GPU: gpu1, Before: "nvidia", Want: "vfio-pci"}
	record.Entry.Undo = slices.Insert(record.Entry.Undo, 0, other)
	if err := records.Put(record.Entry); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Prepare(n.ctx, c); err == nil || !strings.Contains(err.Error(), "the claim has no GPU "+gpu1+" for a virtual machine") {
		t.Errorf("error %v", err)
	}
	if got := n.driverOf("0000:43:00.0"); got != "nvidia/" {
		t.Errorf("the function is with %s", got)
	}
}

// TestADebtOfTheBusWaitsForAnAgentThatHasIt: two functions are owed, and nothing but the bus.
func TestADebtOfTheBusWaitsForAnAgentThatHasIt(t *testing.T) {
	n := newNodeOf(t, withSound)
	n.prepared(n.manager(), claim("machine", "vm="+vm0))
	n.noBus = true
	n.unprepare(n.manager(), "machine-uid")
	list, err := n.manager().Quarantined()
	if err != nil || len(list) != 1 {
		t.Fatalf("in quarantine %+v, %v", list, err)
	}
	all := list[0].Owed.Undo
	for _, kind := range []ledger.StepKind{ledger.StepIOMMUGroup, ledger.StepPCIDriver} {
		var owed []ledger.Step
		for _, step := range all {
			if step.Kind == kind {
				owed = append(owed, step)
			}
		}
		list[0].Owed.Undo = owed
		text, err := json.Marshal(list[0])
		if err != nil {
			t.Fatal(err)
		}
		n.write(filepath.Join(n.quarantineDir(), gpu0+"_machine-uid"+prepare.QuarantineSuffix), string(text))
		if recovery, err := n.manager().Reconcile(n.ctx); err != nil || recovery.Quarantined != 1 || len(owed) == 0 {
			t.Errorf("%s: %+v, %v; want the GPU in quarantine", kind, recovery, err)
		}
	}
	n.noBus = false
	if recovery, err := n.manager().Reconcile(n.ctx); err != nil || recovery.Quarantined > 0 || n.driverOf(sound0) != "snd_hda_intel/" {
		t.Errorf("with the bus: %+v, %v, with %s", recovery, err, n.driverOf(sound0))
	}
}

// openIn are processes that have the GPU open as well, when it is asked for the first time: without a context NVML does not tell of them.
type openIn struct {
	vfio.Users
	pids  []uint32
	asked int
}

func (o *openIn) Of(ctx context.Context, nodes ...string) ([]uint32, error) {
	o.asked++
	if o.asked > 1 {
		return o.Users.Of(ctx, nodes...)
	}
	more, err := o.Users.Of(ctx, nodes...)
	return slices.Concat(o.pids, more), err
}

// TestWhoHasAGPUOpenIsFoundBeforeAnythingIsRecorded: the agent itself is none of them, it closes NVML.
func TestWhoHasAGPUOpenIsFoundBeforeAnythingIsRecorded(t *testing.T) {
	own := uint32(os.Getpid())
	for name, tc := range map[string]struct {
		pids []uint32
		want uint32
	}{
		"the agent":                {pids: []uint32{own}},
		"the agent, and a monitor": {pids: []uint32{own, 70}, want: 70},
		"two monitors":             {pids: []uint32{71, 70}, want: 71},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			n.options.Users = &openIn{Users: vfio.Simulated{Machine: n.hardware.machine}, pids: tc.pids}
			written := 0
			n.fsys = durabletest.Watched{FS: n.disk, Before: func(op, _ string) error {
				if op == "create" {
					written++
				}
				return nil
			}}
			_, err := n.manager().Prepare(n.ctx, claim("machine", "vm="+vm0))
			if tc.want == 0 {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var used *prepare.InUseError
			if !errors.As(err, &used) || used.PID != tc.want || used.GPU != gpu0 || written > 0 {
				t.Errorf("error %v, %d files written; want none, and that process %d has %s open", err, written, tc.want, gpu0)
			}
		})
	}
}

// TestAClaimWhoseRecordWasLostIsRecordedAgain, though its files are there as they should be.
func TestAClaimWhoseRecordWasLostIsRecordedAgain(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	forgotten(n, n.manager())
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(n.manager(), claim(name, result("gpu="+gpu)))
		if _, record := n.recordOf(types.UID(name + "-uid")); record == nil || record.State() != ledger.PrepareCompleted {
			t.Errorf("claim %s: record %+v", name, record)
		}
	}
}

// TestALineOfTheLogNamesItsClaim, also where it is written by what knows no claims: when a claim is prepared, and when it is unprepared.
func TestALineOfTheLogNamesItsClaim(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
	n.ctx = klog.NewContext(n.ctx, logger)
	n.hardware.wrap = func(d nvml.Device) nvml.Device { return forbidden{d, nvml.ErrNotSupported} }
	m := n.manager()
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		uid := types.UID(name + "-uid")
		n.prepared(m, reservedFor(claim(name, result("gpu="+gpu)), "pod-of-"+uid))
		left := process(4711, "pod-of-"+string(uid))
		left.GPU = map[string]string{gpu0: "0", gpu1: "1"}[gpu]
		n.do(left)
		n.unprepare(m, uid)
		text := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
		for _, want := range []string{"Persistence mode cannot be switched on", "is still on its GPU, killing it"} {
			if !slices.ContainsFunc(strings.Split(text, "\n"), func(line string) bool {
				return strings.Contains(line, want) && strings.Contains(line, `claimUID="`+string(uid)+`"`)
			}) {
				t.Errorf("no line %q names claim %s:\n%s", want, uid, text)
			}
		}
	}
}

// TestAnAdministratorsGroupNeedsTheBusAllTheSame: nothing is to be taken from a driver, and who does not see the bus cannot tell the nodes.
func TestAnAdministratorsGroupNeedsTheBusAllTheSame(t *testing.T) {
	n := newNodeOf(t, withSound)
	for _, address := range []string{bus0, sound0} {
		take := func(ctx context.Context) error { return vfio.NewBinder(n.hardware.kernel).Take(ctx, address) }
		if err := n.hardware.Apart(n.ctx, take); err != nil {
			t.Fatal(err)
		}
	}
	n.hardware.discover(t, n.hardware.policy)
	c := claim("machine", "vm="+vm0)
	n.prepared(n.manager(), c)
	files := n.files()
	n.noBus = true
	if _, err := n.manager().Prepare(n.ctx, c); err == nil || !strings.Contains(err.Error(), "no access to the PCI bus") {
		t.Errorf("error %v", err)
	}
	if diff := cmp.Diff(files, n.files()); diff != "" {
		t.Errorf("files (-before +after):\n%s", diff)
	}
}

// TestAClaimWhosePlaceWasTakenWhileItHadItStays: its pods may run, and what is left of it is undone when they are gone.
func TestAClaimWhosePlaceWasTakenWhileItHadItStays(t *testing.T) {
	start := uint32(4)
	for name, devices := range map[string][]result{
		"the claim's only one": {"b=" + gpu0 + "-mig-3g40gb-4"},
		"after another one":    {"a=" + gpu0 + "-mig-1g10gb-0", "b=" + gpu0 + "-mig-3g40gb-4"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			c := claim("train", devices...)
			n.prepared(n.manager(), c)
			for _, instance := range n.gpu(0).Instances {
				if instance.Start == start {
					n.do(&nvmlsim.DestroyMIG{GPU: "0", Instance: instance.ID})
				}
			}
			n.do(&nvmlsim.CreateMIG{GPU: "0", Profile: "1g.20gb", Start: &start})
			before := n.state()
			if _, err := n.manager().Prepare(n.ctx, c); err == nil || !strings.Contains(err.Error(), "somebody else has made a MIG instance there") {
				t.Errorf("error %v", err)
			}
			if diff := before.diff(n.state()); diff != "" {
				t.Errorf("(-before +after):\n%s", diff)
			}
			if _, record := n.recordOf(c.UID); record == nil || record.State() != ledger.PrepareCompleted {
				t.Errorf("record %+v", record)
			}
		})
	}
}

// TestAWaitEndsWithItsOwnTime, also where the call has more.
func TestAWaitEndsWithItsOwnTime(t *testing.T) {
	for _, most := range []time.Duration{2 * time.Second, 20 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.prepared(n.manager(), claim("first", "gpu="+gpu0))
			n.options.UseOf = func(context.Context, *ledger.Entry) prepare.Use { return ending }
			n.options.ReleaseTimeout = most
			ctx, cancel := context.WithTimeout(n.ctx, time.Hour)
			defer cancel()
			begun := time.Now()
			var held *prepare.HeldError
			if _, err := n.manager().Prepare(ctx, claim("second", "gpu="+gpu0)); !errors.As(err, &held) {
				t.Errorf("error %v", err)
			}
			if took := time.Since(begun); took < most || took > most+time.Second {
				t.Errorf("it took %s, want %s", took, most)
			}
		})
	}
}

// TestAClaimIsCompletedWhenAllIsDone, and not before: how long it had its GPUs is counted from then.
func TestAClaimIsCompletedWhenAllIsDone(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		uid, seen := types.UID(name+"-uid"), false
		n.hardware.wrap = func(d nvml.Device) nvml.Device {
			return answers{Device: d, compute: func() (nvml.ComputeMode, error) {
				if n.recorded(uid) {
					seen = true
					if _, record := n.recordOf(uid); record.State() != ledger.PrepareStarted || !record.Entry.Completed.IsZero() {
						t.Errorf("claim %s: while it is prepared: %s, completed %s", uid, record.State(), record.Entry.Completed)
					}
				}
				return d.ComputeMode()
			}}
		}
		n.prepared(n.manager(), withConfig(claim(name, result("gpu="+gpu)), driverName, sharingConfig("GpuConfig", "Exclusive", "")))
		n.hardware.wrap = nil
		if _, record := n.recordOf(uid); !seen || record.Entry.Completed.IsZero() {
			t.Errorf("claim %s: seen while it is prepared: %v, completed %s", uid, seen, record.Entry.Completed)
		}
	}
}

// TestAReleaseThatIsForcedSaysWhatItPassedOver, also if it fails then.
func TestAReleaseThatIsForcedSaysWhatItPassedOver(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	bothPrepared(n, n.manager())
	n.timeout = 30 * time.Millisecond // what is locked is waited for in vain
	m := n.manager()
	for uid, gpu := range map[types.UID]string{"train-uid": gpu0, "infer-uid": gpu1} {
		unlock, err := prepare.LockGPU(n.manager(), gpu)
		if err != nil {
			t.Fatal(err)
		}
		done, err := m.Release(n.ctx, uid, true, func(context.Context) string { return string(uid) + " runs" })
		unlock()
		if !errors.Is(err, context.DeadlineExceeded) || !n.recorded(uid) {
			t.Errorf("claim %s: error %v", uid, err)
		}
		n.wantLine("did", done.Did, "passed over, because of --force: "+string(uid)+" runs")
	}
}
