// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package numa has the plugin NodeResourceTopologyMatch, which keeps pods off nodes whose kubelet would refuse them
// because no single NUMA node has what they ask for. The plugin is that of sigs.k8s.io/scheduler-plugins; what is
// here makes its arguments known and lets it live beside DeviceClaims.
//
// It decides on CPUs, memory and the devices of device plugins, as the Topology Manager of the kubelet does. Neither
// of the two knows the devices of claims.
package numa
