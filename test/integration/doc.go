// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package integration tests the scheduler on a real API server, etcd and kube-controller-manager.
//
// All tests share one control plane (TestMain). Each has a world of its own in it: a namespace, and nodes, a
// device driver and a device class named after that. Nodes and ResourceSlices are made by hand, in the shape that
// the node agent gives them; nothing runs the pods, so a test says itself when one ends.
//
// Most tests run the scheduler in this process, from the configuration files in manifests/ and with the rights
// that manifests/ grant, so that they can look into it and make its steps fail. What concerns the
// process (leader election, refused configurations, the neighbourhood of the stock scheduler) runs the real binary.
//
// Nothing here sleeps: tests wait on watches. The scheduler's periodic flush of waiting pods comes
// minutes after a test has given up, so a pod that is scheduled was woken by an event.
package integration
