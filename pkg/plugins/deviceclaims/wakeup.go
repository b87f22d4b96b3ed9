package deviceclaims

import (
	"context"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/inventory/source"
	"stowage.dev/stowage/pkg/tracker"
)

// waitingPods are the pods that a change of claims or devices may make schedulable, and wakes them.
//
// The framework would wake pods by the events of its own informers. Those may come before the tracker or the
// inventory has seen the change: the pod would be tried on the old state, fail, and never be woken again. So
// it is the tracker and the inventory that wake, and a pod is noted here before it looks at them. Whatever
// changes later than what it saw finds it here.
//
// An entry stays until the pod has been scheduled or is gone. The scheduling queue ignores the activation of
// a pod that is not waiting, retries one that is being scheduled just now, and leaves a gated one alone.
type waitingPods struct {
	lister corelisters.PodLister

	mutex   sync.Mutex
	pods    map[types.UID]*waitingPod
	byClaim map[types.NamespacedName]sets.Set[types.UID]
	// changed are the claims that have changed since the last wake-up; devices tells that devices have
	// been freed, added or changed, or classes changed.
	changed sets.Set[types.NamespacedName]
	devices bool
	wake    chan struct{} // one token while there is something to do

	// watchers are closed with the next event of their claim.
	watchers map[types.NamespacedName]chan struct{}
}

type waitingPod struct {
	pod    *v1.Pod
	handle fwk.PodActivator
	claims []types.NamespacedName
	// devices tells that the pod waits for devices, not only for its claims to exist.
	devices bool
	// told is the last reason that an event was made of.
	told string
}

func newWaitingPods(lister corelisters.PodLister) *waitingPods {
	return &waitingPods{
		lister:   lister,
		pods:     map[types.UID]*waitingPod{},
		byClaim:  map[types.NamespacedName]sets.Set[types.UID]{},
		changed:  sets.New[types.NamespacedName](),
		wake:     make(chan struct{}, 1),
		watchers: map[types.NamespacedName]chan struct{}{},
	}
}

// addForClaims notes that a pod waits for its claims.
func (w *waitingPods) addForClaims(handle fwk.PodActivator, pod *v1.Pod, claims []types.NamespacedName) {
	w.add(&waitingPod{pod: pod, handle: handle, claims: claims})
}

// addForDevices notes that a pod waits for its claims and for devices.
func (w *waitingPods) addForDevices(handle fwk.PodActivator, pod *v1.Pod, claims []types.NamespacedName) {
	w.add(&waitingPod{pod: pod, handle: handle, claims: claims, devices: true})
}

func (w *waitingPods) add(p *waitingPod) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if known := w.pods[p.pod.UID]; known != nil {
		p.told = known.told
	}
	w.removeLocked(p.pod.UID)
	w.pods[p.pod.UID] = p
	for _, claim := range p.claims {
		if w.byClaim[claim] == nil {
			w.byClaim[claim] = sets.New[types.UID]()
		}
		w.byClaim[claim].Insert(p.pod.UID)
	}
	waitingPodsGauge.Set(float64(len(w.pods)))
}

// isNews tells whether the reason why a waiting pod is kept out differs from the one at the last call.
func (w *waitingPods) isNews(pod types.UID, reason string) bool {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	known := w.pods[pod]
	if known == nil || known.told == reason {
		return false
	}
	known.told = reason
	return true
}

// remove forgets a pod that waits no longer.
func (w *waitingPods) remove(pod types.UID) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.removeLocked(pod)
	waitingPodsGauge.Set(float64(len(w.pods)))
}

func (w *waitingPods) removeLocked(pod types.UID) {
	known := w.pods[pod]
	if known == nil {
		return
	}
	delete(w.pods, pod)
	for _, claim := range known.claims {
		w.byClaim[claim].Delete(pod)
		if len(w.byClaim[claim]) == 0 {
			delete(w.byClaim, claim)
		}
	}
}

// onClaimEvent takes the tracker's events.
func (w *waitingPods) onClaimEvent(event tracker.Event) {
	name := types.NamespacedName{Namespace: event.Claim.Namespace, Name: event.Claim.Name}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if watcher := w.watchers[name]; watcher != nil {
		close(watcher)
		delete(w.watchers, name)
	}
	if len(w.byClaim[name]) > 0 {
		w.changed.Insert(name)
		w.signal()
	}
	if len(event.Freed) > 0 && len(w.pods) > 0 {
		w.devices = true
		w.signal()
	}
}

// onInventoryEvent takes the inventory's events. Any of them may make devices match or become complete.
func (w *waitingPods) onInventoryEvent(source.Event) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if len(w.pods) > 0 {
		w.devices = true
		w.signal()
	}
}

func (w *waitingPods) signal() {
	select {
	case w.wake <- struct{}{}:
	default: // there is a token already
	}
}

// watch returns a channel that is closed with the next event of the claim.
func (w *waitingPods) watch(claim types.NamespacedName) <-chan struct{} {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if w.watchers[claim] == nil {
		w.watchers[claim] = make(chan struct{})
	}
	return w.watchers[claim]
}

// run wakes pods until ctx ends. Events that come while it is at it are handled together.
func (w *waitingPods) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		}
		w.wakeUp(klog.FromContext(ctx))
	}
}

func (w *waitingPods) wakeUp(logger klog.Logger) {
	woken := map[fwk.PodActivator]map[string]*v1.Pod{}
	for _, p := range w.takeAffected() {
		known, err := w.lister.Pods(p.pod.Namespace).Get(p.pod.Name)
		if err != nil || known.UID != p.pod.UID || known.Spec.NodeName != "" {
			w.remove(p.pod.UID)
			continue
		}
		if woken[p.handle] == nil {
			woken[p.handle] = map[string]*v1.Pod{}
		}
		woken[p.handle][p.pod.Namespace+"/"+p.pod.Name] = known
	}
	for handle, pods := range woken {
		logger.V(5).Info("Waking pods after a change of claims or devices", "pods", len(pods))
		handle.Activate(logger, pods)
	}
}

// takeAffected returns the pods that the changes since the last call concern.
func (w *waitingPods) takeAffected() []*waitingPod {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	var affected []*waitingPod
	if w.devices {
		for _, p := range w.pods {
			if p.devices {
				affected = append(affected, p)
			}
		}
	}
	for claim := range w.changed {
		for uid := range w.byClaim[claim] {
			if p := w.pods[uid]; !w.devices || !p.devices {
				affected = append(affected, p)
			}
		}
	}
	w.devices = false
	clear(w.changed)
	return affected
}
