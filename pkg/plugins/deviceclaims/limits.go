// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"cmp"
	"time"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
)

// Limits bound what a scheduler does beside finding devices. Each such thing holds up scheduling and can be left half
// done: the pod is then told less, or tried once too often, but nothing becomes wrong. A zero value means the default,
// 50 ms each, which is a small part of what nodes with tens of devices take. Tests that say exactly what is found raise
// them, so that a slow machine finds it, too.
type Limits struct {
	// Holders is for finding the claims whose release would help a pod that fits nowhere. Those that are not found are
	// not named.
	Holders time.Duration
	// Obstacle is for finding which of a pod's own allocations keeps it off a node, where several may. If it ends, the
	// first of them is given up.
	Obstacle time.Duration
	// WakeUp is for finding out whether a waiting pod fits after a change, for each pod. If it ends, the pod is woken.
	WakeUp time.Duration
	// Evaluation is how long the CEL expressions of one pod may be evaluated in one attempt.
	Evaluation time.Duration
}

const defaultLimit = 50 * time.Millisecond

func (l Limits) withDefaults() Limits {
	return Limits{
		Holders:    cmp.Or(l.Holders, defaultLimit),
		Obstacle:   cmp.Or(l.Obstacle, defaultLimit),
		WakeUp:     cmp.Or(l.WakeUp, defaultLimit),
		Evaluation: cmp.Or(l.Evaluation, demand.EvaluationTime),
	}
}
