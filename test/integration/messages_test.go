// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What a pod that can never run is told, in its condition and its event, over the whole path.
func TestAPodThatCanNeverRunIsToldSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(h100, 8)...)
	w.addTemplate("nine", spec(w.exactly("gpu", 9)))
	startScheduler(t, w.name, schedulerSetup{})
	pod := w.addPod("pod", withTemplate("nine"))

	waiting := w.awaitUnschedulable("pod", "request")
	_, told, _ := strings.Cut(scheduledCondition(waiting).Message, ". ")
	want := `request "gpu" of claim ` + *waiting.Status.ResourceClaimStatuses[0].ResourceClaimName + ": asks for 9 " + w.class +
		" devices of one node, the largest has 8"
	if diff := cmp.Diff(want, told); diff != "" {
		t.Errorf("condition (-want +got):\n%s", diff)
	}
	w.awaitEvent(pod, want)
}
