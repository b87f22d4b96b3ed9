// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"regexp"
	"strings"
	"testing"

	"stowage.dev/stowage/internal/localcluster"
)

// What the process counts can be read where a monitoring system reads it, and whether it is well where a kubelet asks.
func TestMetrics(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := startProcess(t, localcluster.SchedulerOptions{
		Name:   w.name,
		Config: writeConfig(t, configHead+strings.ReplaceAll(goodProfile, "config-test", w.name)),
	})
	w.addNode("a", gpus(h100, 1)...)
	for _, name := range []string{"first", "second"} {
		w.addClaim(name, spec(w.exactly("gpu", 1, byProduct(h100))))
		w.addPod(name, withClaim(name))
		if name == "first" {
			w.awaitBound(name)
		}
	}
	w.awaitUnschedulable("second", "held")

	for _, path := range []string{"/healthz", "/readyz", "/livez"} {
		if answer, err := p.Get(t.Context(), path); err != nil || string(answer) != "ok" {
			t.Errorf("%s answers %q, %v", path, answer, err)
		}
	}
	page, err := p.Get(t.Context(), "/metrics")
	w.must(err, "reading the metrics")
	for _, want := range []string{
		`stowage_scheduler_allocations_total\{result="chosen"\} 1`,
		`stowage_scheduler_cache_entries\{cache="matchers"\} 1`,
		`stowage_scheduler_cache_entries\{cache="selectors"\} 2`, // the class's and the request's
		`stowage_scheduler_cache_limit\{cache="matchers"\} [1-9][0-9]*`,
		`stowage_scheduler_cache_evictions_total\{cache="selectors"\} 0`,
		`stowage_scheduler_claim_writes_total\{result="success",write="allocation"\} 1`,
		`stowage_scheduler_refused_nodes_total\{reason="matching devices are held by other claims"\} [1-9][0-9]*`,
		`stowage_scheduler_waiting_pods 1`,
	} {
		if !regexp.MustCompile(`(?m)^` + want + `$`).Match(page) {
			t.Errorf("no line %s", want)
		}
	}
	if t.Failed() {
		for line := range strings.Lines(string(page)) {
			if strings.HasPrefix(line, "stowage_") {
				t.Log(strings.TrimSpace(line))
			}
		}
	}
}
