package deviceclaims

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
)

// victimHandler wakes a nominated pod whenever one of those is gone that were evicted for it. The scheduling queue may
// let it sleep: it drops the events that come while DefaultPreemption still evicts, and what goes last need not be
// what the plugins wait for that refused the pod. If one victim had the volume and goes first, and the other one had the
// device, nobody else would wake the pod. As long as victims are being evicted the queue keeps the pod back.
func victimHandler(logger klog.Logger, handle fwk.Handle) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = tombstone.Obj
		}
		victim, ok := obj.(*v1.Pod)
		if !ok || !wasPreempted(victim) {
			return
		}
		woken := map[string]*v1.Pod{}
		for _, info := range handle.NominatedPodsForNode(victim.Spec.NodeName) {
			if pod := info.GetPod(); usesDevices(pod) {
				woken[pod.Namespace+"/"+pod.Name] = pod
			}
		}
		if len(woken) > 0 {
			logger.V(4).Info("Waking the pods for which a pod was evicted that is gone now", "victim", klog.KObj(victim), "node", victim.Spec.NodeName)
			handle.Activate(logger, woken)
		}
	}}
}

// wasPreempted tells whether a scheduler evicted the pod from its node.
func wasPreempted(pod *v1.Pod) bool {
	if pod.Spec.NodeName == "" {
		return false
	}
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		if c.Type == v1.DisruptionTarget && c.Status == v1.ConditionTrue && c.Reason == v1.PodReasonPreemptionByScheduler {
			return true
		}
	}
	return false
}
