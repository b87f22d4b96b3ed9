// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package rights

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var lastAnswer = metrics.NewGauge(&metrics.GaugeOpts{
	Subsystem: "stowage_scheduler",
	Name:      "rights_last_answer_timestamp_seconds",
	Help: "Unix time when the API server last said which rights the scheduler has; before the first answer, of the check's start. " +
		"0 if no rights are checked.",
	StabilityLevel: metrics.ALPHA,
})

var registerMetrics = sync.OnceFunc(func() { legacyregistry.MustRegister(lastAnswer) })
