// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podmemory

import (
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"stowage.dev/stowage/pkg/usage"
)

const (
	// maxFailedDevices bounds what is remembered for one pod. The devices that failed first are forgotten first.
	maxFailedDevices = 64
	// maxFailuresOnNode is how often devices may fail on one node before it counts as the node's fault. Of a fabric, another device
	// might be tried there each time, for as long as there are any.
	maxFailuresOnNode = 3
)

// FailedDevices knows, by pod, which devices failed to become ready for it, and on which nodes (KEP-5007). The pod is tried with others
// first: without that, what made the scheduler choose a device would make it choose the same one again.
//
// Devices that failed are refused, and so are nodes on which several did, until nothing else is left for the pod. Then they are
// forgotten, first the nodes, and may be tried again. Nothing of this outlives the process: a pod may then meet the same device once more.
type FailedDevices struct {
	pods corelisters.PodLister

	mutex  sync.Mutex
	failed map[types.UID]*Failures
}

// Failures are what failed for one pod. They never change, but are replaced.
type Failures struct {
	pod     types.NamespacedName
	nodes   map[string]int // how often
	Devices []usage.DeviceID

	// view is what Without made of the view with the revision base, if known.
	mutex sync.Mutex
	known bool
	base  uint64
	view  usage.View
}

// newFailedDevices returns no failures. The lister knows which pods there are.
func newFailedDevices(pods corelisters.PodLister) *FailedDevices {
	return &FailedDevices{pods: pods, failed: map[types.UID]*Failures{}}
}

// Add notes that these devices did not become ready for the pod on the node. It forgets pods that are gone: they may have gone while
// their devices were waited for, so that their end was no news later on.
func (e *FailedDevices) Add(pod *v1.Pod, node string, devices []usage.DeviceID) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	for uid, f := range e.failed {
		if known, err := e.pods.Pods(f.pod.Namespace).Get(f.pod.Name); uid != pod.UID && (err != nil || known.UID != uid) {
			delete(e.failed, uid)
		}
	}
	next := &Failures{pod: types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, nodes: map[string]int{}}
	if known := e.failed[pod.UID]; known != nil {
		maps.Copy(next.nodes, known.nodes)
		next.Devices = slices.DeleteFunc(slices.Clone(known.Devices), func(id usage.DeviceID) bool { return slices.Contains(devices, id) })
	}
	next.nodes[node]++
	next.Devices = append(next.Devices, devices...)
	next.Devices = next.Devices[max(0, len(next.Devices)-maxFailedDevices):]
	e.failed[pod.UID] = next
}

// Of returns what failed for the pod, nil if nothing.
func (e *FailedDevices) Of(pod types.UID) *Failures {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	return e.failed[pod]
}

// Relax lets the pod have what keeps it from being tried: nodes, if there are any that are refused, otherwise devices.
func (e *FailedDevices) Relax(pod types.UID) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	known := e.failed[pod]
	if known != nil && slices.ContainsFunc(slices.Collect(maps.Keys(known.nodes)), known.TooOften) {
		e.failed[pod] = &Failures{pod: known.pod, Devices: known.Devices}
		return
	}
	delete(e.failed, pod)
}

func (e *FailedDevices) forget(pod types.UID) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	delete(e.failed, pod)
}

// PodHandler forgets pods that are bound, or gone.
func (e *FailedDevices) PodHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, obj any) {
			if pod, ok := obj.(*v1.Pod); ok && pod.Spec.NodeName != "" {
				e.forget(pod.UID)
			}
		},
		DeleteFunc: func(obj any) {
			if pod, ok := obj.(*v1.Pod); ok {
				e.forget(pod.UID)
			}
		},
	}
}

// On is how often devices failed on the node.
func (f *Failures) On(node string) int {
	if f == nil {
		return 0
	}
	return f.nodes[node]
}

// TooOften tells whether a node counts as unable to make devices ready.
func (f *Failures) TooOften(node string) bool { return f.On(node) >= maxFailuresOnNode }

// Score puts nodes on which devices failed behind all others.
func (f *Failures) Score(node string, score int64) int64 {
	switch {
	case f == nil:
		return score
	case f.On(node) > 0:
		return 0
	}
	return score + 1
}

// heldBy is who has the devices that failed, in a view made for their pod.
var heldBy = usage.ClaimRef{UID: "failed-for-the-pod"}

// Without returns the view as if nobody could have the devices that failed.
func (f *Failures) Without(view usage.View) usage.View {
	if f == nil || len(f.Devices) == 0 {
		return view
	}
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if !f.known || f.base != view.Revision() {
		held := &resourceapi.AllocationResult{}
		for _, id := range f.Devices {
			held.Devices.Results = append(held.Devices.Results,
				resourceapi.DeviceRequestAllocationResult{Driver: id.Driver, Pool: id.Pool, Device: id.Device})
		}
		f.known, f.base, f.view = true, view.Revision(), view.With(heldBy, held)
	}
	return f.view
}
