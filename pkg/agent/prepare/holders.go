package prepare

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// HeldError says that a GPU of a claim is held by another one.
type HeldError struct {
	Claim           ledger.Claim
	Request, Device string
	// Holder has the GPU. Of one whose record cannot be read no more than the UID is known.
	Holder ledger.Claim
	// Use is what is known of those who use it.
	Use Use
	// Unreadable is the reason if the holder's record cannot be read.
	Unreadable error
}

func (e *HeldError) Error() string {
	what := fmt.Sprintf("claim %s, request %s: device %s", e.Claim, e.Request, e.Device)
	use := e.Use.toldTo(e.Claim, e.Holder)
	switch {
	case e.Unreadable != nil:
		// Its namespace is not known.
		return what + " is still held on this node by a claim whose ledger record cannot be read; node-agent ledger show names it, on the node"
	case e.Use.Ends:
		return fmt.Sprintf("%s waits for %s, %s", what, named(e.Claim, e.Holder), use)
	case use != "":
		return fmt.Sprintf("%s is still held on this node by %s, %s", what, named(e.Claim, e.Holder), use)
	}
	return fmt.Sprintf("%s is still held on this node by %s", what, named(e.Claim, e.Holder))
}

func (e *HeldError) Unwrap() error { return e.Unreadable }

func (e *HeldError) holders() []types.UID { return []types.UID{e.Holder.UID} }

func (e *HeldError) note(_ ledger.Claim, use Use) { e.Use = use }

// UnreadableError says that what was done for a claim is not known, because its record cannot be read. It does not pass before somebody decides.
type UnreadableError struct {
	Claim types.UID
	// Path of the current copy.
	Path string
	// GPUs that the file's name says are held.
	GPUs []string
	Err  error
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("the ledger record %s cannot be read: %v. It holds %s until somebody decides: see node-agent ledger show %s",
		e.Path, durable.Reason(e.Err), strings.Join(e.GPUs, ", "), e.Claim)
}

func (e *UnreadableError) Unwrap() error { return e.Err }

// Unreadable is the error for a record that has one.
func Unreadable(record *ledger.Record) *UnreadableError {
	return &UnreadableError{Claim: record.UID, Path: record.Path, GPUs: heldNames(record), Err: record.Err}
}

// checkHolders refuses devices that another claim holds, judged on the physical GPU: partitions in places that do not
// overlap, and shares as long as the GPU has enough for them, are all that can be held beside each other. That is true
// for as long as the caller has the GPUs' locks.
func (m *Manager) checkHolders(j *job) error {
	entry := j.entry
	for i := range entry.Devices {
		device := &entry.Devices[i]
		if device.AdminAccess {
			continue
		}
		holders, err := m.holders(entry, device)
		if err != nil {
			return err
		}
		if device.Share != nil {
			if err := m.checkShare(j, i, holders); err != nil {
				return err
			}
		}
	}
	return nil
}

// holders are the records that hold the device's GPU beside it. It returns a HeldError if one of them excludes the device.
func (m *Manager) holders(entry *ledger.Entry, device *ledger.Device) ([]*ledger.Record, error) {
	holders, err := m.ledger.Holders(device.GPU)
	if err != nil {
		return nil, fmt.Errorf("claim %s, request %s, device %s: %w", entry.Claim, device.Request, device.Device, err)
	}
	for _, holder := range holders {
		if holder.UID == entry.Claim.UID || holder.Entry != nil && overlapping(holder.Entry, device) == nil {
			continue
		}
		held := &HeldError{Claim: entry.Claim, Request: device.Request, Device: device.Device, Holder: ledger.Claim{UID: holder.UID}, Unreadable: holder.Err}
		if holder.Entry != nil {
			held.Holder = holder.Entry.Claim
		}
		return nil, held
	}
	return holders, nil
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
