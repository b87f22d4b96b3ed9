// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestEverythingInSmall is make scale with a cluster so small that it takes a minute: all phases and all checks.
func TestEverythingInSmall(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a control plane")
	}
	dir := t.TempDir()
	binary := filepath.Join(dir, "scheduler")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", binary, "stowage.dev/stowage/cmd/scheduler").CombinedOutput(); err != nil {
		t.Fatalf("building the scheduler: %v\n%s", err, out)
	}
	var out strings.Builder
	o := options{
		size: size{Nodes: 40, GPUsPerSlice: 1, Claims: 150, Burst: 20, Churn: 3 * time.Second, Rate: 3, AuditPeriod: time.Second, Seed: 1},
		root: filepath.Join("..", ".."), binary: binary, figuresFile: filepath.Join(dir, "figures.json"),
		limit: 10 * time.Minute, out: &out,
	}
	if err := run(t.Context(), o); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{
		"start: first binding after", "burst: pods bound per second", "churn: pods that ended", "audit: device held by two claims found after",
		"restart: first binding after", "most memory", " 0 of them are not what they start with or decide",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in the output:\n%s", want, &out)
		}
	}
	if _, err := os.Stat(o.figuresFile); err != nil {
		t.Error(err)
	}
}

func TestASchedulerThatIsNotThereIsSaidBeforeAnythingStarts(t *testing.T) {
	_, err := newBench(options{size: fullSize, root: ".", binary: "no-such-scheduler"})
	if err == nil || !strings.Contains(err.Error(), "run 'make build'") {
		t.Errorf("got error %v", err)
	}
}
