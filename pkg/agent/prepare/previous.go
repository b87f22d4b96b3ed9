// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
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
// first, so that what it found and changed is not taken for how the GPUs were; so is one of other devices before a reboot. What a completed
// one did goes over into the entry, unless a reboot has ended it. The caller has the locks of the record's GPUs, too.
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
	if owed, err := m.quarantines.owes(record.Entry); err != nil {
		return previous{}, err
	} else if owed {
		// It was being unprepared, so nobody uses it.
		before = previous{}
	}
	same := sameDevices(record.Entry, entry)
	if before.completed {
		var err error
		if before.rebooted, err = m.effects.GPUs.EndedByReboot(record.Entry); err != nil {
			return previous{}, fmt.Errorf("claim %s: whether the node was rebooted since it was prepared: %w", entry.Claim, err)
		}
	}
	// What was prepared before a reboot is on no GPU any more, and one of them may have been replaced.
	if !before.completed || !same && before.rebooted {
		if err := m.undoer.rollBack(ctx, record.Entry); err != nil {
			return previous{}, fmt.Errorf("undo the earlier preparation of claim %s with the devices %v: %w", entry.Claim,
				describe(record.Entry), err)
		}
		return previous{}, nil
	}
	if !same {
		return previous{}, fmt.Errorf("claim %s is prepared with the devices %v, but now allocated %v: it has to be unprepared first",
			entry.Claim, describe(record.Entry), describe(entry))
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

// sameDevices compares what makes a preparation what it is: which result has which physical GPU.
func sameDevices(a, b *ledger.Entry) bool {
	return slices.EqualFunc(a.Devices, b.Devices, func(x, y ledger.Device) bool {
		return reflect.DeepEqual(identityOf(x), identityOf(y))
	})
}

func identityOf(d ledger.Device) ledger.Device {
	is := ledger.Device{
		Request: d.Request, Pool: d.Pool, Device: d.Device, GPU: d.GPU, UUID: d.PhysicalUUID(),
		AdminAccess: d.AdminAccess, Share: d.Share, Partition: d.Partition,
	}
	if d.Share != nil {
		is.ShareID = d.ShareID
	}
	return is
}

// NotePods records pods that have come to use a prepared claim. The kubelet does not call Prepare for them, and what
// is not recorded of them is not looked for when the claim is unprepared. A claim that is not prepared, or whose record
// does not say so for certain, is left alone.
func (m *Manager) NotePods(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	locks := m.locks.Begin()
	defer locks.Unlock()
	if err := locks.Claim(ctx, claim.UID); err != nil {
		return fmt.Errorf("record the pods of claim %s: %w", name(claim), err)
	}
	record, err := m.ledger.Get(claim.UID)
	if record == nil || record.Err != nil || record.Recovered != nil || record.Entry.State != ledger.PrepareCompleted {
		return err
	}
	now := podsOf(claim)
	more := joined(now, record.Entry.Pods)
	// A device of the device plugin is one pod's at a time: the next one's is taken back from the one
	// before when it starts, which it has not yet.
	if next := record.Entry.Claim.Plugin != (ledger.PluginDevice{}) && len(record.Entry.Pods) > 0 && len(more) == len(now); next ||
		len(more) == 0 {
		return nil
	}
	record.Entry.Pods = remembered(record.Entry.Pods, now)
	return m.put(record.Entry, ledger.PrepareCompleted)
}

// maxFormerPods is how many pods are remembered that a claim is not reserved for any more. One that always has a pod is never
// unprepared, and would have ever more of them.
const maxFormerPods = resourceapi.ResourceClaimReservedForMaxSize

// remembered are the pods of now and, before them, those known that are none of them, which may have left something behind.
func remembered(known, now []types.UID) []types.UID {
	former := joined(known, now)
	return append(former[max(0, len(former)-maxFormerPods):], now...)
}

// podsOf are the pods that may use the claim, as far as the API says.
func podsOf(claim *resourceapi.ResourceClaim) []types.UID {
	var pods []types.UID
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			pods = append(pods, consumer.UID)
		}
	}
	return pods
}

// joined are those of the pods that are not known.
func joined(pods, known []types.UID) (more []types.UID) {
	for _, pod := range pods {
		if !slices.Contains(known, pod) {
			more = append(more, pod)
		}
	}
	return more
}
