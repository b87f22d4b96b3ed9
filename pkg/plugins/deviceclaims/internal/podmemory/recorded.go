// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podmemory

import (
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
)

// RecordedPods are pods whose status may name a claim for extended resources although the scheduler's informer does
// not show it yet. Safe for concurrent use.
type RecordedPods struct {
	lister corelisters.PodLister

	mutex sync.Mutex
	pods  map[types.UID]types.NamespacedName
}

// newRecordedPods returns no pods. The lister knows which pods there are.
func newRecordedPods(lister corelisters.PodLister) *RecordedPods {
	return &RecordedPods{lister: lister, pods: map[types.UID]types.NamespacedName{}}
}

// Add notes a pod, and forgets those that are gone.
func (r *RecordedPods) Add(pod *v1.Pod) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for uid, name := range r.pods {
		if known, err := r.lister.Pods(name.Namespace).Get(name.Name); err != nil || known.UID != uid {
			delete(r.pods, uid)
		}
	}
	r.pods[pod.UID] = types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
}

// Has tells whether the pod's status names a claim for extended resources, or may.
func (r *RecordedPods) Has(pod *v1.Pod) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if pod.Status.ExtendedResourceClaimStatus != nil {
		delete(r.pods, pod.UID)
		return true
	}
	_, known := r.pods[pod.UID]
	return known
}
