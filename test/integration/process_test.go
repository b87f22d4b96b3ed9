// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"stowage.dev/stowage/internal/localcluster"
)

// schedulerBinary builds cmd/scheduler.
var schedulerBinary = sync.OnceValues(func() (string, error) { return buildBinary("scheduler") })

// buildBinary builds a command of ours. It has the race detector when the tests have it, so that most packages are compiled already.
func buildBinary(name string) (string, error) {
	path := filepath.Join(cluster.Dir(), "bin", name)
	args := []string{"build", "-buildvcs=false", "-o", path}
	if raceDetector {
		args = append(args, "-race")
	}
	if out, err := exec.Command("go", append(args, "stowage.dev/stowage/cmd/"+name)...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("building cmd/%s: %w\n%s", name, err, out)
	}
	return path, nil
}

// startProcess runs our scheduler as a process until the test ends. It need not be stopped, but may be.
func startProcess(t *testing.T, o localcluster.SchedulerOptions) *localcluster.Scheduler {
	t.Helper()
	p, err := tryProcess(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	stopAtEnd(t, p)
	return p
}

func tryProcess(ctx context.Context, o localcluster.SchedulerOptions) (*localcluster.Scheduler, error) {
	binary, err := schedulerBinary()
	if err != nil {
		return nil, err
	}
	o.Binary = binary
	return cluster.StartScheduler(ctx, o)
}

func stopAtEnd(t *testing.T, p *localcluster.Scheduler) {
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Errorf("stopping %s: %v", p.Name(), err)
		}
		if t.Failed() {
			t.Logf("end of the log of %s:\n%s", p.Name(), localcluster.LogTail(p.LogPath()))
		}
	})
}

// sharedProfiles is held by tests that serve the profiles "stowage" and "default-scheduler": pods of those names would
// be served by the schedulers of two tests otherwise.
var sharedProfiles sync.Mutex

func reserveSharedProfiles(t *testing.T) {
	sharedProfiles.Lock()
	t.Cleanup(sharedProfiles.Unlock)
}

// writeConfig writes a scheduler configuration for a test.
func writeConfig(t *testing.T, config string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
