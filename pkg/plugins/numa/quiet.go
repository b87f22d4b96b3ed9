// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package numa

import (
	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// quietly returns a logger that takes a NodeResourceTopology object that does not exist for no error. The original logs
// one for each look at a node without an object, and such nodes may be many.
func quietly(logger logr.Logger) logr.Logger {
	if logger.GetSink() == nil {
		return logger
	}
	return logger.WithSink(quietSink{logger.WithCallDepth(1).GetSink()})
}

// missingLevel is where objects that do not exist are logged.
const missingLevel = 5

type quietSink struct{ logr.LogSink }

func (s quietSink) Error(err error, message string, keysAndValues ...any) {
	switch {
	case !apierrors.IsNotFound(err):
		s.LogSink.Error(err, message, keysAndValues...)
	case s.Enabled(missingLevel):
		s.Info(missingLevel, message, append(keysAndValues, "reason", err.Error())...)
	}
}

func (s quietSink) WithValues(keysAndValues ...any) logr.LogSink {
	return quietSink{s.LogSink.WithValues(keysAndValues...)}
}

func (s quietSink) WithName(name string) logr.LogSink {
	return quietSink{s.LogSink.WithName(name)}
}

// WithCallDepth leaves out the methods above when the line of a log call is looked up.
func (s quietSink) WithCallDepth(depth int) logr.LogSink {
	if sink, ok := s.LogSink.(logr.CallDepthLogSink); ok {
		return quietSink{sink.WithCallDepth(depth)}
	}
	return s
}
