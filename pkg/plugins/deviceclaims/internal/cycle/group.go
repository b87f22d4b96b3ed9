// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cycle

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	fwk "k8s.io/kube-scheduler/framework"
)

// Group is what is known of the pods of a group in one cycle of the group. One goroutine uses it.
type Group struct {
	Pods map[types.UID]*State
}

// Clone implements [fwk.StateData].
func (g *Group) Clone() fwk.StateData { return g }

// Claims are those of the pods, by UID.
func (g *Group) Claims() sets.Set[types.UID] {
	claims := sets.New[types.UID]()
	for _, c := range g.Pods {
		for _, pc := range c.Claims {
			claims.Insert(pc.Claim.UID)
		}
	}
	return claims
}

// ReadGroup returns what is known of the group's pods. It is empty if none of them needs devices.
func ReadGroup(state fwk.PodGroupCycleState) (*Group, error) {
	g, err := read[*Group](state.Read)
	if g == nil && err == nil {
		g = &Group{Pods: map[types.UID]*State{}}
	}
	return g, err
}

// NoteInGroup notes what PreFilter found out about a pod in a cycle of its group.
func NoteInGroup(state fwk.CycleState, pod *v1.Pod, c *State) error {
	group := state.GetPodGroupSchedulingCycle()
	g, err := ReadGroup(group)
	if err != nil {
		return err
	}
	g.Pods[pod.UID] = c
	group.Write(key, g)
	return nil
}
