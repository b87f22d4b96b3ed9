// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"time"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// Table knows how each kind of step is done and undone.
type Table struct {
	gpus  GPUs
	kept  Kept
	kinds map[ledger.StepKind]kind
}

// kind is how one kind of step is done and undone.
type kind struct {
	// do makes the side effect, or finds that it is there. It is nil if it is not Do that makes it.
	do func(ctx context.Context, claim *Claim, step ledger.Step) error
	// over tells that the claim is past the time when it could be done; nil for never.
	over func(claim *Claim, step ledger.Step) (bool, error)
	// undo takes it back.
	undo func(ctx context.Context, entry *ledger.Entry, step ledger.Step) error
	// outlives: a reboot does not end it.
	outlives bool
}

// Effects are what the table is made of.
type Effects struct {
	GPUs       GPUs
	PCI        PCI
	TimeSlices TimeSlices
	Keeper     Keeper
	Daemons    Daemons
	Files      Files
	Ender      Ender
	Kept       Kept
}

// Kept tells whether what was done to the GPU for all claims that have a share of it has to stay when this one goes.
type Kept func(entry *ledger.Entry, gpu string) (bool, error)

// NewTable has the kinds of steps in the order in which a claim's are done, those of a GPU for a virtual machine last.
func NewTable(e Effects) *Table {
	var (
		migMode     = migMode{e.GPUs, e.PCI}
		partition   = partition{e.GPUs, e.PCI}
		persistence = persistence{e.GPUs}
		noPersist   = noPersistence{persistence, e.Keeper, e.PCI}
		compute     = computeMode{e.GPUs}
		processes   = processes{e.GPUs, e.Ender, e.Kept}
		hidden      = hidden{e.GPUs, e.PCI}
		pciDriver   = pciDriver{e.GPUs, e.PCI}
		group       = iommuGroup{e.PCI, e.Ender}
	)
	return &Table{gpus: e.GPUs, kept: e.Kept, kinds: map[ledger.StepKind]kind{
		ledger.StepMIGMode:     {do: migMode.do, undo: migMode.undo},
		ledger.StepPartition:   {do: partition.do, undo: partition.undo},
		ledger.StepPersistence: {do: persistence.do, undo: persistence.undo},
		ledger.StepComputeMode: {do: compute.do, undo: compute.undo, over: hidden.is},
		ledger.StepTimeSlice:   {do: e.TimeSlices.do, undo: e.TimeSlices.undo},
		ledger.StepProcesses:   {undo: processes.undo}, // the claim's pods start them
		ledger.StepMPSDaemon:   {do: e.Daemons.do, undo: e.Daemons.undo, outlives: true},
		ledger.StepCDIFile:     {undo: e.Files.undo, outlives: true}, // Files.Restore writes it, last of all

		ledger.StepNoPersistence: {do: noPersist.do, undo: noPersist.undo, over: hidden.is},
		ledger.StepHidden:        {undo: hidden.undo}, // the steps after it hide the GPU
		ledger.StepPCIDriver:     {do: pciDriver.do, undo: pciDriver.undo},
		ledger.StepIOMMUGroup:    {undo: group.undo}, // the claim's pods open it
	}}
}

// errUnknown means that a newer agent has recorded the step.
var errUnknown = errors.New("this agent does not know this kind of step")

// Claim is for whom steps are done.
type Claim struct {
	Entry *ledger.Entry
	// Passed are its GPUs that go to virtual machines.
	Passed []cdi.GPU
	// Fresh tells that nothing has been done for it since the last boot.
	Fresh bool
}

// passed is the claim's GPU of that name for a virtual machine, nil if it has none.
func (c *Claim) passed(gpu string) *cdi.GPU {
	for i := range c.Passed {
		if c.Passed[i].Name == gpu {
			return &c.Passed[i]
		}
	}
	return nil
}

// Do makes one side effect, or finds that it is there already.
func (t *Table) Do(ctx context.Context, claim *Claim, step ledger.Step) (err error) {
	kind, known := t.kinds[step.Kind]
	switch {
	case !known:
		return errUnknown
	case kind.do == nil:
		return nil
	case kind.over != nil:
		if over, err := kind.over(claim, step); over || err != nil {
			return err
		}
	}
	defer measure(Preparing, step.Kind, time.Now(), &err)
	return kind.do(ctx, claim, step)
}

// Undo takes one side effect back; one that never happened is taken back with success. What others share stays, and so
// does what a reboot has ended.
func (t *Table) Undo(ctx context.Context, entry *ledger.Entry, step ledger.Step) (err error) {
	kind, known := t.kinds[step.Kind]
	if !known {
		return errUnknown
	}
	defer measure(Unpreparing, step.Kind, time.Now(), &err)
	if step.Shared {
		if kept, err := t.kept(entry, step.GPU); kept || err != nil {
			return err
		}
	}
	if !kind.outlives {
		if ended, err := t.gpus.EndedByReboot(entry); ended || err != nil {
			return err
		}
	}
	return kind.undo(ctx, entry, step)
}
