// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"

	fwk "k8s.io/kube-scheduler/framework"
)

// EventsToRegister lists the events of the framework's own informers that may help a pod which this plugin
// has rejected. ResourceClaims and ResourceSlices are not among them: the plugin looks at them through the
// tracker and the inventory, which wake pods
// themselves, see [waiting.Pods]. What the hints are told of nodes goes the same way.
func (pl *Plugin) EventsToRegister(context.Context) ([]fwk.ClusterEventWithHint, error) {
	return []fwk.ClusterEventWithHint{
		{
			Event:          fwk.ClusterEvent{Resource: fwk.TargetPod, ActionType: fwk.UpdatePodGeneratedResourceClaim},
			QueueingHintFn: pl.hints.AfterPodUpdate,
		},
		{
			Event:          fwk.ClusterEvent{Resource: fwk.TargetPod, ActionType: fwk.UpdatePodToleration},
			QueueingHintFn: pl.hints.AfterNewToleration,
		},
		{
			// The framework has no event of its own for nominations: this one is for each update of the pod itself.
			Event:          fwk.ClusterEvent{Resource: fwk.TargetPod, ActionType: fwk.Update},
			QueueingHintFn: pl.hints.AfterNomination,
		},
		{
			Event: fwk.ClusterEvent{
				Resource:   fwk.Node,
				ActionType: fwk.Add | fwk.UpdateNodeLabel | fwk.UpdateNodeTaint | fwk.UpdateNodeAllocatable | fwk.UpdateNodeDeclaredFeature,
			},
			QueueingHintFn: pl.hints.AfterNodeChange,
		},
		{
			Event:          fwk.ClusterEvent{Resource: fwk.AssignedPod, ActionType: fwk.Add},
			QueueingHintFn: pl.hints.AfterPodAssigned,
		},
		{
			// What a nominated pod was to get, or the last pod of a device plugin had, see waiting.Hints.AfterPodDeletion.
			Event:          fwk.ClusterEvent{Resource: fwk.AssignedPod, ActionType: fwk.Delete},
			QueueingHintFn: pl.hints.AfterPodDeletion,
		},
		{
			// Also what keeps the framework's map of extended resources to classes up to date.
			Event:          fwk.ClusterEvent{Resource: fwk.DeviceClass, ActionType: fwk.Add | fwk.Update | fwk.Delete},
			QueueingHintFn: pl.hints.AfterClassChange,
		},
	}, nil
}
