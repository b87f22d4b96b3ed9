// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"fmt"
	"slices"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
	"stowage.dev/stowage/pkg/inventory/amount"
)

// A GPU that is offered in shares (consumable capacity, KEP-5075) is held by several claims at once. Each of them keeps
// in its own record what it takes of the GPU, and all that has been done to the GPU for them together. What is shared is
// done by the first of them, found done by the others, and undone by the last.

// shareOf reads what an allocation result takes of a GPU that several claims can have; nil for one that is its claim's alone.
func shareOf(
	driver string, result *resourceapi.DeviceRequestAllocationResult, target *Target, settings config.Settings,
) (*ledger.Share, error) {
	if result.ShareID == nil || adminAccess(result) {
		return nil, nil
	}
	if ledger.ValidateUID(*result.ShareID) != nil {
		return nil, fmt.Errorf("shareID %q: want a UID", *result.ShareID)
	}
	if target.Partition != nil {
		return nil, fmt.Errorf("shareID %s: a MIG device cannot be shared by several claims", *result.ShareID)
	}
	memory, err := consumed(driver, result, discovery.CapacityMemory, int64(target.MemoryBytes))
	if err != nil {
		return nil, err
	}
	compute, err := consumed(driver, result, discovery.CapacityCompute, 0)
	if err != nil {
		return nil, err
	}
	return &ledger.Share{MemoryBytes: memory, ComputePercent: int(compute), Setup: settings.Setup()}, nil
}

// consumed is the amount of a capacity that the result takes. The name may have the driver's domain before it.
func consumed(driver string, result *resourceapi.DeviceRequestAllocationResult, name resourceapi.QualifiedName, none int64) (int64, error) {
	quantity, ok := result.ConsumedCapacity[name]
	if !ok {
		quantity, ok = result.ConsumedCapacity[resourceapi.QualifiedName(driver)+"/"+name]
	}
	if !ok {
		return none, nil
	}
	if err := amount.Check(quantity); err != nil {
		return 0, fmt.Errorf("consumedCapacity[%s]: %w", name, err)
	}
	n, exact := quantity.AsInt64()
	if !exact || n < 0 {
		return 0, fmt.Errorf("consumedCapacity[%s]: %s: want a whole number that is not negative", name, quantity.String())
	}
	return n, nil
}

// checkShare refuses a share that does not go with those of the others. Of the holders, which are those of
// h.of, all but the claim itself can be read.
func (h *holders) checkShare(j *job, i int, holders []*ledger.Record) error {
	device, total := &j.entry.Devices[i], int64(j.targets[i].MemoryBytes)
	refused := &ShareError{Claim: j.entry.Claim, Request: device.Request, Device: device.Device}
	var memory, compute int64
	add := func(entry *ledger.Entry) {
		for _, d := range entry.Devices {
			if d.GPU == device.GPU && d.Share != nil {
				memory += d.Share.MemoryBytes
				compute += int64(d.Share.ComputePercent)
			}
		}
	}
	add(j.entry)
	for _, holder := range holders {
		if holder.UID == j.entry.Claim.UID || !hasShare(holder.Entry, device.GPU) {
			continue
		}
		if !h.acrossNamespaces && !j.prepared && holder.Entry.Claim.Namespace != j.entry.Claim.Namespace {
			refused.Apart, refused.Others = h.node, []ledger.Claim{holder.Entry.Claim}
			return refused
		}
		for _, d := range holder.Entry.Devices {
			if d.GPU == device.GPU && d.Share != nil && d.Share.Setup != device.Share.Setup {
				refused.Setup, refused.Wants = d.Share.Setup, device.Share.Setup
				refused.Others = []ledger.Claim{holder.Entry.Claim}
				return refused
			}
		}
		add(holder.Entry)
		refused.Others = append(refused.Others, holder.Entry.Claim)
	}
	switch {
	case memory > total:
		refused.Capacity, refused.Taken, refused.Total = discovery.CapacityMemory, bytes(memory), bytes(total)
	case compute > discovery.AllCompute:
		refused.Capacity, refused.Taken, refused.Total = discovery.CapacityCompute, percent(compute), percent(discovery.AllCompute)
	default:
		return nil
	}
	return refused
}

func bytes(n int64) string   { return resource.NewQuantity(n, resource.BinarySI).String() }
func percent(n int64) string { return strconv.FormatInt(n, 10) + "%" }

// sharers are the other claims with a share of the GPU that are set up since the boot, unreadable ones among them. One of so many GPUs that
// its file cannot name them holds them all as far as the ledger knows.
func (h *holders) sharers(gpu string, but types.UID, bootID string) ([]*ledger.Record, error) {
	holders, err := h.ledger.Holders(gpu)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(holders, func(r *ledger.Record) bool {
		return r.UID == but || r.Entry != nil && (bootID != "" && r.Entry.BootID != bootID || !hasShare(r.Entry, gpu))
	}), nil
}

func hasShare(entry *ledger.Entry, gpu string) bool {
	return slices.ContainsFunc(entry.Devices, func(d ledger.Device) bool { return d.GPU == gpu && d.Share != nil })
}

// kept tells whether what was done to the GPU for all that have a share of it has to stay. Not knowing is yes:
// pods may run.
func (h *holders) kept(entry *ledger.Entry, gpu string) (bool, error) {
	bootID, _ := h.bootID() // if it is not known, a claim may be of this boot
	others, err := h.sharers(gpu, entry.Claim.UID, bootID)
	return len(others) > 0, err
}

// shareSteps bring a GPU to the state that its sharers have agreed on: what has been done for others already, and what is
// missing.
func (d *decider) shareSteps(j *job, gpu string, settings config.Settings, now *steps.Observed) ([]ledger.Step, error) {
	list, err := wholeSteps(settings, now)
	if err != nil {
		return nil, err
	}
	others, err := d.holders.sharers(gpu, j.entry.Claim.UID, j.entry.BootID)
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].Shared = list[i].Kind != ledger.StepProcesses
	}
	for _, other := range others {
		if other.Entry == nil {
			continue
		}
		for _, theirs := range other.Entry.Undo {
			if theirs.GPU != gpu || !slices.Contains(setupOrder, theirs.Kind) {
				continue
			}
			// How the GPU was before, the first of them knows.
			if i := slices.IndexFunc(list, func(s ledger.Step) bool { return s.Kind == theirs.Kind }); i >= 0 {
				list[i].Before = theirs.Before
			} else {
				list = append(list, theirs)
			}
		}
		break
	}
	slices.SortStableFunc(list, func(a, b ledger.Step) int {
		return slices.Index(setupOrder, a.Kind) - slices.Index(setupOrder, b.Kind)
	})
	return list, nil
}

// setupOrder has the steps on a GPU that is used as a whole.
var setupOrder = []ledger.StepKind{ledger.StepPersistence, ledger.StepComputeMode, ledger.StepTimeSlice, ledger.StepProcesses}
