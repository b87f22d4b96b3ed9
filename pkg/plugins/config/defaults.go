// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// SetDefaultsDeviceClaimsArgs fills in the fields that are not set.
func SetDefaultsDeviceClaimsArgs(args *DeviceClaimsArgs) {
	args.FilterTimeout = cmp.Or(args.FilterTimeout, &metav1.Duration{Duration: DefaultFilterTimeout})
	args.BindingTimeout = cmp.Or(args.BindingTimeout, &metav1.Duration{Duration: DefaultBindingTimeout})
	args.AuditPeriod = cmp.Or(args.AuditPeriod, &metav1.Duration{Duration: DefaultAuditPeriod})
	args.Fence = cmp.Or(args.Fence, &FenceArgs{})
	args.Fence.Enabled = cmp.Or(args.Fence.Enabled, ptr.To(true))
	args.Fence.Timeout = cmp.Or(args.Fence.Timeout, &metav1.Duration{Duration: DefaultFenceTimeout})
	args.Fence.Jitter = cmp.Or(args.Fence.Jitter, &metav1.Duration{Duration: DefaultFenceJitter})
	args.ScoringStrategy = cmp.Or(args.ScoringStrategy, &ScoringStrategy{})
	args.ScoringStrategy.Type = cmp.Or(args.ScoringStrategy.Type, DefaultScoringStrategyType)
	args.ScoringStrategy.Devices = cmp.Or(args.ScoringStrategy.Devices, DefaultDeviceOrder)
	args.Ownership = cmp.Or(args.Ownership, &OwnershipArgs{})
	args.Ownership.Enabled = cmp.Or(args.Ownership.Enabled, ptr.To(false))
	args.Ownership.Driver = cmp.Or(args.Ownership.Driver, DefaultOwnedDriver)
	args.ClaimsOfOtherNamespaces = cmp.Or(args.ClaimsOfOtherNamespaces, CountClaims)
}
