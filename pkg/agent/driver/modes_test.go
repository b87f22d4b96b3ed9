// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// change updates a claim that allocate has made.
func (m *machine) change(name string, f func(*resourceapi.AllocationResult)) {
	m.t.Helper()
	claims := m.client.ResourceV1().ResourceClaims("default")
	claim, err := claims.Get(m.t.Context(), name, metav1.GetOptions{})
	must(m.t, err)
	f(claim.Status.Allocation)
	_, err = claims.UpdateStatus(m.t.Context(), claim, metav1.UpdateOptions{})
	must(m.t, err)
}

// strategy gives the claim parameters for sharing.
func strategy(name, fields string) func(*resourceapi.AllocationResult) {
	return func(a *resourceapi.AllocationResult) {
		parameters := `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"` + name + `"` + fields + `}}`
		a.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: driver.Name, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
			}},
		}}
	}
}

// share makes the claim's device a share of it.
func share(id types.UID, memory string) func(*resourceapi.AllocationResult) {
	return func(a *resourceapi.AllocationResult) {
		a.Devices.Results[0].ShareID = ptr.To(id)
		a.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{discovery.CapacityMemory: resource.MustParse(memory)}
	}
}

// setups are the GPUs as they are set up, without what is observed of them.
func (m *machine) setups() []nvmlsim.GPUState {
	gpus := slices.Clone(m.gpus.State().GPUs)
	for i := range gpus {
		// Functions are listed once they have been changed.
		if !gpus[i].Detached() {
			gpus[i].Functions = nil
		}
		gpus[i].Health = nvmlsim.Health{}
	}
	return gpus
}

// TestEveryGPUOfANodeInAnotherMode: claims for partitions, time slices, MPS, a whole GPU, shares, an exclusive GPU and a GPU for a virtual
// machine come and go in one call each. Each GPU is set up for its own, what is wrong with one is wrong with no other, and in the
// end all are as they were.
func TestEveryGPUOfANodeInAnotherMode(t *testing.T) {
	t.Parallel()
	const mig0, mig4 = gpu0 + "-mig-1g10gb-0", gpu0 + "-mig-3g40gb-4"
	gpus := []string{
		gpu0, gpu1, "gpu-0000-52-00-0", "gpu-0000-61-00-0", "gpu-0000-9d-00-0", "gpu-0000-c3-00-0", "gpu-0000-d1-00-0", "gpu-0000-df-00-0",
	}
	m := newMachine(t)
	m.adjust = func(o *driver.Options) {
		var err error
		o.Shares, err = discovery.ParseShares(gpus[4], "1Gi", 5)
		must(t, err)
		o.DynamicPartitions, o.Passthrough = true, true
		o.PCI, o.Users = vfio.NewBinder(m.gpus.NVML().Sysfs()), vfio.Simulated{Machine: m.gpus}
	}
	m.run("")
	m.register(driver.Name + "-reg.sock")
	eventually(t, "the GPUs are published", func() error {
		if published := m.published(); !slices.Contains(published, gpus[7]+"-vfio") {
			return fmt.Errorf("published are %v", published)
		}
		return nil
	})
	before := m.setups()

	var claims []*drapb.Claim
	for name, c := range map[string]struct {
		device string
		change func(*resourceapi.AllocationResult)
	}{
		"mig-a":     {mig0, nil},
		"mig-b":     {mig4, nil},
		"slices":    {gpus[1], strategy("TimeSlicing", `,"timeSlicingConfig":{"interval":"Long"}`)},
		"mps":       {gpus[2], strategy("MPS", `,"mpsConfig":{"defaultActiveThreadPercentage":50}`)},
		"whole":     {gpus[3], nil},
		"share-a":   {gpus[4], share("share-a", "10Gi")},
		"share-b":   {gpus[4], share("share-b", "20Gi")},
		"vm":        {gpus[5] + "-vfio", nil},
		"exclusive": {gpus[6], strategy("Exclusive", "")},
	} {
		claims = append(claims, m.allocate(name, c.device))
		if c.change != nil {
			m.change(name, c.change)
		}
	}
	prepared, err := m.plugin().NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: claims})
	must(t, err)
	for uid, answer := range prepared.GetClaims() {
		if answer.GetError() != "" {
			t.Errorf("prepare of %s: %s", uid, answer.GetError())
			continue
		}
		must(t, m.resolve(answer.GetDevices()[0].GetCdiDeviceIds()...))
	}
	if t.Failed() {
		return
	}

	want := slices.Clone(before)
	for i := range want {
		switch i {
		case 0:
			want[i].MIG, want[i].PendingMIG = true, true
		case 1:
			want[i].TimeSlice = nvmlsim.TimeSliceLong
		case 2, 6:
			want[i].ComputeMode = nvmlsim.ComputeExclusiveProcess
		case 5:
			want[i].Persistence = false // the virtual machine has it
		}
	}
	now := m.setups()
	if diff := cmp.Diff(want, now, cmpopts.IgnoreFields(nvmlsim.GPUState{}, "Instances", "Functions", "Processes"), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("GPUs in use (-want +got):\n%s", diff)
	}
	for i := range now {
		if now[i].Detached() != (i == 5) {
			t.Errorf("GPU %d is with a virtual machine: %v", i, now[i].Detached())
		}
		if n := map[int]int{0: 2}[i]; len(now[i].Instances) != n {
			t.Errorf("GPU %d has %d MIG instances, want %d", i, len(now[i].Instances), n)
		}
	}
	if daemons := m.gpus.State().Daemons; len(daemons) != 1 {
		t.Errorf("MPS daemons: %v, want one", daemons)
	}

	// What is wrong with the partition and with the GPU in time slices.
	instance := now[0].Instances[slices.IndexFunc(now[0].Instances, func(g nvmlsim.GPUInstance) bool { return g.Start == 4 })]
	m.do(&nvmlsim.RaiseXID{GPU: "0", Code: 46, Instance: &nvmlsim.Instance{GPU: instance.ID, Compute: instance.Compute[0].ID}})
	m.do(&nvmlsim.RaiseXID{GPU: "1", Code: 46})
	eventually(t, "these have taints, and no others", func() error {
		var well, ill []string
		for device, taints := range m.devices() {
			switch sick := device == mig4 || strings.HasPrefix(device, gpus[1]); {
			case sick && len(taints) == 0:
				well = append(well, device)
			case !sick && len(taints) > 0:
				ill = append(ill, device)
			}
		}
		if len(well)+len(ill) > 0 {
			return errors.New("without a taint: " + strings.Join(well, ", ") + "; with one: " + strings.Join(ill, ", "))
		}
		return nil
	})

	released, err := m.plugin().NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: claims})
	must(t, err)
	for uid, answer := range released.GetClaims() {
		if answer.GetError() != "" {
			t.Errorf("unprepare of %s: %s", uid, answer.GetError())
		}
	}
	if diff := cmp.Diff(before, m.setups(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("GPUs in the end (-before +now):\n%s", diff)
	}
	if daemons := m.gpus.State().Daemons; len(daemons) != 0 {
		t.Errorf("MPS daemons in the end: %v", daemons)
	}
}
