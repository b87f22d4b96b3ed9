// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package numa

import (
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	schedulerconfigv1 "k8s.io/kubernetes/pkg/scheduler/apis/config/v1"
	argsv1 "sigs.k8s.io/scheduler-plugins/apis/config/v1"
)

// The arguments have to be known to both schemes of kube-scheduler's loader: one decodes the file, the other one
// defaults and converts plugin arguments. scheduler-plugins adds its types to the list that both are made from, which
// is too late for a scheme that exists by then; adding a type twice does no harm.
func init() {
	utilruntime.Must(argsv1.AddToScheme(scheme.Scheme))
	utilruntime.Must(argsv1.AddToScheme(schedulerconfigv1.GetPluginArgConversionScheme()))
}
