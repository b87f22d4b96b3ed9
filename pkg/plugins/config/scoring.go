// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Defaults of [ScoringStrategy].
const (
	DefaultScoringStrategyType = MostAllocated
	DefaultDeviceOrder         = SmallestFit
)

// ScoringStrategy says what is preferred among what a pod can have. An earlier alternative of a firstAvailable request
// is always preferred to a later one, whatever is said here.
type ScoringStrategy struct {
	// Type says which nodes are preferred, by how many of the devices that match the pod's requests are held there,
	// counting those that the pod would get: MostAllocated packs pods onto as few nodes as possible, so that whole nodes
	// stay free for those who need them; LeastAllocated spreads them. The score is the plugin's, and counts as much as
	// the plugin's weight says. Default: MostAllocated.
	// +optional
	Type ScoringStrategyType `json:"type,omitempty"`

	// Devices says which devices of the node are taken: SmallestFit takes those with the least capacity, of devices that
	// are shared those with the least left, and of partitions those that take and leave the least of their counters;
	// FirstFit takes the first ones in the order of pools, slices and devices, as kube-scheduler's own plugin does.
	// Default: SmallestFit.
	// +optional
	Devices DeviceOrder `json:"devices,omitempty"`
}

// ScoringStrategyType is a way to choose among nodes, named as in NodeResourcesFitArgs.
type ScoringStrategyType string

// The types of scoring strategies.
const (
	MostAllocated  ScoringStrategyType = "MostAllocated"
	LeastAllocated ScoringStrategyType = "LeastAllocated"
)

// DeviceOrder is a way to choose among the devices of a node.
type DeviceOrder string

// The orders in which devices are taken.
const (
	SmallestFit DeviceOrder = "SmallestFit"
	FirstFit    DeviceOrder = "FirstFit"
)

func validateScoringStrategy(path *field.Path, s *ScoringStrategy) field.ErrorList {
	if s == nil {
		return field.ErrorList{field.Required(path, "")}
	}
	var errs field.ErrorList
	if types := []ScoringStrategyType{LeastAllocated, MostAllocated}; !slices.Contains(types, s.Type) {
		errs = append(errs, field.NotSupported(path.Child("type"), s.Type, types))
	}
	if orders := []DeviceOrder{FirstFit, SmallestFit}; !slices.Contains(orders, s.Devices) {
		errs = append(errs, field.NotSupported(path.Child("devices"), s.Devices, orders))
	}
	return errs
}
