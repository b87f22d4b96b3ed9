// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package liveness asks the question of rest: when nothing moves any more, would a new scheduler do anything?
// Whatever it would do, the old one forgot.
//
// A [Scenario] is a small cluster and what happens to it. [Run] plays it in a bubble of testing/synctest: the real
// scheduling queue, framework and plugins, kube-controller-manager's controllers for claims and groups, and an API in memory
// (memoryapi). When all is at rest the scheduler is stopped and a new one is started on the same API. Each binding,
// eviction and deallocation of that one is a difference, and so is what no rest may have: a device held twice, or
// held for nobody.
//
// Chance is no difference. kube-scheduler places the first pod of a group with what is best for it alone, and begins with another node at
// each attempt; so it may try a group for ever and never find the node that suits all. Where the old scheduler still tries groups, a new
// one is started from the same state with each node as the first one, and only what it does every time counts. Who sleeps though it could
// run, or could have others evicted, is found from each node.
//
// Random scenarios come from [Random]; what fails is made small by [Shrink] and printed as code, which can be pasted
// into the table of TestScenarios.
package liveness
