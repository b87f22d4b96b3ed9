// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"

	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2/ktesting"
)

// TestAWarningAboutTheHostComesAndGoes while the agent serves: an event tells of each that is new, and the condition has the last.
func TestAWarningAboutTheHostComesAndGoes(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	agent := newRig(t, "t4").agent(ctx, newAPIServer())
	events := record.NewFakeRecorder(10)
	agent.reporter.recorder = events
	says := ""
	agent.opts.Warning = func() string { return says }
	for i, step := range []struct {
		says string
		told bool
	}{{"", false}, {"a", true}, {"a", false}, {"b", true}, {"", false}, {"b", true}} {
		says = step.says
		agent.lookAtHost(ctx)
		if told := len(events.Events) > 0; told != step.told {
			t.Errorf("look %d: told: %t, want %t", i, told, step.told)
		}
		for len(events.Events) > 0 {
			if got, want := <-events.Events, "Warning HostConfiguration "+step.says; got != want {
				t.Errorf("look %d: event %q, want %q", i, got, want)
			}
		}
		if v, _ := agent.nodeView(); v.warning != step.says {
			t.Errorf("look %d: the condition gets %q, want %q", i, v.warning, step.says)
		}
	}
}
