// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package node runs a real Kubernetes node on this machine beside the control plane of package localcluster: kubelet, containerd,
// runc and CNI, and our node agent, in a mount namespace and a cgroup of their own (package enclosure).
//
//	n, err := node.Start(ctx, cluster, node.Options{Name: "node-1", Agent: node.Agent{Binary: agent, NVML: "sim:dgx-h100"}})
//	if err != nil {
//		return err
//	}
//	defer n.Stop()
//
// It needs Linux and root. It leaves the machine as it was: kernel settings that kubelet and CNI want to change are shown to
// them as already changed, folders with fixed paths are the node's own, and Stop, which also happens when the context ends, takes away
// processes, mounts, cgroups, links and device nodes, and returns as an error what it finds left. If our own process is killed, the
// enclosure's janitor does the same cleaning.
//
// The agent has the rights of its ServiceAccount, with a token bound to the Node object, and the kubelet those of its node. The one
// thing done as administrator is what a cloud provider does: giving the node its address, here 127.0.0.1.
//
// Pods get an address on a network of this node alone: no other network, no cluster DNS, no services. They want dnsPolicy: Default, and
// automountServiceAccountToken: false where they have no use for a token.
package node
