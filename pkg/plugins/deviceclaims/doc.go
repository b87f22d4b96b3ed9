// Package deviceclaims is the scheduler plugin DeviceClaims: it puts pods that use ResourceClaims on nodes
// whose devices satisfy the claims, and writes which devices each claim got. It takes the place of
// kube-scheduler's own plugin DynamicResources.
//
// It is an adapter with a file per extension point. What devices exist is known by pkg/inventory, who holds
// them by pkg/tracker, and which of them a claim gets is decided by pkg/allocator. What is left for this
// package is the way of a pod through the scheduling framework, the writes to the API, and the wake-up of
// pods that could not be scheduled.
//
// One [Shared] serves all profiles of a scheduler, because two accounts of who holds what cannot be kept
// consistent.
package deviceclaims
