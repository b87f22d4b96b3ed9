// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

// What keeps a write from being taken back is in the log at any verbosity, once for each reason in a row. Conflicts pass by themselves.
func TestWhatKeepsAWriteFromBeingTakenBackIsSaidOnce(t *testing.T) {
	h := newHarness(t, twoNodes())
	h.plugin.binder.UndoPauses = wait.Backoff{Duration: time.Microsecond, Steps: 1}
	log := &strings.Builder{}
	ctx := klog.NewContext(h.ctx, textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log), textlogger.Verbosity(0))))
	claims := resourceapi.Resource("resourceclaims")
	forbidden := apierrors.NewForbidden(claims, "one", errors.New("no right to update"))
	conflict := apierrors.NewConflict(claims, "one", errors.New("outdated"))
	answers := []error{
		forbidden, forbidden, forbidden, errors.New("connection refused"), errors.New("connection reset"),
		conflict, conflict, conflict, conflict, conflict, forbidden, nil,
	}
	err := h.plugin.binder.Persist(ctx, func() bool { return true }, func(context.Context) error {
		answer := answers[0]
		answers = answers[1:]
		return answer
	})
	if err != nil || len(answers) != 0 {
		t.Errorf("%v, and %d answers are left", err, len(answers))
	}
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	for i, want := range []string{"is forbidden: no right to update", "connection refused", "is forbidden: no right to update"} {
		if i >= len(lines) || !strings.Contains(lines[i], `"Cannot take back what was written for a pod, trying again" err="`) || !strings.Contains(lines[i], want) {
			t.Errorf("no line %d with %q in\n%s", i, want, log)
		}
	}
	if len(lines) != 3 {
		t.Errorf("%d lines, want 3:\n%s", len(lines), log)
	}
}
