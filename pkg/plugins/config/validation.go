// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// minBindingTimeout is what kube-scheduler demands of DynamicResourcesArgs, too: with less, no device could
// become ready in time.
const minBindingTimeout = time.Second

// minFenceTimeout is far more than a healthy watch takes, so that a fence does not give up what is about to come.
const minFenceTimeout = time.Second

// minAuditPeriod keeps the lists of all claims from being most of what the API server does.
const minAuditPeriod = time.Second

// ValidateDeviceClaimsArgs checks defaulted arguments. The error lists every bad field with its value.
func ValidateDeviceClaimsArgs(args *DeviceClaimsArgs) error {
	var errs field.ErrorList
	errs = append(errs, validateDuration(field.NewPath("filterTimeout"), args.FilterTimeout, 0)...)
	errs = append(errs, validateDuration(field.NewPath("bindingTimeout"), args.BindingTimeout, minBindingTimeout)...)
	errs = append(errs, validateFence(field.NewPath("fence"), args.Fence)...)
	if args.AuditPeriod == nil || args.AuditPeriod.Duration != 0 {
		errs = append(errs, validateDuration(field.NewPath("auditPeriod"), args.AuditPeriod, minAuditPeriod)...)
	}
	errs = append(errs, validateOwnership(field.NewPath("ownership"), args.Ownership)...)
	errs = append(errs, validateScoringStrategy(field.NewPath("scoringStrategy"), args.ScoringStrategy)...)
	if known := []ClaimDisclosure{CountClaims, NameClaims}; args.ClaimsOfOtherNamespaces == "" {
		errs = append(errs, field.Required(field.NewPath("claimsOfOtherNamespaces"), ""))
	} else if !slices.Contains(known, args.ClaimsOfOtherNamespaces) {
		errs = append(errs, field.NotSupported(field.NewPath("claimsOfOtherNamespaces"), args.ClaimsOfOtherNamespaces, known))
	}
	return errs.ToAggregate()
}

func validateFence(path *field.Path, args *FenceArgs) field.ErrorList {
	if args == nil {
		return field.ErrorList{field.Required(path, "")}
	}
	var errs field.ErrorList
	if args.Enabled == nil {
		errs = append(errs, field.Required(path.Child("enabled"), ""))
	}
	errs = append(errs, validateDuration(path.Child("timeout"), args.Timeout, minFenceTimeout)...)
	return append(errs, validateDuration(path.Child("jitter"), args.Jitter, 0)...)
}

// validateOwnership checks names by the rules for drivers, pools and devices in ResourceSlices.
func validateOwnership(path *field.Path, args *OwnershipArgs) field.ErrorList {
	switch {
	case args == nil:
		return field.ErrorList{field.Required(path, "")}
	case args.Enabled == nil:
		return field.ErrorList{field.Required(path.Child("enabled"), "")}
	}
	var errs field.ErrorList
	invalid := func(child, value string, problems []string) {
		for _, problem := range problems {
			errs = append(errs, field.Invalid(path.Child(child), value, problem))
		}
	}
	invalid("driver", args.Driver, validation.IsDNS1123Subdomain(args.Driver))
	if args.Pool != "" {
		for part := range strings.SplitSeq(args.Pool, "/") {
			invalid("pool", args.Pool, validation.IsDNS1123Subdomain(part))
		}
	}
	if args.Device != "" {
		invalid("device", args.Device, validation.IsDNS1123Label(args.Device))
	}
	return errs
}

func validateDuration(path *field.Path, d *metav1.Duration, least time.Duration) field.ErrorList {
	switch {
	case d == nil:
		return field.ErrorList{field.Required(path, "")}
	case d.Duration < least:
		return field.ErrorList{field.Invalid(path, d.Duration.String(), "must be at least "+least.String())}
	}
	return nil
}
