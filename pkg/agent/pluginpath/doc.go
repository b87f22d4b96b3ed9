// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package pluginpath keeps each GPU of a node on one of the kubelet's two ways to it: ResourceSlices and claims, or the device
// plugin API. A GPU is offered to the kubelet once it is certain that no slice has it, and it is in no slice while a pod has it by
// the device plugin. Whoever has it, the record stands in the one ledger, by package hold.
package pluginpath
