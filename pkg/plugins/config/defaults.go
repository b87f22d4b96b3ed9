// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// SetDefaultsDeviceClaimsArgs fills in the fields that are not set.
func SetDefaultsDeviceClaimsArgs(args *DeviceClaimsArgs) {
	if args.FilterTimeout == nil {
		args.FilterTimeout = &metav1.Duration{Duration: DefaultFilterTimeout}
	}
	if args.BindingTimeout == nil {
		args.BindingTimeout = &metav1.Duration{Duration: DefaultBindingTimeout}
	}
	if args.Fence == nil {
		args.Fence = &FenceArgs{}
	}
	if args.Fence.Enabled == nil {
		args.Fence.Enabled = ptr.To(true)
	}
	if args.Fence.Timeout == nil {
		args.Fence.Timeout = &metav1.Duration{Duration: DefaultFenceTimeout}
	}
	if args.Fence.Jitter == nil {
		args.Fence.Jitter = &metav1.Duration{Duration: DefaultFenceJitter}
	}
	if args.AuditPeriod == nil {
		args.AuditPeriod = &metav1.Duration{Duration: DefaultAuditPeriod}
	}
	if args.Ownership == nil {
		args.Ownership = &OwnershipArgs{}
	}
	if args.Ownership.Enabled == nil {
		args.Ownership.Enabled = ptr.To(false)
	}
	if args.Ownership.Driver == "" {
		args.Ownership.Driver = DefaultOwnedDriver
	}
	args.ScoringStrategy = args.ScoringStrategy.withDefaults()
	if args.ClaimsOfOtherNamespaces == "" {
		args.ClaimsOfOtherNamespaces = CountClaims
	}
}
