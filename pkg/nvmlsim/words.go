// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"maps"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The words that a profile uses for NVML's enumerations; the same as go-nvlib's
// and therefore as in the attributes that NVIDIA's DRA driver publishes.
var (
	brands = map[string]nvml.BrandType{
		"GeForce":    nvml.BRAND_GEFORCE,
		"GeForceRTX": nvml.BRAND_GEFORCE_RTX,
		"Nvidia":     nvml.BRAND_NVIDIA,
		"NvidiaRTX":  nvml.BRAND_NVIDIA_RTX,
		"Quadro":     nvml.BRAND_QUADRO,
		"QuadroRTX":  nvml.BRAND_QUADRO_RTX,
		"Tesla":      nvml.BRAND_TESLA,
		"Titan":      nvml.BRAND_TITAN,
		"TitanRTX":   nvml.BRAND_TITAN_RTX,
	}
	architectures = map[string]nvml.DeviceArchitecture{
		"Pascal":       nvml.DEVICE_ARCH_PASCAL,
		"Volta":        nvml.DEVICE_ARCH_VOLTA,
		"Turing":       nvml.DEVICE_ARCH_TURING,
		"Ampere":       nvml.DEVICE_ARCH_AMPERE,
		"Ada Lovelace": nvml.DEVICE_ARCH_ADA,
		"Hopper":       nvml.DEVICE_ARCH_HOPPER,
		"Blackwell":    nvml.DEVICE_ARCH_BLACKWELL,
	}
	addressingModes = map[string]nvml.DeviceAddressingModeType{
		"None": nvml.DEVICE_ADDRESSING_MODE_NONE,
		"HMM":  nvml.DEVICE_ADDRESSING_MODE_HMM,
		"ATS":  nvml.DEVICE_ADDRESSING_MODE_ATS,
	}
)

// ComputeModes lists what [SetComputeMode] takes.
func ComputeModes() string { return words(computeModes) }

// ThrottleReasons lists what [SetThrottle] takes.
func ThrottleReasons() string { return words(throttleReasons) }

// Settings lists what [Refuse] takes.
func Settings() string { return words(settings) }

// Recoveries lists what [SetRecovery] takes beside nothing.
func Recoveries() string { return strings.TrimPrefix(words(recoveries), ", ") }

// words lists the keys of such a table for an error message.
func words[K ~string, V any](table map[K]V) string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(table)) {
		names = append(names, string(name))
	}
	return strings.Join(names, ", ")
}
