// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"k8s.io/apimachinery/pkg/runtime"
	configv1 "k8s.io/kube-scheduler/config/v1"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	schedulerconfigv1 "k8s.io/kubernetes/pkg/scheduler/apis/config/v1"
)

// kube-scheduler has no hook for the types of out-of-tree plugins. Its loader uses two schemes: one decodes
// the file, the other one defaults and converts plugin arguments.
func init() {
	addToScheme(scheme.Scheme)
	addToScheme(schedulerconfigv1.GetPluginArgConversionScheme())
}

// addToScheme registers the argument types and their defaults. The kind is the plugin's name followed by
// "Args", which is how kube-scheduler's loader finds it.
func addToScheme(s *runtime.Scheme) {
	s.AddKnownTypes(configv1.SchemeGroupVersion, &DeviceClaimsArgs{})
	s.AddKnownTypes(schedulerconfig.SchemeGroupVersion, &DeviceClaimsArgs{})
	s.AddTypeDefaultingFunc(&DeviceClaimsArgs{}, func(obj any) {
		SetDefaultsDeviceClaimsArgs(obj.(*DeviceClaimsArgs))
	})
}
