// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

// nominees are the pods that are nominated to nodes: preemption has evicted others for them. It is a fwk.PodNominator.
type nominees struct {
	mutex sync.Mutex
	on    map[string][]fwk.PodInfo
	node  map[types.UID]string
}

func newNominees(pods []*v1.Pod) *nominees {
	n := &nominees{on: map[string][]fwk.PodInfo{}, node: map[types.UID]string{}}
	for _, pod := range pods {
		if pod.Spec.NodeName == "" && pod.Status.NominatedNodeName != "" && !isOver(pod) {
			if info, err := framework.NewPodInfo(pod); err == nil {
				n.add(info, pod.Status.NominatedNodeName)
			}
		}
	}
	return n
}

func (n *nominees) add(pod fwk.PodInfo, node string) {
	n.remove(pod.GetPod().UID)
	n.on[node] = append(n.on[node], pod)
	n.node[pod.GetPod().UID] = node
}

func (n *nominees) remove(pod types.UID) {
	node, ok := n.node[pod]
	if !ok {
		return
	}
	delete(n.node, pod)
	var left []fwk.PodInfo
	for _, info := range n.on[node] {
		if info.GetPod().UID != pod {
			left = append(left, info)
		}
	}
	n.on[node] = left
}

// AddNominatedPod implements [fwk.PodNominator].
func (n *nominees) AddNominatedPod(_ klog.Logger, pod fwk.PodInfo, how *fwk.NominatingInfo) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	node := pod.GetPod().Status.NominatedNodeName
	if how != nil && how.Mode() == fwk.ModeOverride {
		node = how.NominatedNodeName
	}
	if node != "" {
		n.add(pod, node)
	}
}

// DeleteNominatedPodIfExists implements [fwk.PodNominator].
func (n *nominees) DeleteNominatedPodIfExists(pod *v1.Pod) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.remove(pod.UID)
}

// UpdateNominatedPod implements [fwk.PodNominator].
func (n *nominees) UpdateNominatedPod(logger klog.Logger, before *v1.Pod, after fwk.PodInfo) {
	n.DeleteNominatedPodIfExists(before)
	n.AddNominatedPod(logger, after, nil)
}

// NominatedPodsForNode implements [fwk.PodNominator].
func (n *nominees) NominatedPodsForNode(node string) []fwk.PodInfo {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return append([]fwk.PodInfo(nil), n.on[node]...)
}
