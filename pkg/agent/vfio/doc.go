// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package vfio gives PCI functions of GPUs to the driver vfio-pci, through which a virtual machine gets them, and
// gives them back to the driver that they had.
//
// What the kernel isolates is not a GPU but an IOMMU group: nothing of the group may be used by the host while a part
// of it is with a virtual machine. So a GPU goes with all functions of its card (sound, USB), and one whose group has
// anything else in it, a network card or another GPU, is refused. Bridges do not count.
//
// The kernel is seen through the interface Sysfs, the tree below /sys. The package does not know claims, NVML, or
// who may have a GPU.
package vfio
