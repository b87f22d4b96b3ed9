// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// Use is who uses a prepared claim, by the API alone.
type Use struct {
	// Ends: those who used it are gone or going, or it is not known. That is no proof that nobody does: it says whether to wait for the
	// kubelet to unprepare the claim.
	Ends bool
	// Text goes on after the claim's name. Public says the same without the names of the claim and its pods, for other namespaces.
	Text, Public string
}

// UseOf tells who uses the claim.
func UseOf(entry *ledger.Entry, r *Reading) Use {
	if err := firstOf(r.ClaimErr, r.PodsErr); err != nil {
		const unknown = "and the API server does not tell who uses it"
		return Use{Ends: true, Text: fmt.Sprintf("%s: %v", unknown, err), Public: unknown}
	}
	// A pod may refer to another claim of that name by now.
	ofName := r.Claim == nil || r.Claim.UID == entry.Claim.UID
	ends := true
	text := "which is being released: %s is gone from the API server, and the kubelet has not unprepared it yet"
	pod := "its pod"
	for i := range r.Pods {
		p := &r.Pods[i]
		if !slices.Contains(entry.Pods, p.UID) && (!ofName || !uses(p, entry.Claim)) {
			continue
		}
		pod = "pod " + p.Namespace + "/" + p.Name
		switch {
		case terminal(p):
			text = "which is being released: %s has ended, and the kubelet has not unprepared it yet"
		case p.DeletionTimestamp != nil:
			text = "which is being released: %s was deleted at " + deletedAt(p).UTC().Format(time.RFC3339) + ", and has not ended yet"
		case p.Status.Phase == corev1.PodRunning:
			ends, text = false, "used by %s, which runs"
		default:
			ends, text = false, "used by %s, which is starting"
		}
		if !ends {
			break
		}
	}
	return Use{Ends: ends, Text: fmt.Sprintf(text, pod), Public: fmt.Sprintf(text, "its pod")}
}

// deletedAt is when the pod was deleted: the API has the time at which its grace period is over.
func deletedAt(pod *corev1.Pod) time.Time {
	at := pod.DeletionTimestamp.Time
	if grace := pod.DeletionGracePeriodSeconds; grace != nil {
		at = at.Add(-time.Duration(*grace) * time.Second)
	}
	return at
}

func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
