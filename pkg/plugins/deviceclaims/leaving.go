package deviceclaims

import (
	"context"
	"fmt"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/tracker"
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
	pl.shared.leaving.add(pl.handle, pod, leaving)
	if slices.ContainsFunc(leaving, pl.hasChanged) {
		pl.shared.leaving.remove(pod.UID)
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

// leavingClaims are claims that are about to give up their devices, with the pods that wait for that. Any event of such
// a claim wakes them: it may be free now, or not free itself after all.
type leavingClaims struct {
	mutex   sync.Mutex
	pods    map[types.UID]*awaitingPod
	byClaim map[types.UID]map[types.UID]*awaitingPod
}

type awaitingPod struct {
	pod    *v1.Pod
	handle fwk.PodActivator
	claims []types.UID
}

func newLeavingClaims() *leavingClaims {
	return &leavingClaims{pods: map[types.UID]*awaitingPod{}, byClaim: map[types.UID]map[types.UID]*awaitingPod{}}
}

func (l *leavingClaims) add(handle fwk.PodActivator, pod *v1.Pod, leaving []*stake) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.removeLocked(pod.UID)
	p := &awaitingPod{pod: pod, handle: handle}
	l.pods[pod.UID] = p
	for _, st := range leaving {
		p.claims = append(p.claims, st.claim.UID)
		if l.byClaim[st.claim.UID] == nil {
			l.byClaim[st.claim.UID] = map[types.UID]*awaitingPod{}
		}
		l.byClaim[st.claim.UID][pod.UID] = p
	}
}

// remove forgets a pod, which is tried again or gone.
func (l *leavingClaims) remove(pod types.UID) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.removeLocked(pod)
}

func (l *leavingClaims) removeLocked(pod types.UID) {
	known := l.pods[pod]
	if known == nil {
		return
	}
	delete(l.pods, pod)
	for _, claim := range known.claims {
		delete(l.byClaim[claim], pod)
		if len(l.byClaim[claim]) == 0 {
			delete(l.byClaim, claim)
		}
	}
}

// onClaimEvent takes the tracker's events.
func (l *leavingClaims) onClaimEvent(logger klog.Logger, event tracker.Event) {
	l.mutex.Lock()
	var woken []*awaitingPod
	for _, p := range l.byClaim[event.Claim.UID] {
		woken = append(woken, p)
	}
	for _, p := range woken {
		l.removeLocked(p.pod.UID)
	}
	l.mutex.Unlock()
	for _, p := range woken {
		logger.V(4).Info("Waking a pod that waits for a claim to be released", "pod", klog.KObj(p.pod), "claim", klog.KRef(event.Claim.Namespace, event.Claim.Name))
		p.handle.Activate(logger, map[string]*v1.Pod{p.pod.Namespace + "/" + p.pod.Name: p.pod})
	}
}
