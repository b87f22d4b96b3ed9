package config

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// SetDefaultsDeviceClaimsArgs fills in the fields that are not set.
func SetDefaultsDeviceClaimsArgs(args *DeviceClaimsArgs) {
	if args.FilterTimeout == nil {
		args.FilterTimeout = &metav1.Duration{Duration: DefaultFilterTimeout}
	}
	if args.BindingTimeout == nil {
		args.BindingTimeout = &metav1.Duration{Duration: DefaultBindingTimeout}
	}
}
