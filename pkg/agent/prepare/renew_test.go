// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// versioned are containers that get files of the driver's version.
type versioned struct {
	cdi.Backend
	machine *nvmlsim.Machine
}

func (v versioned) CommonEdits(ctx context.Context) (*specs.ContainerEdits, error) {
	edits, err := v.Backend.CommonEdits(ctx)
	if err == nil {
		edits.Env = append(edits.Env, "DRIVER="+v.machine.DriverVersion())
	}
	return edits, err
}

// TestAPreparedClaimIsInOrderAfterTheDriverWasLoadedAnew: the driver has forgotten partitions and settings of claims whose pods go on. What is not
// prepared, or not any more, is not prepared by that.
func TestAPreparedClaimIsInOrderAfterTheDriverWasLoadedAnew(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	n.backend = func(b cdi.Backend) cdi.Backend { return versioned{b, n.hardware.machine} }
	m := n.manager()
	exclusive := withConfig(claim("whole", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "Exclusive", ""))
	part := claim("part", "gpu="+gpu1+"-mig-1g10gb-2")
	gone, never := claim("gone", "gpu="+gpu1+"-mig-1g10gb-3"), claim("never", "gpu="+gpu1+"-mig-1g10gb-4")
	n.prepared(m, exclusive)
	n.prepared(m, part)
	n.prepared(m, gone)
	n.unprepare(m, gone.UID)
	before := n.state()

	n.do(&nvmlsim.UnloadDriver{}, &nvmlsim.LoadDriver{Version: "999.1.2"})
	n.hardware.discover(t, dynamic)
	if lost := n.state(); lost.GPUs[0].ComputeMode != nvmlsim.ComputeDefault || len(lost.GPUs[1].Instances) != 0 {
		t.Fatalf("the driver has not forgotten what was done: %+v", lost)
	}
	for range 2 { // once is enough
		for _, c := range []*resourceapi.ResourceClaim{exclusive, part, gone, never} {
			if err := m.Renew(n.ctx, c); err != nil {
				t.Errorf("claim %s: %v", c.Name, err)
			}
		}
		now := n.state()
		if now.GPUs[0].ComputeMode != before.GPUs[0].ComputeMode || len(now.GPUs[1].Instances) != 1 || now.GPUs[1].Instances[0].Start != 2 {
			t.Errorf("compute mode %s, instances %+v", now.GPUs[0].ComputeMode, now.GPUs[1].Instances)
		}
	}
	records, is := n.recordOf(part.UID)
	if is.State() != ledger.PrepareCompleted || !strings.Contains(string(is.Entry.CDISpec), "DRIVER=999.1.2") {
		t.Errorf("%s, containers that start again do not get the files of the driver that there is: %s", is.State(), is.Entry.CDISpec)
	}
	if all, err := records.Records(); err != nil || len(all) != 2 {
		t.Errorf("%d claims are prepared, %v; want 2", len(all), err)
	}
	n.unprepare(m, exclusive.UID)
	n.unprepare(m, part.UID)
	if left := n.state(); left.GPUs[0].ComputeMode != nvmlsim.ComputeDefault || len(left.GPUs[1].Instances) != 0 || left.GPUs[1].MIG {
		t.Errorf("left after unprepare: %+v", left)
	}
}

// TestAClaimOfBeforeARebootIsNotRenewed: no container uses it, and its pod may be gone for good. Prepare does what it needs.
func TestAClaimOfBeforeARebootIsNotRenewed(t *testing.T) {
	n := newNodeOf(t, twoGPUs)
	m := n.manager()
	exclusive := withConfig(claim("whole", "gpu="+gpu0), driverName, sharingConfig("GpuConfig", "Exclusive", ""))
	part := claim("part", "gpu="+gpu1+"-mig-1g10gb-2")
	n.prepared(m, exclusive)
	n.prepared(m, part)
	n.do(&nvmlsim.Reboot{})
	n.hardware.discover(t, dynamic)
	for _, c := range []*resourceapi.ResourceClaim{exclusive, part} {
		if err := m.Renew(n.ctx, c); err != nil {
			t.Errorf("claim %s: %v", c.Name, err)
		}
	}
	if now := n.state(); now.GPUs[0].ComputeMode != nvmlsim.ComputeDefault || now.GPUs[1].MIG {
		t.Errorf("compute mode %s, MIG %t", now.GPUs[0].ComputeMode, now.GPUs[1].MIG)
	}
	n.prepared(m, exclusive)
	n.prepared(m, part)
	if now := n.state(); now.GPUs[0].ComputeMode != nvmlsim.ComputeExclusiveProcess || len(now.GPUs[1].Instances) != 1 {
		t.Errorf("prepared: compute mode %s, instances %+v", now.GPUs[0].ComputeMode, now.GPUs[1].Instances)
	}
}
