package driver

import (
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/pkg/agent/health"
)

// taintEffects by severity (resource.k8s.io/v1, DeviceTaintEffect).
var taintEffects = map[health.Severity]resourceapi.DeviceTaintEffect{
	health.Notice: resourceapi.DeviceTaintEffectNone,
	health.Avoid:  resourceapi.DeviceTaintEffectNoSchedule,
	health.Evict:  resourceapi.DeviceTaintEffectNoExecute,
}

// TaintKey is the key of the taint for a reason, such as "gpu.nvidia.com/xid".
func TaintKey(reason health.Reason) string { return Name + "/" + string(reason) }

// reasonNotReady is the key of the taint of all devices while claims cannot be prepared on the node.
const reasonNotReady health.Reason = "not-ready"

func notReadyTaint(why string) resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{Key: TaintKey(reasonNotReady), Value: why, Effect: resourceapi.DeviceTaintEffectNoSchedule}
}

// setNotReady tells why claims cannot be prepared, "" if they can, and reports whether that is news.
func (h *Hardware) setNotReady(why string) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed = h.notReady != why
	h.notReady = why
	return changed
}

// taints are what a device's faults ask for, one for each reason: several MIG devices of a GPU may have a fault of the same. A taint is as
// old as the oldest of its faults: the API server would take the time at which it is written, anew whenever the slices were deleted.
func taints(verdict health.Verdict) []resourceapi.DeviceTaint {
	var list []resourceapi.DeviceTaint
	at := map[health.Reason]int{}
	for _, fault := range verdict.Faults {
		since := addedAt(fault.Since)
		if i, ok := at[fault.Reason]; ok {
			if since.Before(list[i].TimeAdded) {
				list[i].TimeAdded = since
			}
			continue
		}
		at[fault.Reason] = len(list)
		list = append(list, resourceapi.DeviceTaint{
			Key:       TaintKey(fault.Reason),
			Value:     fault.Value,
			Effect:    taintEffects[fault.Severity()],
			TimeAdded: since,
		})
	}
	return list
}

// addedAt is a time as the API keeps it; nil if it is not known.
func addedAt(t time.Time) *metav1.Time {
	if t.IsZero() {
		return nil
	}
	return &metav1.Time{Time: t.Truncate(time.Second)}
}
