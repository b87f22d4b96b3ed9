// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// holders knows from the ledger who has what of the node's GPUs. All but what is asked without a lock is true for as long
// as the caller has the GPU's lock.
type holders struct {
	ledger *ledger.Ledger
	bootID func() (string, error)
	// node gives shares of a GPU to one namespace alone, or to several.
	node             string
	acrossNamespaces bool
}

// preparedBefore returns, without a lock, what was done for a claim that may be prepared; nil for others.
func (h *holders) preparedBefore(uid types.UID) *ledger.Entry {
	record, _ := h.ledger.Get(uid)
	if record == nil || record.State() != ledger.PrepareCompleted {
		return nil
	}
	return record.Entry
}

// check refuses devices that another claim holds, judged on the physical GPU: partitions in places that do not
// overlap, and shares as long as the GPU has enough for them, are all that can be held beside each other.
func (h *holders) check(j *job) error {
	entry := j.entry
	for i := range entry.Devices {
		device := &entry.Devices[i]
		if device.AdminAccess {
			continue
		}
		holders, err := h.of(entry, device)
		if err != nil {
			return err
		}
		if device.Share != nil {
			if err := h.checkShare(j, i, holders); err != nil {
				return err
			}
		}
	}
	return nil
}

// of returns the records that hold the device's GPU beside it. It returns a HeldError if one of them excludes the device.
func (h *holders) of(entry *ledger.Entry, device *ledger.Device) ([]*ledger.Record, error) {
	holders, err := h.ledger.Holders(device.GPU)
	if err != nil {
		return nil, fmt.Errorf("claim %s, request %s, device %s: %w", entry.Claim, device.Request, device.Device, err)
	}
	for _, holder := range holders {
		if holder.UID == entry.Claim.UID ||
			holder.Entry != nil && overlapping(holder.Entry, device) == nil && !onOtherPath(holder.Entry, entry, device) {
			continue
		}
		held := &HeldError{
			Claim: entry.Claim, Request: device.Request, Device: device.Device,
			Holder: ledger.Claim{UID: holder.UID}, Unreadable: holder.Err,
		}
		if holder.Entry != nil {
			held.Holder = holder.Entry.Claim
		}
		return nil, held
	}
	return holders, nil
}

// onOtherPath tells whether one of the two shares the GPU by a claim, and the other one by the device plugin API: a GPU has one path.
func onOtherPath(holder, entry *ledger.Entry, device *ledger.Device) bool {
	none := ledger.PluginDevice{}
	return device.Share != nil && hasShare(holder, device.GPU) && (holder.Claim.Plugin == none) != (entry.Claim.Plugin == none)
}

// overlapping returns a device of the entry that cannot be held beside the other one, nil if there is none.
func overlapping(entry *ledger.Entry, other *ledger.Device) *ledger.Device {
	for i := range entry.Devices {
		device := &entry.Devices[i]
		if !device.AdminAccess && !other.AdminAccess && device.GPU == other.GPU && device.Partition.Overlaps(other.Partition) &&
			(device.Share == nil || other.Share == nil) {
			return device
		}
	}
	return nil
}

// switchedMIG tells whether the GPU's MIG mode was enabled for other claims that have partitions of it. The last
// of them to go takes it back.
func (h *holders) switchedMIG(gpu, bootID string) (bool, error) {
	holders, err := h.ledger.Holders(gpu)
	if err != nil {
		return false, err
	}
	for _, holder := range holders {
		if holder.Entry == nil || holder.Entry.BootID != bootID {
			continue
		}
		for _, step := range holder.Entry.Undo {
			if step.Kind == ledger.StepMIGMode && step.GPU == gpu {
				return true, nil
			}
		}
	}
	return false, nil
}

// adminPods are the pods that use the GPU without holding it.
func (h *holders) adminPods(gpu string) (map[types.UID]bool, error) {
	records, err := h.ledger.Records()
	if err != nil {
		return nil, err
	}
	pods := map[types.UID]bool{}
	for _, record := range records {
		if record.Entry == nil {
			continue
		}
		for _, device := range record.Entry.Devices {
			if device.AdminAccess && device.GPU == gpu {
				for _, pod := range record.Entry.Pods {
					pods[pod] = true
				}
			}
		}
	}
	return pods, nil
}
