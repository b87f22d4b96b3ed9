package driver_test

import (
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
