package deviceclaims

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
	reasonClaimNotMade   = "ClaimNotMade"      // kube-controller-manager has not made it from its template
	reasonClaimMissing   = "ClaimMissing"      // does not exist
	reasonClaimEnds      = "ClaimBeingDeleted" // is being deleted
	reasonClaimOfAnother = "ClaimOfAnotherPod" // was made for another pod
)

// unusableError says that a pod cannot be tried on any node before a claim has changed.
type unusableError struct {
	reason string // of the event
	claim  claimName
	err    error
}

func (e *unusableError) Error() string { return e.err.Error() }

func (e *unusableError) Unwrap() error { return e.err }

// claimOf returns the newest known object of a claim, if the pod may use it.
func claimOf(claims claimGetter, pod *v1.Pod, name claimName) (*resourceapi.ResourceClaim, error) {
	claim, err := claims.Get(name.Namespace, name.Name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, &unusableError{reasonClaimMissing, name, fmt.Errorf("claim %s does not exist", name)}
	case err != nil:
		return nil, fmt.Errorf("claim %s: %w", name, err)
	case claim.DeletionTimestamp != nil:
		return nil, &unusableError{reasonClaimEnds, name, fmt.Errorf("claim %s is being deleted", name)}
	}
	if name.generated {
		if err := resourceclaim.IsForPod(pod, claim, utilfeature.DefaultFeatureGate.Enabled(features.DRAWorkloadResourceClaims)); err != nil {
			return nil, &unusableError{reasonClaimOfAnother, name, err}
		}
	}
	return claim, nil
}

// claimGetter has the newest known object of each claim, such as the tracker.
type claimGetter interface {
	Get(namespace, name string) (*resourceapi.ResourceClaim, error)
}
