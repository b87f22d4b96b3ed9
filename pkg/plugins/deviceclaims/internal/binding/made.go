// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"encoding/json"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// made is what of a claim's status is the doing of one attempt of one pod.
type made struct{ allocation, reservation bool }

// newFieldManager returns a name that no other process has. The API server records under which name a field was
// changed (metadata.managedFields), so a claim tells whose an allocation or a reservation is, also if the answer to the
// write was lost, and also among schedulers that handle the same pod.
func newFieldManager() string { return "stowage-scheduler-" + string(uuid.NewUUID()) }

// madeIn finds out from the claim, as the API server sent it, what of it w did. What the claim does not prove counts
// as somebody else's.
func (w *Write) madeIn(claim *resourceapi.ResourceClaim, manager string) made {
	if claim.UID != w.Planned.UID || IsAdopted(claim, w.User.UID, manager) {
		return made{}
	}
	owned := ownedStatus(claim, manager)
	return made{
		allocation: w.Allocation != nil && claim.Status.Allocation != nil && podclaims.SameAllocation(claim.Status.Allocation, w.Allocation) &&
			owned.has("f:allocation"),
		reservation: podclaims.IsReservedFor(claim, w.User.UID) && owned["f:reservedFor"].has(reservationKey(w.User.UID)),
	}
}

// reservationKey is the name of a reservation in managedFields: status.reservedFor is a map by UID.
func reservationKey(user types.UID) string { return fmt.Sprintf(`k:{"uid":%q}`, user) }

// fieldSet is a set of fields in the format of metadata.managedFields ("FieldsV1").
type fieldSet map[string]fieldSet

func (s fieldSet) has(field string) bool { _, ok := s[field]; return ok }

// ownedStatus returns the fields of the claim's status that were last changed by the manager. Whoever sets a field to
// what it is already does not become its owner.
func ownedStatus(claim *resourceapi.ResourceClaim, manager string) fieldSet {
	for _, entry := range claim.ManagedFields {
		if entry.Manager != manager || entry.Operation != metav1.ManagedFieldsOperationUpdate ||
			entry.Subresource != "status" || entry.FieldsV1 == nil {
			continue
		}
		var fields fieldSet
		if err := json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields); err != nil {
			continue // proves nothing
		}
		return fields["f:status"]
	}
	return nil
}
