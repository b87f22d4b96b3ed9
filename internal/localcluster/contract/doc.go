// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package contract has what a plugin may expect of a kubelet, as one test that the real kubelet and the hollow one both pass:
// registration of DRA drivers and device plugins, when claims are prepared and unprepared, which devices are allocated to which
// container, what both see of restarts, and what PodResources tells. So what is tested with hollow kubelets holds with real ones.
package contract
