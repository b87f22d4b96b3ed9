package deviceclaims

import (
	"fmt"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// trial is where the pods of a group have their devices while the framework tries the group: pod after pod goes through PreFilter,
// Filter and Reserve, and in the end all are unreserved. Nothing else is scheduled in this process meanwhile, so neither the tracker
// nor the API needs to know of it. If the group fits, Reserve runs once more for each pod, and that is for good.
//
// All profiles of a scheduler share one. Filter reads it in many goroutines; what changes it runs in the one that schedules.
type trial struct {
	mutex sync.Mutex
	given []*given
	// leaving are claims of others that count as gone.
	leaving []*stake
	// view is what over made of the view with the revision base; known tells whether it is up to date.
	view  usage.View
	base  uint64
	known bool

	// onNodes are the pods with devices on all nodes, noted when preemption for a group may begin. Nil if it may not.
	onNodes map[types.UID]*v1.Pod
	// removed are those of them that preemption has taken away, nil before that is known.
	removed map[types.UID]*v1.Pod
}

// given is what a claim has been given on trial.
type given struct {
	claim      usage.ClaimRef
	allocation *resourceapi.AllocationResult
	pods       sets.Set[types.UID]
}

// give notes what a pod of the group has been given.
func (t *trial) give(pod types.UID, reserved []tracker.Reservation) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, r := range reserved {
		t.given = append(t.given, &given{claim: usage.RefOf(r.Claim), allocation: r.Allocation, pods: sets.New(pod)})
	}
	t.known = false
}

// join makes a pod one of those that a claim has been given something for.
func (t *trial) join(pod, claim types.UID) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if g := t.of(claim); g != nil {
		g.pods.Insert(pod)
	}
}

// allocation returns what a claim has been given, nil if nothing.
func (t *trial) allocation(claim types.UID) *resourceapi.AllocationResult {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if g := t.of(claim); g != nil {
		return g.allocation
	}
	return nil
}

func (t *trial) of(claim types.UID) *given {
	for _, g := range t.given {
		if g.claim.UID == claim {
			return g
		}
	}
	return nil
}

// takeBack takes from a pod what it has been given. What it shares with other pods stays theirs.
func (t *trial) takeBack(pod types.UID) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, g := range t.given {
		g.pods.Delete(pod)
	}
	t.given = slices.DeleteFunc(t.given, func(g *given) bool { return len(g.pods) == 0 })
	t.known = false
}

// withLeaving calls try while the devices of the given claims count as free.
func (t *trial) withLeaving(leaving []*stake, try func()) {
	set := func(leaving []*stake) {
		t.mutex.Lock()
		defer t.mutex.Unlock()
		t.leaving, t.known = leaving, false
	}
	set(leaving)
	defer set(nil)
	try()
}

// over returns the usage with what pods have on trial.
func (t *trial) over(view usage.View) usage.View {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if len(t.given) == 0 && len(t.leaving) == 0 {
		return view
	}
	if !t.known || t.base != view.Revision() {
		t.known, t.base = true, view.Revision()
		t.view = without(view, t.leaving)
		for _, g := range t.given {
			t.view = t.view.With(g.claim, g.allocation)
		}
	}
	return t.view
}

// mayPreempt tells that preemption for a group may begin, on nodes that have the given pods with devices.
func (t *trial) mayPreempt(onNodes map[types.UID]*v1.Pod) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.onNodes, t.removed = onNodes, nil
}

// removedPods returns the pods that have been taken off their nodes because preemption finds out whether a group would fit without
// them. Nil if that is not so.
//
// Nobody tells a plugin: the framework begins with new cycle states on a snapshot from which pods are missing. It is as long as
// this snapshot is open to changes, and only one can have it open.
func (t *trial) removedPods(handle fwk.Handle) (map[types.UID]*v1.Pod, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.onNodes == nil {
		return nil, nil
	}
	if snapshot := handle.MutableSnapshotSharedLister(); snapshot.StartMutations() == nil {
		t.onNodes, t.removed = nil, nil
		return nil, snapshot.EndMutations()
	}
	if t.removed == nil {
		left, err := podsWithDevices(handle)
		if err != nil {
			return nil, err
		}
		t.removed = map[types.UID]*v1.Pod{}
		for uid, pod := range t.onNodes {
			if left[uid] == nil {
				t.removed[uid] = pod
			}
		}
	}
	return t.removed, nil
}

// podsWithDevices returns the pods on all nodes of the snapshot that may hold devices.
func podsWithDevices(handle fwk.Handle) (map[types.UID]*v1.Pod, error) {
	nodes, err := handle.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	pods := map[types.UID]*v1.Pod{}
	for _, node := range nodes {
		for _, info := range node.GetPods() {
			if pod := info.GetPod(); usesDevices(pod) {
				pods[pod.UID] = pod
			}
		}
	}
	return pods, nil
}
