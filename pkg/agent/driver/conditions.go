// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"encoding/json"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// Conditions of a device in a claim's status (resource.k8s.io/v1, AllocatedDeviceStatus).
const (
	// ConditionReady: the device has been prepared for the claim's pods. It is the API's own name.
	ConditionReady = "Ready"
	// ConditionHealthy: nothing is wrong with it.
	ConditionHealthy = "Healthy"
)

// devices are what the claim's status should say of our devices: of each that was prepared, of each that could not be, and of each of
// which something was said that is over. What is not known is left out.
func (r *reporter) devices(claim *resourceapi.ResourceClaim, entry *ledger.Entry, failure error) []resourceapi.AllocatedDeviceStatus {
	var list []resourceapi.AllocatedDeviceStatus
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != Name || result.Pool != r.pool {
			continue
		}
		status := resourceapi.AllocatedDeviceStatus{Driver: result.Driver, Pool: result.Pool, Device: result.Device}
		if result.ShareID != nil {
			share := string(*result.ShareID)
			status.ShareID = &share
		}
		status.Conditions = keptConditions(claim.Status.Devices, &status)
		prepared := preparedDevice(entry, result)
		switch {
		case failure != nil:
			reason, _ := known(failure)
			r.set(claim, &status, ConditionReady, metav1.ConditionFalse, reason, failure.Error())
		case prepared != nil:
			r.set(claim, &status, ConditionReady, metav1.ConditionTrue, reasonPrepared, "")
			status.Data = deviceData(prepared)
		case meta.FindStatusCondition(status.Conditions, ConditionReady) != nil:
			r.set(claim, &status, ConditionReady, metav1.ConditionFalse, reasonNotPrepared, "the claim is not prepared on this node")
		default:
			continue
		}
		switch verdict := r.health(result.Device); verdict.Status {
		case health.Unhealthy:
			r.set(claim, &status, ConditionHealthy, metav1.ConditionFalse, reasonUnhealthy, verdict.Message())
		case health.Healthy:
			r.set(claim, &status, ConditionHealthy, metav1.ConditionTrue, reasonHealthy, verdict.Message())
		case health.Unknown, "": // "" of a device that is not known
			r.set(claim, &status, ConditionHealthy, metav1.ConditionUnknown, reasonUnknown, "NVML has not been asked yet")
		}
		list = append(list, status)
	}
	return list
}

// maxConditionMessage is the API's limit (metav1.Condition).
const maxConditionMessage = 32768

func (r *reporter) set(claim *resourceapi.ResourceClaim, device *resourceapi.AllocatedDeviceStatus, kind string,
	status metav1.ConditionStatus, reason, message string,
) {
	meta.SetStatusCondition(&device.Conditions, metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: conditionMessage(message), ObservedGeneration: claim.Generation,
	})
}

// conditionMessage is the message, cut between two characters if it is too long.
func conditionMessage(message string) string {
	if len(message) <= maxConditionMessage {
		return message
	}
	return strings.ToValidUTF8(message[:maxConditionMessage-3], "") + "..."
}

func sameDevice(a, b *resourceapi.AllocatedDeviceStatus) bool {
	return a.Driver == b.Driver && a.Pool == b.Pool && a.Device == b.Device && (a.ShareID == nil) == (b.ShareID == nil) &&
		(a.ShareID == nil || *a.ShareID == *b.ShareID)
}

// keptConditions are those that the status has of the device, so that the time of their last transition stays.
func keptConditions(devices []resourceapi.AllocatedDeviceStatus, of *resourceapi.AllocatedDeviceStatus) []metav1.Condition {
	for i := range devices {
		if sameDevice(&devices[i], of) {
			return append([]metav1.Condition(nil), devices[i].Conditions...)
		}
	}
	return nil
}

func preparedDevice(entry *ledger.Entry, result resourceapi.DeviceRequestAllocationResult) *ledger.Device {
	if entry == nil {
		return nil
	}
	for i := range entry.Devices {
		d := &entry.Devices[i]
		if d.Device == result.Device && d.Pool == result.Pool && (d.ShareID == nil || result.ShareID != nil && *d.ShareID == *result.ShareID) {
			return d
		}
	}
	return nil
}

// deviceData names the hardware that the claim got, which for a MIG device is not known before.
func deviceData(device *ledger.Device) *runtime.RawExtension {
	name := "uuid"
	if device.Passthrough {
		name = "pciBusID"
	}
	raw, err := json.Marshal(map[string]string{name: device.UUID})
	if err != nil {
		return nil // a map of strings always is JSON
	}
	return &runtime.RawExtension{Raw: raw}
}

// conditionChange is a condition of a device that has become another.
type conditionChange struct {
	device  string
	was, is *metav1.Condition // was is nil for a new one
}

// changedConditions are those whose status, reason or message differ.
func changedConditions(was, is []resourceapi.AllocatedDeviceStatus) []conditionChange {
	var changes []conditionChange
	for i := range is {
		before := keptConditions(was, &is[i])
		for j := range is[i].Conditions {
			now := &is[i].Conditions[j]
			old := meta.FindStatusCondition(before, now.Type)
			if old == nil || old.Status != now.Status || old.Reason != now.Reason || old.Message != now.Message {
				changes = append(changes, conditionChange{device: is[i].Device, was: old, is: now})
			}
		}
	}
	return changes
}
