// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"os"
	"testing"

	"stowage.dev/stowage/internal/localcluster"
)

// Devices that stand for CPU or memory of a node are accounted for inside kube-scheduler only. A scheduler that is
// asked to serve them refuses, rather than fill nodes beyond what they have.
func TestNodeAllocatableResourcesAreRefused(t *testing.T) {
	t.Parallel()
	_, err := tryProcess(t.Context(), localcluster.SchedulerOptions{
		Name:   "refused",
		Config: writeConfig(t, configHead+goodProfile),
		Args:   []string{"--feature-gates=DRANodeAllocatableResources=true"},
	})
	var exit *localcluster.ExitError
	if !errors.As(err, &exit) || exit.Err == nil {
		t.Fatalf("starting the scheduler: %v, want it to exit with an error", err)
	}
	log, err := os.ReadFile(exit.LogFile)
	if err != nil {
		t.Fatal(err)
	}
	if !hasAll(string(log), []string{"DRANodeAllocatableResources", "CPU or memory", "disable it"}) {
		t.Errorf("the process says\n%s", log)
	}
}
