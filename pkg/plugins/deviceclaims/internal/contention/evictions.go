// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/usage"
)

// Evictions say which claims end if pods of lower priority are evicted, for all pods that are looked at in one pass of the waiting room.
// One goroutine uses it.
type Evictions struct {
	holders *Holders // nil until first needed
	byPool  map[usage.PoolID][]evictableClaim
}

// evictableClaim is a claim that pods use and nobody else.
type evictableClaim struct {
	*Holder
	// priority is the highest of its users.
	priority int32
	// nodes are those that its users are on, apart from pods of groups, which may go as a whole.
	nodes []string
}

// endsOn tells whether the claim ends if all its users are evicted that are on the node: nobody is evicted from several nodes at once.
func (c *evictableClaim) endsOn(node string) bool {
	return !slices.ContainsFunc(c.nodes, func(other string) bool { return other != node })
}

// NewEvictions begins a pass.
func NewEvictions() *Evictions {
	return &Evictions{byPool: map[usage.PoolID][]evictableClaim{}}
}

// Evicted returns what a usage would be without the claims of which all users are on the node and have a lower
// priority than the pod, nil if there are none.
func (e *Evictions) Evicted(r *Rivals, pod *v1.Pod, node *v1.Node, inv *inventory.View, inUse usage.View) func(usage.View) usage.View {
	priority := corev1helpers.PodPriority(pod)
	var gone []*Holder
	for _, pool := range PoolsOf(node, inv) {
		for _, claim := range e.inPool(r, pool, inUse) {
			if claim.priority < priority && claim.endsOn(node.Name) && !slices.Contains(gone, claim.Holder) && !podclaims.Uses(pod, claim.claim) {
				gone = append(gone, claim.Holder)
			}
		}
	}
	if len(gone) == 0 {
		return nil
	}
	return func(view usage.View) usage.View { return without(view, gone) }
}

// inPool returns the claims with devices of a pool that may end by evictions.
func (e *Evictions) inPool(r *Rivals, pool usage.PoolID, inUse usage.View) []evictableClaim {
	known, ok := e.byPool[pool]
	if ok {
		return known
	}
	if e.holders == nil {
		e.holders = r.NewHolders()
	}
	for _, st := range e.holders.holdersOn([]usage.PoolID{pool}, inUse, func(st *Holder) bool { return !st.foreign && len(st.pods) > 0 }) {
		if claim := (evictableClaim{Holder: st}); !st.left && claim.findUsers(r) {
			known = append(known, claim)
		}
	}
	e.byPool[pool] = known
	return known
}

// findUsers looks at the claim's users. It tells whether all are known: one that is not has gone, and its claim will tell.
func (c *evictableClaim) findUsers(r *Rivals) bool {
	for i, user := range c.pods {
		pod := r.PodOf(user.NamespacedName, user.uid)
		if pod == nil {
			return false
		}
		if priority := corev1helpers.PodPriority(pod); i == 0 || priority > c.priority {
			c.priority = priority
		}
		if pod.Spec.NodeName != "" && podclaims.GroupOf(pod) == "" {
			c.nodes = append(c.nodes, pod.Spec.NodeName)
		}
	}
	return true
}
