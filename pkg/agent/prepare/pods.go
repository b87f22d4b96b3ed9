package prepare

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// NotePods records pods that have come to use a prepared claim. The kubelet does not call Prepare for them, and what
// is not recorded of them is not looked for when the claim is unprepared. A claim that is not prepared, or whose record
// does not say so for certain, is left alone.
func (m *Manager) NotePods(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	locks := m.locks.begin()
	defer locks.unlock()
	if err := locks.claim(ctx, claim.UID); err != nil {
		return fmt.Errorf("record the pods of claim %s: %w", name(claim), err)
	}
	record, err := m.ledger.Get(claim.UID)
	if err != nil || record == nil || record.Err != nil || record.Recovered != nil || record.Entry.State != ledger.PrepareCompleted {
		return err
	}
	now := podsOf(claim)
	if len(joined(now, record.Entry.Pods)) == 0 {
		return nil
	}
	record.Entry.Pods = remembered(record.Entry.Pods, now)
	return m.put(record.Entry, ledger.PrepareCompleted)
}

// maxFormerPods is how many pods are remembered that a claim is not reserved for any more. One that always has a pod is never unprepared, and
// would have ever more of them.
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
