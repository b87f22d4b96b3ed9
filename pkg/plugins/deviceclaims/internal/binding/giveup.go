// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/usage"
)

// GiveUpTimeout bounds what a pod that waits writes to give something up, which holds up scheduling.
const GiveUpTimeout = 10 * time.Second

// GivenUp is what a pod that waits gives up of a claim.
type GivenUp struct {
	// Claim is as it was looked at.
	Claim *resourceapi.ResourceClaim
	// User is whose reservation it is: the pod's, or its group's.
	User types.UID
	// Shared tells that others use the claim, too, so that the reservation is all that can be given up.
	Shared bool
	Reason string
}

// why says why it is given up.
func (g *GivenUp) why() string {
	if g.Shared {
		return g.Reason + "; other pods have reserved it, too"
	}
	return g.Reason
}

// String says what has been given up, and why.
func (g *GivenUp) String() string {
	what := "allocation"
	if g.Shared {
		what = "reservation"
	}
	return fmt.Sprintf("gave up the %s of claim %s, %s", what, klog.KObj(g.Claim), g.why())
}

// GiveUp clears the claim's allocation, or takes the pod's reservation from a claim that others use, unless the pod turns out to
// be bound. So of several pods without a node that keep each other's allocation, the last one to leave clears it. The claim's
// resource version makes sure that it is still the claim that was looked at.
func (b *Binder) GiveUp(ctx context.Context, pod *v1.Pod, g *GivenUp) error {
	claim := g.Claim
	ctx, cancel := context.WithTimeout(ctx, GiveUpTimeout)
	defer cancel()
	check := b.CheckUnused
	switch {
	case g.Shared && g.User == pod.UID:
		check = b.checkUnbound
	case g.Shared: // whether another process binds one of the others does not matter
		check = func(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim) error {
			if err := b.CheckNotAdopted(claim, pod.UID, g.User); err != nil {
				return err
			}
			return b.CheckGroupUnbound(ctx, pod, claim)
		}
	}
	if err := check(ctx, pod, claim); err != nil {
		return err
	}
	updated := claim.DeepCopy()
	if g.Shared {
		podclaims.RemoveUser(updated, g.User)
	} else {
		updated.Status.Allocation, updated.Status.ReservedFor, updated.Status.Devices = nil, nil, nil
	}
	written, err := b.Client.ResourceV1().ResourceClaims(claim.Namespace).
		UpdateStatus(ctx, updated, metav1.UpdateOptions{FieldManager: b.FieldManager})
	CountWrite(WriteDeallocation, err)
	if err != nil {
		b.Doubts.Note(claim, err)
		return err
	}
	b.Assume(ctx, written)
	b.LogGivenBack(ctx, pod, "", claim, claim.Status.Allocation, g.why())
	return nil
}

// LogGivenBack writes the line about a claim that the pod has left. Its devices are given back with the last one who has them.
func (b *Binder) LogGivenBack(
	ctx context.Context, pod *v1.Pod, node string, claim *resourceapi.ResourceClaim, allocation *resourceapi.AllocationResult, why string,
) {
	line := decisions.GivenBack
	held := b.claims.Holding(usage.RefOf(claim))
	if held.InFlight != nil || held.Claim != nil && held.Claim.Status.Allocation != nil {
		line = decisions.Left
	}
	decisions.Log(ctx, line, pod, node, claim, allocation, why)
}
