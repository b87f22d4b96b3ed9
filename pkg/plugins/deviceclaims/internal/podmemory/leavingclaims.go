// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podmemory

import (
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/tracker"
)

// LeavingClaims are claims that are about to give up their devices, with the pods that wait for that. Any event of such
// a claim wakes them: it may be free now, or not free itself after all.
type LeavingClaims struct {
	mutex   sync.Mutex
	pods    map[types.UID]*awaitingPod
	byClaim map[types.UID]map[types.UID]*awaitingPod
}

type awaitingPod struct {
	pod    *v1.Pod
	handle fwk.PodActivator
	claims []types.UID
}

// newLeavingClaims returns no claims.
func newLeavingClaims() *LeavingClaims {
	return &LeavingClaims{pods: map[types.UID]*awaitingPod{}, byClaim: map[types.UID]map[types.UID]*awaitingPod{}}
}

// Add has a pod wait for these claims, by UID, and for no others any more.
func (l *LeavingClaims) Add(handle fwk.PodActivator, pod *v1.Pod, claims []types.UID) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.removeLocked(pod.UID)
	p := &awaitingPod{pod: pod, handle: handle, claims: claims}
	l.pods[pod.UID] = p
	for _, claim := range claims {
		if l.byClaim[claim] == nil {
			l.byClaim[claim] = map[types.UID]*awaitingPod{}
		}
		l.byClaim[claim][pod.UID] = p
	}
}

// Remove forgets a pod, which is tried again or gone.
func (l *LeavingClaims) Remove(pod types.UID) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.removeLocked(pod)
}

func (l *LeavingClaims) removeLocked(pod types.UID) {
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

// OnClaimEvent takes the tracker's events.
func (l *LeavingClaims) OnClaimEvent(logger klog.Logger, event tracker.Event) {
	l.mutex.Lock()
	woken := slices.Collect(maps.Values(l.byClaim[event.Claim.UID]))
	for _, p := range woken {
		l.removeLocked(p.pod.UID)
	}
	l.mutex.Unlock()
	for _, p := range woken {
		logger.V(4).Info("Waking a pod that waits for a claim to be released", "pod", klog.KObj(p.pod),
			"claim", klog.KRef(event.Claim.Namespace, event.Claim.Name))
		p.handle.Activate(logger, map[string]*v1.Pod{p.pod.Namespace + "/" + p.pod.Name: p.pod})
	}
}
