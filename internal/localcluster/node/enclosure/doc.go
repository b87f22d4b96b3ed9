// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package enclosure holds one real node apart from the machine it runs on, and takes it away without a trace.
//
// An enclosure is a mount namespace, in which folders of the node stand where kubelet, containerd and CNI have fixed paths, and a
// cgroup, below which the kubelet puts its pods. Both belong to one process, the janitor (command janitor), which outlives nobody:
// when its standard input ends, because Stop closed it or because our process died in whatever way, it kills every process in the
// namespace and in the cgroup, removes the cgroup and the mount points it had made, and exits. With it go the mounts, and with those
// the pods' network namespaces and their links.
//
// Processes are started inside by way of the same binary, see [Enclosure.Wrap].
//
// It is not a container: processes inside see the machine's file system, processes and network.
package enclosure
