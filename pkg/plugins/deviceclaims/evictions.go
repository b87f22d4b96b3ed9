package deviceclaims

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/usage"
)

// evictions say which claims end if pods of lower priority are evicted, for all pods that are looked at in one pass of the waiting room.
// One goroutine uses it.
type evictions struct {
	stakes *stakes // nil until first needed
	byPool map[usage.PoolID][]evictableClaim
}

// evictableClaim is a claim that pods use and nobody else.
type evictableClaim struct {
	*stake
	// priority is the highest of its users.
	priority int32
	// nodes are those that its users are on, apart from pods of groups, which may go as a whole.
	nodes []string
}

// endsOn tells whether the claim ends if all its users are evicted that are on the node: nobody is evicted from several nodes at once.
func (c *evictableClaim) endsOn(node string) bool {
	return !slices.ContainsFunc(c.nodes, func(other string) bool { return other != node })
}

func newEvictions() *evictions {
	return &evictions{byPool: map[usage.PoolID][]evictableClaim{}}
}

// evicted returns what a usage would be without the claims of which all users are on the node and have a lower priority than the pod, nil if there
// are none.
func (e *evictions) evicted(pl *Plugin, pod *v1.Pod, node *v1.Node, inv *inventory.View, inUse usage.View) func(usage.View) usage.View {
	priority := corev1helpers.PodPriority(pod)
	var gone []*stake
	for _, pool := range poolsOf(node, inv) {
		for _, claim := range e.inPool(pl, pool, inUse) {
			if claim.priority < priority && claim.endsOn(node.Name) && !slices.Contains(gone, claim.stake) && !podclaims.Uses(pod, claim.claim) {
				gone = append(gone, claim.stake)
			}
		}
	}
	if len(gone) == 0 {
		return nil
	}
	return func(view usage.View) usage.View { return without(view, gone) }
}

// inPool returns the claims with devices of a pool that may end by evictions.
func (e *evictions) inPool(pl *Plugin, pool usage.PoolID, inUse usage.View) []evictableClaim {
	known, ok := e.byPool[pool]
	if ok {
		return known
	}
	if e.stakes == nil {
		e.stakes = newStakes(pl)
	}
	for _, st := range e.stakes.stakesOn([]usage.PoolID{pool}, inUse, func(st *stake) bool { return !st.foreign && len(st.pods) > 0 }) {
		if claim := (evictableClaim{stake: st}); !st.left && claim.findUsers(pl) {
			known = append(known, claim)
		}
	}
	e.byPool[pool] = known
	return known
}

// findUsers looks at the claim's users. It tells whether all are known: one that is not has gone, and its claim will tell.
func (c *evictableClaim) findUsers(pl *Plugin) bool {
	for i, user := range c.pods {
		pod := pl.podOf(user)
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
