// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hollow is a kubelet without containers. It needs no root, no cgroups and no namespaces, so any number of nodes fits into
// one process.
//
// What it does is real, and done with the identity of a node (user system:node:<name>): it registers its Node, keeps a Lease,
// deletes the node's ResourceSlices when it starts, watches the folder of plugin registrars and speaks the registration protocol,
// calls a DRA plugin's NodePrepareResources and NodeUnprepareResources for its pods' claims under the kubelet's rules, resolves
// the CDI devices that it gets with the CDI library as a container runtime does, and reports its pods' status, including their
// end. It serves device plugins (v1beta1), with the kubelet's checkpoint, and tells by PodResources' List what pods have. Package
// contract has the tests that the real kubelet passes, too.
//
// What it leaves out: containers, and with them images, volumes, probes, logs and exits. A pod runs until it is deleted.
// [Kubelet.Seen] tells what its containers would have seen. Of admission there is the allocation of devices alone: no resource
// fit, no taints, no topology.
package hollow
