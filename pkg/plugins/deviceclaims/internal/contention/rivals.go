// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package contention knows who competes with a pod for devices: who holds them, who is about to leave, and what pods
// that are nominated to a node are going to get. It knows neither what a pod asks for nor what is written to the API.
package contention

import (
	"context"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podmemory"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Common is what all profiles of a scheduler know of each other's pods.
type Common struct {
	Claims *tracker.Tracker
	Pods   corelisters.PodLister
	// Devices returns the newest view of the inventory.
	Devices  func() *inventory.View
	Attempts *podmemory.Attempts
	Leaving  *podmemory.LeavingClaims
	// Nominations are the nodes that have devices kept for nominated pods.
	Nominations *Nominations
	// Trial has what the pods of a group have been given while the group is tried.
	Trial *Trial
}

// Rivals knows who competes with the pods of one profile.
type Rivals struct {
	*Common
	Handle Handle
	Groups *podclaims.Groups
	// Extended knows which claims are still to be made for extended resources.
	Extended interface {
		// UnbornFor returns the claim that will be made for a pod if it comes to the node, nil if it needs none there or has one.
		UnbornFor(pod *v1.Pod, node *v1.Node) *resourceapi.ResourceClaim
	}
	// Search is how devices are chosen.
	Search
	// NameAll tells that claims of other namespaces are named to a pod's user.
	NameAll bool
}

// Handle is the part of the framework's handle that tells of other pods.
type Handle interface {
	fwk.PodNominator
	fwk.PodActivator
	SnapshotSharedLister() fwk.SharedLister
}

// Search is how a profile chooses devices.
type Search struct {
	Features allocator.Features
	Policy   allocator.Policy
	Scoring  allocator.Scoring
	Time     Time
}

// Time is how long a profile may search.
type Time interface {
	// Attempt begins the time that searches for a pod have together. It is its namespace's.
	Attempt(pod *v1.Pod) allocator.Attempt
	// OnNode bounds the search on one node.
	OnNode(ctx context.Context) (context.Context, context.CancelFunc)
}

// Facts are what does not change in one attempt of a pod.
type Facts struct {
	Search
	// Inventory and Usage are the views of the attempt.
	Inventory *inventory.View
	Usage     usage.View
	// Holders are what other pods hold.
	Holders *Holders
}

// Situation is what one attempt of a pod, or a clone of its state, decides on.
type Situation struct {
	*Facts
	// Trial has what other pods of the group have been given in this cycle of the group. Nil if the pod is scheduled alone.
	Trial *Trial
	// WhatIf says what is different from Usage.
	WhatIf *WhatIf
}

// Input is what the allocator decides on, for a node or, without one, for all as they are.
func (s *Situation) Input(ctx context.Context, requests *allocator.Requests, node *v1.Node) allocator.Input {
	return allocator.Input{
		Requests: requests, Node: node, Inventory: s.Inventory, Usage: s.View(ctx, node), Policy: s.Policy, Scoring: s.Scoring,
	}
}
