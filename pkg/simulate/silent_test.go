// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
)

// silent drops events.
type silent struct{}

func (silent) Eventf(runtime.Object, runtime.Object, string, string, string, string, ...any) {}

func (r silent) WithLogger(logr.Logger) events.EventRecorderLogger { return r }
