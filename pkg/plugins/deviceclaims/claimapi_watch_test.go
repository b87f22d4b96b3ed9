// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// claimWatch is one watch of a claimAPI. Only the API sends, under its mutex.
type claimWatch struct {
	result  chan watch.Event
	stopped chan struct{}
	once    sync.Once
}

func (w *claimWatch) Stop() { w.once.Do(func() { close(w.stopped) }) }

func (w *claimWatch) ResultChan() <-chan watch.Event { return w.result }

func (w *claimWatch) send(event watch.Event) {
	select {
	case w.result <- event:
	case <-w.stopped:
	}
}

func newerVersion(a, b string) bool {
	x, errX := strconv.Atoi(a)
	y, errY := strconv.Atoi(b)
	return errX == nil && errY == nil && x > y
}

// statusOwners says which manager was the last to change a field of a claim's status. The keys are as in managedFields.
type statusOwners map[string]string

// after returns the owners after a write of the manager, which owns what it has set and was not set before.
func (o statusOwners) after(claim *resourceapi.ResourceClaim, manager string) statusOwners {
	fields := statusOwners{}
	if claim.Status.Allocation != nil {
		devices, _ := json.Marshal(claim.Status.Allocation)
		fields["f:allocation"] = string(devices)
	}
	for _, user := range claim.Status.ReservedFor {
		fields[fmt.Sprintf(`k:{"uid":%q}`, user.UID)] = ""
	}
	next := statusOwners{}
	for field, value := range fields {
		next[field], next["="+field] = manager, value
		if owner, ok := o[field]; ok && o["="+field] == value {
			next[field] = owner
		}
	}
	return next
}

func (o statusOwners) managedFields() []metav1.ManagedFieldsEntry {
	byManager := map[string]map[string]any{}
	for field, manager := range o {
		if field[0] == '=' {
			continue
		}
		if byManager[manager] == nil {
			byManager[manager] = map[string]any{}
		}
		if field == "f:allocation" {
			byManager[manager][field] = map[string]any{}
			continue
		}
		if byManager[manager]["f:reservedFor"] == nil {
			byManager[manager]["f:reservedFor"] = map[string]any{}
		}
		byManager[manager]["f:reservedFor"].(map[string]any)[field] = map[string]any{}
	}
	var entries []metav1.ManagedFieldsEntry
	for _, manager := range slices.Sorted(maps.Keys(byManager)) {
		raw, _ := json.Marshal(map[string]any{"f:status": byManager[manager]})
		entries = append(entries, metav1.ManagedFieldsEntry{
			Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, Subresource: "status",
			FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(string(raw)),
		})
	}
	return entries
}
