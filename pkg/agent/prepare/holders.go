package prepare

import (
	"fmt"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// HeldError says that a GPU of a claim is held by another one.
type HeldError struct {
	Claim           ledger.Claim
	Request, Device string
	// Holder describes the claim that holds the GPU.
	Holder string
	// Unreadable is the reason if the holder's record cannot be read.
	Unreadable error
}

func (e *HeldError) Error() string {
	message := fmt.Sprintf("claim %s, request %s: device %s is still held on this node by claim %s", e.Claim, e.Request, e.Device, e.Holder)
	if e.Unreadable != nil {
		message += ", whose ledger record cannot be read: " + e.Unreadable.Error()
	}
	return message
}

func (e *HeldError) Unwrap() error { return e.Unreadable }

// checkHolders refuses devices that another claim holds, judged on the physical GPU: partitions in places that do not
// overlap, and shares as long as the GPU has enough for them, are all that can be held beside each other. The caller has
// the GPUs' locks.
func (m *Manager) checkHolders(j *job) error {
	entry := j.entry
	for i := range entry.Devices {
		device := &entry.Devices[i]
		if device.AdminAccess {
			continue
		}
		holders, err := m.ledger.Holders(device.GPU)
		if err != nil {
			return fmt.Errorf("claim %s, request %s, device %s: %w", entry.Claim, device.Request, device.Device, err)
		}
		for _, holder := range holders {
			if holder.UID == entry.Claim.UID || holder.Entry != nil && overlapping(holder.Entry, device) == nil {
				continue
			}
			held := &HeldError{Claim: entry.Claim, Request: device.Request, Device: device.Device, Holder: string(holder.UID), Unreadable: holder.Err}
			if holder.Entry != nil {
				held.Holder = holder.Entry.Claim.String()
			}
			return held
		}
		if device.Share != nil {
			if err := m.checkShare(j, i, holders); err != nil {
				return err
			}
		}
	}
	return nil
}

// overlapping returns a device of the entry that cannot be held beside the other one, nil if there is none.
func overlapping(entry *ledger.Entry, other *ledger.Device) *ledger.Device {
	for i := range entry.Devices {
		device := &entry.Devices[i]
		if !device.AdminAccess && !other.AdminAccess && device.GPU == other.GPU && device.Partition.Overlaps(other.Partition) && (device.Share == nil || other.Share == nil) {
			return device
		}
	}
	return nil
}
