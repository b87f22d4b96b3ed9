// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package ownership keeps schedulers that do not know the fence off devices: a
// DeviceTaintRule with a key of ours makes kube-scheduler, and everybody else who
// respects taints, leave them alone. DeviceClaims ignores the taint in every
// profile, whoever made the rule, so that it can come and go while pods are
// being scheduled.
//
// [Rule] says what a rule looks like, [Keeper] sees to it that the API server has
// exactly the wanted ones. A rule belongs to one profile and bears its name, so
// schedulers with different settings never fight over one rule.
package ownership
