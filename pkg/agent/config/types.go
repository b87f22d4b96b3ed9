// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// APIVersion of all kinds.
const APIVersion = "resource.nvidia.com/v1beta1"

// Kind of parameters; each is for devices of one type.
type Kind string

// The kinds.
const (
	// KindGPU is for whole GPUs.
	KindGPU Kind = "GpuConfig"
	// KindMIG is for MIG devices.
	KindMIG Kind = "MigDeviceConfig"
)

// Strategy says how the containers that use a claim share its devices.
type Strategy string

// The strategies.
const (
	// TimeSlicing lets processes take turns. It is what a GPU does by itself.
	TimeSlicing Strategy = "TimeSlicing"
	// MPS lets processes run side by side, under a daemon of NVIDIA's Multi-Process Service.
	MPS Strategy = "MPS"
	// Exclusive admits one process at a time (compute mode Exclusive_Process); for whole GPUs only.
	Exclusive Strategy = "Exclusive"
)

// Interval is how long a process keeps the GPU before the next one gets it.
type Interval string

// The intervals that nvidia-smi compute-policy knows.
const (
	IntervalDefault Interval = "Default"
	IntervalShort   Interval = "Short"
	IntervalMedium  Interval = "Medium"
	IntervalLong    Interval = "Long"
)

// intervals in the order of nvidia-smi's numbers.
var intervals = []Interval{IntervalDefault, IntervalShort, IntervalMedium, IntervalLong}

// Number is the interval's for nvidia-smi compute-policy --set-timeslice.
func (i Interval) Number() int {
	for number, known := range intervals {
		if i == known {
			return number
		}
	}
	return 0
}

// gpuConfig and migDeviceConfig are the API's types.
type gpuConfig struct {
	metav1.TypeMeta `json:",inline"`

	Sharing *gpuSharing `json:"sharing,omitempty"`
}

type gpuSharing struct {
	Strategy          Strategy           `json:"strategy"`
	TimeSlicingConfig *timeSlicingConfig `json:"timeSlicingConfig,omitempty"`
	MPSConfig         *mpsConfig         `json:"mpsConfig,omitempty"`
}

type migDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`

	Sharing *migDeviceSharing `json:"sharing,omitempty"`
}

type migDeviceSharing struct {
	Strategy  Strategy   `json:"strategy"`
	MPSConfig *mpsConfig `json:"mpsConfig,omitempty"`
}

type timeSlicingConfig struct {
	Interval *Interval `json:"interval,omitempty"`
}

type mpsConfig struct {
	DefaultActiveThreadPercentage  *int                `json:"defaultActiveThreadPercentage,omitempty"`
	DefaultPinnedDeviceMemoryLimit *quantity           `json:"defaultPinnedDeviceMemoryLimit,omitempty"`
	PerDevicePinnedMemoryLimit     map[string]quantity `json:"defaultPerDevicePinnedMemoryLimit,omitempty"`
	MultiUser                      *bool               `json:"multiUser,omitempty"`
}

// quantity is a number of bytes as it was written, a JSON string or a number. It is parsed later, when the field's name is at hand.
type quantity string

// UnmarshalJSON takes what is there.
func (q *quantity) UnmarshalJSON(data []byte) error {
	*q = quantity(data)
	return nil
}
