// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestWhoCannotBeReadIsNotWaitedFor: who uses what it has is not known.
func TestWhoCannotBeReadIsNotWaitedFor(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	var asked, told atomic.Int32
	n.options.UseOf = func(_ context.Context, held *ledger.Entry) prepare.Use {
		asked.Add(1)
		return prepare.Use{Ends: held.Claim.UID != ""}
	}
	n.options.Waiting = func(*resourceapi.ResourceClaim, error) { told.Add(1) }
	torn(n, n.manager())
	for _, gpu := range bothGPUs {
		_, err := n.manager().Prepare(n.ctx, claim("next", result("gpu="+gpu)))
		var held *prepare.HeldError
		if !errors.As(err, &held) || held.Unreadable == nil || asked.Load()+told.Load() > 0 {
			t.Errorf("%s: error %v, asked %d times, told %d times", gpu, err, asked.Load(), told.Load())
		}
	}
}

// TestWhatIsReleasedMeanwhileIsHadAtOnce: the second of two that share a GPU goes while it is found out who uses the first one's share.
func TestWhatIsReleasedMeanwhileIsHadAtOnce(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	plain := n.manager()
	for _, name := range []string{"one", "two"} {
		n.prepared(plain, sharedBy(name, "30Gi:40", ""))
	}
	var told atomic.Int32
	n.options.Waiting = func(*resourceapi.ResourceClaim, error) { told.Add(1) }
	n.options.UseOf = func(_ context.Context, held *ledger.Entry) prepare.Use {
		n.unprepare(plain, "two-uid")
		return running
	}
	if _, err := n.manager().Prepare(n.ctx, sharedBy("next", "30Gi:40", "")); err != nil || told.Load() > 0 {
		t.Errorf("error %v, told %d times", err, told.Load())
	}
}

// TestTheFirstOfThoseWhoRunIsNamed, with its use: of the next one's nothing is said.
func TestTheFirstOfThoseWhoRunIsNamed(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.options.UseOf = func(_ context.Context, held *ledger.Entry) prepare.Use {
		return prepare.Use{Text: "used by pod of " + held.Claim.Name}
	}
	m := n.manager()
	for _, name := range []string{"one", "two"} {
		n.prepared(m, sharedBy(name, "30Gi:40", ""))
	}
	_, err := m.Prepare(n.ctx, sharedBy("next", "30Gi:40", ""))
	want := []string{"default/one (one-uid), used by pod of one", "default/two (two-uid)"}
	if got := prepare.Others(err); !slices.Equal(got, want) {
		t.Errorf("others %q of error %v, want %q", got, err, want)
	}
}

// TestAnAgentWithoutABusGivesNothingBack: the GPU waits in quarantine for one that has it. Nor does it prepare again what is with vfio-pci.
func TestAnAgentWithoutABusGivesNothingBack(t *testing.T) {
	for name, tc := range map[string]struct {
		before []nvmlsim.Command
		wrap   func(nvml.Device) nvml.Device
	}{
		"a compute mode to be put back": {before: passthrough.before},
		"nothing to be put back": {wrap: func(d nvml.Device) nvml.Device {
			return answers{Device: d, persistence: func() (bool, error) { return false, nvml.ErrNotSupported }}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, withSound)
			n.do(tc.before...)
			n.hardware.wrap = tc.wrap
			c := claim("machine", "vm="+vm0)
			n.prepared(n.manager(), c)
			n.hardware.wrap, n.noBus = nil, true
			const noBus = "no access to the PCI bus"
			if _, err := n.manager().Prepare(n.ctx, c); err == nil || !strings.Contains(err.Error(), noBus) {
				t.Errorf("prepare: %v", err)
			}
			n.unprepare(n.manager(), c.UID)
			if list, err := n.manager().Quarantined(); err != nil || len(list) != 1 || !strings.Contains(list[0].Reason, noBus) || n.driverOf(bus0) != "vfio-pci/vfio-pci" {
				t.Errorf("in quarantine %+v, %v, with %s", list, err, n.driverOf(bus0))
			}
			n.noBus = false
			n.hardware.discover(t, n.hardware.policy)
			if recovery, err := n.manager().Recover(n.ctx); err != nil || recovery.Quarantined > 0 || n.driverOf(bus0) != "nvidia/" {
				t.Errorf("with the bus: %+v, %v, with %s", recovery, err, n.driverOf(bus0))
			}
		})
	}
}

// foreignKernel says that a function has another driver.
type foreignKernel struct {
	vfio.Sysfs
	address, driver string
}

func (k foreignKernel) ReadLink(name string) (string, error) {
	if strings.HasSuffix(name, k.address+"/driver") {
		return "../../../bus/pci/drivers/" + k.driver, nil
	}
	return k.Sysfs.ReadLink(name)
}

// TestAGPUIsTakenFromItsDriverAlone, and from no other one.
func TestAGPUIsTakenFromItsDriverAlone(t *testing.T) {
	for _, driver := range []string{"nouveau", "nvidia-drm"} {
		n := newNodeOf(t, withSound)
		n.pci = foreignKernel{n.hardware.kernel, bus0, driver}
		before := n.driverOf(bus0) + n.driverOf(sound0)
		want := `has the driver "` + driver + `": it is taken from the driver nvidia only`
		if _, err := n.manager().Prepare(n.ctx, claim("machine", "vm="+vm0)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
		if after := n.driverOf(bus0) + n.driverOf(sound0); after != before || len(n.files()) > 0 {
			t.Errorf("refused, and changed: drivers %s, files %v", after, n.files())
		}
	}
}

// TestAnAdministratorsProcessIsNoReason to refuse a GPU. To know whose it is every record is read: one that cannot be is somebody else's, and
// without the folder nobody's is known.
func TestAnAdministratorsProcessIsNoReason(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	n.prepared(m, reservedFor(claim("watch", "gpu="+gpu0+"+admin"), "admin-pod"))
	n.prepared(m, reservedFor(claim("other", "gpu="+gpu1+"+admin"), "other-pod"))
	n.prepared(m, claim("torn", "gpu="+gpu1))
	n.tear("torn-uid")
	n.do(process(70, "admin-pod"))
	train := func(fails int) (lists int, err error) {
		n.fsys = durabletest.Watched{FS: n.disk, Before: func(op, path string) error {
			if op == "list" && strings.HasSuffix(path, "/claims") {
				if lists++; lists == fails {
					return errDisk
				}
			}
			return nil
		}}
		_, err = n.manager().Prepare(n.ctx, claim("train", "gpu="+gpu0))
		n.fsys = n.disk
		n.unprepare(m, "train-uid")
		return lists, err
	}
	all, err := train(0)
	if err != nil {
		t.Fatal(err)
	}
	for fails := 2; fails <= all; fails++ { // the first time it is looked for what the claim has, without its lock
		if _, err := train(fails); !errors.Is(err, errDisk) {
			t.Errorf("the ledger cannot be read for the %d. time: %v", fails, err)
		}
	}
	n.do(process(71, "other-pod"))
	var busy *prepare.BusyError
	if _, err := m.Prepare(n.ctx, claim("train", "gpu="+gpu0)); !errors.As(err, &busy) || busy.PID != 71 {
		t.Errorf("error %v, want that process 71 is on the GPU", err)
	}
}

// TestMIGModeOfThisBootIsAnAdministrators, if the agent switched it on before the last one only.
func TestMIGModeOfThisBootIsAnAdministrators(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	n.prepared(m, claim("before", "part="+gpu0+"-mig-1g10gb-0"))
	n.do(&nvmlsim.Reboot{}, &nvmlsim.SetMIG{GPU: "0", Enabled: true})
	n.hardware.discover(t, dynamic)
	for _, name := range []string{"one", "two"} {
		n.prepared(m, claim(name, "part="+gpu0+"-mig-1g10gb-1"))
		n.unprepare(m, types.UID(name+"-uid"))
		if g := n.gpu(0); !g.MIG || len(g.Instances) > 0 {
			t.Errorf("after claim %s: MIG mode %v, instances %v", name, g.MIG, g.Instances)
		}
	}
}

// used is how long claims had a device, by the metric.
func used(t *testing.T, device string) (seconds float64) {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != "stowage_agent_device_use_seconds_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if label.GetValue() == device {
					seconds = metric.GetCounter().GetValue()
				}
			}
		}
	}
	return seconds
}

// TestTheUseOfADeviceIsCounted from when its claim was prepared: not of one that never was, and not of who has it without holding it.
func TestTheUseOfADeviceIsCounted(t *testing.T) {
	prepare.RegisterMetrics()
	n := newNode(t)
	m := n.manager()
	devices := slices.DeleteFunc(n.offers(), func(name string) bool { return strings.Contains(name, "-mig-") })
	tests := []struct {
		device, suffix string
		completed      func(at time.Time) time.Time
		want           float64
	}{
		{devices[len(devices)-1], "", func(at time.Time) time.Time { return at.Add(-time.Hour) }, 3600},
		{devices[len(devices)-2], "", func(time.Time) time.Time { return time.Time{} }, 0},
		{devices[len(devices)-3], "+admin", func(at time.Time) time.Time { return at.Add(-time.Hour) }, 0},
	}
	for _, tc := range tests {
		n.prepared(m, claim("train", result("gpu="+tc.device+tc.suffix)))
		records, record := n.recordOf("train-uid")
		record.Entry.Completed = tc.completed(record.Entry.Completed)
		if err := records.Put(record.Entry); err != nil {
			t.Fatal(err)
		}
		before := used(t, tc.device)
		n.unprepare(m, "train-uid")
		if got := used(t, tc.device) - before; got != tc.want {
			t.Errorf("%s%s was used for %v seconds, want %v", tc.device, tc.suffix, got, tc.want)
		}
	}
}

// TestPersistenceThatCannotBeTakenBackIsOwed.
func TestPersistenceThatCannotBeTakenBackIsOwed(t *testing.T) {
	r := refusal{noPower: true}
	n := r.start(t)
	m := n.manager()
	n.prepared(m, wholeWith(sharingConfig("GpuConfig", "Exclusive", ""))("train"))
	n.prepared(m, claim("beside", "gpu="+gpu1))
	n.do(&nvmlsim.Refuse{GPU: "0", Settings: []nvmlsim.Setting{nvmlsim.SettingPersistence}})
	n.unprepare(m, "train-uid")
	n.unprepare(m, "beside-uid")
	list, err := m.Quarantined()
	if err != nil || len(list) != 1 || list[0].GPU != gpu0 || !strings.Contains(list[0].Reason, "undo Persistence") {
		t.Errorf("in quarantine %+v, %v", list, err)
	}
	n.do(&nvmlsim.Refuse{GPU: "0"})
	if recovery, err := m.Reconcile(n.ctx); err != nil || recovery.Quarantined > 0 || n.gpu(0).Persistence {
		t.Errorf("once it can be: %+v, %v, persistence %v", recovery, err, n.gpu(0).Persistence)
	}
}

// forbidden is a GPU of which persistence mode cannot be switched on.
type forbidden struct {
	nvml.Device
	err error
}

func (forbidden) Persistence() (bool, error)  { return false, nil }
func (d forbidden) SetPersistence(bool) error { return d.err }

// TestPersistenceThatIsForbiddenIsMissedByASettingAlone. Any other reason is none to go on.
func TestPersistenceThatIsForbiddenIsMissedByASettingAlone(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	for _, reason := range []error{nvml.ErrNoPermission, nvml.ErrNotSupported, nvml.ErrGPULost} {
		n.hardware.wrap = func(d nvml.Device) nvml.Device { return forbidden{d, reason} }
		for _, parameters := range []string{"", sharingConfig("GpuConfig", "Exclusive", ""), longSlices} {
			c := wholeWith(parameters)("train")
			_, err := m.Prepare(n.ctx, c)
			if parameters == "" && !errors.Is(reason, nvml.ErrGPULost) {
				if err != nil {
					t.Errorf("a plain claim: %v", err)
				}
				n.unprepare(m, c.UID)
			} else if !errors.Is(err, reason) || n.recorded(c.UID) {
				t.Errorf("parameters %s: error %v, want %v", parameters, err, reason)
			}
		}
	}
}

// TestARefusalNamesTheParametersOfItsGPU: not those of another one of the claim, and not those of who uses it without holding it.
func TestARefusalNamesTheParametersOfItsGPU(t *testing.T) {
	exclusive := sharingConfig("GpuConfig", "Exclusive", "")
	for name, results := range map[string][]result{
		"beside another GPU":         {"other=" + gpu1, "gpu=" + gpu0},
		"beside one without holding": {"other=" + gpu0 + "+admin", "gpu=" + gpu0},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.do(&nvmlsim.Refuse{GPU: "0", Settings: []nvmlsim.Setting{nvmlsim.SettingComputeMode}})
			c := withConfig(claim("train", results...), driverName, exclusive)
			c.Status.Allocation.Devices.Config[0].Requests = []string{"gpu"}
			if _, err := n.manager().Prepare(n.ctx, c); err == nil || !strings.Contains(err.Error(), `sharing.strategy: "Exclusive": `) {
				t.Errorf("error %v, want that it names the strategy Exclusive", err)
			}
		})
	}
}

// TestSharesOfAllOfAGPU: to the last byte and percent, on two GPUs, beside a device that is not held. One byte more is too much.
func TestSharesOfAllOfAGPU(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	target, err := n.hardware.Find(n.ctx, gpu0)
	if err != nil {
		t.Fatal(err)
	}
	rest := func(name string, more int64) *resourceapi.ResourceClaim {
		c := sharedBy(name, "1Gi:50", "")
		c.Status.Allocation.Devices.Results[0].ConsumedCapacity["memory"] = *resource.NewQuantity(int64(target.MemoryBytes)-30<<30+more, resource.BinarySI)
		return c
	}
	n.prepared(m, claim("first", "a="+gpu0+"+share:a:30Gi:50", "b="+gpu1+"+share:b:60Gi:60", "watch="+gpu0+"+admin"))
	var share *prepare.ShareError
	if _, err := m.Prepare(n.ctx, rest("more", 1)); !errors.As(err, &share) || share.Capacity != "memory" {
		t.Errorf("one byte more: %v", err)
	}
	n.prepared(m, rest("rest", 0))
	if _, err := m.Prepare(n.ctx, sharedBy("last", "0:1", "")); !errors.As(err, &share) || share.Capacity != "compute" {
		t.Errorf("one percent more: %v", err)
	}
}

// TestWhatAContainerMayUseOfEachGPU is told by its request: the sum of the shares of one GPU, without a percentage if one of them has none.
func TestWhatAContainerMayUseOfEachGPU(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares = config.TimeSlicing
	devices := n.prepared(n.manager(), claim("train",
		"gpu="+gpu0+"+share:a:4Gi:10", "gpu="+gpu0+"+share:b:1Gi:5", "gpu="+gpu1+"+share:c:1Gi:0", "gpu="+gpu1+"+share:d:2Gi:20"))
	env := n.env(devices)
	for _, want := range []string{
		"SHARE_GPU_0000_1B_00_0_MEMORY_MIB=5120", "SHARE_GPU_0000_1B_00_0_COMPUTE_PERCENT=15", "SHARE_GPU_0000_43_00_0_MEMORY_MIB=3072",
	} {
		if !slices.Contains(env, want) {
			t.Errorf("environment %v lacks %s", env, want)
		}
	}
	if i := slices.IndexFunc(env, func(v string) bool { return strings.HasPrefix(v, "SHARE_GPU_0000_43_00_0_COMPUTE_PERCENT") }); i >= 0 {
		t.Errorf("%s, and one of the shares has no limit", env[i])
	}
}

// TestALimitOfAllOfAShareIsNoMoreThanIt.
func TestALimitOfAllOfAShareIsNoMoreThanIt(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares = config.MPS
	limits := func(memory string, percent string) string {
		return sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultActiveThreadPercentage":`+percent+`,"defaultPinnedDeviceMemoryLimit":"`+memory+`"}`)
	}
	m := n.manager()
	n.prepared(m, sharedBy("all", "20Gi:25", limits("20Gi", "25")))
	n.prepared(m, sharedBy("free", "20Gi:0", limits("20Gi", "10"))) // a share without a percentage has no limit
	for _, more := range []string{limits("20481Mi", "25"), limits("20Gi", "26")} {
		if _, err := m.Prepare(n.ctx, sharedBy("more", "20Gi:25", more)); err == nil || !strings.Contains(err.Error(), "more than the share of the GPU has") {
			t.Errorf("error %v for %s", err, more)
		}
	}
}

// intervals notes what time slices are set to.
type intervals struct {
	sharing.TimeSlicer
	mu  sync.Mutex
	set []config.Interval
}

func (s *intervals) SetTimeSlice(ctx context.Context, gpu string, interval config.Interval) error {
	s.mu.Lock()
	s.set = append(s.set, interval)
	s.mu.Unlock()
	return s.TimeSlicer.SetTimeSlice(ctx, gpu, interval)
}

// TestTimeSlicesOfOlderSharesStay: an older agent let claims that share a GPU set them. Whoever joins neither ends them nor takes them back before the last.
func TestTimeSlicesOfOlderSharesStay(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	slicer := &intervals{TimeSlicer: n.tools.TimeSlicer}
	n.tools.TimeSlicer = slicer
	m := n.manager()
	n.prepared(m, sharedBy("old", "20Gi:25", ""))
	records, record := n.recordOf("old-uid")
	step := ledger.Step{Kind: ledger.StepTimeSlice, GPU: gpu0, Target: n.hardware.uuid(gpu0), Want: string(config.IntervalLong), Shared: true}
	record.Entry.Undo = slices.Insert(record.Entry.Undo, 0, step)
	if err := records.Put(record.Entry); err != nil {
		t.Fatal(err)
	}
	n.do(&nvmlsim.SetTimeSlice{GPU: "0", Time: nvmlsim.TimeSliceLong})
	n.prepared(m, sharedBy("new", "20Gi:25", ""))
	if slices.Contains(slicer.set, config.IntervalDefault) || n.gpu(0).TimeSlice != nvmlsim.TimeSliceLong {
		t.Errorf("set to %v, is %q", slicer.set, n.gpu(0).TimeSlice)
	}
	n.unprepare(m, "old-uid")
	if got := n.gpu(0).TimeSlice; got != nvmlsim.TimeSliceLong {
		t.Errorf("with the one that joined it is %q", got)
	}
	n.unprepare(m, "new-uid")
	if got := n.gpu(0).TimeSlice; got != nvmlsim.TimeSliceDefault {
		t.Errorf("in the end it is %q", got)
	}
}

// TestWhoHasAClaimIsToldByTheAPI: a result without admin access is held, also if that is said, and pods alone are the claim's users.
func TestWhoHasAClaimIsToldByTheAPI(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	c := reservedFor(claim("train", "gpu="+gpu0), "pod-1", "pod-2")
	c.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(false)
	c.Status.ReservedFor = append(c.Status.ReservedFor,
		resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", UID: "group"},
		resourceapi.ResourceClaimConsumerReference{APIGroup: "example.com", Resource: "pods", UID: "other"},
		resourceapi.ResourceClaimConsumerReference{Resource: "services", UID: "service"})
	n.prepared(m, c)
	if _, record := n.recordOf("train-uid"); !slices.Equal(record.Entry.Pods, []types.UID{"pod-1", "pod-2"}) {
		t.Errorf("pods %v", record.Entry.Pods)
	}
	var held *prepare.HeldError
	if _, err := m.Prepare(n.ctx, claim("second", "gpu="+gpu0)); !errors.As(err, &held) {
		t.Errorf("error %v, want that the GPU is held", err)
	}
}

// TestAClaimThatOwesOnAnotherGPUIsPrepared as it is: what is owed is not of what it has now.
func TestAClaimThatOwesOnAnotherGPUIsPrepared(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	daemons := &leftDaemons{Daemons: n.tools.Daemons}
	n.tools.Daemons = daemons
	m := n.manager()
	n.prepared(m, withConfig(claim("train", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "Exclusive", "")))
	n.hardware.broken[gpu0] = nvml.ErrGPULost
	n.unprepare(m, "train-uid")
	moved := func() *resourceapi.ResourceClaim {
		return withConfig(claim("train", "gpu="+gpu1), driverName, underMPS)
	}
	n.prepared(m, moved())
	before := n.state()
	n.prepared(m, moved())
	if diff := before.diff(n.state()); diff != "" || len(daemons.stopped) > 0 {
		t.Errorf("prepared again, stopped %v (-before +after):\n%s", daemons.stopped, diff)
	}
}

// TestAQuarantineThatTheDiskDoesNotGiveSaysSo.
func TestAQuarantineThatTheDiskDoesNotGiveSaysSo(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	inQuarantine(n, n.manager())
	n.fsys = durabletest.Watched{FS: n.disk, Before: failing("read", ".quarantine", 1)}
	list, err := n.manager().Quarantined()
	if err != nil || len(list) != 2 {
		t.Fatalf("in quarantine %+v, %v", list, err)
	}
	for _, q := range list {
		if q.Holder() != "" || !strings.Contains(q.Reason, errDisk.Error()) {
			t.Errorf("%s is in quarantine for %q because of %q", q.GPU, q.Holder(), q.Reason)
		}
		const unknown = "what is to be undone is not known"
		if _, err := n.manager().Prepare(n.ctx, claim("next", result("gpu="+q.GPU))); err == nil || !strings.Contains(prepare.Others(err)[0], unknown) {
			t.Errorf("%s: error %v, want for the log that %s", q.GPU, prepare.Others(err), unknown)
		}
	}
}
