package deviceclaims

import (
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"
)

// elsewhere knows, by pod, on which nodes its devices failed to become ready. The pod is tried elsewhere first: without
// that, what made the scheduler choose such a node would make it choose it again.
type elsewhere struct {
	mutex  sync.Mutex
	failed map[types.UID]sets.Set[string]
}

func newElsewhere() *elsewhere { return &elsewhere{failed: map[types.UID]sets.Set[string]{}} }

// add notes that devices of the node did not become ready for the pod.
func (e *elsewhere) add(pod types.UID, node string) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if e.failed[pod] == nil {
		e.failed[pod] = sets.New[string]()
	}
	e.failed[pod].Insert(node)
}

// score puts such nodes behind all others.
func (e *elsewhere) score(pod types.UID, node string, score int64) int64 {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	switch failed := e.failed[pod]; {
	case failed == nil:
		return score
	case failed.Has(node):
		return 0
	}
	return score + 1
}

func (e *elsewhere) forget(pod types.UID) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	delete(e.failed, pod)
}

// podHandler forgets pods that are bound, or gone.
func (e *elsewhere) podHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, obj any) {
			if pod, ok := obj.(*v1.Pod); ok && pod.Spec.NodeName != "" {
				e.forget(pod.UID)
			}
		},
		DeleteFunc: func(obj any) {
			if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = tombstone.Obj
			}
			if pod, ok := obj.(*v1.Pod); ok {
				e.forget(pod.UID)
			}
		},
	}
}
