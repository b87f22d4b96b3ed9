package driver

import (
	resourceapi "k8s.io/api/resource/v1"

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

// taints are what a device's faults ask for, one for each reason: several MIG devices of a GPU may have a fault of the same.
func taints(verdict health.Verdict) []resourceapi.DeviceTaint {
	var list []resourceapi.DeviceTaint
	seen := map[health.Reason]bool{}
	for _, fault := range verdict.Faults {
		if seen[fault.Reason] {
			continue
		}
		seen[fault.Reason] = true
		list = append(list, resourceapi.DeviceTaint{
			Key:    TaintKey(fault.Reason),
			Value:  fault.Value,
			Effect: taintEffects[fault.Severity()],
		})
	}
	return list
}
