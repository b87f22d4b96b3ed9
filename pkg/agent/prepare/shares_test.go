// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// prepared prepares the claim.
func (n *node) prepared(m *prepare.Manager, c *resourceapi.ResourceClaim) []ledger.Device {
	n.t.Helper()
	devices, err := m.Prepare(n.ctx, c)
	if err != nil {
		n.t.Fatal(err)
	}
	return devices
}

func (n *node) unprepare(m *prepare.Manager, uid types.UID) {
	n.t.Helper()
	if err := m.Unprepare(n.ctx, uid); err != nil {
		n.t.Fatal(err)
	}
}

func TestSharesOfAGPUAreHeldSideBySide(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	n.do(&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess}) // an administrator's, which comes back with the last
	before := n.setting(0)
	shared := setting{Compute: nvmlsim.ComputeDefault}

	for _, name := range []string{"one", "two"} {
		for range 2 { // the second time it is prepared already
			got := n.prepared(m, sharedBy(name, "20Gi:25", ""))
			want := []ledger.Device{{
				Request: "gpu", Pool: pool, Device: gpu0, ShareID: ptr.To(types.UID(name + "-share")),
				CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=" + name + "-uid_gpu_" + gpu0 + "_" + name + "-share"},
			}}
			if diff := cmp.Diff(want, got, told); diff != "" {
				t.Errorf("devices of %s (-want +got):\n%s", name, diff)
			}
			if diff := cmp.Diff([]string{n.hardware.uuid(gpu0)}, n.visible(got)); diff != "" {
				t.Errorf("GPUs in the container of %s (-want +got):\n%s", name, diff)
			}
			for _, want := range []string{"SHARE_GPU_0000_1B_00_0_MEMORY_MIB=20480", "SHARE_GPU_0000_1B_00_0_COMPUTE_PERCENT=25"} {
				if env := n.env(got); !slices.Contains(env, want) {
					t.Errorf("environment %v of %s lacks %s", env, name, want)
				}
			}
		}
	}
	if diff := cmp.Diff(shared, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("setting for two (-want +got):\n%s", diff)
	}
	n.unprepare(m, "one-uid")
	if diff := cmp.Diff(shared, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("setting for the one that is left (-want +got):\n%s", diff)
	}
	n.unprepare(m, "two-uid")
	if diff := cmp.Diff(before, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("setting after the last (-before the first +after):\n%s", diff)
	}
	if left := n.files(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestAShareThatAsksForSeveralUsersIsNotServedOneByOne: where the driver cannot do that its claim is refused, and others are not.
func TestAShareThatAsksForSeveralUsersIsNotServedOneByOne(t *testing.T) {
	asks := sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"multiUser":true}`)
	secondAsks := withConfig(claim("second", "a="+gpu0+"+share:a:4Gi:10", "b="+gpu0+"+share:b:4Gi:10"), driverName, asks)
	secondAsks.Status.Allocation.Devices.Config[0].Requests = []string{"b"}
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  sharing.MultiUser
	}{
		"it says nothing":      {claim: sharedBy("one", "20Gi:25", ""), want: sharing.MultiUserIfPossible},
		"it says no":           {claim: sharedBy("one", "20Gi:25", sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"multiUser":false}`)), want: sharing.MultiUserIfPossible},
		"it asks":              {claim: sharedBy("one", "20Gi:25", asks), want: sharing.MultiUserYes},
		"its other share asks": {claim: secondAsks, want: sharing.MultiUserYes},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.rules.Shares = config.MPS
			m := n.manager()
			n.prepared(m, sharedBy("before", "8Gi:10", ""))
			n.prepared(m, tc.claim)
			_, record := n.recordOf(tc.claim.UID)
			var got []string
			for _, step := range record.Entry.Undo {
				if step.Daemon != nil {
					got = append(got, step.Daemon.MultiUser)
				}
			}
			if diff := cmp.Diff([]string{string(tc.want)}, got); diff != "" {
				t.Errorf("the daemon is for several users (-want +got):\n%s", diff)
			}
		})
	}
}

// TestOneMPSDaemonServesAllWhoShareAGPU: each brings its own limits along.
func TestOneMPSDaemonServesAllWhoShareAGPU(t *testing.T) {
	n := newNode(t)
	n.rules.Shares = config.MPS
	m := n.manager()
	served := setting{Compute: nvmlsim.ComputeExclusiveProcess, Daemons: []nvmlsim.Daemon{{Name: gpu0, GPUs: []string{"GPU"}, MultiUser: true}}}
	tests := []struct {
		claim *resourceapi.ResourceClaim
		want  []string
		never string
	}{
		{
			claim: sharedBy("one", "20Gi:25", underMPS),
			want:  []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"},
		},
		{
			claim: sharedBy("two", "30Gi:0", ""), // that it asks for nothing changes nothing
			want:  []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=30720M"}, never: "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
		},
		{ // four processes in one share
			claim: sharedBy("three", "8Gi:40", sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultActiveThreadPercentage":10,"defaultPinnedDeviceMemoryLimit":"2Gi"}`)),
			want:  []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2048M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10", "SHARE_GPU_0000_1B_00_0_MEMORY_MIB=8192"},
		},
		{ // two shares in one request
			claim: withConfig(claim("four", "gpu="+gpu0+"+share:a:4Gi:10", "gpu="+gpu0+"+share:b:1Gi:5", "other="+gpu0+"+share:c:2Gi:5"), driverName, underMPS),
			want:  []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5120M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=15", "NVIDIA_VISIBLE_DEVICES=" + n.hardware.uuid(gpu0)},
		},
		{ // one of them without a limit
			claim: withConfig(claim("five", "gpu="+gpu0+"+share:d:1Gi:5", "gpu="+gpu0+"+share:e:1Gi:0"), driverName, underMPS),
			want:  []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2048M"}, never: "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
		},
	}
	for _, tc := range tests {
		devices := n.prepared(m, tc.claim)
		env := n.env(slices.DeleteFunc(slices.Clone(devices), func(d ledger.Device) bool { return d.Request == "other" }))
		for _, want := range tc.want {
			if !slices.Contains(env, want) {
				t.Errorf("%s: environment %v lacks %s", tc.claim.Name, env, want)
			}
		}
		if tc.never != "" && strings.Contains(strings.Join(env, "\n"), tc.never) {
			t.Errorf("%s: environment %v has %s", tc.claim.Name, env, tc.never)
		}
		if diff := cmp.Diff(served, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("setting for %s (-want +got):\n%s", tc.claim.Name, diff)
		}
	}
	for i, tc := range tests {
		n.unprepare(m, tc.claim.UID)
		want := served
		if i == len(tests)-1 {
			want = setting{Compute: nvmlsim.ComputeDefault}
		}
		if diff := cmp.Diff(want, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("setting when %s has gone (-want +got):\n%s", tc.claim.Name, diff)
		}
	}
}

func TestSharesThatDoNotGoTogether(t *testing.T) {
	tests := map[string]struct {
		shares        config.Strategy
		first, second *resourceapi.ResourceClaim
		want          []string
		// holds tells that the error is about who holds the GPU, and not about what is shared.
		holds bool
		// bad input is no matter of the others.
		bad bool
		// refused are the claim's parameters.
		refused bool
	}{
		"more memory than there is": {
			first: sharedBy("one", "50Gi:25", ""), second: sharedBy("two", "30Gi:25", ""),
			want: []string{"default/two", "80Gi of the 81559Mi memory", "default/one"},
		},
		"more compute than there is": {
			first: sharedBy("one", "10Gi:75", ""), second: sharedBy("two", "10Gi:30", ""),
			want: []string{"105% of the 100% compute", "default/one"},
		},
		"too much for a GPU that nobody has": {
			second: sharedBy("two", "90Gi:30", ""), want: []string{"90Gi of the 81559Mi memory", "nobody else"},
		},
		"all of a GPU that is shared": {
			first: sharedBy("one", "10Gi:0", ""), second: claim("two", "gpu="+gpu0), want: []string{"held on this node by claim default/one"}, holds: true,
		},
		"a share of a GPU that is somebody's": {
			first: claim("one", "gpu="+gpu0), second: sharedBy("two", "10Gi:0", ""), want: []string{"held on this node by claim default/one"}, holds: true,
		},
		"a share of a GPU that is partitioned": {
			first: claim("one", "gpu="+gpu0+"-mig-1g10gb-0"), second: sharedBy("two", "10Gi:0", ""), want: []string{"held on this node by claim default/one"}, holds: true,
		},
		"more for a process than for all": {
			shares: config.MPS,
			second: sharedBy("two", "10Gi:10", sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultPinnedDeviceMemoryLimit":"11Gi"}`)),
			want:   []string{"default/two", "sharing.mpsConfig", "11264Mi", "10240Mi"}, bad: true, refused: true,
		},
		"more threads for a process than for all": {
			shares: config.MPS,
			second: sharedBy("two", "10Gi:10", sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultActiveThreadPercentage":15}`)),
			want:   []string{"defaultActiveThreadPercentage: 15", "10"}, bad: true, refused: true,
		},
		"a limit for a device that the share is not": {
			shares: config.MPS,
			second: sharedBy("two", "10Gi:10", sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}`)),
			want:   []string{"request gpu", `defaultPerDevicePinnedMemoryLimit["1"]`, "only 1"}, bad: true, refused: true,
		},
		"two daemons for one container": {
			shares: config.MPS,
			second: withConfig(claim("two", "a="+gpu0+"+share:a:4Gi:10", "b="+gpu1+"+share:b:1Gi:5"), driverName, underMPS),
			want:   []string{"request b", "one MPS daemon"}, bad: true, refused: true,
		},
		"a share of a partition":    {second: claim("two", "gpu="+gpu0+"-mig-1g10gb-0+share:a:4Gi:10"), want: []string{"request gpu", "shareID a", "MIG"}, bad: true},
		"a share without a name":    {second: claim("two", "gpu="+gpu0+"+share::4Gi:10"), want: []string{`shareID ""`}, bad: true},
		"a share that is a path":    {second: claim("two", "gpu="+gpu0+"+share:../x:4Gi:10"), want: []string{`shareID "../x"`}, bad: true},
		"a share of less than none": {second: claim("two", "gpu="+gpu0+"+share:a:-4Gi:10"), want: []string{"consumedCapacity[memory]", "-4Gi"}, bad: true},
		"a fraction of a percent":   {second: claim("two", "gpu="+gpu0+"+share:a:4Gi:500m"), want: []string{"consumedCapacity[compute]", "500m"}, bad: true},
		"one share twice":           {second: claim("two", "a="+gpu0+"+share:a:4Gi:10", "b="+gpu0+"+share:a:4Gi:10"), want: []string{"allocated twice", "a and b"}, bad: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.rules.Shares = tc.shares
			m := n.manager()
			if tc.first != nil {
				n.prepared(m, tc.first)
			}
			before := n.state()
			_, err := m.Prepare(n.ctx, tc.second)
			if err == nil {
				t.Fatal("prepared")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			var held *prepare.HeldError
			var share *prepare.ShareError
			if errors.As(err, &held) != tc.holds || errors.As(err, &share) != !(tc.holds || tc.bad) {
				t.Errorf("error %T: %v", err, err)
			}
			if tc.bad {
				checkRefusal(t, err, tc.refused)
			}
			if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("machine (-before +after):\n%s", diff)
			}
			if tc.first != nil {
				n.unprepare(m, tc.first.UID)
				if _, err := m.Prepare(n.ctx, tc.second); err != nil {
					t.Errorf("when the other has gone: %v", err)
				}
			}
		})
	}
}

// TestACapacityMayHaveTheDriversName, and what is not said is all of the memory.
func TestACapacityMayHaveTheDriversName(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	named := sharedBy("one", "1Gi:0", "")
	named.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{driverName + "/memory": resource.MustParse("3Gi")}
	if env := n.env(n.prepared(m, named)); !slices.Contains(env, "SHARE_GPU_0000_1B_00_0_MEMORY_MIB=3072") {
		t.Errorf("environment %v", env)
	}
	silent := sharedBy("two", "1Gi:0", "")
	silent.Status.Allocation.Devices.Results[0].ConsumedCapacity = nil
	if _, err := m.Prepare(n.ctx, silent); err == nil || !strings.Contains(err.Error(), "84631Mi of the 81559Mi") {
		t.Errorf("a share of all of it beside another: %v", err)
	}
}

// TestAShareIsTakenBackFromItsOwnPodsAlone: the processes of others that share the GPU go on.
func TestAShareIsTakenBackFromItsOwnPodsAlone(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	n.prepared(m, reservedFor(sharedBy("one", "20Gi:25", ""), "pod-one"))
	n.do(
		&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 1, Kind: nvmlsim.ProcessCompute, MemoryMiB: 1000, Pod: "pod-one"}},
		// It came to use the claim after it was prepared, which nobody tells.
		&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 2, Kind: nvmlsim.ProcessCompute, MemoryMiB: 1000, Pod: "pod-late"}},
	)
	n.prepared(m, reservedFor(sharedBy("two", "20Gi:25", ""), "pod-two"))
	n.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 3, Kind: nvmlsim.ProcessCompute, MemoryMiB: 1000, Pod: "pod-two"}})
	n.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 2})

	n.unprepare(m, "one-uid")
	var left []uint32
	for _, p := range n.gpu(0).Processes {
		left = append(left, p.PID)
	}
	if diff := cmp.Diff([]uint32{3}, left); diff != "" {
		t.Errorf("processes (-want +got):\n%s", diff)
	}
	if list, err := m.Quarantined(); err != nil || len(list) > 0 {
		t.Errorf("quarantined: %+v, %v", list, err)
	}
	// Memory that nobody has may be the other's as long as there is one, and not any more when the last has gone.
	n.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 3}, &nvmlsim.LeakMemory{GPU: "0", MemoryMiB: 2000})
	n.prepared(m, sharedBy("three", "20Gi:25", ""))
	n.unprepare(m, "three-uid")
	if list, err := m.Quarantined(); err != nil || len(list) > 0 {
		t.Errorf("quarantined while another has a share: %+v, %v", list, err)
	}
	n.options.EndTimeout = 200 * time.Millisecond // it is waited for in vain
	n.unprepare(n.manager(), "two-uid")
	if list, err := m.Quarantined(); err != nil || len(list) != 1 || !strings.Contains(list[0].Reason, "of memory are in use") {
		t.Errorf("quarantined after the last: %+v, %v", list, err)
	}
}

// TestAForeignProcessIsNoShare: nobody has the GPU, and a process of some pod is on it.
func TestAForeignProcessIsNoShare(t *testing.T) {
	n := newNode(t)
	n.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 1, Kind: nvmlsim.ProcessCompute, MemoryMiB: 1000, Pod: "stranger"}})
	_, err := n.manager().Prepare(n.ctx, sharedBy("one", "20Gi:25", ""))
	var busy *prepare.BusyError
	if !errors.As(err, &busy) || busy.Pod != "stranger" {
		t.Errorf("error %v, want that the GPU is in use by the stranger", err)
	}
}

// TestSharesAfterAReboot: each that comes back sets the GPU up again, and one whose pod does not come back undoes nothing of it.
func TestSharesAfterAReboot(t *testing.T) {
	n := newNode(t)
	n.rules.Shares = config.MPS
	m := n.manager()
	n.prepared(m, sharedBy("one", "20Gi:25", underMPS))
	n.prepared(m, sharedBy("two", "20Gi:25", underMPS))
	n.do(&nvmlsim.Reboot{})
	n.hardware.discover(t, dynamic)
	m = n.manager()
	if _, err := m.Recover(n.ctx); err != nil {
		t.Fatal(err)
	}
	n.prepared(m, sharedBy("two", "20Gi:25", underMPS))
	served := setting{Compute: nvmlsim.ComputeExclusiveProcess, Daemons: []nvmlsim.Daemon{{Name: gpu0, GPUs: []string{"GPU"}, MultiUser: true}}}
	for _, step := range []struct {
		name string
		do   func()
		want setting
	}{
		{"one came back", func() {}, served},
		{"the other went without", func() { n.unprepare(m, "one-uid") }, served},
		{"a third joined", func() { n.prepared(m, sharedBy("three", "20Gi:25", underMPS)) }, served},
		{"the one that came back went", func() { n.unprepare(m, "two-uid") }, served},
		{"all went", func() { n.unprepare(m, "three-uid") }, setting{Compute: nvmlsim.ComputeDefault}},
		{"two of the next", func() {
			n.prepared(m, sharedBy("four", "20Gi:25", underMPS))
			n.prepared(m, sharedBy("five", "20Gi:25", underMPS))
		}, served},
		{"one of them came back and went, and the other was not seen again", func() {
			n.do(&nvmlsim.Reboot{})
			n.hardware.discover(t, dynamic)
			n.prepared(m, sharedBy("four", "20Gi:25", underMPS))
			n.unprepare(m, "four-uid")
		}, setting{Compute: nvmlsim.ComputeDefault}},
		{"the other went, too", func() { n.unprepare(m, "five-uid") }, setting{Compute: nvmlsim.ComputeDefault}},
	} {
		step.do()
		if diff := cmp.Diff(step.want, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
	}
}

// TestSomeoneWhoCannotBeReadKeepsWhatIsShared: its pods may run.
func TestSomeoneWhoCannotBeReadKeepsWhatIsShared(t *testing.T) {
	n := newNode(t)
	n.rules.Shares = config.MPS
	m := n.manager()
	n.prepared(m, sharedBy("one", "20Gi:25", ""))
	n.prepared(m, sharedBy("two", "20Gi:25", ""))
	shared := n.setting(0)
	for _, suffix := range []string{".claim", ".claim.prev"} {
		if err := os.WriteFile(filepath.Join(n.claimsDir(), "two-uid_"+gpu0+suffix), []byte("garbage"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n.unprepare(m, "one-uid")
	if diff := cmp.Diff(shared, n.setting(0)); diff != "" {
		t.Errorf("taken from a claim that may be in use (-for two +now):\n%s", diff)
	}
	if _, err := m.Prepare(n.ctx, sharedBy("three", "20Gi:25", "")); err == nil || strings.Contains(err.Error(), "two-uid") || !strings.Contains(strings.Join(prepare.Others(err), ""), "two-uid") {
		t.Errorf("a share beside one that is not known: %v", err)
	}
}

// TestAClaimOfManyGPUsSharesNoOther: its file cannot name so many, and is found for each GPU of the node. What was done for the shares of another
// GPU is taken back when they have gone.
func TestAClaimOfManyGPUsSharesNoOther(t *testing.T) {
	n := newNode(t)
	n.rules.Shares = config.MPS
	m := n.manager()
	boot, err := n.hardware.BootID()
	if err != nil {
		t.Fatal(err)
	}
	many := &ledger.Entry{Claim: ledger.Claim{Namespace: "default", Name: "many", UID: "many-uid"}, State: ledger.PrepareCompleted, BootID: boot}
	for i := range 15 {
		gpu := fmt.Sprintf("gpu-0001-%02x-00-0", i)
		many.Devices = append(many.Devices, ledger.Device{Request: "gpu", Pool: "node-a", Device: gpu, GPU: gpu, UUID: "GPU-" + gpu})
	}
	records := ledger.At(durable.OS{}, n.claimsDir())
	if err := records.Put(many); err != nil {
		t.Fatal(err)
	}
	if record, err := records.Get("many-uid"); err != nil || record == nil || !record.Holds(gpu0) || record.Entry == nil {
		t.Fatalf("%+v, %v: want a readable record that is found for %s", record, err, gpu0)
	}
	n.prepared(m, sharedBy("one", "20Gi:25", underMPS))
	n.prepared(m, sharedBy("two", "20Gi:25", underMPS))
	n.unprepare(m, "one-uid")
	n.unprepare(m, "two-uid")
	if diff := cmp.Diff(setting{Compute: nvmlsim.ComputeDefault}, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("left on the GPU (-want +got):\n%s", diff)
	}
}

// TestADaemonOfSharesThatDoesNotEndKeepsItsGPUAlone: what the claim has beside the share, nobody's daemon serves.
func TestADaemonOfSharesThatDoesNotEndKeepsItsGPUAlone(t *testing.T) {
	n := newNode(t)
	n.rules.Shares = config.MPS
	n.tools.Daemons = &stuckDaemons{Daemons: n.tools.Daemons, stuck: true}
	m := n.manager()
	c := withConfig(claim("train", "share="+gpu1+"+share:a:4Gi:10", "gpu="+gpu0), driverName, underMPS)
	c.Status.Allocation.Devices.Config[0].Requests = []string{"share"}
	n.prepared(m, c)
	n.unprepare(m, c.UID)
	if list, err := m.Quarantined(); err != nil || len(list) != 1 || list[0].GPU != gpu1 {
		t.Errorf("in quarantine: %+v, %v; want %s alone", list, err, gpu1)
	}
	n.prepared(m, claim("next", "gpu="+gpu0))
}
