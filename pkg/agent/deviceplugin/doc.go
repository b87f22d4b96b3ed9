// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin serves the kubelet's device plugin API, v1beta1
// (https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/): pods ask for a number of
// nvidia.com/gpu, and the kubelet chooses the GPUs.
//
// [Server] registers each resource that the [Inventory] has, and again whenever the kubelet cannot be relied on to know
// it. How a device is made ready, and remembered, is the [Holder]'s.
//
// What the kubelet's device manager does decides on two rules. Allocate is called while the kubelet admits the pod, and
// an error fails the pod for good: so it refuses only what must never be, and whatever may pass is left to
// PreStartContainer, which the kubelet calls before each start of a container, and again after an error. And the kubelet
// keeps the answer to Allocate, over reboots, and asks again for the same devices for other reasons than a new pod: so
// the same devices always get the same answer.
package deviceplugin
