// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The words that NVIDIA's DRA driver and device plugin publish: selectors in
// users' manifests compare with them.
var (
	brands = map[gonvml.BrandType]string{
		gonvml.BRAND_UNKNOWN:             "Unknown",
		gonvml.BRAND_QUADRO:              "Quadro",
		gonvml.BRAND_TESLA:               "Tesla",
		gonvml.BRAND_NVS:                 "NVS",
		gonvml.BRAND_GRID:                "Grid",
		gonvml.BRAND_GEFORCE:             "GeForce",
		gonvml.BRAND_TITAN:               "Titan",
		gonvml.BRAND_NVIDIA_VAPPS:        "NvidiaVApps",
		gonvml.BRAND_NVIDIA_VPC:          "NvidiaVPC",
		gonvml.BRAND_NVIDIA_VCS:          "NvidiaVCS",
		gonvml.BRAND_NVIDIA_VWS:          "NvidiaVWS",
		gonvml.BRAND_NVIDIA_CLOUD_GAMING: "NvidiaCloudGaming",
		gonvml.BRAND_QUADRO_RTX:          "QuadroRTX",
		gonvml.BRAND_NVIDIA_RTX:          "NvidiaRTX",
		gonvml.BRAND_NVIDIA:              "Nvidia",
		gonvml.BRAND_GEFORCE_RTX:         "GeForceRTX",
		gonvml.BRAND_TITAN_RTX:           "TitanRTX",
	}
	architectures = map[gonvml.DeviceArchitecture]string{
		gonvml.DEVICE_ARCH_KEPLER:    "Kepler",
		gonvml.DEVICE_ARCH_MAXWELL:   "Maxwell",
		gonvml.DEVICE_ARCH_PASCAL:    "Pascal",
		gonvml.DEVICE_ARCH_VOLTA:     "Volta",
		gonvml.DEVICE_ARCH_TURING:    "Turing",
		gonvml.DEVICE_ARCH_AMPERE:    "Ampere",
		gonvml.DEVICE_ARCH_ADA:       "Ada Lovelace",
		gonvml.DEVICE_ARCH_HOPPER:    "Hopper",
		gonvml.DEVICE_ARCH_BLACKWELL: "Blackwell",
		gonvml.DEVICE_ARCH_RUBIN:     "Rubin",
		gonvml.DEVICE_ARCH_UNKNOWN:   "Unknown",
	}
	addressingModes = map[gonvml.DeviceAddressingModeType]string{
		gonvml.DEVICE_ADDRESSING_MODE_NONE: "None",
		gonvml.DEVICE_ADDRESSING_MODE_HMM:  "HMM",
		gonvml.DEVICE_ADDRESSING_MODE_ATS:  "ATS",
	}
	// The generations of NVLink.
	nvlinkVersions = map[gonvml.NvlinkVersion]int{
		gonvml.NVLINK_VERSION_1_0: 1, gonvml.NVLINK_VERSION_2_0: 2, gonvml.NVLINK_VERSION_2_2: 2, gonvml.NVLINK_VERSION_3_0: 3,
		gonvml.NVLINK_VERSION_3_1: 3, gonvml.NVLINK_VERSION_4_0: 4, gonvml.NVLINK_VERSION_5_0: 5, gonvml.NVLINK_VERSION_6_0: 6,
	}
	fabricStates = map[uint8]string{
		gonvml.GPU_FABRIC_STATE_NOT_STARTED: "NotStarted",
		gonvml.GPU_FABRIC_STATE_IN_PROGRESS: "InProgress",
		gonvml.GPU_FABRIC_STATE_COMPLETED:   "Completed",
	}
)

// word names a value. A driver newer than the table has values without a word:
// they get one made of the number, so that such a GPU is still published.
func word[K comparable](table map[K]string, value K) string {
	if w, ok := table[value]; ok {
		return w
	}
	return fmt.Sprintf("Unknown%v", value)
}
