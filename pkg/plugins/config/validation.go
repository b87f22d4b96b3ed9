package config

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// minBindingTimeout is what kube-scheduler demands of DynamicResourcesArgs, too: with less, no device could
// become ready in time.
const minBindingTimeout = time.Second

// ValidateDeviceClaimsArgs checks defaulted arguments. The error lists every bad field with its value.
func ValidateDeviceClaimsArgs(args *DeviceClaimsArgs) error {
	var errs field.ErrorList
	errs = append(errs, validateDuration(field.NewPath("filterTimeout"), args.FilterTimeout, 0)...)
	errs = append(errs, validateDuration(field.NewPath("bindingTimeout"), args.BindingTimeout, minBindingTimeout)...)
	return errs.ToAggregate()
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
