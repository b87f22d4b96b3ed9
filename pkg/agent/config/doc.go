// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package config reads the opaque parameters that a claim or a DeviceClass carries for this driver: GpuConfig,
// MigDeviceConfig and VfioDeviceConfig of resource.nvidia.com/v1beta1, as NVIDIA's DRA driver has them, so that existing manifests mean
// the same here. The strategy Exclusive is ours.
//
// Decoding is strict. What is not understood (another kind, a field that does not exist, a value out of range) is
// an error that names the field and the value: ignoring it would hand out a device in another mode than was asked for.
//
// The package only reads. What a setting does to a GPU is package prepare's, and how it is done package sharing's.
package config
