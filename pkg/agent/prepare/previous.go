package prepare

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// previous is what the ledger said of a claim before this call.
type previous struct {
	// completed: the kubelet may have been told that the claim is ready, and containers may be running.
	completed bool
	// stale: the current record is lost or is not what it should be, and has to be written again.
	stale bool
	// rebooted: nothing of what was done to GPUs is there any more, and how they were before is how they were at another time.
	rebooted bool
}

// fresh tells that nothing has been done to the claim's GPUs.
func (p previous) fresh() bool { return !p.completed || p.rebooted }

// reconcilePrevious looks at what the ledger already says of the claim, if there is a record of it. An unfinished preparation is undone
// first, so that what it found and changed is not taken for how the GPUs were; so is one of other devices before a reboot. What a completed one
// did goes over into the entry, unless a reboot has ended it. The caller has the locks of the record's GPUs, too.
func (m *Manager) reconcilePrevious(ctx context.Context, record *ledger.Record, entry *ledger.Entry) (previous, error) {
	if record == nil {
		return previous{}, nil
	}
	if record.Err != nil {
		return previous{}, fmt.Errorf("claim %s: %w", entry.Claim, Unreadable(record))
	}
	before := previous{completed: record.Entry.State == ledger.PrepareCompleted}
	if record.Recovered != nil {
		// The record that was lost may have been the completed one.
		klog.FromContext(ctx).Error(record.Recovered, "Ledger record was replaced by its previous copy", "path", record.Path)
		before = previous{completed: true, stale: true}
	}
	if owed, err := m.owes(record.Entry); err != nil {
		return previous{}, err
	} else if owed {
		// It was being unprepared, so nobody uses it.
		before = previous{}
	}
	same := sameDevices(record.Entry, entry)
	if before.completed {
		var err error
		if before.rebooted, err = m.endedByReboot(record.Entry); err != nil {
			return previous{}, fmt.Errorf("claim %s: whether the node was rebooted since it was prepared: %w", entry.Claim, err)
		}
	}
	// What was prepared before a reboot is on no GPU any more, and one of them may have been replaced.
	if !before.completed || !same && before.rebooted {
		if err := m.rollBack(ctx, record.Entry); err != nil {
			return previous{}, fmt.Errorf("undo the earlier preparation of claim %s with the devices %v: %w", entry.Claim, describe(record.Entry), err)
		}
		return previous{}, nil
	}
	if !same {
		return previous{}, fmt.Errorf("claim %s is prepared with the devices %v, but now allocated %v: it has to be unprepared first", entry.Claim, describe(record.Entry), describe(entry))
	}
	entry.CDISpec, entry.Metadata, entry.Completed = record.Entry.CDISpec, record.Entry.Metadata, record.Entry.Completed
	if !before.rebooted {
		entry.Undo, entry.BootID = record.Entry.Undo, record.Entry.BootID
	}
	for i := range entry.Devices {
		before.stale = before.stale || record.Entry.Devices[i].UUID == ""
	}
	before.stale = before.stale || len(joined(entry.Pods, record.Entry.Pods)) > 0
	entry.Pods = remembered(record.Entry.Pods, entry.Pods)
	return before, nil
}

// preparedBefore returns, without a lock, what was done for a claim that may be prepared; nil for others.
func (m *Manager) preparedBefore(uid types.UID) *ledger.Entry {
	record, err := m.ledger.Get(uid)
	if err != nil || record == nil || record.State() != ledger.PrepareCompleted {
		return nil
	}
	return record.Entry
}
