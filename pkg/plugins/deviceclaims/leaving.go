package deviceclaims

import (
	"context"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

// awaitLeaving keeps a pod from preempting while the devices that others were evicted for are about to become free.
// The pods of a claim are gone before kube-controller-manager takes the allocation back, and a pod whose binding was
// cancelled gives its devices back a moment later; a preemptor that is tried in between would find no device and evict
// somebody else. The status ends the attempt and leaves the nomination as it is. It is nil if there is nothing to wait
// for.
func (pl *Plugin) awaitLeaving(ctx context.Context, c *cycle, pod *v1.Pod) (*fwk.PostFilterResult, *fwk.Status) {
	node, leaving := c.results.leavingFor()
	if len(leaving) == 0 {
		return nil, nil
	}
	// First noted, then looked: what has changed before the note is seen now, and what changes later wakes the pod.
	pl.shared.leaving.Add(pl.handle, pod, uidsOf(leaving))
	if slices.ContainsFunc(leaving, pl.hasChanged) {
		pl.shared.leaving.Remove(pod.UID)
		tryAtOnce(ctx, pl.handle, pod)
	}
	// The nomination is said again: the scheduler takes it from the pod's status otherwise, where it may not be yet.
	return framework.NewPostFilterResultWithNominatedNode(node), fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
		fmt.Sprintf("node %s: %s", node, pl.describeLeaving(leaving, pod.Namespace)))
}

// hasChanged tells whether a claim is not what it was when the attempt looked at it.
func (pl *Plugin) hasChanged(st *stake) bool {
	if st.left {
		return true
	}
	now := pl.shared.tracker.Holding(st.claim)
	return now.Claim != st.known.Claim || now.InFlight != st.known.InFlight || !slices.Equal(now.Owners, st.known.Owners)
}

// waitingForDeallocation is in what a pod is told that waits for claims to leave. It is no warning, see postponedIn.
const waitingForDeallocation = " released, waiting for "

// describeLeaving says that claims are about to give up their devices.
func (pl *Plugin) describeLeaving(leaving []*stake, namespace string) string {
	whose := "their"
	if len(leaving) == 1 {
		whose = "its"
	}
	return pl.listClaims(leaving, namespace) + waitingForDeallocation + whose + " deallocation"
}

// uidsOf returns the claims' UIDs.
func uidsOf(stakes []*stake) []types.UID {
	uids := make([]types.UID, len(stakes))
	for i, st := range stakes {
		uids[i] = st.claim.UID
	}
	return uids
}
