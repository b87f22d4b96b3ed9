// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podclaims

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/kubernetes/pkg/features"
)

// Why PreEnqueue keeps a pod back: reasons of its events.
const (
	ReasonNotMade   = "ClaimNotMade"      // kube-controller-manager has not made it from its template
	ReasonMissing   = "ClaimMissing"      // does not exist
	ReasonEnds      = "ClaimBeingDeleted" // is being deleted
	ReasonOfAnother = "ClaimOfAnotherPod" // was made for another pod
)

// UnusableError says that a pod cannot be tried on any node before a claim has changed.
type UnusableError struct {
	Reason string // of the event
	Claim  Name
	err    error
}

func (e *UnusableError) Error() string { return e.err.Error() }

func (e *UnusableError) Unwrap() error { return e.err }

// Get returns the newest known object of a claim, if the pod may use it.
func Get(claims Getter, pod *v1.Pod, name Name) (*resourceapi.ResourceClaim, error) {
	claim, err := claims.Get(name.Namespace, name.Name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, &UnusableError{ReasonMissing, name, fmt.Errorf("claim %s does not exist", name)}
	case err != nil:
		return nil, fmt.Errorf("claim %s: %w", name, err)
	case claim.DeletionTimestamp != nil:
		return nil, &UnusableError{ReasonEnds, name, fmt.Errorf("claim %s is being deleted", name)}
	}
	if name.Generated {
		if err := resourceclaim.IsForPod(pod, claim, utilfeature.DefaultFeatureGate.Enabled(features.DRAWorkloadResourceClaims)); err != nil {
			return nil, &UnusableError{ReasonOfAnother, name, err}
		}
	}
	return claim, nil
}

// Getter has the newest known object of each claim, such as the tracker.
type Getter interface {
	Get(namespace, name string) (*resourceapi.ResourceClaim, error)
}
