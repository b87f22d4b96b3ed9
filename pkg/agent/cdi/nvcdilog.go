// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/klog/v2"
)

// nvcdiLogger passes nvcdi's messages on, and keeps the warnings of one use: what it tries and skips is detail, not
// news, unless something is missing for it.
type nvcdiLogger struct {
	logger   klog.Logger
	warnings []string
}

func newNvcdiLogger(ctx context.Context) *nvcdiLogger {
	return &nvcdiLogger{logger: klog.LoggerWithName(klog.FromContext(ctx), "nvcdi")}
}

// said is what was skipped below /dev, for the end of an error.
func (l *nvcdiLogger) said() string {
	var nodes []string
	for _, warning := range l.warnings {
		if strings.Contains(warning, "/dev/") && !slices.Contains(nodes, warning) {
			nodes = append(nodes, warning)
		}
	}
	if len(nodes) == 0 {
		return ""
	}
	return "; nvcdi says: " + strings.Join(nodes, "; ")
}

func (l *nvcdiLogger) Errorf(format string, args ...any) {
	l.logger.Info(fmt.Sprintf(format, args...), "severity", "error")
}

func (l *nvcdiLogger) Warningf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	l.warnings = append(l.warnings, text)
	l.logger.V(4).Info(text, "severity", "warning")
}

func (l *nvcdiLogger) Infof(format string, args ...any) {
	l.logger.V(5).Info(fmt.Sprintf(format, args...))
}

func (l *nvcdiLogger) Debugf(format string, args ...any) {
	l.logger.V(6).Info(fmt.Sprintf(format, args...))
}

func (l *nvcdiLogger) Tracef(format string, args ...any) {
	l.logger.V(7).Info(fmt.Sprintf(format, args...))
}
