// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package schedulerconfig has the shipped scheduler configurations, so that a simulation runs what is installed.
package schedulerconfig

import _ "embed"

// SecondScheduler is second-scheduler.yaml, a KubeSchedulerConfiguration.
//
//go:embed second-scheduler.yaml
var SecondScheduler []byte
