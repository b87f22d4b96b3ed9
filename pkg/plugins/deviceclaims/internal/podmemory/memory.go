// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podmemory

import corelisters "k8s.io/client-go/listers/core/v1"

// Memory is all that is remembered of single pods.
type Memory struct {
	// Attempts are the pods that are being bound, Leaving the claims that preemptors wait for.
	Attempts *Attempts
	Leaving  *LeavingClaims
	// Failed has the devices, and nodes, that pods should not try again before others.
	Failed *FailedDevices
	// Recorded are pods whose status may name a claim for extended resources.
	Recorded *RecordedPods
}

// New returns an empty memory. The lister knows which pods there are.
func New(pods corelisters.PodLister) *Memory {
	return &Memory{Attempts: newAttempts(), Leaving: newLeavingClaims(), Failed: newFailedDevices(pods), Recorded: newRecordedPods(pods)}
}
