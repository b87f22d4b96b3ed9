// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package config holds the typed arguments of the scheduler plugins in this module: the `args` of a
// `pluginConfig` entry in a KubeSchedulerConfiguration.
//
// Importing the package registers the types with kube-scheduler's own schemes, in the group and version
// kubescheduler.config.k8s.io/v1. So kube-scheduler's loader decodes them strictly (an unknown field is an
// error that names it), fills in defaults and prints them with --write-config-to, as it does for its own
// plugins.
//
// It is not where configurations are judged as a whole: which plugins may stand beside each other, and in
// which order, is checked by pkg/plugins.
package config
