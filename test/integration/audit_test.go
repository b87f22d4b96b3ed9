// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"

	"stowage.dev/stowage/internal/localcluster"
)

// The auditor is silent while pods come and go, tells of two claims that somebody has given one device, and tells when
// that is over.
func TestAudit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := startProcess(t, localcluster.SchedulerOptions{
		Name: w.name,
		Config: writeConfig(t, configHead+strings.ReplaceAll(goodProfile, "config-test", w.name)+
			"  pluginConfig: [{name: DeviceClaims, args: {auditPeriod: 1s, fence: {timeout: 5s}}}]\n"),
	})
	w.addNode("a", gpus(h100, 8)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))

	for i := range 16 {
		w.addPod(fmt.Sprintf("pod-%d", i), withTemplate("one"))
	}
	ended := map[string]bool{}
	w.awaitPods("ended", 16, 3*patience, func(pod *v1.Pod) bool {
		if pod.Spec.NodeName != "" && !ended[pod.Name] {
			ended[pod.Name] = true
			w.endPod(pod)
		}
		return pod.Status.Phase == v1.PodSucceeded
	})
	w.awaitPage(p, `(?m)^stowage_scheduler_audit_comparisons_total\{result="done"\} ([3-9]|[1-9][0-9]+)$`)
	for _, kind := range []string{"gone", "missing", "outdated", "usage"} {
		w.awaitPage(p, `(?m)^stowage_scheduler_audit_differences\{kind="`+kind+`"\} 0$`)
	}
	if line := logLine(t, p, "is held by more than one claim", w.driver); line != "" {
		t.Errorf("a false alarm: %s", line)
	}
	if line := logLine(t, p, "differs from the API"); line != "" {
		t.Errorf("a false alarm: %s", line)
	}

	w.allocate(w.addClaim("left", spec(w.exactly("gpu", 1))), "a", "gpu-0")
	w.allocate(w.addClaim("right", spec(w.exactly("gpu", 1))), "a", "gpu-0")
	device := w.driver + "/" + w.nodeName("a") + "/gpu-0"
	left, right := "claim "+w.name+"/left (allocated ", "claim "+w.name+"/right (allocated "
	w.awaitClaimEvent("left", "DeviceHeldTwice", device, right)
	w.awaitClaimEvent("right", "DeviceHeldTwice", device, left)
	if logLine(t, p, "is held by more than one claim", device, left, right) == "" {
		t.Error("the log does not name the device and both claims")
	}
	w.awaitPage(p, `(?m)^stowage_scheduler_audit_double_held_devices [1-9]`)

	claim := w.claim("right")
	claim.Status.Allocation = nil
	_, err := w.client.ResourceV1().ResourceClaims(w.name).UpdateStatus(w.ctx, claim, metav1.UpdateOptions{})
	w.must(err, "releasing the device of claim right")
	w.eventually("the log says that it is over", func() bool {
		return logLine(t, p, "no longer held by claims that must not have it together", device) != ""
	})
}

// eventually waits for something that cannot be watched.
func (w *world) eventually(what string, met func() bool) {
	w.t.Helper()
	if err := wait.PollUntilContextTimeout(w.ctx, 200*time.Millisecond, patience, true, func(context.Context) (bool, error) { return met(), nil }); err != nil {
		w.t.Fatalf("waiting until %s: %v", what, err)
	}
}

func (w *world) awaitPage(p *localcluster.Scheduler, pattern string) {
	w.t.Helper()
	line := regexp.MustCompile(pattern)
	w.eventually("the metrics have a line "+pattern, func() bool {
		page, err := p.Get(w.ctx, "/metrics")
		return err == nil && line.Match(page)
	})
}

func (w *world) awaitClaimEvent(claim string, parts ...string) {
	w.t.Helper()
	lw := cache.NewListWatchFromClient(w.client.CoreV1().RESTClient(), "events", w.name,
		fields.OneTermEqualSelector("involvedObject.name", claim))
	await(w, fmt.Sprintf("an event of claim %s with %q", claim, parts), lw, func(e *v1.Event) bool {
		return e.InvolvedObject.Kind == "ResourceClaim" && hasAll(e.Reason+" "+e.Message, parts)
	})
}

// logLine returns a line of the process's log that has all parts, empty if there is none.
func logLine(t *testing.T, p *localcluster.Scheduler, parts ...string) string {
	t.Helper()
	content, err := os.ReadFile(p.LogPath())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(content)) {
		if hasAll(line, parts) {
			return line
		}
	}
	return ""
}
