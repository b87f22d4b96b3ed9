// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// A call waits for a GPU's lock as long as the agent was told to.
func TestLockTimeoutIsTheAgents(t *testing.T) {
	m := newMachine(t)
	m.adjust = func(o *driver.Options) { o.LockTimeout = 50 * time.Millisecond }
	m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	unlock, err := durable.Lock(t.Context(), m.path("state", "locks", "gpu-"+gpu0+".lock"))
	must(t, err)
	defer unlock()

	began := time.Now()
	if message := m.prepare(m.allocate("train", gpu0)).GetError(); !strings.Contains(message, gpu0) || !strings.Contains(message, "deadline exceeded") {
		t.Errorf("prepare is answered %q, want that the lock of the GPU was not to be had in time", message)
	}
	if took := time.Since(began); took >= prepare.DefaultLockTimeout {
		t.Errorf("prepare took %s, the limit that is the default", took)
	}
}

// A file that was removed is put back while another claim, whose file was removed before, is being worked on.
func TestAFileIsPutBackWhileAnotherClaimIsLocked(t *testing.T) {
	m := newMachine(t)
	m.adjust = func(o *driver.Options) { o.LockTimeout = time.Hour }
	m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	for name, gpu := range map[string]string{"busy": gpu0, "idle": gpu1} {
		if message := m.prepare(m.allocate(name, gpu)).GetError(); message != "" {
			t.Fatal(message)
		}
	}
	unlock, err := durable.LockKey(t.Context(), m.path("state", "locks", "claims.lock"), "busy-uid")
	must(t, err)
	defer unlock() // before the agent is told to stop
	for _, name := range []string{"busy", "idle"} {
		files, err := filepath.Glob(m.path("cdi", "*"+name+"-uid*"))
		must(t, err)
		if len(files) != 1 {
			t.Fatalf("files of claim %s: %v", name, files)
		}
		must(t, os.Remove(files[0]))
		if name == "idle" {
			eventually(t, "the file is back", func() error { _, err := os.Stat(files[0]); return err })
		}
	}
}
