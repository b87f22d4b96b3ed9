// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// State says how far the preparation of a claim has come.
type State string

const (
	// PrepareStarted: side effects may have happened, the kubelet was never told that the claim is ready.
	PrepareStarted State = "PrepareStarted"
	// PrepareCompleted: the kubelet may have been told, containers may run with the claim's GPUs.
	PrepareCompleted State = "PrepareCompleted"
)

// Entry is what is known of one claim. Fields are only ever added within a schema version.
type Entry struct {
	Claim   Claim     `json:"claim"`
	State   State     `json:"state"`
	Devices []Device  `json:"devices"`
	Updated time.Time `json:"updated"`
	// Completed is when the claim was first PrepareCompleted; zero before, and in records of older agents.
	Completed time.Time `json:"completed,omitzero"`

	// BootID is the boot of the machine in which the side effects were made: a reboot ends what is on a GPU.
	// Records of schema version 1 have none.
	BootID string `json:"bootID,omitempty"`
	// Pods are those that the claim was reserved for when it was prepared: what is left of their processes when
	// it is unprepared has no business on its GPUs any more.
	Pods []types.UID `json:"pods,omitempty"`

	// Undo lists the side effects in the order in which they are done, each recorded before it is done.
	// They are undone in reverse; undoing one that never happened must do nothing.
	Undo []Step `json:"undo,omitempty"`

	// Metadata are the device metadata files as they were written for the claim's containers, by the names of its requests.
	Metadata map[string]json.RawMessage `json:"metadata,omitempty"`
	// CDISpec is the CDI specification as it was written for this claim, so that it can be put back
	// without NVML or the API server.
	CDISpec json.RawMessage `json:"cdiSpec,omitempty"`
}

// Claim names a ResourceClaim, or stands for a device that the kubelet was given through its device plugin API.
type Claim struct {
	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	// Plugin is the device of the device plugin, and empty for a ResourceClaim. Namespace is empty with it, which no claim's is.
	Plugin PluginDevice `json:"plugin,omitzero"`
}

// PluginDevice is a device as the kubelet's device manager knows it.
type PluginDevice struct {
	// Resource is what pods ask for, "nvidia.com/gpu".
	Resource string `json:"resource"`
	// ID is the device's: the UUID of a GPU.
	ID string `json:"id"`
}

// String is the resource and the device's ID, for messages.
func (d PluginDevice) String() string { return d.Resource + " " + d.ID }

// String returns namespace/name (UID), for messages; of a device plugin's device the resource and the ID.
func (c Claim) String() string {
	if c.Plugin != (PluginDevice{}) {
		return c.Plugin.String() + " of the device plugin"
	}
	return c.Namespace + "/" + c.Name + " (" + string(c.UID) + ")"
}

// Device is one allocation result of the claim that this node's agent serves.
type Device struct {
	// Request is the result's request, with the subrequest after a slash if there is one.
	Request string `json:"request"`
	Pool    string `json:"pool"`
	// Device is the name in the ResourceSlice, GPU the physical GPU behind it.
	Device string `json:"device"`
	GPU    string `json:"gpu"`
	// UUID that containers get: the GPU's or, once it is made, the MIG device's. Of a GPU that is passed through it is the
	// PCI address, by which alone it can be known.
	UUID string `json:"uuid"`
	// GPUUUID is the physical GPU's, left out where UUID is.
	GPUUUID string `json:"gpuUUID,omitempty"`
	// Partition is nil for a whole GPU.
	Partition *Partition `json:"partition,omitempty"`
	// Share is nil for a device that the claim has to itself.
	Share *Share `json:"share,omitempty"`
	// Passthrough: it is a whole GPU for a virtual machine.
	Passthrough bool `json:"passthrough,omitempty"`
	// AdminAccess results use the device without holding it.
	AdminAccess bool       `json:"adminAccess,omitempty"`
	ShareID     *types.UID `json:"shareID,omitempty"`
	// CDIDeviceIDs are the fully qualified CDI names that the kubelet was or will be told.
	CDIDeviceIDs []string `json:"cdiDeviceIDs"`
}

// Partition is a place on a GPU for a MIG GPU instance, with one compute instance that is all of it or with several. At most
// one instance can be in a place, so the place finds it again after a crash.
type Partition struct {
	// Profile such as 1g.10gb; ProfileID is the driver's.
	Profile   string `json:"profile"`
	ProfileID uint32 `json:"profileID"`
	// Start and Size are its memory slices.
	Start uint32 `json:"start"`
	Size  uint32 `json:"size"`
	// ComputeStart and ComputeSize are the compute slices of the GPU instance that a compute instance has which has not all
	// of them. With ComputeSize 0 it is the only one.
	ComputeStart uint32 `json:"computeStart,omitempty"`
	ComputeSize  uint32 `json:"computeSize,omitempty"`
}

// String names the place, for messages.
func (p *Partition) String() string {
	if p.ComputeSize > 0 {
		return fmt.Sprintf("%dc.%s at slice %d, compute slice %d", p.ComputeSize, p.Profile, p.Start, p.ComputeStart)
	}
	if p.Size == 0 {
		return "as a whole"
	}
	return fmt.Sprintf("%s at slice %d", p.Profile, p.Start)
}

// Overlaps tells whether both cannot exist at once. A whole GPU is nil, and overlaps everything; a place of size 0 overlaps that alone.
func (p *Partition) Overlaps(q *Partition) bool {
	if p == nil || q == nil {
		return true
	}
	if p.Start == q.Start && p.Size == q.Size && p.ComputeSize > 0 && q.ComputeSize > 0 {
		return p.ComputeStart < q.ComputeStart+q.ComputeSize && q.ComputeStart < p.ComputeStart+p.ComputeSize
	}
	return p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

// Share is a part of a whole GPU that several claims have at once.
type Share struct {
	// MemoryBytes and ComputePercent are what the allocation takes of the GPU; a share may take no percent.
	MemoryBytes    int64 `json:"memoryBytes"`
	ComputePercent int   `json:"computePercent,omitempty"`
	// Setup names how the GPU is set up: all that have a share of it have to agree.
	Setup string `json:"setup"`
}

// StepKind names a kind of side effect. A newer agent may have recorded others.
type StepKind string

// The kinds of side effects, and what their steps' fields are.
const (
	// StepMIGMode: MIG was switched on, on GPU with UUID Target.
	StepMIGMode StepKind = "MIGMode"
	// StepPartition: the MIG instances in the place Partition were made, on GPU with UUID Target.
	StepPartition StepKind = "Partition"
	// StepPersistence: persistence mode was switched on, on GPU with UUID Target.
	StepPersistence StepKind = "Persistence"
	// StepComputeMode: it was changed from Before to Want, on GPU with UUID Target.
	StepComputeMode StepKind = "ComputeMode"
	// StepTimeSlice: it was set to Want, on GPU with UUID Target.
	StepTimeSlice StepKind = "TimeSlice"
	// StepProcesses: the claim's pods may run processes from now on, on GPU with UUID Target, in the place
	// Partition if that is not nil. Before is the memory in use, in bytes, before they did, or before anybody who has a share.
	StepProcesses StepKind = "Processes"
	// StepNoPersistence: persistence mode was switched off, on GPU with UUID Target. Before is who had it on: nvidia-persistenced, or the
	// driver itself if empty.
	StepNoPersistence StepKind = "NoPersistence"
	// StepHidden: NVML does not see the GPU with UUID Target from now on.
	StepHidden StepKind = "Hidden"
	// StepPCIDriver: PCI function Target was taken from the driver Before (none if empty), which it had with Override
	// or without one, and given to Want.
	StepPCIDriver StepKind = "PCIDriver"
	// StepIOMMUGroup: the claim's pods may have IOMMU group Target open from now on.
	StepIOMMUGroup StepKind = "IOMMUGroup"
	// StepMPSDaemon: an MPS daemon with the name Target was started.
	StepMPSDaemon StepKind = "MPSDaemon"
	// StepCDIFile: a CDI specification file was written, and the device metadata that it mounts; Target is the former's path.
	StepCDIFile StepKind = "CDIFile"
)

// Step is one side effect that unprepare, or the roll-back of a failed prepare, takes back.
type Step struct {
	Kind   StepKind `json:"kind"`
	Target string   `json:"target"`
	// GPU is the name of the physical GPU, for steps on one.
	GPU       string     `json:"gpu,omitempty"`
	Partition *Partition `json:"partition,omitempty"`
	Before    string     `json:"before,omitempty"`
	Want      string     `json:"want,omitempty"`
	// Shared steps are done for all claims that have a share of the GPU, each of which records them, and are undone with the
	// last of these.
	Shared   bool   `json:"shared,omitempty"`
	Override string `json:"override,omitempty"`
	// Daemon is how an MPS daemon was started; nil before, and in records of older agents.
	Daemon *Daemon `json:"daemon,omitempty"`
}

// Daemon is what an MPS daemon is started with, besides its name.
type Daemon struct {
	// GPUs, or one MIG device, by UUID.
	GPUs []string `json:"gpus"`
	// ActiveThreadPercentage of a client, and MemoryMiB of a client on each GPU; 0 for no limit.
	ActiveThreadPercentage int     `json:"activeThreadPercentage,omitempty"`
	MemoryMiB              []int64 `json:"memoryMiB,omitempty"`
	// MultiUser is sharing.MultiUser; empty in records of older agents, also of shared steps, which are for several users now.
	MultiUser string `json:"multiUser,omitempty"`
}

// String names the step, for messages.
func (s Step) String() string {
	text := string(s.Kind) + " " + s.Target
	if s.Partition != nil {
		text += " " + s.Partition.String()
	}
	return text
}

// PhysicalUUID is the UUID of the GPU that the device is, or is a part of.
func (d *Device) PhysicalUUID() string {
	if d.GPUUUID != "" {
		return d.GPUUUID
	}
	return d.UUID
}

// HeldGPUs returns the physical GPUs that the claim holds: those of all results without admin access, each
// once, in the order of the results.
func (e *Entry) HeldGPUs() []string {
	var gpus []string
	seen := map[string]bool{}
	for _, device := range e.Devices {
		if !device.AdminAccess && !seen[device.GPU] {
			seen[device.GPU] = true
			gpus = append(gpus, device.GPU)
		}
	}
	return gpus
}
