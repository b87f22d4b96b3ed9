// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import "k8s.io/apimachinery/pkg/util/resourceversion"

// Order says when a claim got the allocation that it has: by a write not before
// one resource version and not after another. All writes of ResourceClaims are
// totally ordered by their resource versions, in every scheduler alike, and no
// two claims share one.
//
// A watch brings every write, so the two versions are the same one: the order is
// exact. A list brings the outcome of writes that nobody has seen.
type Order struct {
	// NotBefore is "" for a write of which nothing is known but its end.
	NotBefore string
	NotAfter  string
}

// exactly is the order of a write that the watch has brought.
func exactly(version string) Order { return Order{NotBefore: version, NotAfter: version} }

// Precedence is how the allocation of one claim stands to that of another one in
// the order of the store.
type Precedence string

const (
	// Earlier: the allocation was certainly written first.
	Earlier Precedence = "Earlier"
	// Later: the allocation was certainly written second, or has not been
	// observed yet.
	Later Precedence = "Later"
	// EitherWay: it is not known which was written first.
	EitherWay Precedence = "EitherWay"
)

// to says how a claim with this order stands to another claim.
func (o Order) to(other Order) Precedence {
	switch {
	case notAfter(o.NotAfter, other.NotBefore):
		return Earlier
	case notAfter(other.NotAfter, o.NotBefore):
		return Later
	default:
		return EitherWay
	}
}

// notAfter tells whether resource version a is known not to be later than b.
func notAfter(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order <= 0
}
