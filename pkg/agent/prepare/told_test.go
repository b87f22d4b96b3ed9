// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics/legacyregistry"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// observations counts what a histogram of the agent has observed, by the values of its labels in the order of their names.
func observations(t *testing.T, histogram string) map[string]uint64 {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]uint64{}
	for _, family := range families {
		if family.GetName() != "stowage_agent_"+histogram {
			continue
		}
		for _, metric := range family.GetMetric() {
			var values []string
			for _, label := range metric.GetLabel() {
				values = append(values, label.GetValue())
			}
			counts[strings.Join(values, " ")] = metric.GetHistogram().GetSampleCount()
		}
	}
	return counts
}

// TestStepsAndLocksAreMeasured, of two claims: those that succeed, and those that do not.
func TestStepsAndLocksAreMeasured(t *testing.T) {
	prepare.RegisterMetrics()
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	between := func(histogram string, do func()) map[string]uint64 {
		before := observations(t, histogram)
		do()
		grown := map[string]uint64{}
		for labels, count := range observations(t, histogram) {
			if count > before[labels] {
				grown[labels] = count - before[labels]
			}
		}
		return grown
	}
	both := func() {
		for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
			n.prepared(m, withConfig(claim(name, result("gpu="+gpu)), driverName, underMPS))
			n.unprepare(m, types.UID(name+"-uid"))
		}
	}
	// Operation, outcome and step are in the order of the labels' names.
	want := map[string]uint64{
		"prepare ok Find": 2, "prepare ok Decide": 2, "prepare ok Record": 4, "prepare ok ComputeMode": 2, "prepare ok MPSDaemon": 2, "prepare ok CDIFile": 2,
		"prepare ok Verify":   2,
		"unprepare ok Record": 2, "unprepare ok ComputeMode": 2, "unprepare ok MPSDaemon": 2, "unprepare ok CDIFile": 2, "unprepare ok Processes": 2,
	}
	if diff := cmp.Diff(want, between("step_duration_seconds", both)); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]uint64{"claim ok": 4, "gpu ok": 4}, between("lock_wait_seconds", both)); diff != "" {
		t.Errorf("locks (-want +got):\n%s", diff)
	}
	n.hardware.broken[gpu0] = nvml.ErrGPULost
	if diff := cmp.Diff(map[string]uint64{"prepare error Find": 1}, between("step_duration_seconds", func() {
		if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); err == nil {
			t.Error("prepared")
		}
	})); diff != "" {
		t.Errorf("steps on a GPU that is lost (-want +got):\n%s", diff)
	}
	n.prepared(m, claim("first", "gpu="+gpu1))
	n.options.UseOf = func(context.Context, *ledger.Entry) prepare.Use { return ending }
	n.options.ReleaseTimeout = 30 * time.Millisecond
	if diff := cmp.Diff(map[string]uint64{"release error": 1}, between("lock_wait_seconds", func() {
		if _, err := n.manager().Prepare(n.ctx, claim("second", "gpu="+gpu1)); err == nil {
			t.Error("prepared")
		}
	})); diff != "" {
		t.Errorf("a claim that is not released (-want +got):\n%s", diff)
	}
	n.unprepare(m, "first-uid")
	n.timeout = 30 * time.Millisecond // what is locked is waited for in vain
	unlock, err := prepare.LockGPU(m, gpu1)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if diff := cmp.Diff(map[string]uint64{"claim ok": 1, "gpu error": 1}, between("lock_wait_seconds", func() {
		if _, err := n.manager().Prepare(n.ctx, claim("infer", "gpu="+gpu1)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("prepare: %v", err)
		}
	})); diff != "" {
		t.Errorf("locks, one of which is not free (-want +got):\n%s", diff)
	}
}

// TestAnErrorAfterAWaitIsTold: the GPU is lost while it is waited for.
func TestAnErrorAfterAWaitIsTold(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	plain := n.manager()
	for _, gpu := range bothGPUs {
		n.prepared(plain, claim("first", result("gpu="+gpu)))
		n.options.UseOf = func(context.Context, *ledger.Entry) prepare.Use { return ending }
		n.options.Waiting = func(*resourceapi.ResourceClaim, error) {
			n.unprepare(plain, "first-uid")
			n.hardware.broken[gpu] = nvml.ErrGPULost
		}
		if devices, err := n.manager().Prepare(n.ctx, claim("second", result("gpu="+gpu))); !errors.Is(err, nvml.ErrGPULost) {
			t.Errorf("%s: %v, %v", gpu, devices, err)
		}
	}
}

// TestARefusalBecauseOfQuarantineSaysWhoseItIs, and since when.
func TestARefusalBecauseOfQuarantineSaysWhoseItIs(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	inQuarantine(n, n.manager())
	for i, gpu := range bothGPUs {
		n.do(&nvmlsim.Refuse{GPU: []string{"0", "1"}[i], Settings: []nvmlsim.Setting{nvmlsim.SettingComputeMode}})
		_, err := n.manager().Prepare(n.ctx, claim("next", result("gpu="+gpu)))
		var got *prepare.QuarantinedError
		if !errors.As(err, &got) {
			t.Fatalf("%s: %v", gpu, err)
		}
		if !errors.Is(err, nvml.ErrNoPermission) && !errors.Is(err, nvml.ErrNotSupported) {
			t.Errorf("%s: %v, want the library's error in it", gpu, err)
		}
		if got.GPU != gpu || got.Owed.UID != bothClaims[i] || got.Claim.UID != "next-uid" || got.Since.Year() != 2026 || !strings.Contains(got.Reason, "undo ") {
			t.Errorf("%s: %+v", gpu, got)
		}
		n.do(&nvmlsim.Refuse{GPU: []string{"0", "1"}[i]})
	}
	// One claim is released, the other one's GPU stays.
	done := n.releaseOf(n.manager(), "train-uid", false)
	n.wantLine("did", done.Did, gpu0)
	if list, err := n.manager().Quarantined(); err != nil || len(list) != 1 || list[0].GPU != gpu1 {
		t.Errorf("in quarantine %+v, %v", list, err)
	}
}

// TestWhatTheAgentHasMadeEndsWithTheBoot: MIG mode and instances are somebody else's after it.
func TestWhatTheAgentHasMadeEndsWithTheBoot(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(m, claim(name, result("part="+gpu+"-mig-1g10gb-0")))
	}
	if got := len(m.Made()); got != 4 {
		t.Errorf("%d made, want MIG mode and an instance on each GPU", got)
	}
	records, record := n.recordOf("infer-uid")
	boot := record.Entry.BootID
	for _, of := range []string{"", boot} { // an older agent's record, when the boot is not known
		record.Entry.BootID = of
		if err := records.Put(record.Entry); err != nil {
			t.Fatal(err)
		}
		if of == "" {
			n.hardware.readings = &readings{fails: 1}
		}
		if got := m.Made(); (len(got) == 0) != (of == "") {
			t.Errorf("made %v in boot %q", got, of)
		}
		n.hardware.readings = nil
	}
	n.hardware.broken[gpu0] = nvml.ErrGPULost
	n.unprepare(m, "train-uid")
	if got := len(m.Made()); got != 4 {
		t.Errorf("%d made, and what is owed is", got)
	}
	n.do(&nvmlsim.Reboot{})
	if got := m.Made(); len(got) > 0 {
		t.Errorf("made %v before the boot", got)
	}
}

// TestARecordSaysWhenItWasWritten, and when its claim was first prepared.
func TestARecordSaysWhenItWasWritten(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.prepared(n.manager(), reservedFor(claim("train", "gpu="+gpu0), "pod-1"))
	records, record := n.recordOf("train-uid")
	written := record.Entry.Updated
	if written.IsZero() || !written.Equal(record.Entry.Completed) || written.Location() != time.UTC {
		t.Errorf("updated %s, completed %s", written, record.Entry.Completed)
	}
	before := written.Add(-time.Hour)
	record.Entry.Updated, record.Entry.Completed = before, before
	if err := records.Put(record.Entry); err != nil {
		t.Fatal(err)
	}
	n.prepared(n.manager(), reservedFor(claim("train", "gpu="+gpu0), "pod-2"))
	if _, record := n.recordOf("train-uid"); !record.Entry.Updated.Equal(written) || !record.Entry.Completed.Equal(before) {
		t.Errorf("updated %s, completed %s", record.Entry.Updated, record.Entry.Completed)
	}
}

// TestWhatIsOfAPreviousCopyMayHaveBeenCompleted: nothing of it is undone when it is prepared again, and no pod is noted in it before.
func TestWhatIsOfAPreviousCopyMayHaveBeenCompleted(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	daemons := &leftDaemons{Daemons: n.tools.Daemons}
	n.tools.Daemons = daemons
	m := n.manager()
	c := func(name, gpu string) *resourceapi.ResourceClaim {
		return reservedFor(withConfig(claim(name, result("gpu="+gpu)), driverName, underMPS), "pod-1")
	}
	for name, gpu := range map[string]string{"train": gpu0, "infer": gpu1} {
		n.prepared(m, c(name, gpu))
		n.tearCurrent(types.UID(name + "-uid")) // the copy before is of a claim that was begun
		if err := m.NotePods(n.ctx, reservedFor(claim(name), "pod-2")); err != nil {
			t.Error(err)
		}
		if _, record := n.recordOf(types.UID(name + "-uid")); record.Recovered == nil || !slices.Equal(record.Entry.Pods, []types.UID{"pod-1"}) {
			t.Errorf("claim %s: a pod is noted in %+v", name, record)
		}
		n.prepared(m, c(name, gpu))
		_, record := n.recordOf(types.UID(name + "-uid"))
		if len(daemons.stopped) > 0 || record.Recovered != nil || record.Entry.State != ledger.PrepareCompleted {
			t.Errorf("claim %s: stopped %v, record %+v", name, daemons.stopped, record)
		}
	}
}

// TestAdminAccessAsksNobody: neither who has the GPU, also if that cannot be read, nor for a share of it.
func TestAdminAccessAsksNobody(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	torn(n, m)
	for name, gpu := range map[string]string{"watch": gpu0, "look": gpu1} {
		env := n.env(n.prepared(m, claim(name, result("gpu="+gpu+"+share:s:1Gi:100+admin"))))
		if i := slices.IndexFunc(env, func(v string) bool { return strings.HasPrefix(v, "SHARE_") }); i >= 0 {
			t.Errorf("%s has a share: %s", name, env[i])
		}
		if _, record := n.recordOf(types.UID(name + "-uid")); len(record.Entry.HeldGPUs()) > 0 || record.Entry.Devices[0].Share != nil {
			t.Errorf("%s holds %v", name, record.Entry.Devices)
		}
	}
}

// TestEachSharerRecordsTheSameSteps: the last one to go undoes them all, once.
func TestEachSharerRecordsTheSameSteps(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares = config.MPS
	m := n.manager()
	steps := map[string][]ledger.Step{}
	for _, name := range []string{"one", "two", "three"} {
		n.prepared(m, sharedBy(name, "10Gi:20", ""))
		_, record := n.recordOf(types.UID(name + "-uid"))
		steps[name] = slices.DeleteFunc(record.Entry.Undo, func(s ledger.Step) bool { return s.Kind == ledger.StepCDIFile })
	}
	for _, name := range slices.Sorted(maps.Keys(steps)) {
		if diff := cmp.Diff(steps["one"], steps[name]); diff != "" {
			t.Errorf("steps of %s (-of the first +its):\n%s", name, diff)
		}
	}
	var share *prepare.ShareError
	if _, err := m.Prepare(n.ctx, sharedBy("four", "10Gi:50", "")); !errors.As(err, &share) || share.Device != gpu0 || share.Request != "gpu" || share.Claim.UID != "four-uid" {
		t.Errorf("error %+v", share)
	}
}

// TestAReleaseOfTheLastShareWithoutARecordEndsTheDaemon of those who shared the GPU.
func TestAReleaseOfTheLastShareWithoutARecordEndsTheDaemon(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares = config.MPS
	m := n.manager()
	for _, name := range []string{"one", "two"} {
		n.prepared(m, sharedBy(name, "20Gi:25", ""))
	}
	n.tear("one-uid")
	n.tear("two-uid")
	n.releaseOf(m, "one-uid", false)
	if got := n.setting(0); len(got.Daemons) != 1 || got.Compute != nvmlsim.ComputeExclusiveProcess {
		t.Errorf("with one that cannot be read: %+v", got)
	}
	done := n.releaseOf(m, "two-uid", false)
	n.wantLine("did", done.Did, "undone: MPSDaemon "+gpu0)
	if got := n.setting(0); len(got.Daemons) > 0 || got.Compute != nvmlsim.ComputeDefault {
		t.Errorf("with none: %+v", got)
	}
}

// unsyncable is a disk that forgets which files there are.
type unsyncable struct{ durable.FS }

func (unsyncable) SyncDir(string) error { return errDisk }

// TestAClaimIsNotForgottenBeforeTheDiskHas: it might be known again after a power cut.
func TestAClaimIsNotForgottenBeforeTheDiskHas(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.fsys = unsyncable{n.disk}
	for _, uid := range bothClaims {
		if err := n.manager().Unprepare(n.ctx, uid); !errors.Is(err, errDisk) {
			t.Errorf("claim %s: %v", uid, err)
		}
	}
}

// TestAGPUThatIsUnpluggedIsNotWaitedForAtTheBus: what is owed is that NVML sees it again.
func TestAGPUThatIsUnpluggedIsNotWaitedForAtTheBus(t *testing.T) {
	n := newNodeOf(t, withSound)
	n.prepared(n.manager(), claim("machine", "vm="+vm0))
	n.pci = unplugged{n.hardware.kernel}
	n.options.GPUTimeout = 300 * time.Millisecond // NVML is waited for in vain
	n.unprepare(n.manager(), "machine-uid")
	list, err := n.manager().Quarantined()
	if err != nil || len(list) != 1 || !strings.Contains(list[0].Reason, "NVML does not see it") {
		t.Errorf("in quarantine %+v, %v", list, err)
	}
}

// unplugged is a bus without functions.
type unplugged struct{ vfio.Sysfs }

func (unplugged) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
}

func (unplugged) ReadLink(name string) (string, error) {
	return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrNotExist}
}

func (unplugged) Lstat(name string) (fs.FileInfo, error) {
	return nil, &fs.PathError{Op: "lstat", Path: name, Err: fs.ErrNotExist}
}

func (unplugged) Write(name, _ string) error {
	return &fs.PathError{Op: "write", Path: name, Err: fs.ErrNotExist}
}
