// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package numa

import (
	"errors"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// An object that does not exist is logged for who wants details, anything else as what it is, through whatever the
// plugin makes of its logger.
func TestQuietly(t *testing.T) {
	missing := apierrors.NewNotFound(schema.GroupResource{Resource: "noderesourcetopologies"}, "node-a")
	tests := map[string]struct {
		verbosity int
		err       error
		want      []string // parts of the only line; no line if there are none
	}{
		"an object that does not exist":            {verbosity: missingLevel - 1, err: missing},
		"an object that does not exist, in detail": {verbosity: missingLevel, err: missing, want: []string{`"level"=5`, `"reason"=`, "node-a", `"node"="a"`, "quiet_test.go"}},
		"another error":                            {err: errors.New("connection refused"), want: []string{`"error"="connection refused"`, `"node"="a"`, "quiet_test.go"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var lines []string
			log := funcr.New(func(prefix, args string) { lines = append(lines, prefix+" "+args) },
				funcr.Options{Verbosity: tc.verbosity, LogCaller: funcr.All})
			quietly(log).WithName("cache").WithValues("node", "a").V(missingLevel).Error(tc.err, "cannot get")
			if len(tc.want) == 0 {
				if len(lines) > 0 {
					t.Errorf("logged %q", lines)
				}
				return
			}
			if len(lines) != 1 || !strings.HasPrefix(lines[0], "cache ") {
				t.Fatalf("logged %q, want one line with its name", lines)
			}
			for _, part := range tc.want {
				if !strings.Contains(lines[0], part) {
					t.Errorf("%s does not have %s", lines[0], part)
				}
			}
		})
	}
	if quietly(logr.Logger{}).GetSink() != nil {
		t.Error("a logger that logs nowhere was given a sink")
	}
}
