package deviceclaims

import (
	"context"
	"fmt"
	"maps"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// adoptedPrefix begins the annotations that say which process uses a reservation that another one made. The name is that of
// the user's UID, the value that of the process, see newFieldManager.
const adoptedPrefix = "adopted.stowage.dev/"

func adoptedKey(user types.UID) string { return adoptedPrefix + string(user) }

// adopt says in the claim that this process uses the reservation that it has found there, before it binds the pod with it.
//
// Whoever made the reservation may still be at work: a leader that was frozen and goes on although there is another one. When it
// undoes what it wrote, the claim has another resource version, so that it looks again, and the annotation tells it to leave the
// reservation alone. Was it faster, this write fails, and the pod is not bound.
//
// Usually that process has ended, and this is one write more for a pod that was being bound when it did.
func (pl *Plugin) adopt(ctx context.Context, w *claimWrite, claim *resourceapi.ResourceClaim) error {
	if claim.Annotations[adoptedKey(w.user.UID)] == pl.shared.fieldManager {
		w.written = claim
		return nil
	}
	forgetAdoptions(claim)
	metav1.SetMetaDataAnnotation(&claim.ObjectMeta, adoptedKey(w.user.UID), pl.shared.fieldManager)
	updated, err := pl.client.ResourceV1().ResourceClaims(claim.Namespace).Update(ctx, claim, metav1.UpdateOptions{FieldManager: pl.shared.fieldManager})
	countWrite(writeAdoption, err)
	if err != nil {
		return fmt.Errorf("take over the reservation: %w", err)
	}
	w.written = updated
	return nil
}

// forgetAdoptions drops what was noted of reservations that are not there any more, and tells whether that was anything.
func forgetAdoptions(claim *resourceapi.ResourceClaim) bool {
	noted := len(claim.Annotations)
	maps.DeleteFunc(claim.Annotations, func(key, _ string) bool {
		user, is := strings.CutPrefix(key, adoptedPrefix)
		return is && !isReservedFor(claim, types.UID(user))
	})
	return len(claim.Annotations) < noted
}

// isAdopted tells whether another process than the manager uses the reservation.
func isAdopted(claim *resourceapi.ResourceClaim, user types.UID, manager string) bool {
	by := claim.Annotations[adoptedKey(user)]
	return by != "" && by != manager
}
