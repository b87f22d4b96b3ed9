// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package wakeup knows which pods wait for devices and for what, and decides which of them a change may help.
//
// A pod that could not be scheduled sleeps in the scheduling queue. A device that is freed, a new slice, a lifted taint or
// a changed class may help it. To try every sleeping pod after each such change would cost the scheduler more than all else
// it does, so a change is first looked at here, beside the scheduling loop: the allocator says for the nodes that the change
// touches, on the newest state, which of the pods could now fit.
//
// # What is promised
//
//   - No pod sleeps that could fit, or that could have others evicted where it could not in its last attempt: whatever changes
//     after a pod has been noted is looked at for it, in whatever order events come. What cannot be decided here wakes the pod.
//   - No more pods are woken than the change admits. A woken pod counts as having taken what it is expected to take until it
//     has been tried. If it fails, goes elsewhere or is gone, the next one in the order of the queue is woken.
//   - A pod that was tried and refused on a state is not woken by what was part of that state.
//
// # What it is not
//
// It has no clients, no goroutines and no clock of its own, and knows nothing of the scheduling framework: the plugin tells it
// what happens and wakes the pods that it names. It does not know the other plugins either: a woken pod may be refused for want of
// CPU. That is what a wake-up that led to nothing is counted for.
package wakeup
