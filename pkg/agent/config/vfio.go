// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// KindVFIO is for GPUs that a virtual machine gets.
const KindVFIO Kind = "VfioDeviceConfig"

// Backend says by which of the kernel's interfaces the GPU is put into the virtual machine's address space.
type Backend string

// The backends.
const (
	// LegacyOnly is by IOMMU groups, which every virtual machine monitor knows.
	LegacyOnly Backend = "LegacyOnly"
	// PreferIOMMUFD is by functions, where the kernel can, and otherwise by groups.
	PreferIOMMUFD Backend = "PreferIommuFD"
)

type vfioDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`

	IOMMU *iommuConfig `json:"iommu,omitempty"`
}

type iommuConfig struct {
	BackendPolicy   *Backend `json:"backendPolicy,omitempty"`
	EnableAPIDevice *bool    `json:"enableAPIDevice,omitempty"`
}

// VFIO are the settings of a GPU that a virtual machine gets. The zero value is what is meant if nothing is asked for.
type VFIO struct {
	// PreferIOMMUFD is that backend.
	PreferIOMMUFD bool
	// NoAPIDevice leaves out the node by which an address space is made: somebody else passes that in.
	NoAPIDevice bool
}

func (c *vfioDeviceConfig) settings() (Settings, error) {
	var s Settings
	if c.IOMMU == nil {
		return s, nil
	}
	if policy := c.IOMMU.BackendPolicy; policy != nil {
		switch *policy {
		case LegacyOnly:
		case PreferIOMMUFD:
			s.VFIO.PreferIOMMUFD = true
		default:
			return Settings{}, unknown("iommu.backendPolicy", *policy, LegacyOnly, PreferIOMMUFD)
		}
	}
	s.VFIO.NoAPIDevice = c.IOMMU.EnableAPIDevice != nil && !*c.IOMMU.EnableAPIDevice
	return s, nil
}
