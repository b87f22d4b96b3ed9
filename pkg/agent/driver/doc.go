// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package driver is the node agent's outside: the kubelet's DRA plugin for gpu.nvidia.com on one node. It
// registers with the kubelet, publishes the node's GPUs as ResourceSlices, reports their health, and passes
// prepare and unprepare calls on to package prepare.
//
// Any start order is fine. No kubelet folder, no driver, no GPU and no API server are states that it waits out
// and says so; another plugin that serves the same driver name on the node is a reason not to start, because
// the kubelet would hand claims to either.
//
// The package does not decide how a GPU is prepared (prepare), what a container gets (cdi), or what is
// published about a GPU (discovery).
package driver
